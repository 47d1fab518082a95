"""How loaders get at the bytes of shards, whoever holds them.

Purpose: one interface for "give me these ranges of this object", served by the node's sidecar (a mapped file descriptor of
its cache), by the same cache engine inside the process, or straight from the store or its files.
Invariant: the bytes are those of the stored object; whether they are the *right* bytes is checked by the caller against the
index's digests, since a cache disk may rot.
Failure behaviour: errors of `headrace.dataio.core.errors`; a reader whose sidecar goes away continues by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

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
        """Fill the pieces of every (key, pieces), as `read_into` does, and yield after each. They are some tens: all may be
        prepared before the first is read."""
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
