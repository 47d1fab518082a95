"""What loaders and checkpoints use of the sidecar: `open_reader` for shards, `Sidecar.find(...).stage(...)` for saves."""

from __future__ import annotations

import os

from dataio.cache.contract import ShardReader
from dataio.cache.reader import PrivateReader
from dataio.store.contract import Store

__all__ = ["Sidecar", "Staged", "open_reader"]


def open_reader(store: Store, sidecar: str | os.PathLike[str] | None = "auto") -> ShardReader:
    """A reader of `store`'s objects: the node's sidecar where one answers, else a cache inside this process."""
    return PrivateReader(store)


class Staged:
    """A checkpoint that the daemon owns."""

    token: str

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes done and in all."""
        return (0, 0)

    def wait_released(self, timeout: float | None = None) -> None:
        """Until the arena may be written again."""

    def result(self, timeout: float | None = None) -> dict[str, object]:
        """What the job reported when it was done, or its error."""
        return {}


class Sidecar:
    """One connection to the node's daemon."""

    @classmethod
    def find(cls, sidecar: str | os.PathLike[str] | None = "auto") -> Sidecar | None:
        """A connection, or None when no daemon answers."""
        return None

    def stage(self, kind: str, arena_fd: int, plan: bytes) -> Staged:
        """Hand an arena and its plan to the daemon; returns once it owns both."""
        return Staged()

    def status(self) -> dict[str, object]:
        """What the daemon says of itself."""
        return {}

    def close(self) -> None:
        """End the connection; staged jobs go on."""
