"""The plan's picture of one cache file.

Purpose: two kinds of file. A *block file* holds whole blocks of an object, for as long as there is room. A *ring file* holds the
exact bytes of one announced read, for as long as that read is awaited.
Invariant: the parts of a file (its blocks, or a ring file's extents) are disjoint; each is absent, in flight, present, or adopted
(left by an earlier daemon, on disk and on the books, not yet checked).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from headrace.dataio.cache.events import ObjectId, Ranges

_FAR = 1 << 63
GAP_BYTES = 4096
"""Ranges no further apart are fetched together: a request costs more than the headers between two members of a tar."""


@dataclass(slots=True, eq=False)
class Books:
    """Bytes of one kind of file in one tier: `used` counts present, in flight, adopted, and dropped but still held."""

    used: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Awaited:
    """How often a stream will still read a range of a ring file: `named` times by its newest announcement, `making` times by
    earlier ones: a loader names a read no more as soon as its batch is in the making."""

    making: int = 0
    named: int = 0

    @property
    def left(self) -> int:
        return self.making + self.named

    def read(self) -> None:
        if self.making:
            self.making -= 1
        elif self.named:
            self.named -= 1


@dataclass(slots=True, eq=False)
class Readers:
    """What one stream still wants of a ring file; `number` is its announcement that last named it, `due` when it is next read."""

    number: int = 0
    due: float = 0.0
    ranges: dict[tuple[int, int], Awaited] = field(default_factory=dict)

    @property
    def next_use(self) -> float:
        """When it is needed next: now, for a batch that is in the making."""
        return 0.0 if any(wanted.making for wanted in self.ranges.values()) else self.due


@dataclass(slots=True, eq=False)
class CacheFile:
    """One file. `flying` maps a part to the tickets that wait for it, `ahead` to the stream it is prefetched for."""

    id: int
    object: ObjectId
    tier: int
    books: Books
    block_bytes: int
    parts: Ranges | None = None  # of a ring file
    present: set[int] = field(default_factory=set)
    flying: dict[int, list[int]] = field(default_factory=dict)
    ahead: dict[int, int] = field(default_factory=dict)
    adopted: set[int] = field(default_factory=set)
    checking: set[int] = field(default_factory=set)
    awaited: dict[int, Readers] = field(default_factory=dict)
    """Of a ring file: who will still read it."""
    again: bool = False
    """Of a ring file: it is read more than once within what is announced, and stays in between."""
    holds: int = 0
    bytes: int = 0
    stale: bool = False
    listed: list[tuple[int, int]] = field(default_factory=list)
    """All runs of present bytes."""

    @property
    def ring(self) -> bool:
        return self.parts is not None

    def part(self, number: int) -> tuple[int, int]:
        """(offset, length) of a part."""
        if self.parts is not None:
            return self.parts[number]
        first = number * self.block_bytes
        return first, min(self.block_bytes, self.object.size - first)

    def cost(self, numbers: Iterable[int]) -> int:
        """Bytes of parts."""
        return sum(self.part(number)[1] for number in numbers)

    def needs(self, ranges: Ranges) -> set[int] | None:
        """The parts that hold `ranges`; None when the file has no place for them all."""
        if self.parts is None:
            return blocks_of(ranges, self.block_bytes)
        wanted: set[int] = set()
        for offset, length in ranges:
            left = length
            for number, (first, size) in enumerate(self.parts):
                shared = min(first + size, offset + length) - max(first, offset)
                if shared > 0:
                    wanted.add(number)
                    left -= shared
            if left:
                return None
        return wanted

    @property
    def next_use(self) -> float:
        """Of a ring file: when somebody reads it next; infinity when nobody does."""
        return min((readers.next_use for readers in self.awaited.values()), default=float("inf"))

    @property
    def whole(self) -> bool:
        """Whether every part of a ring file is present or in flight."""
        return len(self.present) + len(self.flying) == len(self.parts or ())

    def there(self, offset: int, length: int) -> list[tuple[int, int]]:
        """What of [offset, offset + length) is present, as (offset, length)."""
        numbers = self.present if self.ring else blocks_of(((offset, length),), self.block_bytes) & self.present
        out: list[tuple[int, int]] = []
        for number in numbers:
            first, size = self.part(number)
            start, end = max(first, offset), min(first + size, offset + length)
            if start < end:
                out.append((start, end - start))
        return out

    def arrived(self, number: int) -> None:
        """The part is present. Who has the list of runs keeps it as it was."""
        if number in self.present:
            return
        self.present.add(number)
        first, size = self.part(number)
        at, end = bisect.bisect_left(self.listed, (first, 0)), first + size
        before = at > 0 and self.listed[at - 1][1] == first
        after = at < len(self.listed) and self.listed[at][0] == end
        joined = (self.listed[at - 1][0] if before else first, self.listed[at][1] if after else end)
        self.listed = [*self.listed[: at - before], joined, *self.listed[at + after :]]

    def has(self, ranges: Ranges) -> bool:
        """Whether these ranges are all present. On the path of every open."""
        listed = self.listed
        for offset, length in ranges:
            at = bisect.bisect_right(listed, (offset, _FAR)) - 1
            if (at < 0 or listed[at][1] < offset + length) and length:
                return False
        return True

    def runs(self, at_most: int) -> list[tuple[int, int]]:
        """The present bytes as (first, end) runs, sorted; the first `at_most` of them."""
        return self.listed if len(self.listed) <= at_most else self.listed[:at_most]


def blocks_of(ranges: Iterable[tuple[int, int]], block_bytes: int) -> set[int]:
    """The blocks that ranges touch."""
    blocks: set[int] = set()
    for offset, length in ranges:
        if length:
            first, last = offset // block_bytes, (offset + length - 1) // block_bytes
            blocks.add(first)
            if first < last:
                blocks.update(range(first + 1, last + 1))
    return blocks


def extents_of(ranges: Ranges, at_most: int, gap: int = GAP_BYTES) -> Ranges:
    """Sorted, disjoint extents of at most `at_most` bytes each that cover `ranges`, neighbours closer than `gap` in one."""
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if not length:
            continue
        if merged and offset <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], offset + length))
        else:
            merged.append((offset, offset + length))
    return tuple((at, min(at_most, end - at)) for first, end in merged for at in range(first, end, at_most))
