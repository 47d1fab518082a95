"""See `training`: through torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from headrace.checkpoint import Checkpointer
from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from tests.support.framework_training import BATCH, EVERY, loss_of, net, run


def train(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    module, url, first = net(), str(folder / "repo"), 0
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def state(step: int) -> dict[str, Any]:
        return {
            "model": module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "step": step,
        }

    with Checkpointer(url, run="exp", sidecar=None) as looks:
        steps = looks.steps()
    if steps:
        found = state(0)
        dcp.load(found, storage_reader=RepositoryReader(url, run="exp", step=steps[-1]))
        module.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["rng"])
        first = found["step"]
    for step in range(first + 1, stop + 1):
        optimizer.zero_grad()
        loss_of(module, torch.randn(BATCH, 6)).backward()
        optimizer.step()
        if step % EVERY == 0:
            dcp.save(state(step), storage_writer=RepositoryWriter(url, run="exp", step=step))
    return first, module


def main(*arguments: str) -> None:
    run(train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
