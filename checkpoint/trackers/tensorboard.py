"""TensorBoard: `Checkpointer(..., trackers=[TensorBoardTracker(writer)])` logs each committed step to event files.

Scalars `checkpoint/...`, at the step's number: bytes, stall and duration in seconds, numbers of the metadata. The text
`checkpoint/committed` has all values as JSON, with the URL, the digest and texts of the metadata. Published versions
are logged in the same way, as `published/<name>/...`, at the number of their step.

Invariant: nothing else is written. Texts are shown as they are, without Markdown or HTML in them being interpreted.
Failure behaviour: errors of the file system are logged once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.checkpoint.trackers.events import CommittedStep, PublishedVersion, Tracker


class Writer(Protocol):
    """As much of `torch.utils.tensorboard.SummaryWriter` as is used. tensorboardX has the same methods."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int | None = None) -> Any: ...
    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> Any: ...
    def flush(self) -> Any: ...


class TensorBoardTracker(Tracker):
    """Logs committed steps and published versions to TensorBoard.

    Args:
        writer (SummaryWriter | str | os.PathLike[str]): The trainer's writer, or a folder for the event files of a
            writer of its own.

    Example:
        >>> tracker = TensorBoardTracker("runs/exp42")
        >>> checkpointer = Checkpointer(url, run="exp42", trackers=[tracker])  # doctest: +SKIP
    """

    def __init__(self, writer: Writer | str | os.PathLike[str]) -> None:
        self._given = writer
        self._writer: Any = None

    def committed(self, step: CommittedStep) -> None:
        self._log("checkpoint", "committed", step.step, step.numbers(), step.document())

    def published(self, version: PublishedVersion) -> None:
        self._log(f"published/{version.name}", "version", version.step, version.numbers(), version.document())

    def close(self) -> None:
        if self._writer is not None and self._writer is not self._given:
            self._writer.close()

    def _log(
        self, prefix: str, title: str, step: int, numbers: Mapping[str, float], document: Mapping[str, Any]
    ) -> None:
        if self._writer is None:
            self._writer = self._given if not isinstance(self._given, str | os.PathLike) else _opened(self._given)
        for name, value in numbers.items():
            self._writer.add_scalar(f"{prefix}/{name}", value, step)
        self._writer.add_text(f"{prefix}/{title}", _as_code(document), step)
        self._writer.flush()


def _opened(folder: str | os.PathLike[str]) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(folder))


def _as_code(document: Mapping[str, Any]) -> str:
    """The document as JSON, each line indented by four spaces: in Markdown, a block in which nothing is interpreted."""
    text = json.dumps(document, indent=1)  # ASCII only, so that no character ends a line in the middle of a text
    return "\n".join(f"    {line}" for line in text.splitlines())
