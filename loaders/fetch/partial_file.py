"""A long file of which only the required pieces are fetched, and a cache of the heads of such files.

Purpose: decoders open the file, seek and read. The pieces that the index predicts are fetched in advance, and other
pieces on access. Every clip of a long video first reads the head of its file. The head may be as long as the clip, and
an epoch reads clips of one video at many positions, so heads are cached.

Invariants:
- A piece is compared with its digest on first access. A fetched piece that is never accessed is not compared.
- A piece that does not match is read again directly from the store, since the cache may be wrong. If it still does not
  match, it is read a third time later, since the network may be faulty.
- Sequential access doubles the size of each fetch, up to `AHEAD_BYTES`. About `KEPT_BYTES` of unpredicted pieces are
  kept.
- `HeadCache` holds only verified pieces, at most its limit in bytes but always at least one piece. It evicts the least
  recently used piece first.
- `HeadCache` is safe to share between threads. `PartialFile` is not.

Failure behaviour: `CorruptionError` with the object and the offset of a piece that is wrong or missing. Other errors of
the store are raised unchanged. Failures are not cached.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.pieces import matches
from headrace.dataio.shards.sample import Member, Pieces
from headrace.loaders.fetch import byte_ranges
from headrace.loaders.fetch.byte_ranges import Runs, merged

AHEAD_BYTES = 8 * limits.MIB
KEPT_BYTES = 64 * limits.MIB
Read = Callable[[Sequence[tuple[int, int]]], Sequence[memoryview]]
"""Reads every (offset, length) of the object that contains the file."""


class Media(Protocol):
    """A file's bytes: a memoryview, or an object that reads them on access."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> memoryview: ...


@runtime_checkable
class Marked(Media, Protocol):
    """A file for which the index has marks (`Pieces.marks`)."""

    @property
    def marks(self) -> Sequence[tuple[int, int]]: ...


@runtime_checkable
class Partial(Media, Protocol):
    """A file of which some bytes must be fetched first."""

    def present_until(self, start: int, end: int) -> int:
        """The end of the bytes from `start` on, at most `end`, that can be read without a fetch.

        If the first of them must be fetched, the end of its piece.
        """
        ...


