"""Lightning: `Trainer(plugins=[RepositoryIO("s3://bucket/ckpt", run="exp42")])` keeps its checkpoints in the repository.

Lightning gathers the state on rank 0 and names files; a file's name is kept as a small text that says which step it is, so
that `ckpt_path=` and the retention of ModelCheckpoint work as they do. Saving returns when the state is copied.
Invariant: nothing is pickled; the named file holds no tensor.
Failure behaviour: a checkpoint that holds a value that cannot be encoded is a `UsageError` naming its path (values of
hyper-parameters and callbacks must be plain); a save that fails later is raised by the next one, or by `teardown`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO

from checkpoint.api import Checkpointer
from checkpoint.frameworks.mapping import Where, mapped
from checkpoint.handle import Handle
from dataio.core.errors import CorruptionError, UsageError

_MOST_BYTES = 4096
"""Of the text that names a step."""


class RepositoryIO(CheckpointIO):  # type: ignore[misc, unused-ignore]
    """`url`, `run` and `options` as for `Checkpointer`."""

    def __init__(self, url: str, *, run: str, **options: Any) -> None:
        self._checkpointer = Checkpointer(url, run=run, rank=0, world_size=1, **options)
        self._last = -1
        self._handle: Handle | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Called on rank 0. One state may be saved under several names (`last.ckpt`), and is stored once."""
        step = int(checkpoint["global_step"])
        if step != self._last:
            self._handle = self._checkpointer.save(step, {"checkpoint": checkpoint})
            self._last = step
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps({"millrace-step": step}) + "\n")

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Where = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint, where `map_location` wants it (as for `torch.load`); in main memory if it says nothing."""
        state: dict[str, Any] = {"checkpoint": None}
        self._checkpointer.restore(state, _step(path))
        found: dict[str, Any] = mapped(state["checkpoint"], map_location)
        return found

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Drop the name. The step goes when the run's retention says so."""
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Wait for the save in flight. Lightning calls it at the end of each `fit`, and may save again afterwards."""
        if self._handle is not None:
            self._handle.result()

    def close(self) -> None:
        """Wait, and let go of the store."""
        self._checkpointer.close()


def _step(path: str | os.PathLike[str]) -> int:
    try:
        with open(path, "rb") as file:  # what another plugin saved may be of any size
            return int(json.loads(file.read(_MOST_BYTES))["millrace-step"])
    except OSError:
        raise UsageError(f"there is no checkpoint named {os.fspath(path)}", hint="check ckpt_path") from None
    except (ValueError, KeyError, TypeError):
        raise CorruptionError(
            f"{os.fspath(path)} does not name a step of ours", hint="was it saved by another plugin?"
        ) from None
