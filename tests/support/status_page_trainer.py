"""A trainer for the tests of the status page, a program of the nursery: `main(DATASET, REPOSITORY, SOCKET, STOP)` reads,
computes and saves until the file STOP exists."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import torch

from headrace.checkpoint import Checkpointer
from headrace.loaders import Clip, VideoLoader


def main(dataset: str, repository: str, socket: str, stop: str) -> None:
    state = {"w": torch.randn(2_000_000)}
    with (
        VideoLoader(dataset, 2, clip=Clip(frames=4), size=(64, 64), sidecar=socket, num_threads=1) as loader,
        Checkpointer(repository, run="flow-7b", sidecar=socket) as checkpointer,
    ):
        steps = itertools.count(1)
        while True:
            for batch in loader:
                step = next(steps)
                state["w"] += float(batch["video"].float().mean())
                time.sleep(
                    0.03 if step < 60 else 0.25
                )  # it computes; once there is enough to show, it leaves the cores
                if step in (25, 50) or step % 40 == 0:
                    checkpointer.save(step, state).result(60)
                if Path(stop).exists():
                    return