class PartialFile:
    """The file `member` of the object `name`.

    Args:
        read: reads ranges of the object, possibly through a cache.
        read_direct: reads directly from the store.
        heads: holds pieces of file heads. This file takes pieces from it and adds its own.
        read_later: reads directly from the store after a delay, through another connection.
        describe: returns the name in errors for an offset of the object. The default is `name`.
    """

    def __init__(
        self,
        name: str,
        member: Member,
        *,
        read: Read,
        read_direct: Read,
        heads: HeadCache,
        read_later: Read | None = None,
        describe: Callable[[int], str] | None = None,
    ) -> None:
        assert member.pieces is not None
        self._name, self._member, self._read, self._heads = name, member, read, heads
        self._retries = (read_direct, read_later) if read_later is not None else (read_direct,)
        self._pieces: Pieces = member.pieces
        self._describe = describe or (lambda _: name)
        self._unchecked = dict[int, memoryview]()  # not compared with their digests yet
        self._checked = dict[int, memoryview]()
        self._unpredicted = OrderedDict[int, None]()
        self._next, self._count = -1, 1

    def __len__(self) -> int:
        return self._member.length

    @property
    def marks(self) -> Sequence[tuple[int, int]]:
        """The index's marks (`Pieces.marks`)."""
        return self._pieces.marks

    def __getitem__(self, key: slice) -> memoryview:
        start, end, _ = key.indices(len(self))
        if start >= end:
            return memoryview(b"")
        size = self._pieces.size
        first, last = start // size, (end - 1) // size
        if first == last:
            return self._piece(first)[start - first * size : end - first * size]
        inner = [self._piece(number) for number in range(first + 1, last)]
        head, tail = self._piece(first)[start - first * size :], self._piece(last)[: end - last * size]
        return memoryview(b"".join([head, *inner, tail]))

    def present_until(self, start: int, end: int) -> int:
        """The end of the bytes from `start` on, at most `end`, that are in memory (`Partial`)."""
        return _present_until(self._pieces.size, start, end, self._has)

    def prefetch(self, runs: Runs) -> None:
        """Fetch these pieces in one request. If the store lacks a piece, the error is raised when it is accessed.

        Pieces of the head are kept for later clips, even if this clip does not access them.
        """
        with contextlib.suppress(NotFoundError, RangeError):
            self._fetch(self._heads.uncached(self._name, self._member, runs))
        for first, count in self._pieces.head:
            for number in self._unchecked.keys() & range(first, first + count):
                if matches(self._pieces, number, self._unchecked[number]):
                    self._checked[number] = self._unchecked.pop(number)
                    self._heads.put(self._name, self._member, number, self._checked[number])

    def sent_pieces(self) -> SentPieces:
        """The verified pieces in memory, for another process."""
        for first, count in self._pieces.head:
            for number in range(first, first + count):
                view = self._heads.get(self._name, self._member, number)
                if view is not None:
                    self._checked.setdefault(number, view)
        for number, view in list(self._unchecked.items()):
            if matches(self._pieces, number, view):
                self._checked[number] = self._unchecked.pop(number)
        return SentPieces(
            len(self),
            self._pieces.size,
            pieces={number: bytes(view) for number, view in self._checked.items()},
            marks=self._pieces.marks,
        )

    def load(self, number: int) -> None:
        """Read and verify this piece."""
        self._piece(number)

    def _piece(self, number: int) -> memoryview:
        view = self._checked.get(number) or self._heads.get(self._name, self._member, number)
        if view is None:
            view = self._load_checked(number)
            self._heads.put(self._name, self._member, number, view)
        self._checked[number] = view
        return view

    def _load_checked(self, number: int) -> memoryview:
        try:
            if number not in self._unchecked:
                self._fetch_on(number)
            view = self._unchecked.pop(number)
            for read_again in self._retries:
                if not matches(self._pieces, number, view):
                    view = read_again(byte_ranges.ranges(self._member, ((number, 1),)))[0]
        except (NotFoundError, RangeError) as error:
            described = self._describe(self._member.offset + number * self._pieces.size)
            raise CorruptionError(f"{described}: {error.message}", hint=error.hint) from error
        if not matches(self._pieces, number, view):
            offset = self._member.offset + number * self._pieces.size
            raise CorruptionError(
                f"{self._describe(offset)}: the {len(view)} bytes at {offset} are not those that were packed",
                hint="check the dataset with `headrace verify`",
            )
        return view

    def _fetch_on(self, number: int) -> None:
        """Fetch an unpredicted piece.

        The size of the fetch doubles each time that reading continues where the last such fetch ended.
        """
        max_count = max(1, AHEAD_BYTES // self._pieces.size)
        count = min(2 * self._count, max_count) if number == self._next else 1
        piece_count = -(-len(self) // self._pieces.size)
        end = next(
            (n for n in range(number + 1, min(piece_count, number + count)) if self._has(n)),
            min(piece_count, number + count),
        )
        try:
            self._fetch(((number, end - number),))
        except (NotFoundError, RangeError):
            if end == number + 1:
                raise
            end = number + 1  # the piece itself may exist even if the following ones do not
            self._fetch(((number, 1),))
        self._next, self._count = end, count
        self._unpredicted.update(dict.fromkeys(range(number, end)))
        while len(self._unpredicted) * self._pieces.size > KEPT_BYTES + AHEAD_BYTES:
            dropped, _ = self._unpredicted.popitem(last=False)
            self._checked.pop(dropped, None)
            self._unchecked.pop(dropped, None)

    def _has(self, number: int) -> bool:
        is_loaded = number in self._unchecked or number in self._checked
        return is_loaded or self._heads.get(self._name, self._member, number) is not None

    def _fetch(self, runs: Runs) -> None:
        if not runs:
            return
        views = self._read(byte_ranges.ranges(self._member, runs))
        size = self._pieces.size
        for (first, _), view in zip(runs, views, strict=True):
            for at in range(0, len(view), size):
                self._unchecked[first + at // size] = view[at : at + size]


def _present_until(size: int, start: int, end: int, has: Callable[[int], bool]) -> int:
    """The end of the pieces of `size` bytes from `start` on that `has` accepts, at most `end`; of one piece at least."""
    number = start // size + 1
    while number * size < end and has(number):
        number += 1
    return min(end, number * size)


# --- the file in another process, which cannot fetch


class SentPieces(msgspec.Struct, frozen=True):
    """Some pieces of a file of `length` bytes; each has `size` bytes."""

    length: int
    size: int
    pieces: dict[int, bytes]
    marks: tuple[tuple[int, int], ...] = ()


class MissingPieceError(Exception):
    """The decoder accessed a piece that was not sent."""

    def __init__(self, number: int) -> None:
        super().__init__(f"piece {number} was not given")
        self.number = number


class SentFile:
    """A file made of the pieces that were sent. Access to other pieces raises `MissingPieceError`."""

    def __init__(self, sent_pieces: SentPieces) -> None:
        self._sent = sent_pieces

    def __len__(self) -> int:
        return self._sent.length

    @property
    def marks(self) -> Sequence[tuple[int, int]]:
        """The index's marks (`Pieces.marks`)."""
        return self._sent.marks

    def present_until(self, start: int, end: int) -> int:
        """The end of the bytes from `start` on, at most `end`, that were sent (`Partial`)."""
        return _present_until(self._sent.size, start, end, self._sent.pieces.__contains__)

    def __getitem__(self, key: slice) -> memoryview:
        start, end, _ = key.indices(len(self))
        size, parts = self._sent.size, list[bytes | memoryview]()
        for number in range(start // size, -(-end // size) if start < end else 0):
            piece = self._sent.pieces.get(number)
            if piece is None:
                raise MissingPieceError(number)
            parts.append(memoryview(piece)[max(0, start - number * size) : end - number * size])
        return memoryview(b"".join(parts))


HEAD_CACHE_BYTES = 64 * limits.MIB
"""The limit for one loader. Its sources share it equally."""
PieceKey = tuple[str, int, int]
"""A piece: the object's name, the file's offset in it, and the piece's number."""


class HeadCache:
    """A cache for pieces of file heads."""

    def __init__(self, max_bytes: int = HEAD_CACHE_BYTES) -> None:
        self._max_bytes, self._size = max_bytes, 0
        self._pieces = OrderedDict[PieceKey, memoryview]()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes in the cache."""
        return self._size

    def get(self, name: str, member: Member, number: int) -> memoryview | None:
        """A piece of a file in the object `name`; None if it is not cached."""
        with self._lock:
            view = self._pieces.get((name, member.offset, number))
            if view is not None:
                self._pieces.move_to_end((name, member.offset, number))
            return view

    def put(self, name: str, member: Member, number: int, view: memoryview) -> None:
        """Cache a copy of this verified piece if it belongs to the file's head."""
        assert member.pieces is not None
        if not any(first <= number < first + count for first, count in member.pieces.head):
            return
        with self._lock:
            if (name, member.offset, number) in self._pieces:
                return
            self._pieces[name, member.offset, number] = memoryview(bytes(view))
            self._size += len(view)
            while self._size > self._max_bytes and len(self._pieces) > 1:
                self._size -= len(self._pieces.popitem(last=False)[1])

    def uncached(self, name: str, member: Member, runs: Runs) -> Runs:
        """The pieces among `runs` that are not cached."""
        assert member.pieces is not None
        with self._lock:
            cached = {
                number
                for first, count in member.pieces.head
                for number in range(first, first + count)
                if (name, member.offset, number) in self._pieces
            }
        if not cached:
            return runs
        return merged(
            (number, 1) for first, count in runs for number in range(first, first + count) if number not in cached
        )
