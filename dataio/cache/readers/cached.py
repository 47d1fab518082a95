"""Reads shards through a cache engine inside this process.

Invariant: a view stays valid and unchanged while it is referenced, even if the cache evicts its file.
Failure behaviour: ranges that have no room in the cache are read from the store into memory. A `PrivateReader` also
does so when the cache's disk cannot be read. The store's errors pass through. A read that waits longer than
`WAIT_SECONDS` raises `DeadlineError`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.dataio.cache.blocks import Lease, MappedFile, fill, map_file
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.readers.base import Read, ThreadBuffer, copy_into, one_by_one
from headrace.dataio.core import limits
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.errors import DeadlineError
from headrace.dataio.store.base import Store

WAIT_SECONDS = 300.0
MAPPED_FILES = 64
"""Maximum number of mappings that are kept for later reads. Views keep further ones alive."""
PRIVATE_BUDGET = 1 * limits.GIB
PRIVATE_THREADS = 4
PRIVATE_FILES = 128
COPIED_BYTES = 16 * limits.MIB

Ranges = Sequence[tuple[int, int]]


class Mappings:
    """The most recently used mappings by file. Safe to share between threads."""

    def __init__(self, limit: int = MAPPED_FILES) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._maps: OrderedDict[int, MappedFile] = OrderedDict()

    def get(self, file: int) -> MappedFile | None:
        with self._lock:
            mapped = self._maps.get(file)
            if mapped is not None:
                self._maps.move_to_end(file)
            return mapped

    def add(self, file: int, mapped: MappedFile) -> MappedFile:
        """Keep `mapped`, or the mapping that another thread added first."""
        with self._lock:
            mapped = self._maps.setdefault(file, mapped)
            dropped = self._maps.popitem(last=False) if len(self._maps) > self._limit else None
        del dropped  # its lease ends outside the lock
        return mapped

    def drop(self, file: int) -> None:
        with self._lock:
            dropped = self._maps.pop(file, None)
        del dropped

    def clear(self) -> None:
        with self._lock:
            dropped, self._maps = self._maps, OrderedDict()
        del dropped


class CachedReader:
    """A `ShardReader` of `store` through `engine`. Closing it closes neither."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store, self._engine, self._maps = store, engine, Mappings()
        self._unsubscribe = weakref.finalize(self, engine.subscribe(self._maps.drop))

    def read(self, key: str, ranges: Ranges) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        lease = self._get_lease(key, ranges)
        return stream(self._store, key, ranges) if lease is None else views(self._get_mapping(lease), ranges)

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        copy_into(self, key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each."""
        return one_by_one(self, reads)

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        """Prefetch the ranges that will be read next."""
        self._engine.announce(id(self), self._store, upcoming)

    def close(self) -> None:
        """Close all mappings; views stay valid."""
        self._unsubscribe()
        self._engine.withdraw(id(self))
        self._maps.clear()

    def _get_lease(self, key: str, ranges: Ranges) -> Lease | None:
        """A lease on a file that holds the ranges; None: read the store directly."""
        return self._engine.open_present(self._store, key, ranges, id(self)) or self._request_lease(key, ranges)

    def _request_lease(self, key: str, ranges: Ranges) -> Lease | None:
        try:
            return self._engine.open(self._store, key, ranges, id(self)).result(WAIT_SECONDS)
        except TimeoutError:
            raise DeadlineError(
                f"{key}: the store sent no bytes for {WAIT_SECONDS:.0f} s", hint="check that the store is reachable"
            ) from None

    def _get_mapping(self, lease: Lease) -> MappedFile | None:
        if not lease.size:
            return None
        mapped = None if lease.once else self._maps.get(lease.file)
        if mapped is None:
            descriptor = lease.take_descriptor()  # a mapping has a descriptor of its own
            mapped = map_file(descriptor.fileno(), lease.size, lease)
            if lease.once:
                return mapped
            mapped = self._maps.add(lease.file, mapped)
        if not self._engine.live(lease.file):  # dropped meanwhile, perhaps before it was added
            self._maps.drop(lease.file)
        return mapped


class PrivateReader(CachedReader):
    """A `CachedReader` with its own engine, for a process without a sidecar whose shards are not local files.

    The cache does not outlive the process. Reads of up to `COPIED_BYTES` are copied out of the cache file, because mapped
    pages count as this process's memory.
    """

    def __init__(self, store: Store, *, budget: int = PRIVATE_BUDGET) -> None:
        directory = Path(tempfile.gettempdir())
        free = os.statvfs(directory)
        budget = min(budget, free.f_bavail * free.f_frsize // 4)
        engine = Engine(directory, budget, threads=PRIVATE_THREADS, max_files=PRIVATE_FILES)
        super().__init__(store, engine)
        self._memory = ThreadBuffer()
        self._end = Finalizer(self, engine.close)

    def read(self, key: str, ranges: Ranges) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        if sum([length for _, length in ranges]) > COPIED_BYTES or any(length < 0 for _, length in ranges):
            return super().read(key, ranges)
        pieces = self._memory.allocate_pieces(ranges)
        self.read_into(key, pieces)
        return [view.toreadonly() for _, view in pieces]

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        lease = self._get_lease(key, [(offset, len(buffer)) for offset, buffer in pieces])
        if lease is not None:
            descriptor = lease.take_descriptor()
            with contextlib.suppress(OSError):  # the cache's disk failed; the store has the bytes
                for offset, buffer in pieces:
                    fill(descriptor, offset, buffer)
                return
        self._store.get_ranges_into(key, [(offset, buffer) for offset, buffer in pieces if buffer])

    def close(self) -> None:
        super().close()
        self._end()


def stream(store: Store, key: str, ranges: Ranges) -> list[memoryview]:
    """Read ranges directly from the store into memory."""
    buffers = [memoryview(bytearray(length)) for _, length in ranges]
    store.get_ranges_into(
        key, [(offset, buffer) for (offset, _), buffer in zip(ranges, buffers, strict=True) if buffer]
    )
    return [buffer.toreadonly() for buffer in buffers]


def views(mapped: MappedFile | None, ranges: Ranges) -> list[memoryview]:
    """Read-only views of a mapping; `mapped` is None for an empty file."""
    data = memoryview(mapped) if mapped is not None else memoryview(b"")
    return [data[offset : offset + length] for offset, length in ranges]


def covered(present: Sequence[tuple[int, int]], ranges: Ranges) -> bool:
    """Whether sorted, disjoint (first, end) runs cover every (offset, length)."""
    for offset, length in ranges:  # plain loops: this is on the path of every read
        for first, end in present:
            if first <= offset and offset + length <= end:
                break
        else:
            if length:
                return False
    return True
