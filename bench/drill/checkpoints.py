"""Checkpoints on a GPU: copies to the host, saves during training, restores, and GPUDirect Storage (GDS).

Each of `staging`, `lazy`, `restore` and `gds` is a part of the drill. They share `Trainer`, a real training step. GDS
uses torch's own binding (`torch.cuda.gds.GdsFile`). Without the kernel module cuFile may work in compatibility mode,
which copies through host memory. The drill allows that mode (`CUFILE_ENV_PATH_JSON`), so the figures include its cost.
Invariant: every restored or copied bit is compared.

Failure behaviour: a candidate that fails is an error of its part.
"""

from __future__ import annotations

import importlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.bench.drill.result import PartResult, timed
from headrace.checkpoint import Checkpointer


class Trainer:
    """`step()` is one forward, backward and optimizer step on a batch that stays on the device."""

    def __init__(self, gpu: bool, *, layers: int | None = None, width: int | None = None) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if gpu else "cpu")
        width, layers = width or (2048 if gpu else 128), layers or (8 if gpu else 2)
        layer = torch.nn.TransformerEncoderLayer(
            width, max(2, width // 128), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=gpu)
        self.batch = torch.randn(8 if gpu else 2, 512 if gpu else 32, width, device=self.device)

    def step(self) -> None:
        """Run one step. On a GPU it returns when the work is queued."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def sync(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint saves."""
        return {"model": self.model, "optimizer": self.optimizer}

    def state_bytes(self) -> int:
        """The size of parameters and moments in bytes."""
        moments = [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        return sum(t.numel() * t.element_size() for t in (*self.model.parameters(), *moments))

    def seconds_a_step(self, steps: int, between: Callable[[int], object] = lambda step: None) -> list[float]:
        """Return the seconds of each step, including the device's work. `between` runs before each step."""
        seconds = []
        for number in range(steps):
            began = time.perf_counter()
            between(number)
            self.step()
            self.sync()
            seconds.append(time.perf_counter() - began)
        return seconds


def lazy(gpu: bool) -> PartResult:
    """Measure steps alone, and steps during a save, with lazy and with eager staging."""
    part = PartResult("lazy", "Saves under a bf16 transformer", against="eager")
    part.metric("step", "step alone", "ms")
    part.metric("visible", "visible stall of a save: longer than the median step by", "ms")
    part.metric("slow", "steps slower during the save", "%")
    part.metric("durable", "committed after", "s")
    trainer = Trainer(gpu)
    trainer.seconds_a_step(3)
    alone = trainer.seconds_a_step(30 if gpu else 10)
    base = statistics.median(alone)
    part.settings = {"state_gib": round(trainer.state_bytes() / 2**30, 3), "device": str(trainer.device)}
    for mode in ("lazy", "eager"):
        part.add(mode, "step", *(1e3 * seconds for seconds in alone))
        try:
            _save_in_mode(part, trainer, mode, base)
        except Exception as error:
            part.fail(mode, f"{type(error).__name__}: {error}")
    return part


def _save_in_mode(part: PartResult, trainer: Trainer, mode: str, base: float) -> None:

    with (
        tempfile.TemporaryDirectory(prefix="mrb-") as folder,
        Checkpointer(folder, run="drill", sidecar=None, staging=mode) as checkpointer,
    ):
        for step in range(1, 5):
            began = time.perf_counter()
            handle = checkpointer.save(step, trainer.state())
            stall = time.perf_counter() - began
            during: list[float] = []
            while not handle.done and len(during) < 400:
                during += trainer.seconds_a_step(1)
            handle.result(timeout=400)
            if step == 1:
                continue  # the first save allocates the arena
            part.add(mode, "durable", time.perf_counter() - began)
            part.add(mode, "visible", 1e3 * (stall + max(0.0, sum(during[:2]) - base * len(during[:2]))))
            if during:
                part.add(mode, "slow", 100 * (statistics.median(during) / base - 1))


def restore(gpu: bool) -> PartResult:
    """Save once, then overwrite the tensors with zeros and restore them in place."""

    part = PartResult("restore", "Restore into the device")
    part.metric("rate", "GB/s", "GB/s", "higher", goal=4)
    trainer = Trainer(gpu)
    trainer.seconds_a_step(2)
    size = trainer.state_bytes()
    part.settings = {"bytes": size, "device": str(trainer.device)}
    with (
        tempfile.TemporaryDirectory(prefix="mrb-") as folder,
        Checkpointer(folder, run="drill", sidecar=None) as checkpointer,
    ):
        checkpointer.save(1, trainer.state()).result(timeout=400)
        before = [tensor.detach().clone() for tensor in trainer.model.parameters()]
        for name in ("warm", "cold"):
            seconds = []
            for _ in range(3):
                for tensor in trainer.model.parameters():
                    _overwrite(tensor)
                if name == "cold":
                    _drop(Path(folder))
                seconds.append(_restore_once(checkpointer, trainer))
            part.add(name, "rate", *(size / taken / 1e9 for taken in seconds))
            if not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)):
                part.fail(name, "restored something else")
    return part


def _restore_once(checkpointer: Checkpointer, trainer: Trainer) -> float:
    began = time.perf_counter()
    checkpointer.restore(trainer.state())
    trainer.sync()
    return time.perf_counter() - began


def _overwrite(tensor: torch.Tensor) -> None:
    """Overwrite the tensor with zeros."""
    tensor.detach().fill_(0)


def _drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def staging(gpu: bool) -> PartResult:
    """Measure copies of 1 GiB (64 MiB without a GPU), then a save of a real model's state."""

    part = PartResult("staging", "Staging: from the device into host memory", against="pageable")
    part.metric("rate", "GB/s", "GB/s", "higher")
    part.metric("register", "cudaHostRegister of the memfd, s/GiB", "s/GiB")
    part.metric("stall", "stall of save, s/GiB", "s/GiB", goal=0.16)
    part.metric("share", "stall compared with the fastest copy of the same bytes", "%", "higher", goal=50)
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
    _save_stall(part, gpu, best)
    return part


def _sync(gpu: bool) -> Any:

    return torch.cuda.synchronize if gpu else lambda: None


def _memfd(size: int) -> Any:

    fd = os.memfd_create("drill", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    mapped = mmap.mmap(fd, size)
    os.close(fd)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    tensor.fill_(1)
    return tensor


def _register(tensor: Any) -> float:
    """Register the memfd's pages with CUDA, and return the seconds."""
    began = time.perf_counter()
    runtime = _runtime()
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(f"cudaHostRegister of a memfd: error {code}")
    return time.perf_counter() - began


def _runtime() -> Any:

    cuda: Any = torch.cuda
    return cuda.cudart()


def _unregister(tensor: Any) -> None:
    runtime = _runtime()
    runtime.cudaHostUnregister(tensor.data_ptr())


def _save_stall(part: PartResult, gpu: bool, best: float) -> None:
    """Measure how long `save` blocks the trainer, from the second save on."""

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


def gds(gpu: bool) -> PartResult:
    """Run the probe, and measure the rates if there is a GPU.

    An error of cuFile is a failure only if the probe has found that cuFile works.
    """
    part = PartResult("gds", "GPUDirect Storage", against="through host memory")
    part.metric("write", "write, GB/s", "GB/s", "higher")
    part.metric("read", "read, GB/s", "GB/s", "higher")
    part.metric("save", "a checkpoint saved, committed, GB/s", "GB/s", "higher")
    part.metric("restore", "a checkpoint restored, checked, GB/s", "GB/s", "higher")
    part.settings = {"nvidia_fs": Path("/proc/driver/nvidia-fs/version").exists(), "probe": _gds_probe()}
    if not gpu:
        part.notes.append("no GPU: only the probe ran")
        return part
    with tempfile.TemporaryDirectory(prefix="mrb-") as folder:
        size = 1 << 30
        part.settings["bytes"] = size
        _through_host(part, Path(folder) / "host", size)
        try:
            _direct(part, Path(folder) / "direct", size)
        except Exception as error:
            if "not available" not in part.settings["probe"]:
                part.fail("cuFile", f"{type(error).__name__}: {error}")
            part.notes.append(f"cuFile, called directly: {type(error).__name__}: {error}")
        for name, by in (("through host memory", False), ("cuFile", True)):
            try:
                save_and_restore(part, name, Path(folder) / f"repo-{by:d}", size, by)
            except Exception as error:
                part.fail(name, f"{type(error).__name__}: {error}")
    return part


def save_and_restore(
    part: PartResult, name: str, where: Path, size: int, by: Any, device: str = "cuda", rounds: int = 3, **more: Any
) -> None:
    """Save and restore `size` bytes with a `Checkpointer(gds=by)`, and compare every bit."""

    state = {"w": torch.randn(size // 4, device=device)}
    with Checkpointer(str(where), run="drill", sidecar=None, gds=by, **more) as checkpointer:
        for step in range(rounds):
            state["w"] += 1  # every chunk differs from the last step's
            began = time.perf_counter()
            checkpointer.save(step, state).result(600)
            part.add(name, "save", size / (time.perf_counter() - began) / 1e9)
        into = {"w": torch.zeros_like(state["w"])}
        for _ in range(rounds):
            began = time.perf_counter()
            checkpointer.restore(into)
            if device == "cuda":
                torch.cuda.synchronize()
            part.add(name, "restore", size / (time.perf_counter() - began) / 1e9)
    if not torch.equal(into["w"], state["w"]):
        raise AssertionError("what was restored is not what was saved")


def _gds_probe() -> str:
    """Return the result of `headrace.checkpoint.gds.probe`."""
    try:
        gds: Any = importlib.import_module("headrace.checkpoint.gds")
        return str(gds.probe())
    except (ImportError, AttributeError) as error:
        return f"headrace.checkpoint.gds has no probe ({error})"


def _through_host(part: PartResult, path: Path, size: int) -> None:

    device = torch.full((size,), 3, dtype=torch.uint8, device="cuda")
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    array: Any = host.numpy()
    view = memoryview(array)

    def write() -> None:
        host.copy_(device)
        with path.open("wb", buffering=0) as file:
            file.write(view)
            os.fsync(file.fileno())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            file.readinto(view)
        device.copy_(host)

    for name, action in (("write", write), ("read", read)):
        part.add(
            "through host memory", name, *(size / taken / 1e9 for taken in timed(action, 3, torch.cuda.synchronize))
        )


def _direct(part: PartResult, path: Path, size: int) -> None:

    gds: Any = torch.cuda.gds
    storage = torch.full((size,), 3, dtype=torch.uint8, device="cuda").untyped_storage()
    file = gds.GdsFile(str(path), os.O_CREAT | os.O_RDWR)
    gds.gds_register_buffer(storage)

    def write() -> None:
        file.save_storage(storage)
        os.fsync(file.fd)

    try:
        for name, action in (("write", write), ("read", lambda: file.load_storage(storage))):
            part.add("cuFile", name, *(size / taken / 1e9 for taken in timed(action, 3, torch.cuda.synchronize)))
    finally:
        gds.gds_deregister_buffer(storage)
