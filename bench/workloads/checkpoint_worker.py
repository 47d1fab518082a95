"""One candidate on one rank: it saves while training continues, then restores into other tensors.

The saves are:

1. The first save.
2. A save after one more step, when every tensor has changed.
3. A save after many steps, if requested.
4. A save after a step in which nine tenths of the layers were frozen.
5. A save of a LoRA run, if requested.

Invariants:

- Training continues from the return of `save` until the state is durable. The steps of that time are compared with
  steps without a save.
- With several ranks, each figure is that of the slowest rank.
- The ranks find each other by a file, not by a port. Another process might take a free port while the ranks import
  torch.
- Restored tensors equal the saved ones bit for bit.

Failure behaviour: an exception ends the process, and `headrace.bench.core.measure` reports it. If a rank fails, the
others are ended. No rank outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from headrace.bench.core.measure import Meter, children, command_of, memory_kib
from headrace.bench.peers.checkpointers import SECONDS, Built
from headrace.bench.workloads.checkpoint import ENTRIES
from headrace.bench.workloads.training import ManyTensors, State, Training

Build = Callable[[str, Any], Built]
Figures = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The measurements of a candidate. `steps` is the number of steps before the third save; 0 for no such save.

    `lora` adds a LoRA run. `tensors` is the number of tensors of 1 KiB that are saved instead; 0 for the transformer.
    """

    build: Build
    where: str
    mib: int
    ranks: int
    steps: int
    lora: bool
    tensors: int


def measure(job: Job) -> Figures:
    """Measure all figures of the candidate. Every rank calls this and gets the same result."""
    if _first_rank():
        empty(job.where)
    _barrier()
    training = ManyTensors(job.tensors) if job.tensors else Training(job.mib, job.ranks)
    meter = Meter()
    quiet = _seconds_of_a_step(training)
    built = job.build(job.where, training)
    training.guard = built.guard
    built.warm_up()
    training.step()
    nbytes = sum(tensor.nbytes for tensor in training.state().values())
    out: Figures = {"state_mib": nbytes / 2**20, "copy_s": _seconds_of_a_copy(nbytes)}
    _reset_peak()
    before = memory_kib("VmRSS")
    out |= _keys("first", _save(job, built, training), "stall_s", "durable_s", "mib")
    training.step()
    figures = _save(job, built, training)
    out |= _keys("step", figures, "stall_s", "waited_s", "durable_s", "mib") | {"slow_down": figures["step"] / quiet}
    out["extra_mib"] = (memory_kib("VmHWM") - before + _children_kib()) / 1024
    if job.steps:
        for _ in range(job.steps):
            training.step()
        out |= _keys("later", _save(job, built, training), "mib")
    training.train_only(0.1)
    training.step()
    _save(job, built, training)  # changes of earlier steps must not count
    training.step()
    expected = {name: tensor.detach().clone() for name, tensor in training.state().items()}
    out |= _keys("frozen", _save(job, built, training), "durable_s", "mib")
    out |= _restores(job, built, expected)
    if job.lora and isinstance(training, Training):
        training.to_lora()
        _save(job, built, training)
        training.step()
        out |= _keys("lora", _save(job, built, training), "durable_s", "mib")
    built.close()
    return _slowest(out | meter.read())


def _keys(prefix: str, figures: Mapping[str, float], *keys: str) -> Figures:
    return {f"{prefix}_{key}": figures[key] for key in keys}


def _save(job: Job, built: Built, training: Training | ManyTensors) -> Figures:
    """Save, and train until the state is durable."""
    before = stored_bytes(job.where)
    values, results = training.state(), list[object]()
    at: list[float] = []
    _barrier()
    training.lost, began = 0.0, time.perf_counter()
    wait = built.save(values)
    stall = time.perf_counter() - began

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
    _barrier()
    return {
        "stall_s": stall + waited,
        "waited_s": waited,
        "durable_s": at[0] - began,
        "mib": (stored_bytes(job.where) - before) / 2**20 if _first_rank() else 0.0,
        "step": step - waited / steps,
    }


