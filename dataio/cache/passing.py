"""The bytes of one part on their way from a store into a cache file, piece by piece.

Purpose: what arrives piece by piece, from a network, is written and digested while it is still in the processor's caches. What a
store has at once comes as one piece: each more is three more hand-overs of the interpreter's lock, which take longer than the
caches save.
Invariants: of two attempts at a part only one writes piece by piece, the other all at once; the one that has all of it in the
file first is the one that counts, and after it the other writes nothing. So a part's bytes are those of one attempt, and so is
its digest, which is worked out only for files that keep them.
Failure behaviour: trouble with the cache's own disk is a `DiskError`, of which stores know nothing. A part whose fetch fails may
leave some of its bytes in the file; nobody is told of them, and the next fetch writes over them.
"""

from __future__ import annotations

import threading

import xxhash

from headrace.dataio.cache.blocks import BlockFile
from headrace.dataio.cache.kept import KeptFile, digest


class DiskError(Exception):
    """The cache's own disk failed; `error` says how."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class OvertakenError(Exception):
    """Another attempt has all of it in the file."""


class Part:
    """A part of a file that is being written. Safe to share between the threads of its attempts."""

    __slots__ = ("_block", "_file", "_first", "_lock", "_there")

    def __init__(self, file: BlockFile, block: int, first: int) -> None:
        self._file, self._block, self._first = file, block, first
        self._lock, self._there = threading.Lock(), False

    def begin(self) -> Passing:
        """For the attempt that goes by pieces."""
        return Passing(self._first, xxhash.xxh3_64() if isinstance(self._file, KeptFile) else None, self)

    def whole(self, view: memoryview) -> None:
        """For the other one, or where the bytes come from several places: all of it."""
        with self._lock:
            if not self._there:
                self._write(self._first, view)
                self._file.wrote(self._block, digest(view) if isinstance(self._file, KeptFile) else 0)
                self._there = True

    def piece(self, offset: int, piece: memoryview) -> None:
        """Write a piece; `OvertakenError` when the other attempt has written all."""
        with self._lock:
            if self._there:
                raise OvertakenError
            self._write(offset, piece)

    def _write(self, offset: int, data: memoryview) -> None:
        try:
            self._file.write(offset, data)
        except OSError as error:
            raise DiskError(error) from None

    def end(self, found: int) -> None:
        """All pieces are written, and `found` is their digest."""
        with self._lock:
            if not self._there:
                self._file.wrote(self._block, found)
            self._there = True


class Passing:
    """One attempt: `take` every piece in order, from the first one again where a store begins anew, then `end`."""

    __slots__ = ("_first", "_hash", "_part")

    def __init__(self, first: int, hash: xxhash.xxh3_64 | None, part: Part) -> None:
        self._first, self._hash, self._part = first, hash, part

    def take(self, offset: int, piece: memoryview) -> None:
        if self._hash is not None:
            if offset == self._first:
                self._hash.reset()
            self._hash.update(piece)
        self._part.piece(offset, piece)

    def end(self) -> None:
        self._part.end(self._hash.intdigest() if self._hash is not None else 0)
