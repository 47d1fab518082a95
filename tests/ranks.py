"""Jobs of several ranks (gloo, real processes): a job is a module whose `main` is decorated with `in_group`; `launch` starts it
on every rank and gives back the lines of JSON that each of them printed."""

from __future__ import annotations

import faulthandler
import json
import socket
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

from tests import nursery


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def launch(world_size: int, module: str, *arguments: str, **environment: str) -> list[list[dict[str, Any]]]:
    """The lines of each rank; asserts that all of them ended well."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    running = [nursery.start(module, *arguments, **place, RANK=str(rank), **environment) for rank in range(world_size)]
    try:
        with ThreadPoolExecutor(world_size) as pool:  # all at once: a rank whose pipe is full would hold up the others
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

        faulthandler.dump_traceback_later(100, exit=True)  # a hang is to say where
        warnings.simplefilter("ignore")  # torch's own
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        main(*arguments)
        dist.destroy_process_group()

    return run
