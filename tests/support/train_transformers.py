"""See `training`: under transformers."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.framework_training import (  # first: variables
    BATCH,
    EVERY,
    STEPS,
    loss_of,
    net,
    rows,
    run,
    settle,
)

import torch  # isort: skip
import transformers  # isort: skip
from torch import nn  # isort: skip
from transformers.trainer_utils import get_last_checkpoint  # isort: skip

from headrace.checkpoint import Checkpointer  # isort: skip
from headrace.checkpoint.frameworks.transformers import RepositoryTrainer  # isort: skip

transformers.utils.logging.set_verbosity_error()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(net(), nn.Dropout(0.2))  # the generators must be those of the step, too

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, x)}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(rows())

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": rows()[i]}


class Told(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    def __init__(self, stop: int, checkpointer: Checkpointer) -> None:
        self.stop, self.step, self.checkpointer = stop, 0, checkpointer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.step = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        settle(self.checkpointer)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_training_stop = state.global_step >= self.stop


def train(folder: Path, stop: int, resume: str) -> tuple[int, nn.Module]:
    out = folder / "names"
    out.mkdir(exist_ok=True)
    arguments = transformers.TrainingArguments(
        str(out), max_steps=STEPS, save_steps=EVERY, save_total_limit=1, per_device_train_batch_size=BATCH,
        learning_rate=0.05, report_to=[], use_cpu=True, disable_tqdm=True, seed=7,
    )  # fmt: skip
    model = Model()
    with Checkpointer(str(folder / "repo"), run="exp", sidecar=None) as checkpointer:
        told = Told(stop, checkpointer)
        trainer = RepositoryTrainer(model, arguments, train_dataset=Rows(), callbacks=[told], checkpointer=checkpointer)
        path = get_last_checkpoint(str(out)) if resume == "auto" else str(out / resume)
        with contextlib.redirect_stdout(open(os.devnull, "w")):  # it prints its metrics
            trainer.train(resume_from_checkpoint=path)
    return told.step, model


def main(*arguments: str) -> None:
    run(train, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
