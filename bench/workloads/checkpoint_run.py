"""One candidate on one rank: it saves while training continues, then restores into other tensors.

The saves are:

1. a first one;
2. one after one more step, when every tensor has changed;
3. one after many steps, if requested;
4. one after a step in which nine tenths of the layers were frozen;
5. one of a LoRA run, if requested.

Invariants: training continues from the return of `save` until the state is durable. The steps of that time are compared
with steps without a save. With several ranks each figure is that of the slowest rank. Restored tensors equal the saved
ones bit for bit.
Failure behaviour: an exception ends the process; `headrace.bench.core.measure` reports it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.bench.core.measure import Meter
from headrace.bench.peers.checkpointers import SECONDS, Built
from headrace.bench.workloads.training import State, Training

Build = Callable[[str, Training], Built]
Figures = dict[str, float]


@dataclass(frozen=True)
class Job:
    """What to measure. `steps` is the number of steps before the third save, 0 for none. `lora` adds a LoRA run."""

    build: Build
    where: str
    mib: int
    ranks: int
    steps: int
    lora: bool


def measure(job: Job) -> Figures:
    """Measure all figures of the candidate. Every rank calls this and gets the same result."""
    if _first_rank():
        empty(job.where)
    _together()
    training, meter = Training(job.mib, job.ranks), Meter()
    quiet = _seconds_of_a_step(training)
    built = job.build(job.where, training)
    training.guard = built.guard
    built.warm_up()
    training.step()
    out: Figures = {"state_mib": sum(t.nbytes for t in training.state().values()) / 2**20}
    _reset_peak()
    before = _status("VmRSS")
    out |= _keys("first", _save(job, built, training), "stall_s", "durable_s", "mib")
    training.step()
    found = _save(job, built, training)
    out |= _keys("step", found, "stall_s", "waited_s", "durable_s", "mib") | {"slow_down": found["step"] / quiet}
    out["extra_mib"] = (_status("VmHWM") - before + _of_children()) / 1024
    if job.steps:
        for _ in range(job.steps):
            training.step()
        out |= _keys("later", _save(job, built, training), "mib")
    training.train_only(0.1)
    training.step()
    _save(job, built, training)  # changes of earlier steps must not count
    training.step()
    wanted = {name: tensor.detach().clone() for name, tensor in training.state().items()}
    out |= _keys("frozen", _save(job, built, training), "durable_s", "mib")
    out |= _restores(job, built, wanted)
    if job.lora:
        training.to_lora()
        _save(job, built, training)
        training.step()
        out |= _keys("lora", _save(job, built, training), "durable_s", "mib")
    built.close()
    return _slowest(out | meter.read())


def _keys(prefix: str, found: Mapping[str, float], *keys: str) -> Figures:
    return {f"{prefix}_{key}": found[key] for key in keys}


def _save(job: Job, built: Built, training: Training) -> Figures:
    """Save, and train until the state is durable."""
    before = stored_bytes(job.where)
    values, results = training.state(), list[object]()
    at: list[float] = []
    _together()
    training.lost, begun = 0.0, time.perf_counter()
    wait = built.save(values)
    stall = time.perf_counter() - begun

    def watch() -> None:
        try:
            results.append(wait())
        finally:
            at.append(time.perf_counter())

    watcher = threading.Thread(target=watch)
    watcher.start()
    steps, trained = 0, time.perf_counter()
    while True:
        training.step()
        steps += 1
        if _all_done(bool(at)):
            break
    step = (time.perf_counter() - trained) / steps
    watcher.join(SECONDS)
    if not results:
        raise RuntimeError("a save failed")
    waited = float(getattr(results[0], "wait_seconds", 0.0)) + training.lost
    _together()
    return {
        "stall_s": stall + waited,
        "waited_s": waited,
        "durable_s": at[0] - begun,
        "mib": (stored_bytes(job.where) - before) / 2**20 if _first_rank() else 0.0,
        "step": step - waited / steps,
    }


def _restores(job: Job, built: Built, wanted: State) -> Figures:
    """Restore into allocated memory, as a trainer does, and compare.

    The restores are cold (on a disk only), warm and, with several ranks, into unsharded tensors.
    """
    out: Figures = {}
    on_disk = "://" not in job.where and not job.where.startswith("/dev/shm")
    target = {name: torch.ones_like(tensor) for name, tensor in wanted.items()}
    if on_disk:
        out["restore_cold_s"] = _restore(built, target, lambda: forget(job.where))
        _require_equal(target, wanted)
        target = {name: tensor.zero_() for name, tensor in target.items()}
    out["restore_s"] = _restore(built, target, lambda: recall(job.where))
    _require_equal(target, wanted)
    if job.ranks > 1:
        del target
        gc.collect()
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in wanted.items()}
        other = {name: torch.ones_like(tensor) for name, tensor in whole.items()}
        out["restore_other_s"] = _restore(built, other, lambda: recall(job.where))
        _require_equal(other, whole)
    return out


def _restore(built: Built, target: State, prepare: Callable[[], object]) -> float:
    if _first_rank():
        prepare()
    _together()
    begun = time.perf_counter()
    built.restore(target)
    return time.perf_counter() - begun


def _require_equal(found: State, wanted: State) -> None:
    for name, tensor in found.items():
        ours, theirs = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, wanted[name]))
        if not torch.equal(ours, theirs):
            raise AssertionError(f"{name} was restored as something else")


def _seconds_of_a_step(training: Training) -> float:
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        training.step()
        found.append(time.perf_counter() - begun)
    return sorted(found)[2]


# ranks


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _together() -> None:
    if _several():
        dist.barrier()


def _all_done(done: bool) -> bool:
    """Return whether all ranks are done. All ranks take the same number of steps, because steps wait for each other."""
    if not _several():
        return done
    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def _slowest(out: Figures) -> Figures:
    if not _several():
        return out
    names = sorted(out)
    values = torch.tensor([out[name] for name in names], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(names, values.tolist(), strict=True))


# memory


def _status(name: str, pid: str = "self") -> float:
    """Return a value of /proc/PID/status in KiB, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _of_children() -> float:
    """Return the KiB of anonymous memory of the child processes."""
    try:
        children = [c for task in Path("/proc/self/task").iterdir() for c in (task / "children").read_text().split()]
    except OSError:
        return 0
    return sum(_status("RssAnon", pid) for pid in children)


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # the peak is then that of the whole process lifetime
        return


def empty(where: str) -> None:
    """Remove everything that an earlier candidate saved.

    `stored_bytes` would not count a write that replaces an object of the same name.
    """
    if where.startswith("s3://"):
        from headrace.dataio.store.open import open_store

        with open_store(where) as store:
            store.delete_many([info.key for info in store.list()])
    else:
        shutil.rmtree(where, ignore_errors=True)


def stored_bytes(where: str) -> int:
    """Return the total bytes of all objects or files."""
    if where.startswith("s3://"):
        from headrace.dataio.store.open import open_store

        with open_store(where) as store:
            return sum(info.size for info in store.list())
    return sum(size for _, size in _all_files(where))


def forget(where: str) -> None:
    """Drop all files from the page cache."""
    for path, _ in _all_files(where):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def recall(where: str) -> None:
    """Read all files into the page cache."""
    buffer = bytearray(4 << 20)
    for path, _ in _all_files(where):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _all_files(where: str) -> Iterator[tuple[Path, int]]:
    for path in sorted(Path(where).rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size
