"""See `training`: with a Checkpointer in a loop of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from headrace.checkpoint import RNG, Checkpointer, Keep
from tests.support.framework_training import BATCH, EVERY, loss_of, net, run, settle


def train(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    state = {"model": module, "optimizer": optimizer, "rng": RNG()}
    with Checkpointer(str(folder / "repo"), run="exp", sidecar=None, keep=Keep(last=1)) as checkpointer:
        first = checkpointer.restore(state) or 0
        for step in range(first + 1, stop + 1):
            settle(checkpointer)
            optimizer.zero_grad()
            loss_of(module, torch.randn(BATCH, 6)).backward()
            optimizer.step()
            if step % EVERY == 0:
                checkpointer.save(step, state)
    return first, module


def main(*arguments: str) -> None:
    run(train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
