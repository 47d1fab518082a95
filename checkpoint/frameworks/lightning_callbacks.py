"""Lightning: `Trainer(callbacks=headrace_callbacks("s3://bucket/ckpt", run="exp42", every=500))`.

One call in place of a `ModelCheckpoint`, a `RepositoryIO` and trackers:

- The trainer saves a step after every 500 training steps, and after the last one. The values that the module logged with
  `self.log` are the step's metadata.
- `trainer.fit(model, loader, ckpt_path="last")` resumes from the run's newest step. It finds the step in the repository,
  so the job may start on another machine. If the run has no step, training begins at step 0.
- The position of a Headrace loader is in the step, because Lightning saves the state of each loader that has one.
- Committed steps are logged to the trainer's loggers for MLflow, TensorBoard and W&B.

Invariant: all ranks resume from the step that rank 0 found. All steps are committed, and logged, when `fit` returns.

Failure behaviour: as `RepositoryIO`. The error of a failed save is raised at the end of `fit`. `UsageError` is raised if
the trainer already has a `CheckpointIO`, or if some ranks found a step and rank 0 did not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger

from headrace.checkpoint.frameworks.lightning import RepositoryIO
from headrace.checkpoint.frameworks.name_files import Record, replace_file
from headrace.checkpoint.trackers.events import Tracker
from headrace.dataio.core.errors import TransientError, UsageError

RESUME_NAME = "resume.ckpt"
"""The name, in the folder of names, of the step that `ckpt_path="last"` resumes from."""


def headrace_callbacks(
    url: str,
    *,
    run: str,
    every: int,
    folder: str | os.PathLike[str] = "checkpoints",
    trackers: Sequence[Tracker] | None = None,
    **options: Any,
) -> list[Callback]:
    """The callbacks of a `lightning.Trainer` for checkpoints, resuming and trackers.

    Args:
        url (str): The repository, as for `Checkpointer`.
        run (str): The run's name.
        every (int): The number of training steps between two saves.
        folder (str | os.PathLike[str]): A folder on this machine, or a shared one, for the small files that name
            checkpoints. Default: "checkpoints".
        trackers (Sequence[Tracker] | None): Trackers of committed steps. Default: None, one for each of the trainer's
            loggers for MLflow, TensorBoard and W&B.
        **options: Further arguments of `Checkpointer`, such as `keep` or `storage_options`.

    Returns:
        list[Callback]: One `RepositoryCheckpoint`. Its `close` is called at the end of `fit`.

    Raises:
        UsageError: `every` is not positive.

    Example:
        >>> callbacks = headrace_callbacks("s3://bucket/ckpt", run="exp42", every=500)
        >>> trainer = lightning.Trainer(max_steps=10_000, callbacks=callbacks)  # doctest: +SKIP
        >>> trainer.fit(model, loader, ckpt_path="last")  # doctest: +SKIP
    """
    return [RepositoryCheckpoint(url, run=run, every=every, folder=folder, trackers=trackers, **options)]


class RepositoryCheckpoint(ModelCheckpoint):  # type: ignore[misc, unused-ignore]
    """A `ModelCheckpoint` that brings its own `RepositoryIO`. The arguments are those of `headrace_callbacks`."""

    def __init__(
        self,
        url: str,
        *,
        run: str,
        every: int,
        folder: str | os.PathLike[str] = "checkpoints",
        trackers: Sequence[Tracker] | None = None,
        **options: Any,
    ) -> None:
        if every < 1:
            raise UsageError(f"every={every} is no number of training steps", hint="give 1 or more")
        super().__init__(os.fspath(folder), filename="{step}", every_n_train_steps=every)
        self._url, self._run, self._trackers, self._options = url, run, trackers, options
        self._io: RepositoryIO | None = None
        self._resume_path = Path(self._folder) / RESUME_NAME  # `setup` makes `dirpath` that of rank 0
        self._resumed: Record | None = None
        self._asked = False
        self._saved_step = -1

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the trainer the `RepositoryIO`, and agree on the step to resume from."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* exists and is not empty")  # it has the run's earlier names
            super().setup(trainer, pl_module, stage)
        present = trainer.strategy.checkpoint_io
        if present is not self._io and type(present) is not TorchCheckpointIO:
            self.close()
            raise UsageError(
                f"the trainer already has a {type(present).__name__}",
                hint="leave it out of `plugins`; headrace_callbacks(...) brings its own",
            )
        trainer.strategy.checkpoint_io = self._opened(trainer)
        if self._asked:
            self._agree(trainer.strategy.broadcast(self._resumed, src=0))
            trainer.strategy.barrier("resume")  # in a shared folder, no rank may read the name before all agree

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Make the logged metrics the metadata of the step."""
        self._opened(trainer).metadata = dict(trainer.callback_metrics)
        self._saved_step = int(checkpoint["global_step"])

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The step that is resumed from is saved."""
        self._saved_step = int(checkpoint["global_step"])

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, if it is not saved yet."""
        super().on_train_end(trainer, pl_module)
        if self._saved_step != trainer.global_step > 0:
            trainer.save_checkpoint(Path(self._folder) / f"step={trainer.global_step}{self.FILE_EXTENSION}")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait until all saves are committed and logged."""
        super().teardown(trainer, pl_module, stage)
        self.close()
        trainer.strategy.checkpoint_io = TorchCheckpointIO()

    def close(self) -> None:
        """Wait for saves in flight and close the store. The next `fit`, `validate` or `test` opens it again."""
        opened, self._io = self._io, None
        if opened is not None:
            opened.close()

    @property
    def _folder(self) -> str:
        return str(self.dirpath)

    def _opened(self, trainer: Any) -> RepositoryIO:
        if self._io is None:
            trackers = _trackers_of(trainer) if self._trackers is None else self._trackers
            mine = trackers if trainer.is_global_zero else ()
            self._io = RepositoryIO(self._url, run=self._run, trackers=mine, **self._options)
        return self._io

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """The candidates of `ckpt_path="last"`: a name of the run's newest step. Lightning calls it on each rank."""
        self._asked, self._resumed = True, self._opened(trainer).newest()
        if self._resumed is None:
            return set()
        replace_file(self._resume_path, self._resumed)
        return {str(self._resume_path)}

    def _agree(self, first: Record | None) -> None:
        """Resume from the step that rank 0 found, also if this rank found another one a moment earlier or later."""
        self._asked = False
        if (first is None) != (self._resumed is None):
            raise TransientError(
                f"the first step of run {self._run} was committed while the ranks looked for it",
                hint="start the job again",
            )
        if first is not None and first != self._resumed:
            replace_file(self._resume_path, first)


def _trackers_of(trainer: Any) -> list[Tracker]:
    """A tracker for each logger of the trainer that has one."""
    found = list[Tracker]()
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            from headrace.checkpoint.trackers.tensorboard import TensorBoardTracker

            found.append(TensorBoardTracker(logger.experiment))
        elif isinstance(logger, MLFlowLogger):
            from headrace.checkpoint.trackers.mlflow import MlflowTracker

            found.append(MlflowTracker(logger.run_id))
        elif isinstance(logger, WandbLogger):
            from headrace.checkpoint.trackers.wandb import WandbTracker

            found.append(WandbTracker(logger.experiment))
    return found
