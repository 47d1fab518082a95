"""Device to host: pinned against pageable, a registered memfd, and what `save` makes of it beside the limit of the link."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Any

from headrace.bench.drill.result import PartResult, timed

LINE = "D2H staging GB/s pinned, pageable and into a registered memfd; stall of `save` beside the PCIe limit"


def run(gpu: bool) -> PartResult:
    """Copies of one gibibyte (64 MiB without a GPU), then a save of a real model's state."""
    import torch

    part = PartResult("staging", "Staging: from the device into host memory", against="pageable")
    part.metric("rate", "GB/s", "GB/s", "higher")
    part.metric("register", "cudaHostRegister of the memfd, s/GiB", "s/GiB")
    part.metric("stall", "stall of save, s/GiB", "s/GiB", goal=0.16)
    part.metric("share", "stall beside the fastest copy of the same bytes", "%", "higher", goal=50)
    size = (1 << 30) if gpu else (64 << 20)
    part.settings = {"bytes": size, "device": "cuda" if gpu else "cpu"}
    source = torch.full((size,), 7, dtype=torch.uint8, device="cuda" if gpu else "cpu")
    targets: dict[str, Any] = {"pageable": torch.ones(size, dtype=torch.uint8)}
    if gpu:
        targets["pinned"] = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    memfd = _memfd(size)
    targets["memfd, registered" if gpu else "memfd"] = memfd
    if gpu:
        part.add("memfd, registered", "register", _register(memfd) / (size / 2**30))
    best = 0.0
    for name, target in targets.items():
        seconds = timed(lambda target=target: target.copy_(source, non_blocking=True), 5, _sync(gpu))  # type: ignore[misc]
        part.add(name, "rate", *(size / taken / 1e9 for taken in seconds))
        best = max(best, size / min(seconds) / 1e9)
        if not bool((target[:: max(1, size // 4096)] == 7).all()):
            part.fail(name, "the copy holds other bytes")
    if gpu:
        _unregister(memfd)
    _save(part, gpu, best)
    return part


def _sync(gpu: bool) -> Any:
    import torch

    return torch.cuda.synchronize if gpu else lambda: None


def _memfd(size: int) -> Any:
    import torch

    fd = os.memfd_create("drill", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    mapped = mmap.mmap(fd, size)
    os.close(fd)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    tensor.fill_(1)
    return tensor


def _register(tensor: Any) -> float:
    """Seconds to make the memfd's pages known to CUDA."""
    began = time.perf_counter()
    runtime = _runtime()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of a memfd: error {code}")
    return time.perf_counter() - began


def _runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def _unregister(tensor: Any) -> None:
    runtime = _runtime()
    runtime.cudaHostUnregister(tensor.data_ptr())


def _save(part: PartResult, gpu: bool, best: float) -> None:
    """What the trainer feels: seconds in `save`, the second and later times."""
    from headrace.bench.drill.model import Trainer
    from headrace.checkpoint import Checkpointer

    trainer = Trainer(gpu)
    trainer.seconds_a_step(2)
    gib = trainer.state_bytes() / 2**30
    with tempfile.TemporaryDirectory(prefix="mrb-") as folder, Checkpointer(folder, run="drill", sidecar=None) as ckpt:
        for step in range(1, 5):
            trainer.seconds_a_step(1)
            result = ckpt.save(step, trainer.state()).result(timeout=400)
            if step > 1:
                part.add("Checkpointer.save", "stall", result.stall / gib)
                part.add("Checkpointer.save", "share", 100 * gib * 2**30 / 1e9 / best / result.stall)
    part.settings["state_gib"] = round(gib, 3)
