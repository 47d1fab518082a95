"""Reads the first batch directly from the store, bypassing the cache.

Purpose: a cache fetches whole blocks, which pays off over an epoch. But the first batch of small samples would wait for
blocks that hold mostly other samples.
Invariants: the bytes are the same. Only ranges of the first announcement are fetched directly, and only if they are few,
and at most `MAX_BYTES` and half of their blocks. At most `PARALLEL` requests run at the same time. From the second
announcement on, all reads use the fallback reader, which is created then or at the first read of another range. Directly
fetched ranges of at least `MIN_PART_BYTES` are not fetched again with their blocks: `PartlyFetchedStore` supplies them.
Failure behaviour: a range that could not be fetched is read through the fallback reader, whose errors pass through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np

from headrace.dataio.cache.readers.base import Read, ShardReader, copy_into, one_by_one
from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.base import Store
from headrace.dataio.store.wrappers import Wrapper

PARALLEL = 8
MAX_BYTES = 4 * limits.CACHE_BLOCK_BYTES
"""Maximum bytes of direct fetches. They stay in memory until their blocks are read or the reader is closed."""
MIN_PART_BYTES = 128 << 10
"""Minimum size of a part that is not fetched again. A smaller one saves less than the additional request costs."""
WAIT_SECONDS = 300.0

Range = tuple[str, int, int]
_Pending = dict[str, list[tuple[int, int, "Future[memoryview]"]]]


def is_worthwhile(upcoming: Sequence[Range], block: int = limits.CACHE_BLOCK_BYTES) -> bool:
    """Whether these ranges arrive sooner than their blocks: they are few, and a small part of the blocks."""
    upcoming = [(key, offset, length) for key, offset, length in upcoming if length]  # the others bound a file
    if not upcoming or any(length < 0 for _, _, length in upcoming):
        return False
    blocks = {
        (key, number)
        for key, offset, length in upcoming
        for number in range(offset // block, (offset + length - 1) // block + 1)
    }
    size = sum(length for _, _, length in upcoming)
    return size <= MAX_BYTES and 2 * size <= len(blocks) * block and len(upcoming) <= PARALLEL + 2 * len(blocks)


class PartlyFetchedStore(Wrapper):
    """`inner`, with some bytes already in memory.

    `get_pieces` requests only the other bytes, and removes from memory those that it delivers.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._lock, self._parts = threading.Lock(), dict[str, list[tuple[int, memoryview]]]()

    def add(self, key: str, offset: int, part: memoryview) -> None:
        """Add bytes of an object that are in memory."""
        if len(part) >= MIN_PART_BYTES:
            with self._lock:
                self._parts.setdefault(key, []).append((offset, part))

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        at, end = offset, offset + len(buffer)

        def pass_on(first: int, piece: memoryview) -> None:
            nonlocal at
            if first != at:
                raise _RestartedError
            take(first, piece)
            at += len(piece)

        if parts := self._take(key, offset, end):
            with contextlib.suppress(_RestartedError):
                for first, part in parts:
                    if at < first:
                        self.inner.get_pieces(key, at, buffer[: first - at], pass_on)
                    pass_on(first, part)
                if at < end:
                    self.inner.get_pieces(key, at, buffer[: end - at], pass_on)
                return
        self.inner.get_pieces(key, offset, buffer, take)

    def _take(self, key: str, first: int, end: int) -> list[tuple[int, memoryview]]:
        """Remove and return the parts of [first, end), sorted and disjoint.

        If a part crosses an edge, its rest stays.
        """
        if key not in self._parts:
            return []
        taken, remaining, at = list[tuple[int, memoryview]](), list[tuple[int, memoryview]](), first
        with self._lock:
            for offset, part in sorted(self._parts.pop(key, []), key=lambda entry: entry[0]):
                a, b = max(0, at - offset), min(len(part), end - offset)
                if b - a < MIN_PART_BYTES:
                    remaining.append((offset, part))
                    continue
                taken.append((offset + a, part[a:b]))
                at = offset + b
                rests = ((offset, part[:a]), (at, part[b:]))
                remaining += [(start, rest) for start, rest in rests if len(rest) >= MIN_PART_BYTES]
            if remaining:
                self._parts[key] = remaining
        return taken


class _RestartedError(Exception):
    """The store restarted a read: all pieces are delivered again from the first one."""


class BypassReader:
    """A `ShardReader` of `store` that reads the first batch directly.

    It reads the rest through the reader that `make` returns. Closing it closes that reader.
    """

    def __init__(self, store: Store, make: Callable[[Store], ShardReader]) -> None:
        self._store, self._make = PartlyFetchedStore(store), make
        self._fallback_lock, self._announced = threading.Lock(), False
        self._fallback_reader: ShardReader | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pending: _Pending = {}

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        views = [self._wait_for(key, offset, length) for offset, length in ranges] if key in self._pending else [None]
        present = [view for view in views if view is not None]
        return present if len(present) == len(ranges) else self._fallback().read(key, ranges)

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        if key not in self._pending:
            self._fallback().read_into(key, pieces)
            return
        copy_into(self, key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each."""
        if any(key in self._pending for key, _ in reads):
            return one_by_one(self, reads)
        return self._fallback().read_each(reads)

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Fetch the first announcement directly; pass later ones to the fallback reader."""
        is_first, self._announced = not self._announced, True
        if is_first and self._fallback_reader is None and is_worthwhile(upcoming):
            self._fetch(upcoming)
        else:
            self._release()
            self._fallback().announce(upcoming)

    def close(self) -> None:
        self._release()
        with self._fallback_lock:
            if self._fallback_reader is not None:
                self._fallback_reader.close()

    def _fetch(self, upcoming: Sequence[Range]) -> None:
        self._pool = ThreadPoolExecutor(min(PARALLEL, len(upcoming)), "headrace-first")
        pending: _Pending = {}
        for key, offset, length in dict.fromkeys(planned for planned in upcoming if planned[2]):
            future = self._pool.submit(self._get, key, offset, length)
            pending.setdefault(key, []).append((offset, offset + length, future))
        self._pending = pending

    def _get(self, key: str, offset: int, length: int) -> memoryview:
        buffer = np.empty(length, np.uint8).data
        self._store.get_ranges_into(key, [(offset, buffer)])
        return buffer.toreadonly()

    def _wait_for(self, key: str, offset: int, length: int) -> memoryview | None:
        """Wait for a range that is fetched directly; None if it is not one, or could not be fetched."""
        if not length:
            return memoryview(b"")
        for first, end, future in self._pending.get(key, ()):
            if first <= offset and offset + length <= end:
                with contextlib.suppress(HeadraceError, TimeoutError, CancelledError):
                    return future.result(WAIT_SECONDS)[offset - first : offset - first + length]
        return None

    def _release(self) -> None:
        """Cancel direct fetches that have not arrived. Pass the others to the store as parts of their blocks."""
        pool, self._pool = self._pool, None
        pending, self._pending = self._pending, {}
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for key, ranges in pending.items():
            for offset, _, future in ranges:
                if future.done() and not future.cancelled() and future.exception() is None:
                    self._store.add(key, offset, future.result())

    def _fallback(self) -> ShardReader:
        with self._fallback_lock:
            if self._fallback_reader is None:
                self._fallback_reader = self._make(self._store)
            return self._fallback_reader
