"""Restoring into the device: GB/s, verified, from a warm and a dropped page cache; equal to the bit."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.drill.model import Trainer
from headrace.bench.drill.result import PartResult

if TYPE_CHECKING:
    import torch

    from headrace.checkpoint import Checkpointer

LINE = "restore into GPU tensors, verified, warm and cold: GB/s; equal to the bit"


def run(gpu: bool) -> PartResult:
    """Save once, spoil the tensors, restore in place."""
    import torch

    from headrace.checkpoint import Checkpointer

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
                    spoil(tensor)
                if name == "cold":
                    _drop(Path(folder))
                seconds.append(_once(checkpointer, trainer))
            part.add(name, "rate", *(size / taken / 1e9 for taken in seconds))
            if not all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True)):
                part.fail(name, "restored something else")
    return part


def _once(checkpointer: Checkpointer, trainer: Trainer) -> float:
    began = time.perf_counter()
    checkpointer.restore(trainer.state())
    trainer.sync()
    return time.perf_counter() - began


def spoil(tensor: torch.Tensor) -> None:
    """Zeros, whatever the tensor held."""
    tensor.detach().fill_(0)


def _drop(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
