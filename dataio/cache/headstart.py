"""What is wanted first, straight from the store, before the cache behind it is even made.

Purpose: a cache fetches blocks, which pays off over an epoch; whoever waits for the first batch of small samples would wait for
blocks that hold mostly other samples.
Invariants: the bytes are the same. Only what the first announcement names is fetched so, side by side, in `PARALLEL` requests
and `MOST_BYTES` at most, and only where that is less than half of what blocks would be; from the second announcement on
everything goes through the `other` reader, which is made then, or when anything else is read.
Failure behaviour: what could not be fetched so is asked of the other reader, whose errors pass through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np

from dataio.cache.contract import Read, ShardReader, copy_into, one_by_one
from dataio.core import limits
from dataio.core.errors import MillraceError
from dataio.store.contract import Store

PARALLEL = 8
MOST_BYTES = 4 * limits.CACHE_BLOCK_BYTES
"""These bytes are in memory until the next batch is looked up, and read once more with their blocks."""
WAIT_SECONDS = 300.0

Range = tuple[str, int, int]
_Coming = dict[str, list[tuple[int, int, "Future[memoryview]"]]]


def is_worth_it(upcoming: Sequence[Range], block: int = limits.CACHE_BLOCK_BYTES) -> bool:
    """Whether these ranges come sooner by themselves than the blocks that hold them: they are few, and little of those. Pure."""
    if not upcoming or any(length <= 0 for _, _, length in upcoming):
        return False
    blocks = {
        (key, number)
        for key, offset, length in upcoming
        for number in range(offset // block, (offset + length - 1) // block + 1)
    }
    size = sum(length for _, _, length in upcoming)
    return size <= MOST_BYTES and 2 * size <= len(blocks) * block and len(upcoming) <= PARALLEL + 2 * len(blocks)


class HeadStart:
    """A `ShardReader` of `store`, which is the one that `make` gives but for the beginning. Closing it closes that one."""

    def __init__(self, store: Store, make: Callable[[], ShardReader]) -> None:
        self._store, self._make = store, make
        self._making, self._begun = threading.Lock(), False
        self._other: ShardReader | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._coming: _Coming = {}

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        views = [self._there(key, offset, length) for offset, length in ranges] if key in self._coming else [None]
        there = [view for view in views if view is not None]
        return there if len(there) == len(ranges) else self._elsewhere().read(key, ranges)

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        if key not in self._coming:
            self._elsewhere().read_into(key, pieces)
            return
        copy_into(self, key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each."""
        if any(key in self._coming for key, _ in reads):
            return one_by_one(self, reads)
        return self._elsewhere().read_each(reads)

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Fetch what is read first; have the other reader prefetch what comes later."""
        first, self._begun = not self._begun, True
        if first and self._other is None and is_worth_it(upcoming):
            self._fetch(upcoming)
        else:
            self._let_go()
            self._elsewhere().announce(upcoming)

    def close(self) -> None:
        self._let_go()
        with self._making:
            if self._other is not None:
                self._other.close()

    def _fetch(self, upcoming: Sequence[Range]) -> None:
        self._pool = ThreadPoolExecutor(min(PARALLEL, len(upcoming)), "millrace-first")
        coming: _Coming = {}
        for key, offset, length in dict.fromkeys(upcoming):
            future = self._pool.submit(self._get, key, offset, length)
            coming.setdefault(key, []).append((offset, offset + length, future))
        self._coming = coming

    def _get(self, key: str, offset: int, length: int) -> memoryview:
        buffer = np.empty(length, np.uint8).data
        self._store.get_ranges_into(key, [(offset, buffer)])
        return buffer.toreadonly()

    def _there(self, key: str, offset: int, length: int) -> memoryview | None:
        """A range of what was fetched, once it is there."""
        for first, end, future in self._coming.get(key, ()):
            if first <= offset and offset + length <= end:
                with contextlib.suppress(MillraceError, TimeoutError, CancelledError):
                    return future.result(WAIT_SECONDS)[offset - first : offset - first + length]
        return None

    def _let_go(self) -> None:
        """What nobody read by now is not waited for."""
        pool, self._pool, self._coming = self._pool, None, {}
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _elsewhere(self) -> ShardReader:
        with self._making:
            if self._other is None:
                self._other = self._make()
            return self._other
