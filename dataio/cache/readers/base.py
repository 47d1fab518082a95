"""The interface through which loaders read shards, and how a process without a sidecar chooses an implementation.

Purpose: one interface for "give me these ranges of this object". The implementations read from the node's sidecar (a
mapped file descriptor of its cache), from a cache inside the process, from local files, or directly from the store.
Invariants: the bytes are those of the stored object. Callers verify them against the index's digests, since a cache
disk may rot. Memory of a `ThreadBuffer` is not reused while anything refers to it.
Failure behaviour: errors of `headrace.dataio.core.errors`; a reader whose sidecar dies continues without it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from headrace.dataio.core import limits
from headrace.dataio.store.base import Store

GAP_BYTES = 4096
"""Bytes between two members (a tar header) that are read along, rather than asking once more."""
LARGE = 1 << 16
"""From so many bytes on, copying takes longer than letting other threads go on."""
Read = tuple[str, Sequence[tuple[int, memoryview]]]
"""An object's key, and (offset, buffer) for what is wanted of it."""


class ShardReader(Protocol):
    """Ranged reads of immutable objects. Safe to share between threads."""

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length), valid for as long as the view is referenced.

        `key` is the object's key in the dataset's store. Blocks until all ranges are there.
        """
        ...

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) with the object's bytes from there; buffers are writable and flat."""
        ...

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), as `read_into` does, and yield after each. They are some tens: all
        may be prepared before the first is read."""
        ...

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        """Say which (key, offset, length) will be read next, soonest first; a hint that costs nothing to ignore."""
        ...

    def close(self) -> None: ...


def one_by_one(reader: ShardReader, reads: Sequence[Read]) -> Iterator[None]:
    """`read_each` of a reader that knows nothing better."""
    for key, pieces in reads:
        reader.read_into(key, pieces)
        yield


def copy_into(reader: ShardReader, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """`read_into` of a reader that has the bytes in memory anyhow."""
    views = reader.read(key, [(offset, len(buffer)) for offset, buffer in pieces])
    for (_, buffer), view in zip(pieces, views, strict=True):
        if len(view) < LARGE:
            buffer[:] = view
        else:  # other threads go on meanwhile
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(view, np.uint8))


REUSED_BYTES = 64 * limits.MIB
"""What a thread needs more than this for is not kept for its next read."""
_GRAIN = 1 << 16


class ThreadBuffer(threading.local):
    """This thread's memory for reads, lent to one at a time."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._lent: weakref.ref[np.ndarray] | None = None

    def allocate(self, size: int) -> memoryview:
        """`size` writable bytes, which nothing else refers to for as long as anything refers to them."""
        if size > REUSED_BYTES:
            return np.empty(size, np.uint8).data
        if size > len(self._block) or (self._lent is not None and self._lent() is not None):
            self._block = np.empty(max(size + size // 8, _GRAIN), np.uint8)
        loan = self._block[:size]
        self._lent = weakref.ref(loan)
        return loan.data

    def allocate_pieces(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, memoryview]]:
        """Memory for every (offset, length), as (offset, memory), one after the other."""
        memory, at, pieces = self.allocate(sum([length for _, length in ranges])), 0, list[tuple[int, memoryview]]()
        for offset, length in ranges:
            pieces.append((offset, memory[at : at + length]))
            at += length
        return pieces


def open_local_reader(store: Store) -> ShardReader:
    """A reader of `store` for this process alone. Each of the two is imported where it is needed."""
    if not _has_files(store):
        from headrace.dataio.cache.readers.bypass import BypassReader

        return BypassReader(store, _cached)
    from headrace.dataio.cache.readers.local import DirectReader

    return DirectReader(store, lambda: _cached(store))


def _cached(store: Store) -> ShardReader:
    from headrace.dataio.cache.readers.cached import PrivateReader

    return PrivateReader(store)


def _has_files(store: Store) -> bool:
    """Whether some of its objects may be files: it is a directory, or one is mounted in it."""
    location = store.location
    mounted = location.options.get("mounts")
    urls = (
        [location.url, *(str(one.get("url")) for one in mounted.values())]
        if isinstance(mounted, dict)
        else [location.url]
    )
    return any(url.startswith("file:") for url in urls)