def _restores(job: Job, built: Built, expected: State) -> Figures:
    """Restore into allocated memory, as a trainer does, and compare.

    The restores are cold (on a disk only), warm and, with several ranks, into unsharded tensors.
    """
    out: Figures = {}
    on_disk = "://" not in job.where and not job.where.startswith("/dev/shm")
    target = {name: torch.ones_like(tensor) for name, tensor in expected.items()}
    if on_disk:
        out["restore_cold_s"] = _restore(built, target, lambda: drop_from_page_cache(job.where))
        _require_equal(target, expected)
        target = {name: tensor.zero_() for name, tensor in target.items()}
    out["restore_s"] = _restore(built, target, lambda: read_into_page_cache(job.where))
    _require_equal(target, expected)
    if job.ranks > 1:
        del target
        gc.collect()
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in expected.items()}
        full_target = {name: torch.ones_like(tensor) for name, tensor in full.items()}
        out["restore_other_s"] = _restore(built, full_target, lambda: read_into_page_cache(job.where))
        _require_equal(full_target, full)
    return out


def _restore(built: Built, target: State, prepare: Callable[[], object]) -> float:
    if _first_rank():
        prepare()
    _barrier()
    began = time.perf_counter()
    built.restore(target)
    return time.perf_counter() - began


def _require_equal(restored: State, expected: State) -> None:
    for name, tensor in restored.items():
        restored_local, expected_local = (
            t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name])
        )
        if not torch.equal(restored_local, expected_local):
            raise AssertionError(f"{name} was restored as something else")


def _seconds_of_a_step(training: Training | ManyTensors) -> float:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[2]


def _seconds_of_a_copy(nbytes: int) -> float:
    """Return the seconds in which one thread copies this many bytes in memory."""
    source, target, seconds = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[1]


# --- ranks


def _first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _barrier() -> None:
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


# --- memory and files


def _children_kib() -> int:
    """Return the KiB of anonymous memory of the child processes."""
    return sum(memory_kib("RssAnon", pid) for pid in children())


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


def drop_from_page_cache(where: str) -> None:
    """Drop all files from the page cache."""
    for path, _ in _all_files(where):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_into_page_cache(where: str) -> None:
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


# --- the processes


_RENDEZVOUS = "HEADRACE_BENCH_RENDEZVOUS"
"""The environment variable with the rendezvous file of the ranks and the id of the process that started them."""
_PR_SET_PDEATHSIG = 1


def measure_in_process(
    name: str, where: str, mib: int, ranks: int, steps: int, lora: bool, tensors: int = 0
) -> Figures:
    """Measure the candidate `name`, in its own process. With several ranks, it starts their processes."""
    if ranks > 1 and _RENDEZVOUS not in os.environ:
        return _start_ranks((name, where, mib, ranks, steps, lora, tensors), ranks)
    entry = ENTRIES[name]
    checkpointers: Any = importlib.import_module("headrace.bench.peers.checkpointers")
    build = partial(getattr(checkpointers, entry.build), **entry.options)
    job = Job(build=build, where=where, mib=mib, ranks=ranks, steps=steps, lora=lora, tensors=tensors)
    if ranks == 1:
        return measure(job)
    _join_ranks()
    try:
        return measure(job)
    finally:
        dist.destroy_process_group()


def _join_ranks() -> None:
    """Join the process group, and let the kernel end this rank together with the process that started it."""
    file, _, parent = os.environ[_RENDEZVOUS].rpartition(" ")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the process that started this rank has ended")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world_size)


def _start_ranks(arguments: tuple[Any, ...], ranks: int) -> Figures:
    """Run all ranks and return the figures of rank 0."""
    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common = os.environ | sizes | {"MASTER_ADDR": "127.0.0.1"}
    command = command_of(f"{__name__}:measure_in_process", *arguments)
    with tempfile.TemporaryDirectory(prefix="mrb-") as name, contextlib.ExitStack() as stack:
        folder, processes = Path(name), []
        for rank in range(ranks):
            out, err = (stack.enter_context((folder / f"{rank}.{kind}").open("wb")) for kind in ("out", "err"))
            rendezvous = f"{folder / 'rendezvous'} {os.getpid()}"
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), _RENDEZVOUS: rendezvous}
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=environment))
        try:
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.05)
            ended = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, failed in enumerate(ended):
            if failed:
                sys.exit(f"rank {rank}: {(folder / f'{rank}.err').read_text()[-2000:]}")
        figures: Figures = json.loads((folder / "0.out").read_text().strip().splitlines()[-1])
        return figures
