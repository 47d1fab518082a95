"""Checkpoints beside their peers: stall of the trainer, seconds until durable, bytes written, seconds to restore.

Purpose: `python -m bench.checkpoint CANDIDATE DIRECTORY` saves a state of weights and Adam moments twice (all of it changed,
then a tenth of it changed) and restores it into other tensors.
Invariant: every candidate saves the same bytes and counts as durable only what it has fsynced; a restored state that is not
equal to the bit fails the candidate.
Failure behaviour: an exception ends the process; `bench.measure` reports it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.measure import Meter

CANDIDATES = ("millrace", "torch.save", "dcp.save", "dcp.async_save")
_LAYERS = int(os.environ.get("MILLRACE_BENCH_LAYERS", "16"))

State = dict[str, torch.Tensor]
Wait = Callable[[], object]


def state(seed: int) -> State:
    """16 layers of 1024 x 1024 weights with two Adam moments, 192 MiB of float32."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{kind}.{layer}": torch.randn(1024, 1024, generator=generator)
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for layer in range(_LAYERS)
    }


def change_a_tenth(values: State) -> None:
    """What a step does to a model of which nine tenths are frozen."""
    for tensor in list(values.values())[: max(1, len(values) // 10)]:
        tensor.add_(1e-3)


def measure(candidate: str, directory: Path) -> dict[str, float]:
    """Figures of one candidate in `directory`, which is emptied first."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    meter = Meter()
    values = state(0)
    save, restore, close = _BUILD[candidate](directory)
    out: dict[str, float] = {}
    for name, change in (("first", None), ("again", change_a_tenth)):
        if change:
            change(values)
        before, begun = _bytes_under(directory), time.perf_counter()
        wait = save(values)
        out[f"{name}_stall_s"] = time.perf_counter() - begun
        wait()
        out[f"{name}_durable_s"] = time.perf_counter() - begun
        out[f"{name}_mib"] = (_bytes_under(directory) - before) / 2**20
    target = {name: torch.empty_like(tensor) for name, tensor in values.items()}
    begun = time.perf_counter()
    restore(target)
    out["restore_s"] = time.perf_counter() - begun
    close()
    if not all(torch.equal(target[name], values[name]) for name in values):
        raise AssertionError(f"{candidate} restored something else")
    return out | meter.read()


def _bytes_under(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


Built = tuple[Callable[[State], Wait], Callable[[State], object], Callable[[], None]]


def _millrace(directory: Path) -> Built:
    from checkpoint import Checkpointer

    checkpointer = Checkpointer(str(directory), run="bench", sidecar=None)
    steps = iter(range(1, 1000))

    def save(values: State) -> Wait:
        handle = checkpointer.save(next(steps), {"state": values})
        return lambda: handle.result(_WAIT_SECONDS)

    return save, lambda target: checkpointer.restore({"state": target}), checkpointer.close


def _torch_save(directory: Path) -> Built:
    paths: list[Path] = []

    def save(values: State) -> Wait:
        paths.append(directory / f"{len(paths)}.pt")
        with paths[-1].open("wb") as file:
            torch.save(values, file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: None

    def restore(target: State) -> None:
        for name, tensor in torch.load(paths[-1], weights_only=True).items():
            target[name].copy_(tensor)

    return save, restore, lambda: None


def _dcp(directory: Path, *, asynchronous: bool) -> Built:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    paths: list[Path] = []

    def save(values: State) -> Wait:
        paths.append(directory / str(len(paths)))
        writer = dcp.FileSystemWriter(paths[-1], thread_count=2)
        if not asynchronous:
            dcp.save(values, storage_writer=writer)
            return lambda: None
        future = dcp.async_save(values, storage_writer=writer)
        return lambda: future.result(_WAIT_SECONDS)  # type: ignore[union-attr]

    def restore(target: State) -> None:
        dcp.load(target, storage_reader=dcp.FileSystemReader(paths[-1]))

    return save, restore, dist.destroy_process_group


_WAIT_SECONDS = 120
_BUILD: dict[str, Callable[[Path], Built]] = {
    "millrace": _millrace,
    "torch.save": _torch_save,
    "dcp.save": lambda directory: _dcp(directory, asynchronous=False),
    "dcp.async_save": lambda directory: _dcp(directory, asynchronous=True),
}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
