"""Jobs of several ranks (gloo, real processes): a job is a module whose `main` is decorated with `in_group`; `launch` starts it
on every rank and gives back the lines of JSON that each of them printed.

Invariant: ranks meet at a store of the tests' process, as those of torchrun do at its agent's: a port that is chosen for them,
and free until one of them has torch, may be somebody else's by then. No rank outlives the process of the tests
(`tests.support.nursery`).
"""

from __future__ import annotations

import faulthandler
import json
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import wraps
from typing import Any

from tests.support import nursery


@contextmanager
def meeting(world_size: int) -> Iterator[dict[str, str]]:
    """The variables, but for RANK, by which so many ranks find each other."""
    from torch.distributed import TCPStore

    host = "127.0.0.1"
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)  # at a port that the kernel chooses
    place = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world_size)}
    yield place | {"TORCHELASTIC_USE_AGENT_STORE": "True"}


def launch(world_size: int, module: str, *arguments: str, **environment: str) -> list[list[dict[str, Any]]]:
    """The lines of each rank; asserts that all of them ended well."""
    with meeting(world_size) as place:
        running = [
            nursery.start(module, *arguments, **place, RANK=str(rank), **environment) for rank in range(world_size)
        ]
        try:
            with ThreadPoolExecutor(world_size) as pool:  # all at once: who waits for a full pipe holds up the others
                outputs = list(pool.map(lambda process: process.communicate(timeout=180), running))
        finally:
            for process in running:
                process.kill()
    failed = [err[-8000:] for process, (_, err) in zip(running, outputs, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    return [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]


def in_group(main: Callable[..., None]) -> Callable[..., None]:
    """`main` on one rank, in the job's process group, with one thread."""

    @wraps(main)
    def run(*arguments: str) -> None:
        import torch
        import torch.distributed as dist

        faulthandler.dump_traceback_later(150, exit=True)  # a hang is to say where
        warnings.simplefilter("ignore")  # torch's own
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        main(*arguments)
        dist.destroy_process_group()

    return run
