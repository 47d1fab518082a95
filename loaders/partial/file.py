"""A long file of which only what is looked at is fetched.

Purpose: decoders open it, seek and read; what they need was fetched before, as far as it was foreseen, and the rest comes when
they ask for it.
Invariants: every byte that is given was compared with the digest of its piece, when it was first looked at; what is fetched and
never looked at, nobody compares. Bytes that do not fit are read once more, straight from the store, since the cache may be
wrong, and then later, since the network may be. Reading on doubles what is fetched at a time, up to `AHEAD_BYTES`; no more than
about `KEPT_BYTES` is kept of what was not foreseen.
Failure behaviour: `CorruptionError` naming the object, and where in it the piece lies, for wrong bytes and for such as are not
there; other errors of the store pass through. Nothing failed is remembered. To be used by one thread at a time.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.contract import Member, Pieces
from headrace.dataio.shards.pieces import is_right
from headrace.loaders.partial import needed
from headrace.loaders.partial.heads import Heads
from headrace.loaders.partial.needed import Runs

AHEAD_BYTES = 8 * limits.MIB
KEPT_BYTES = 64 * limits.MIB
Read = Callable[[Sequence[tuple[int, int]]], Sequence[memoryview]]
"""Gives every (offset, length) of the object in which a file lies."""


class Media(Protocol):
    """A file's bytes: a memoryview, or something that reads them."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> memoryview: ...


@runtime_checkable
class Marked(Media, Protocol):
    """A file of which the index says more: `Pieces.marks`."""

    @property
    def marks(self) -> Sequence[tuple[int, int]]: ...


class PartialFile:
    """`member` of the object `name`. `read` may go through a cache, `again` goes straight to the store, `later`
    does so after a while and by another connection; its head may be among
    `heads`, and is put there."""

    def __init__(
        self, name: str, member: Member, read: Read, again: Read, heads: Heads, later: Read | None = None
    ) -> None:
        assert member.pieces is not None
        self._name, self._member, self._read, self._heads = name, member, read, heads
        self._looks = (again, later) if later is not None else (again,)
        self._pieces: Pieces = member.pieces
        self._there = dict[int, memoryview]()  # not compared yet
        self._right = dict[int, memoryview]()
        self._unforeseen = OrderedDict[int, None]()
        self._next, self._count = -1, 1

    def __len__(self) -> int:
        return self._member.length

    @property
    def marks(self) -> Sequence[tuple[int, int]]:
        """`Pieces.marks`."""
        return self._pieces.marks

    def __getitem__(self, where: slice) -> memoryview:
        start, end, _ = where.indices(len(self))
        if start >= end:
            return memoryview(b"")
        size = self._pieces.size
        first, last = start // size, (end - 1) // size
        if first == last:
            return self._piece(first)[start - first * size : end - first * size]
        inner = [self._piece(number) for number in range(first + 1, last)]
        head, tail = self._piece(first)[start - first * size :], self._piece(last)[: end - last * size]
        return memoryview(b"".join([head, *inner, tail]))

    def foresee(self, runs: Runs) -> None:
        """Fetch these pieces, all at once. What the store has not is missed when it is looked at."""
        with contextlib.suppress(NotFoundError, RangeError):
            self._fetch(self._heads.others(self._name, self._member, runs))

    def given(self) -> Given:
        """What is there, and right, to be sent elsewhere."""
        for first, count in self._pieces.head:
            for number in range(first, first + count):
                view = self._heads.get(self._name, self._member, number)
                if view is not None:
                    self._right.setdefault(number, view)
        for number, view in list(self._there.items()):
            if is_right(self._pieces, number, view):
                self._right[number] = self._there.pop(number)
        return Given(
            len(self),
            self._pieces.size,
            {number: bytes(view) for number, view in self._right.items()},
            self._pieces.marks,
        )

    def look_at(self, number: int) -> None:
        """Have this piece, as if it was looked at."""
        self._piece(number)

    def _piece(self, number: int) -> memoryview:
        view = self._right.get(number) or self._heads.get(self._name, self._member, number)
        if view is None:
            view = self._compared(number)
            self._heads.put(self._name, self._member, number, view)
        self._right[number] = view
        return view

    def _compared(self, number: int) -> memoryview:
        try:
            if number not in self._there:
                self._fetch_on(number)
            view = self._there.pop(number)
            for look in self._looks:
                if not is_right(self._pieces, number, view):
                    view = look(needed.ranges(self._member, ((number, 1),)))[0]
        except (NotFoundError, RangeError) as error:
            raise CorruptionError(f"{self._name}: {error.message}", hint=error.hint) from error
        if not is_right(self._pieces, number, view):
            where = self._member.offset + number * self._pieces.size
            raise CorruptionError(
                f"{self._name}: the {len(view)} bytes at {where} are not those that were packed",
                hint="check the dataset with `headrace verify`",
            )
        return view

    def _fetch_on(self, number: int) -> None:
        """Fetch what was not foreseen, and more each time that reading goes on where the last such fetch ended."""
        most = max(1, AHEAD_BYTES // self._pieces.size)
        count = min(2 * self._count, most) if number == self._next else 1
        last = -(-len(self) // self._pieces.size)
        end = next((n for n in range(number + 1, min(last, number + count)) if self._has(n)), min(last, number + count))
        try:
            self._fetch(((number, end - number),))
        except (NotFoundError, RangeError):
            if end == number + 1:
                raise
            end = number + 1  # a part of it may be there
            self._fetch(((number, 1),))
        self._next, self._count = end, count
        self._unforeseen.update(dict.fromkeys(range(number, end)))
        while len(self._unforeseen) * self._pieces.size > KEPT_BYTES + AHEAD_BYTES:
            gone, _ = self._unforeseen.popitem(last=False)
            self._right.pop(gone, None)
            self._there.pop(gone, None)

    def _has(self, number: int) -> bool:
        there = number in self._there or number in self._right
        return there or self._heads.get(self._name, self._member, number) is not None

    def _fetch(self, runs: Runs) -> None:
        if not runs:
            return
        views = self._read(needed.ranges(self._member, runs))
        size = self._pieces.size
        for (first, _), view in zip(runs, views, strict=True):
            for at in range(0, len(view), size):
                self._there[first + at // size] = view[at : at + size]


# --- the same in another process, which cannot fetch


class Given(msgspec.Struct, frozen=True):
    """Some pieces, of `size` bytes each, of a file of `length` bytes."""

    length: int
    size: int
    pieces: dict[int, bytes]
    marks: tuple[tuple[int, int], ...] = ()


class MissingError(Exception):
    """A piece was looked at that was not given."""

    def __init__(self, number: int) -> None:
        super().__init__(f"piece {number} was not given")
        self.number = number


class GivenFile:
    """The file of which those pieces are given; `MissingError` for others."""

    def __init__(self, given: Given) -> None:
        self._given = given

    def __len__(self) -> int:
        return self._given.length

    @property
    def marks(self) -> Sequence[tuple[int, int]]:
        """`Pieces.marks`."""
        return self._given.marks

    def __getitem__(self, where: slice) -> memoryview:
        start, end, _ = where.indices(len(self))
        size, found = self._given.size, list[bytes | memoryview]()
        for number in range(start // size, -(-end // size) if start < end else 0):
            piece = self._given.pieces.get(number)
            if piece is None:
                raise MissingError(number)
            found.append(memoryview(piece)[max(0, start - number * size) : end - number * size])
        return memoryview(b"".join(found))
