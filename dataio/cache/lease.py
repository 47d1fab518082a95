"""What a reader gets of the cache: a file that holds what it asked for, for as long as it keeps the lease.

Invariant: the engine hears once that a lease has ended, whichever thread let go of it, and under whichever lock.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import deque

from headrace.dataio.cache.blocks import BlockFile, Descriptor


class Lease:
    """A file that holds the asked-for ranges. While it lives, its bytes count as held. `once`: the cache has forgotten it
    already, so there is no use in keeping its mapping."""

    __slots__ = ("_ended", "descriptor", "file", "once", "present", "size")

    def __init__(
        self, file: int, opened: BlockFile, present: list[tuple[int, int]], ended: deque[int], once: bool = False
    ) -> None:
        self.file, self.size, self.present, self.once = file, opened.size, present, once
        self.descriptor: Descriptor = opened.reader
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self.file)  # runs in any thread, under any lock: the engine reads it later
