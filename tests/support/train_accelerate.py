"""See `training`: under Accelerate."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.framework_training import BATCH, EVERY, loss_of, net, run, settle  # first: it sets variables

import accelerate  # isort: skip
import torch  # isort: skip
from torch import nn  # isort: skip

from headrace.checkpoint import Checkpointer  # isort: skip
from headrace.checkpoint.frameworks.accelerate import attach  # isort: skip


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    settings = accelerate.utils.ProjectConfiguration(
        str(folder / "names"), automatic_checkpoint_naming=True, total_limit=1
    )
    accelerator, module, progress = accelerate.Accelerator(cpu=True, project_config=settings), net(), Progress()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.05))
    accelerator.register_for_checkpointing(progress)
    with Checkpointer(str(folder / "repo"), run="exp", sidecar=None) as checkpointer:
        attach(accelerator, checkpointer)
        there = list((folder / "names" / "checkpoints").glob("checkpoint_*"))
        if there:
            accelerator.load_state()
            settings.iteration = progress.step // EVERY
        first = progress.step
        while progress.step < stop:
            settle(checkpointer)
            batch = torch.randn(BATCH, 6)  # of the global generator
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            progress.step += 1
            if progress.step % EVERY == 0:
                accelerator.save_state()
    return first, module


def main(*arguments: str) -> None:
    run(train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
