"""The log of uploads in parts: what one process writes down, so that the next can abort what it left unfinished.

Invariant: no upload is continued by another process. Requests of the first one may still be on their way, and would then
change what the second one stores.
Failure behaviour: that of the log.
"""

from __future__ import annotations

from typing import Protocol


class UploadLog(Protocol):
    """Where uploads are written down; called from several threads. Nothing is promised before a call returns."""

    def begun(self, key: str, upload: str) -> None:
        """An upload of this object has begun under this id."""

    def ended(self, key: str, size: int | None) -> None:
        """The object is there with `size` bytes; None: its upload was aborted."""
