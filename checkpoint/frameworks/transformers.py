"""transformers: `RepositoryTrainer`, and `RepositoryCallback` for a Trainer that must not change.

`LoaderTrainer` of `transformers_data` is also here. It trains on a Headrace loader, with the Trainer's own checkpoints.

`RepositoryTrainer(model, args, ..., checkpointer=checkpointer)` is a Trainer whose checkpoints are steps of the
repository. Its `checkpoint-<step>` folders keep `trainer_state.json` and name the step, so
`train(resume_from_checkpoint=...)`, `save_total_limit` and `load_best_model_at_end` work as usual. A folder appears
when its step is committed. Older folders are removed after that (`naming`). Resuming is exact. It restores the step's
model, optimizer, scheduler, scaler and random generators, and training continues at the next batch. A Headrace loader
is part of the step. Pass it as `train_dataset`, or return it from `get_train_dataloader`.

`Trainer(callbacks=[RepositoryCallback(checkpointer)])` saves when the Trainer does, in addition to the Trainer's own
files. It restores when training begins. A Headrace loader then continues at its saved position. A callback cannot skip
batches of any other data. Such data starts from the beginning, and a warning is logged. The Trainer divides the first
loss after that by all steps since the run began. The callback corrects it in `log_history` and for the callbacks after
it. Trackers of `report_to` come before it and get the smaller number once.

Invariant: a saved step holds model, optimizer, scheduler and generators as they were when the Trainer saved.

Failure behaviour: as `Checkpointer`. If a save fails in the background, the error is logged. Closing the checkpointer
raises it. The module also raises these errors:

- `UnsupportedError` under DeepSpeed, which keeps its own optimizer states.
- `UnsupportedError`, before the first step, for a Headrace loader in a `DataLoader` that prefetches.
- `MissingStepError`, a `FileNotFoundError`, for a folder whose step does not exist.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import transformers.trainer as trainer_module
from transformers import TrainerCallback
from transformers.trainer_utils import sort_checkpoints

from headrace.checkpoint.api import Checkpointer
from headrace.checkpoint.frameworks.metrics import scalars
from headrace.checkpoint.frameworks.name_files import move_folder
from headrace.checkpoint.frameworks.naming import Names
from headrace.checkpoint.frameworks.transformers_data import LoaderTrainer, loader_in, to_next_batch
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.checkpoint.rng import RNG
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import UnsupportedError
from headrace.dataio.core.log import get_logger, warn_first

__all__ = ["LoaderTrainer", "RepositoryCallback", "RepositoryTrainer"]

_log = get_logger(__name__)
_SCRATCH = ".headrace-unnamed"
"""The name of a save's folder in `output_dir`, until its attempt is created."""

_written = declare("name.trainer-folder-written", "the Trainer has written its folder, hidden; no save has begun")


