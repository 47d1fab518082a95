"""The buffers that blocks pass through between a store and the cache's files.

Purpose: the buffer that was used last is used next, so that its bytes are still in the processor's caches: passing blocks through
one buffer takes less than half the processor time that passing them through sixteen in turn does.
Invariants: at most `most` buffers, and whoever needs one more waits until one is given back; one that nobody used for
`IDLE_SECONDS` goes back to the system.
Failure behaviour: no memory for a new one is a `MemoryError`, for the fetch that asked alone.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

from headrace.dataio.core.clock import Clock

IDLE_SECONDS = 5.0


class Buffers:
    """At most `most` buffers of `size` bytes, last in, first out. Safe to share between threads."""

    def __init__(self, size: int, most: int, clock: Clock) -> None:
        self._size, self._clock = size, clock
        self._lock, self._left = threading.Lock(), threading.Semaphore(most)
        self._free: list[tuple[memoryview, float]] = []  # with the time of its last use; the latest last

    @contextlib.contextmanager
    def one(self) -> Iterator[memoryview]:
        """A buffer, until the block ends. Its bytes are whatever they were."""
        with self._left:
            with self._lock:
                buffer = self._free.pop()[0] if self._free else None
            if buffer is None:
                buffer = memoryview(mmap.mmap(-1, self._size))  # and no bytearray: malloc keeps what it was given
            try:
                yield buffer
            finally:
                with self._lock:
                    self._free.append((buffer, self._clock.monotonic()))

    def trim(self) -> int:
        """Give back what has been idle for `IDLE_SECONDS`; returns how many are left."""
        oldest = self._clock.monotonic() - IDLE_SECONDS
        with self._lock:
            self._free = [(buffer, used) for buffer, used in self._free if used > oldest]
            return len(self._free)
