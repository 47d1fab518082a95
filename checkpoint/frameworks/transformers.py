"""transformers: two ways.

`RepositoryTrainer(model, args, ..., checkpointer=checkpointer)` is the Trainer whose checkpoints are steps of the repository.
Its `checkpoint-<step>` folders keep `trainer_state.json` alone and name the step, so that `train(resume_from_checkpoint=...)`,
`save_total_limit` and `load_best_model_at_end` find them as they always do. Resuming is exact: model, optimizer, scheduler,
scaler and generators are those of the step, and the Trainer goes on at the batch where it was.
`Trainer(callbacks=[RepositoryCallback(checkpointer)])` saves when the Trainer does, beside the Trainer's own files, and resumes
when training begins: a Trainer need not be changed, but a callback cannot tell it to skip batches, so that data begins anew.

Invariant: at every save, model, optimizer, scheduler and generators are staged before training goes on.
Failure behaviour: as `Checkpointer`; a save that fails in the background is logged and raised when the checkpointer is closed.
`UnsupportedError` under DeepSpeed, which keeps optimizer states of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from checkpoint.api import Checkpointer
from checkpoint.dcp.writer import step_of
from checkpoint.rng import RNG
from dataio.core.errors import UnsupportedError


class RepositoryTrainer(Trainer):  # type: ignore[misc, unused-ignore]
    """A Trainer with `checkpointer`, which stays the caller's to close."""

    def __init__(self, *args: Any, checkpointer: Checkpointer, **given: Any) -> None:
        super().__init__(*args, **given)
        if self.is_deepspeed_enabled:
            raise UnsupportedError("DeepSpeed keeps optimizer states of its own", hint="use its checkpoints, or FSDP2")
        self._checkpointer, self._naming = checkpointer, False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the Trainer does it, but for the four that follow."""
        self._naming = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._naming = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The model as files, unless it is a checkpoint that is saved."""
        if not self._naming:
            super().save_model(output_dir, _internal_call)
            return
        Path(str(output_dir)).mkdir(parents=True, exist_ok=True)
        rest = {} if self.args.save_only_model else self._rest() | {"rng": RNG()}
        self._checkpointer.save(int(self.state.global_step), {"model": self.model} | rest)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Saved with the model."""

    def _save_scaler(self, output_dir: str) -> None:
        """Saved with the model."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Saved with the model."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._restore({"model": self.model if model is None else model}, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._restore({"model": self.model}, str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._restore(self._rest(), checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Trainer calls it when it has skipped the batches that were trained on."""
        if checkpoint is not None:
            self._restore({"rng": RNG()}, checkpoint)

    def _rest(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "scaler": self.accelerator.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _restore(self, parts: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        self._checkpointer.restore(parts, step_of(folder), include=list(parts))


class RepositoryCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """`resume`: restore the run's newest step, if it has one, when training begins. Close the checkpointer yourself."""

    def __init__(self, checkpointer: Checkpointer, *, resume: bool = True) -> None:
        self._checkpointer, self._resume = checkpointer, resume

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        into = _state(given) | {"progress": {"global_step": 0, "epoch": 0.0}}
        if self._resume and self._checkpointer.restore(into) is not None:
            state.global_step, state.epoch = into["progress"]["global_step"], into["progress"]["epoch"]

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        progress = {"global_step": int(state.global_step), "epoch": float(state.epoch or 0)}
        self._checkpointer.save(int(state.global_step), _state(given) | {"progress": progress})


def _state(given: dict[str, Any]) -> dict[str, Any]:
    parts = {"model": given["model"], "optimizer": given.get("optimizer"), "scheduler": given.get("lr_scheduler")}
    return {name: part for name, part in parts.items() if part is not None} | {"rng": RNG()}
