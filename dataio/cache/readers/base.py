"""The interface through which loaders read shards, and how a process without a sidecar chooses an implementation.

Purpose: one interface for ranged reads of objects. There are implementations that read

- from the node's sidecar, by mapping files of its cache;
- from a cache inside the process;
- from local files;
- directly from the store.

Invariants: the bytes are those of the stored object. Callers verify them against the index's digests, since bytes on a
cache disk may be damaged. Memory of a `ThreadBuffer` is not reused while anything refers to it.
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
"""Maximum gap between two ranges (a tar header) that are read with one request."""
LARGE = 1 << 16
"""Copies of at least this size release the interpreter's lock."""
Read = tuple[str, Sequence[tuple[int, memoryview]]]
"""An object's key, and an (offset, buffer) for each range to read."""


class ShardReader(Protocol):
    """Ranged reads of immutable objects. Safe to share between threads."""

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length), valid for as long as the view is referenced.

        `key` is the object's key in the dataset's store. Blocks until all ranges are available. The ranges belong to one
        sample. Those of a part of a file may begin and end with an empty range, at the first byte of the file and behind
        its last one: then a cache fetches no more than the ranges, if they leave out much of the file.
        """
        ...

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) with the object's bytes at that offset. Buffers must be writable and flat."""
        ...

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), as `read_into` does, and yield after each.

        Pass some tens of reads at most, because a reader may prepare all of them before the first.
        """
        ...

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        """Announce the (key, offset, length) that will be read next, soonest first. A reader may ignore this hint.

        The ranges of a part of a file are those that `read` will get, with the empty ones.
        """
        ...

    def close(self) -> None: ...


def one_by_one(reader: ShardReader, reads: Sequence[Read]) -> Iterator[None]:
    """The simplest `read_each`: one `read_into` after the other."""
    for key, pieces in reads:
        reader.read_into(key, pieces)
        yield


def copy_into(reader: ShardReader, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """The `read_into` of a reader whose bytes are in memory."""
    views = reader.read(key, [(offset, len(buffer)) for offset, buffer in pieces])
    for (_, buffer), view in zip(pieces, views, strict=True):
        if len(view) < LARGE:
            buffer[:] = view
        else:  # releases the interpreter's lock
            np.copyto(np.frombuffer(buffer, np.uint8), np.frombuffer(view, np.uint8))


REUSED_BYTES = 64 * limits.MIB
"""A larger block is not kept for the next read."""
_GRAIN = 1 << 16


class ThreadBuffer(threading.local):
    """A thread's memory for reads, reused because new memory costs a page fault for every 4 KiB.

    While anything refers to the last allocation, the next read gets new memory instead.
    """

    def __init__(self) -> None:
        self._block = np.empty(1, np.uint8).data
        self._last_allocation: weakref.ref[np.ndarray] | None = None

    def allocate(self, size: int) -> memoryview:
        """`size` writable bytes. They are not reused while anything refers to them."""
        if size > REUSED_BYTES:
            return np.empty(size, np.uint8).data
        if size > len(self._block) or (self._last_allocation is not None and self._last_allocation() is not None):
            self._block = np.empty(max(size + size // 8, _GRAIN), np.uint8).data
        # Not a view of an array: numpy's views of a view refer only to the first array, and not to `allocation`.
        allocation = np.frombuffer(self._block, np.uint8, size)
        self._last_allocation = weakref.ref(allocation)
        return allocation.data

    def allocate_pieces(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, memoryview]]:
        """Contiguous memory for every (offset, length), as (offset, memory)."""
        memory, at, pieces = self.allocate(sum([length for _, length in ranges])), 0, list[tuple[int, memoryview]]()
        for offset, length in ranges:
            pieces.append((offset, memory[at : at + length]))
            at += length
        return pieces


def open_local_reader(store: Store) -> ShardReader:
    """A reader of `store` without the sidecar.

    It reads local files directly, and other objects through a cache in this process.
    """
    if not may_have_local_files(store):
        from headrace.dataio.cache.readers.bypass import BypassReader

        return BypassReader(store, _make_cached_reader)
    from headrace.dataio.cache.readers.local import DirectReader

    return DirectReader(store, lambda: _make_cached_reader(store))


def _make_cached_reader(store: Store) -> ShardReader:
    from headrace.dataio.cache.readers.cached import PrivateReader

    return PrivateReader(store)


def may_have_local_files(store: Store) -> bool:
    """Whether some objects may be local files: the store is a directory, or one is mounted in it."""
    location = store.location
    mounted = location.options.get("mounts")
    urls = (
        [location.url, *(str(mount.get("url")) for mount in mounted.values())]
        if isinstance(mounted, dict)
        else [location.url]
    )
    return any(url.startswith("file:") for url in urls)
