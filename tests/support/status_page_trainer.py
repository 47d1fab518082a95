"""A trainer for the tests of the status page: `page_trainer.py DATASET REPOSITORY SOCKET STOP`: reads, computes, saves until
the file STOP is there."""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch

from headrace.checkpoint import Checkpointer
from headrace.loaders import Clip, VideoLoader


def main() -> None:
    dataset, repository, socket, stop = sys.argv[1:]
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
                time.sleep(0.03)  # the trainer computes
                if step % 25 == 0:
                    checkpointer.save(step, state).result(60)
                if Path(stop).exists():
                    return


if __name__ == "__main__":
    main()
