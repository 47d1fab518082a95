"""torchtitan's checkpoint manager, with the repository as storage.

`RepositoryCheckpointManager.Config(enable=True, url="s3://bucket/ckpt", run="exp42", ...)` replaces
`CheckpointManager.Config(...)`.

All settings of torchtitan's manager keep their meaning: `interval`, `async_mode`, `exclude_from_loading`,
`last_save_model_only`, `initial_load_path` and `keep_latest_k`.

- `initial_load_path` is a folder of DCP or Hugging Face. It is read while the run has no step.
- Step 0 may be a Hugging Face folder that `headrace ckpt import` made a step of. It is read through torchtitan's
  `sd_adapter`.
- `keep_latest_k` is the repository's retention, which rank 0 applies.
- A step has the numbers of torchtitan's `train_state` as metadata, such as `step` and `ntokens_seen`. Set
  `manager.metadata` before a save to add others, such as the loss.
- A step that was already saved is saved again, because torchtitan would overwrite its files.
- A final export in Hugging Face's format goes to `folder`. torchtitan itself writes it.

Invariant: all ranks load the same step. Rank 0 finds the newest step and sends its number to the other ranks.

Failure behaviour: as `headrace.checkpoint.dcp`. `MissingStepError`, a `FileNotFoundError`, is raised for a step that
does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from headrace.checkpoint.dcp import RepositoryReader, RepositoryWriter
from headrace.checkpoint.dcp.writer import step_of
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.frameworks.metrics import scalars
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.collect import Retention
from headrace.checkpoint.repository.retention import Keep
from headrace.checkpoint.repository.steps import MissingStepError
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.store.open import open_store

_RETENTION_SECONDS = 60.0
"""The time that `close` waits for old steps to be removed, in seconds. The next commit removes the rest."""


class RepositoryCheckpointManager(CheckpointManager):  # type: ignore[misc, unused-ignore]
    """torchtitan's `CheckpointManager` with the repository as storage. The module's docstring describes it."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc, unused-ignore]
        """torchtitan's settings, and `url`, `run` and `storage_options` as for `Checkpointer`."""

        url: str = ""
        run: str = ""
        storage_options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        self.metadata: dict[str, Any] = {}
        if not self.enable:
            return
        if not config.url or not config.run:
            raise UsageError("no repository is given", hint="Config(enable=True, url=..., run=...)")
        self._url, self._run, self._options = config.url, config.run, config.storage_options
        self._store = open_store(config.url, storage_options=config.storage_options)
        rank = Ranks.from_environment(None, None).rank
        keeps = config.keep_latest_k > 0 and rank == 0
        self._retention = Retention(self._store, self._run, Keep(last=config.keep_latest_k)) if keeps else None

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save `state_dict`; torchtitan's `save` calls it."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = RepositoryWriter(
            self._url,
            run=self._run,
            step=step_of(checkpoint_id),
            overwrite=True,
            metadata=self._step_metadata(),
            storage_options=self._options,
        )
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            done = None
        elif async_mode == AsyncMode.ASYNC:
            done = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            done = dcp.async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return done

    def _step_metadata(self) -> Metadata:
        """The numbers of the trainer's own state, and what `metadata` was set to."""
        trainer = self.states.get(TRAIN_STATE)
        own = trainer.state_dict() if hasattr(trainer, "state_dict") else {}
        return scalars({**own, **self.metadata})

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        step_to_load = self._find_load_step() if step == -1 else step
        if step_to_load == -1:  # the run has no step yet: load torchtitan's initial checkpoint
            return bool(super()._load(-1))
        if step != -1:
            self._require(step)
        states = self._states_to_load(step_to_load == 0)
        reader = RepositoryReader(
            self._url, run=self._run, step=step_to_load, resume=True, storage_options=self._options
        )
        if step_to_load != 0 or not self._load_imported(states, reader):
            dcp.load(states, storage_reader=reader)
            self.states[MODEL].load_state_dict(states)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def _load_imported(self, states: dict[str, Any], reader: RepositoryReader) -> bool:
        """Load a step with the names of Hugging Face. False if the step has others."""
        if self.sd_adapter is None:
            return False
        imported = {f"{MODEL}.{name}": tensor for name, tensor in self.sd_adapter.to_hf(states).items()}
        if not imported.keys() <= reader.read_metadata().state_dict_metadata.keys():
            return False
        dcp.load(imported, storage_reader=reader)
        names = {name.removeprefix(f"{MODEL}."): tensor for name, tensor in imported.items()}
        self.states[MODEL].load_state_dict(self.sd_adapter.from_hf(names))
        return True

    def _find_load_step(self, folder: str = "") -> int:
        """The run's newest step, or -1 if it has none."""
        ranks, newest, error = Ranks.from_environment(None, None), -1, None
        try:
            base = repository.find(self._store, self._run, "latest") if ranks.rank == 0 else None
            newest = -1 if base is None else base.step
        except NotFoundError:  # no repository yet
            pass
        except Exception as caught:  # of any type: the other ranks must receive it
            error = caught
        return int(ranks.agree(0, str(newest).encode(), error))

    def _require(self, step: int) -> None:
        """Raise `MissingStepError` on all ranks if the run has no such step."""
        ranks, exists, error = Ranks.from_environment(None, None), b"yes", None
        try:
            if ranks.rank == 0:
                repository.find(self._store, self._run, step)
        except NotFoundError:
            exists = b""
        except Exception as caught:  # of any type: the other ranks must receive it
            error = caught
        if not ranks.agree(step, exists, error):
            raise MissingStepError(
                f"--checkpoint.load_step={step}: run {self._run} has no such step",
                hint="`headrace ckpt ls` lists the steps",
            )

    def _purge_stale_checkpoints(self) -> None:
        """Apply retention to the steps committed so far. The next call counts a save that is in flight now."""
        if self._retention is not None:
            self._retention.committed()

    def _close(self) -> None:
        super()._close()
        if hasattr(self, "_store"):
            if self._retention is not None:
                self._retention.wait(_RETENTION_SECONDS)
            self._store.close()
