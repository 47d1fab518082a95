"""The directories of a cache's tiers, and the files in them.

Purpose: make, adopt and remove cache files, and remember which disks are in trouble.
Invariants: the engine calls under its lock. A tier in trouble is tried again after `RECOVER_SECONDS`.
Failure behaviour: a disk that cannot be written costs one warning; what it has is still served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.dataio.cache import kept
from headrace.dataio.cache.blocks import BlockDirectory, BlockFile
from headrace.dataio.cache.events import Create
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.log import get_logger, warn_once

RECOVER_SECONDS = 30.0

_log = get_logger(__name__)


class Place(msgspec.Struct, frozen=True):
    """A directory for cache files, and how many bytes it may hold. With `keep`, files outlive the engine, and what an earlier
    one left is adopted; then the directory must belong to this engine alone."""

    path: Path
    budget: int
    keep: bool = False


class Disks:
    """The files by number. `places` are the tiers, the fast one first."""

    def __init__(self, places: Sequence[Place], block_bytes: int, clock: Clock) -> None:
        self.places, self._block_bytes, self._clock = places, block_bytes, clock
        self.files: dict[int, BlockFile] = {}
        self._paused: dict[int, float] = {}  # tiers in trouble, and when to try them again

    def create(self, create: Create) -> None:
        """An empty file; `OSError` when its disk has none."""
        place = self.places[create.tier]
        self.files[create.file] = (
            kept.create(place.path, create.object, self._block_bytes)
            if create.keep and place.keep
            else BlockDirectory(place.path).create(create.object.size)
        )

    def drop(self, file: int) -> bool:
        """Forget and unlink it; whether there was one."""
        dropped = self.files.pop(file, None)
        if dropped is not None:
            dropped.unlink()
        return dropped is not None

    def left(self) -> Iterator[tuple[int, kept.Adopted]]:
        """What an earlier engine left, by tier: its blocks are to be checked when they are first asked for."""
        for tier, place in enumerate(self.places):
            if place.keep:
                for found in kept.adopt(place.path, self._block_bytes):
                    yield tier, found

    # trouble

    @property
    def paused(self) -> bool:
        """Whether any of them is in trouble."""
        return bool(self._paused)

    def pause(self, tier: int, error: OSError) -> None:
        """Use the tier no more, for a while."""
        self._paused[tier] = self._clock.monotonic() + RECOVER_SECONDS
        left = "using the other tiers" if len(self._paused) < len(self.places) else "reading from the store directly"
        warn_once(_log, f"the cache in {self.places[tier].path} cannot be written ({error.strerror}): {left}")

    def recovered(self) -> list[int]:
        """The tiers that are to be tried again now."""
        found = [tier for tier, until in self._paused.items() if self._clock.monotonic() >= until]
        for tier in found:
            del self._paused[tier]
        return found
