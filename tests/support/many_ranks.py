"""A job of many real ranks on a store that takes 20 ms: `python -m tests.support.many_ranks FOLDER SAVING RESTORING`.

The ranks are forked, so that they share the memory of torch. They save two steps and restore the newest, by gloo.
It prints a line of JSON for each of the three parts: its seconds on the slowest rank, and the requests of all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from headrace.checkpoint import Checkpointer
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import register_back_end
from headrace.dataio.store.posix import PosixStore
from tests.support.checkpoint_states import Wrapped

LATENCY = 0.02
SECONDS = 100.0
NAMES = [f"layers.{number}.weight" for number in range(20)]
REQUESTS = itertools.count()


class Far(Wrapped):
    """A directory whose every request takes 20 ms more."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            next(REQUESTS)
            time.sleep(LATENCY)
            return found(*arguments, **named)

        return call


OPERATIONS = {
    "get",
    "get_into",
    "get_ranges_into",
    "put",
    "put_if_absent",
    "put_multipart",
    "list",
    "stat",
    "delete_many",
}


def _open(url: str, options: object) -> Store:
    return Far(PosixStore(url.removeprefix("far://")))


def state(step: int, world_size: int) -> dict[str, Any]:
    """Shards of every rank, and a replica."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(193 * 8, dtype=torch.float32).reshape(193, 8)
    found: dict[str, Any] = {
        name: distribute_tensor(whole * step + n, mesh, [Shard(0)]) for n, name in enumerate(NAMES)
    }
    return found | {"common": distribute_tensor(whole + step, mesh, [Replicate()]), "step": step}


def save(folder: str, world_size: int, step: int) -> None:
    with Checkpointer(f"far://{folder}", run="many", sidecar=None, timeout=SECONDS) as checkpointer:
        checkpointer.save(step, {"state": state(step, world_size)}).result(SECONDS)


def restore(folder: str, world_size: int, step: int) -> None:
    into = {"state": state(0, world_size)}
    with Checkpointer(f"far://{folder}", run="many", sidecar=None, timeout=SECONDS) as checkpointer:
        assert checkpointer.restore(into) == step
    wanted = state(step, world_size)
    for name, value in wanted.items():
        found = into["state"][name]
        if isinstance(value, DTensor):
            assert torch.equal(found.to_local(), value.to_local()), name
        else:
            assert found == value, name


def run(work: Callable[[str, int, int], None], folder: str, world_size: int, step: int) -> dict[str, float]:
    """Fork the ranks, and wait for them. Raises if one of them fails."""
    with tempfile.TemporaryDirectory() as scratch:
        return _run(work, folder, world_size, step, f"{scratch}/ranks")


def _run(
    work: Callable[[str, int, int], None], folder: str, world_size: int, step: int, meeting: str
) -> dict[str, float]:
    pids, readers = [], []
    for rank in range(world_size):
        reader, writer = os.pipe()
        if pid := os.fork():
            os.close(writer)
            pids.append(pid)
            readers.append(reader)
        else:
            _rank(work, folder, world_size, step, rank, meeting, writer)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert not any(codes), codes
    lines = []
    for reader in readers:
        with open(reader) as file:
            lines.append(json.load(file))
    return {
        "ranks": world_size,
        "seconds": round(max(seconds for seconds, _ in lines), 2),
        "requests": sum(requests for _, requests in lines),
    }


def _rank(
    work: Callable[[str, int, int], None], folder: str, world_size: int, step: int, rank: int, meeting: str, writer: int
) -> None:
    """One rank, which ends its process."""
    with _ended():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
        dist.barrier()
        began = time.monotonic()
        work(folder, world_size, step)
        os.write(writer, json.dumps([time.monotonic() - began, next(REQUESTS)]).encode())
        dist.barrier()


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def part(what: str, folder: str, world_size: str) -> None:
    """One part, in a process of its own: a process that has forked ranks once cannot start a second group."""
    register_back_end("far", "posix", _open)
    work, step = {"first save": (save, 1), "later save": (save, 2), "restore": (restore, 2)}[what]
    print(json.dumps({"what": what} | run(work, folder, int(world_size), step)), flush=True)


def main(folder: str, saving: str, restoring: str) -> None:
    for what, world_size in (("first save", saving), ("later save", saving), ("restore", restoring)):
        subprocess.run([sys.executable, "-m", __spec__.name, what, folder, world_size, "part"], check=True)


if __name__ == "__main__":
    if sys.argv[4:]:
        part(*sys.argv[1:4])
    else:
        main(*sys.argv[1:])
