"""GPUDirect Storage: what the probe says, and GB/s of cuFile writes and reads, and of checkpoints that go so, beside copies
through host memory.

torch's own binding is used (`torch.cuda.gds.GdsFile`). Where the kernel module is absent cuFile may work in compatibility
mode, which goes through host memory behind the scenes: the drill tells the library to allow it (`CUFILE_ENV_PATH_JSON`), and the
figures then say what that costs.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from headrace.bench.drill.result import PartResult, timed

LINE = "GDS/cuFile: probe, compatibility mode, save and restore GB/s beside copies through host memory"


def run(gpu: bool) -> PartResult:
    """The probe everywhere; the rates with a GPU."""
    part = PartResult("gds", "GPUDirect Storage", against="through host memory")
    part.metric("write", "write, GB/s", "GB/s", "higher")
    part.metric("read", "read, GB/s", "GB/s", "higher")
    part.metric("save", "a checkpoint saved, committed, GB/s", "GB/s", "higher")
    part.metric("restore", "a checkpoint restored, checked, GB/s", "GB/s", "higher")
    part.settings = {"nvidia_fs": Path("/proc/driver/nvidia-fs/version").exists(), "probe": _probe()}
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
            part.fail("cuFile", f"{type(error).__name__}: {error}")
        for name, by in (("through host memory", False), ("cuFile", True)):
            try:
                checkpoints(part, name, Path(folder) / f"repo-{by:d}", size, by)
            except Exception as error:
                part.fail(name, f"{type(error).__name__}: {error}")
    return part


def checkpoints(
    part: PartResult, name: str, where: Path, size: int, by: Any, device: str = "cuda", rounds: int = 3, **more: Any
) -> None:
    """Save and restore `size` bytes with a `Checkpointer`, whose `gds` is `by`; every bit compared."""
    import torch

    from headrace.checkpoint import Checkpointer

    state = {"w": torch.randn(size // 4, device=device)}
    with Checkpointer(str(where), run="drill", sidecar=None, gds=by, **more) as checkpointer:
        for step in range(rounds):
            state["w"] += 1  # nothing is found in the step before
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


def _probe() -> str:
    """What the checkpoints' own probe says, in its words."""
    try:
        gds: Any = importlib.import_module("headrace.checkpoint.gds")
        return str(gds.probe())
    except (ImportError, AttributeError) as error:
        return f"checkpoints have no probe here ({error})"


def _through_host(part: PartResult, path: Path, size: int) -> None:
    import torch

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
    import torch

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
