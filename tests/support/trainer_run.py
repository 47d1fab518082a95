"""A training under transformers on a loader of latents: `trainer_run URL FOLDER STEPS RESUME [KILL_AFTER]`.

It appends the keys of each batch to `FOLDER/seen`, and on rank 1 to `FOLDER/seen-1`. With KILL_AFTER, the process is
killed after it has been given so many batches and one more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from headrace.checkpoint.frameworks.transformers import LoaderTrainer
from tests.support.latents import latent_loader


class Net(torch.nn.Module):
    """A model that notes the keys of its batches."""

    def __init__(self, seen: Path, kill_after: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self._seen, self._kill_after, self._batches = torch.nn.Linear(4, 1), seen, kill_after, 0

    def forward(self, latent: torch.Tensor, key: list[str]) -> dict[str, torch.Tensor]:
        if self._batches == self._kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self._batches += 1
        with self._seen.open("a") as file:
            file.write(json.dumps(key) + "\n")
        return {"loss": self.layer(latent).square().mean()}


SETTINGS: dict[str, Any] = {
    "save_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
}


def arguments(folder: Path, steps: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder / "out"), max_steps=steps, **(SETTINGS | options))


def train(
    url: str,
    folder: Path,
    steps: int,
    *,
    resume: bool,
    kill_after: int | None = None,
    transform: Callable[..., Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and return the weights at the end and what the loader counted."""
    how = arguments(folder, steps, **options)  # joins the process group, so the loader is made afterwards
    with latent_loader(url, 4 // how.world_size, transform=transform) as loader:
        net = Net(folder / (f"seen-{how.process_index}" if how.process_index else "seen"), kill_after)
        trainer = LoaderTrainer(net, how, train_dataset=loader)
        trainer.train(resume_from_checkpoint=resume or None)
        return {"weights": net.layer.weight.tolist(), "state": loader.state_dict()}


def main(url: str, folder: str, steps: str, resume: str, *kill_after: str) -> None:
    warnings.simplefilter("ignore")
    after = int(kill_after[0]) if kill_after else None
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints its log
        result = train(url, Path(folder), int(steps), resume=resume == "yes", kill_after=after)
    print(json.dumps(result))