class RepositoryTrainer(LoaderTrainer):  # type: ignore[misc, unused-ignore]
    """A `Trainer` whose checkpoints are steps of the repository. It trains on a Headrace loader as `LoaderTrainer` does.

    Args:
        *args: Arguments of `Trainer`.
        checkpointer (Checkpointer): Saves and restores. Close it yourself.
        **given: Keyword arguments of `Trainer`.

    Raises:
        UnsupportedError: Under DeepSpeed.
    """

    def __init__(self, *args: Any, checkpointer: Checkpointer, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.is_deepspeed_enabled:
            raise UnsupportedError(
                "DeepSpeed keeps its own optimizer states, which the Trainer does not pass on",
                hint="use DeepSpeed's checkpoints, or FSDP2",
            )
        self._checkpointer, self._names = checkpointer, Names(checkpointer)
        self._scratch: Path | None = None
        self._recover(self.args.output_dir)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As `Trainer.train`. Returns after the names of its checkpoints are published."""
        if resume_from_checkpoint:
            newest = isinstance(resume_from_checkpoint, bool)
            self._recover(self.args.output_dir if newest else Path(str(resume_from_checkpoint)).parent)
        output = super().train(resume_from_checkpoint, *args, **options)
        self._names.wait_quietly()
        return output

    def _recover(self, folder: str | os.PathLike[str]) -> None:
        """Publish names that an earlier process left hidden. After this call, all ranks see the same folders."""
        if self.args.should_save:
            self._names.recover(folder)
        self.accelerator.wait_for_everyone()

    # saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save as the Trainer does, into a hidden folder. The next four methods replace its files."""
        run_dir = Path(super()._get_output_dir(trial))
        self._scratch = run_dir / _SCRATCH
        if self.args.should_save:
            shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            hidden, self._scratch = self._scratch, None
        self._name(run_dir, hidden)

    def _name(self, run_dir: Path, hidden: Path) -> None:
        """Save the state. The folder is published after the step is committed."""
        step = int(self.state.global_step)
        folder = f"checkpoint-{step}"
        if self.state.best_model_checkpoint == str(hidden / folder):
            self.state.best_model_checkpoint = str(run_dir / folder)
        state = {"model": self.model} | ({} if self.args.save_only_model else self._rest() | {"rng": RNG()})
        metadata = scalars((self.state.log_history or [{}])[-1])
        if not self.args.should_save:
            self._names.save(step, state, None, move_folder(hidden), metadata=metadata)
            return
        self.state.save_to_json(str(hidden / folder / trainer_module.TRAINER_STATE_NAME))
        _written()
        then = functools.partial(self._rotate, run_dir, self.state.best_model_checkpoint)
        self._names.save(step, state, run_dir / folder, move_folder(hidden / folder), then, metadata)
        shutil.rmtree(hidden, ignore_errors=True)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._scratch is None else str(self._scratch)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as files, unless a checkpoint is being saved."""
        if self._scratch is None:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            Path(str(output_dir)).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Do nothing: this is saved with the model."""

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: this is saved with the model."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Do nothing: this is saved with the model."""

    def _rotate(self, run_dir: Path, best: str | None) -> None:
        """Apply `save_total_limit` as the Trainer does. The newest and the best checkpoint are kept."""
        limit = self.args.save_total_limit
        if not limit or limit <= 0:
            return
        checkpoints = sort_checkpoints(str(run_dir), use_mtime=True)
        protected = {*checkpoints[-1:], *([str(Path(best))] if best else [])}
        surplus = len(checkpoints) - max(limit, len(protected))
        for path in [each for each in checkpoints if each not in protected][: max(surplus, 0)]:
            self._names.remove_now(path)

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        self._names.wait_quietly()  # the Trainer looks for the best checkpoint, and may remove all others
        return super()._finalize_training(*args, **options)

    # resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._restore({"model": self.model if model is None else model}, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        try:
            self._restore({"model": self.model}, best)
        except MissingStepError as error:  # as the Trainer does
            warn_first(_log, "job", "the best model cannot be loaded; the newest one is used: %s", error)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._restore(self._rest(), checkpoint)
            if self._loader is not None:
                self._loader.was_moved()

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: it is loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the generators. The Trainer calls this after it has skipped the batches that were trained on."""
        if checkpoint is not None:
            self._restore({"rng": RNG()}, checkpoint)

    def _rest(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "scheduler": self.lr_scheduler, "scaler": self.accelerator.scaler}
        loader = None if self._loader is None else self._loader.loader
        return {name: part for name, part in (parts | {"loader": loader}).items() if part is not None}

    def _restore(self, parts: dict[str, Any], folder: str | os.PathLike[str]) -> None:
        self._names.restore(parts, folder, include=list(parts))


class RepositoryCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves when the Trainer does, in addition to its files.

    Args:
        checkpointer (Checkpointer): Saves and restores. Close it yourself.
        resume (bool): Restore the run's newest step, if any, when training begins. Default: True.
    """

    def __init__(self, checkpointer: Checkpointer, *, resume: bool = True) -> None:
        self._checkpointer, self._resume = checkpointer, resume
        self._counted: tuple[int, int] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        into = _state(objects) | {"progress": {"global_step": 0, "epoch": 0.0}}
        if not self._resume or self._checkpointer.restore(into) is None:
            return
        began = state.global_step
        state.global_step, state.epoch = into["progress"]["global_step"], into["progress"]["epoch"]
        self._counted = (began, state.global_step)
        if "loader" in into:
            to_next_batch(into["loader"])
        else:
            warn_first(
                _log,
                "job",
                "step %d is restored, but the Trainer's data starts from the beginning: a callback cannot skip batches. "
                "RepositoryTrainer continues at the next batch",
                state.global_step,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **objects: Any) -> None:
        """Correct the first loss after a restore: the Trainer divides it by all steps since its own start."""
        if self._counted is None or logs is None or "loss" not in logs:
            return
        (began, restored), self._counted = self._counted, None
        logs["loss"] *= (state.global_step - began) / (state.global_step - restored)
        state.log_history[-1]["loss"] = logs["loss"]

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        progress = {"global_step": int(state.global_step), "epoch": float(state.epoch or 0)}
        metadata = scalars((state.log_history or [{}])[-1])
        self._checkpointer.save(int(state.global_step), _state(objects) | {"progress": progress}, metadata=metadata)


def _state(objects: dict[str, Any]) -> dict[str, Any]:
    parts = {"model": objects["model"], "optimizer": objects.get("optimizer"), "scheduler": objects.get("lr_scheduler")}
    parts |= {"loader": loader_in(objects.get("train_dataloader"))}
    return {name: part for name, part in parts.items() if part is not None} | {"rng": RNG()}
