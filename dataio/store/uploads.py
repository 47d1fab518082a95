"""Uploads in parts that are not ended yet, and what is written down of them.

Invariants: nothing here is believed: whoever goes on with an upload asks the server which parts it has (`dataio.store.resume`).
Failure behaviour: that of who keeps the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec


class Part(msgspec.Struct, frozen=True):
    """A part that the server has. `digest` is the XXH3-128 of its bytes."""

    number: int
    size: int
    etag: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that was begun and not ended. `nonce` stands in the object's metadata."""

    id: str
    nonce: str
    parts: Mapping[int, Part] = field(default_factory=dict)


class UploadLog(Protocol):
    """Where uploads are written down; called from several threads. Nothing is promised before a call returns."""

    def unfinished(self, key: str) -> Unfinished | None:
        """The upload of this object that was begun last, if it was not ended."""

    def begun(self, key: str, upload: Unfinished) -> None: ...
    def sent(self, key: str, part: Part) -> None: ...
    def filled(self, key: str) -> None:
        """All bytes of the object are known; the last are about to be sent."""

    def ended(self, key: str, size: int | None) -> None:
        """The object is there with `size` bytes; None: its upload was aborted."""
