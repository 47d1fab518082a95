"""The plan's bookkeeping: cache files, the tiers that they are in, and the bytes of each.

There are two kinds of file. A *block file* holds whole blocks of an object, as long as there is room. A *ring file*
holds the exact bytes of one announced read, as long as a stream waits for that read. A tier is a directory with a
budget. Tiers are ordered, fastest first (memory, then NVMe). An object has at most one block file in each tier.

A block file may also hold *extents*: the exact bytes of parts of long files (`extents`), without the rest of their
blocks. An extent has a number below 0 while it is in flight. Afterwards, only `listed` knows its bytes.

Invariants: the blocks of a file, and the extents of a ring file, are disjoint. Each of these parts is absent, in flight,
present, or adopted (left by an earlier daemon: on disk and accounted for, but not verified yet). A tier's `used` counts
bytes that are present, in flight, adopted, or dropped but still held; callers that charge bytes ensure that the budget
is not exceeded. Bytes of an extent that are fetched again with their block count once. A dropped file stays accounted
for until its last holder closes it.
Failure behaviour: a tier whose disk fails is not `open`: its blocks are served, and no new ones are admitted.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.dataio.cache.plan.events import Create, Drop, Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.extents import extents_of, is_part, joined, within, without

_FAR = 1 << 63


@dataclass(slots=True, eq=False)
class ByteCounts:
    """Bytes of one kind of file in one tier: `used` counts present, in flight, adopted, and dropped but still held."""

    used: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Awaited:
    """How often a stream will still read a range of a ring file.

    `announced` counts reads of its newest announcement. `in_progress` counts those of earlier ones, because a loader stops
    announcing a read when it begins the batch.
    """

    in_progress: int = 0
    announced: int = 0

    @property
    def left(self) -> int:
        return self.in_progress + self.announced

    def read(self) -> None:
        if self.in_progress:
            self.in_progress -= 1
        elif self.announced:
            self.announced -= 1


@dataclass(slots=True, eq=False)
class Readers:
    """The ranges of a ring file that one stream will still read.

    `number` is the number of the stream's announcement that last named the file. `due` is the time of the next read.
    """

    number: int = 0
    due: float = 0.0
    ranges: dict[tuple[int, int], Awaited] = field(default_factory=dict)

    @property
    def next_use(self) -> float:
        """The time of the next read; 0 for a batch in progress."""
        return 0.0 if any(awaited.in_progress for awaited in self.ranges.values()) else self.due


class BlockSet:
    """A set of block numbers, in one bit each: a cache of terabytes has a million adopted blocks."""

    __slots__ = ("_bits",)

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        bits = bytearray()
        for number in numbers:
            if number >> 3 >= len(bits):
                bits.extend(bytes((number >> 3) + 1 - len(bits)))
            bits[number >> 3] |= 1 << (number & 7)
        self._bits = int.from_bytes(bits, "little")

    def __bool__(self) -> bool:
        return bool(self._bits)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __contains__(self, number: int) -> bool:
        return bool(self._bits >> number & 1)

    def __iter__(self) -> Iterator[int]:
        return (number for number in range(self._bits.bit_length()) if number in self)

    def add(self, number: int) -> None:
        self._bits |= 1 << number

    def discard(self, number: int) -> None:
        if number in self:
            self._bits ^= 1 << number

    def among(self, numbers: Iterable[int]) -> set[int]:
        """Those of `numbers` that are in this set."""
        return {number for number in numbers if number in self} if self._bits else set()


@dataclass(slots=True, eq=False)
class CacheFile:
    """One file.

    `in_flight` maps a part to the tickets that wait for it. `holds` counts the file's holders. A `stale` file belongs to
    an older version of its object. A cache may have a hundred thousand files, so a file has few containers of its own.
    """

    id: int
    object: ObjectId
    tier: int
    counts: ByteCounts
    block_bytes: int
    parts: Ranges | None = None  # of a ring file
    present: set[int] = field(default_factory=set)
    in_flight: dict[int, list[int]] = field(default_factory=dict)
    adopted: BlockSet = field(default_factory=BlockSet)
    awaited: dict[int, Readers] = field(default_factory=dict)
    """The streams that will still read a ring file."""
    reused: bool = False
    """Whether a ring file is announced more than once, and kept between its reads."""
    holds: int = 0
    bytes: int = 0
    stale: bool = False
    listed: list[tuple[int, int]] = field(default_factory=list)
    """All runs of present bytes."""
    extents: dict[int, tuple[int, int]] | None = None
    """The extents in flight of a block file, as (offset, length) by number."""

    @property
    def ring(self) -> bool:
        return self.parts is not None

    def part(self, number: int) -> tuple[int, int]:
        """(offset, length) of a part."""
        if self.parts is not None:
            return self.parts[number]
        if number < 0:
            return (self.extents or {})[number]
        first = number * self.block_bytes
        return first, min(self.block_bytes, self.object.size - first)

    def cost(self, numbers: Iterable[int]) -> int:
        """Total bytes of these parts."""
        return sum(self.part(number)[1] for number in numbers)

    def needs(self, ranges: Ranges) -> set[int] | None:
        """The parts that hold `ranges`; None if the file does not cover them."""
        if self.parts is None:
            return blocks_of(ranges, self.block_bytes)
        needed: set[int] = set()
        for offset, length in ranges:
            uncovered = length
            for number, (first, size) in enumerate(self.parts):
                shared = min(first + size, offset + length) - max(first, offset)
                if shared > 0:
                    needed.add(number)
                    uncovered -= shared
            if uncovered:
                return None
        return needed

    @property
    def next_use(self) -> float:
        """The time at which a ring file is read next; infinity if no stream waits for it."""
        return min((readers.next_use for readers in self.awaited.values()), default=float("inf"))

    @property
    def whole(self) -> bool:
        """Whether every part of a ring file is present or in flight."""
        return len(self.present) + len(self.in_flight) == len(self.parts or ())

    def lacking(self, ranges: Ranges, *, adopted: bool = True) -> list[tuple[int, int]]:
        """The bytes of a part, as (offset, length), that are neither present nor in flight in a block file.

        Adopted blocks count as present if `adopted`.
        """
        lacking = without(ranges, self.listed)
        if lacking and self.in_flight:
            in_flight = sorted(self.part(number) for number in self.in_flight)
            lacking = without(lacking, [(first, first + size) for first, size in extents_of(in_flight, _FAR, 0)])
        if lacking and adopted and self.adopted:
            blocks = sorted(self.adopted.among(blocks_of(lacking, self.block_bytes)))
            lacking = without(lacking, [(first, first + size) for first, size in map(self.part, blocks)])
        return lacking

    def cost_of(self, ranges: Ranges) -> tuple[int, int]:
        """The bytes that a read adds to a block file, and those that it would add to an empty one."""
        if is_part(ranges):
            added = extents_of(self.lacking(ranges), self.block_bytes)
            return sum(size for _, size in added), sum(size for _, size in extents_of(ranges, self.block_bytes))
        return self.cost_of_blocks(blocks_of(ranges, self.block_bytes))

    def cost_of_blocks(self, blocks: set[int]) -> tuple[int, int]:
        """As `cost_of`, for whole blocks. Extents in flight do not reduce it, because a block is charged in addition."""
        missing = blocks - self.present - self.in_flight.keys()
        return self.cost(missing - self.adopted.among(missing)), self.cost(blocks)

    def begin(self, ranges: Ranges) -> list[int]:
        """The parts to fetch for a read, sorted. Extents of a part get their numbers here."""
        if self.parts is None and is_part(ranges):
            adopted = self.adopted.among(blocks_of(self.lacking(ranges, adopted=False), self.block_bytes))
            lacking = extents_of(self.lacking(ranges), self.block_bytes)
            return sorted(adopted) + [self._add_extent(extent) for extent in lacking]
        if self.has(ranges):
            return []
        return sorted((self.needs(ranges) or set()) - self.present - self.in_flight.keys())

    def unfinished(self, ranges: Ranges) -> set[int]:
        """The parts in flight that a read waits for."""
        if self.parts is not None or not is_part(ranges):
            return set() if self.has(ranges) else (self.needs(ranges) or set()) - self.present
        lacking = without(ranges, self.listed)
        parts = ((number, *self.part(number)) for number in self.in_flight) if lacking else ()
        return {
            number
            for number, first, size in parts
            if any(first < offset + length and offset < first + size for offset, length in lacking)
        }

    def _add_extent(self, extent: tuple[int, int]) -> int:
        self.extents = self.extents if self.extents is not None else {}
        number = min(self.extents, default=0) - 1
        self.extents[number] = extent
        return number

    def forget_extent(self, number: int) -> None:
        """The fetch of this part has ended; an extent has no number any more."""
        if number < 0 and self.extents is not None:
            del self.extents[number]

    def present_within(self, offset: int, length: int) -> list[tuple[int, int]]:
        """The present bytes in [offset, offset + length), as (offset, length)."""
        return within(self.listed, offset, length)

    def arrived(self, number: int) -> None:
        """Mark the part as present. Lists of runs that `runs` returned before do not change."""
        if number in self.present:
            return
        first, size = self.part(number)
        self.listed = joined(self.listed, first, first + size)
        if number >= 0:
            self.present.add(number)
            return
        self.forget_extent(number)
        for block in blocks_of(((first, size),), self.block_bytes):
            if self.has((self.part(block),)):
                self.present.add(block)

    def has(self, ranges: Ranges) -> bool:
        """Whether these ranges are all present. Every open calls this, so it must be fast."""
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


@dataclass(slots=True, eq=False)
class Tier:
    """One tier. `linked` are its block files, least recently used first."""

    number: int
    budget: int
    open: bool = True
    pinned: ByteCounts = field(default_factory=ByteCounts)
    ring: ByteCounts = field(default_factory=ByteCounts)
    linked: OrderedDict[ObjectId, CacheFile] = field(default_factory=OrderedDict)
    bytes_of: dict[str, int] = field(default_factory=dict)
    """Bytes of block files, by source."""
    stale_bytes: int = 0
    max_files: int = 4096
    """Maximum number of block files."""

    @property
    def has_room_for_files(self) -> bool:
        return len(self.linked) < self.max_files

    @property
    def used(self) -> int:
        return self.pinned.used + self.ring.used

    @property
    def dropped(self) -> int:
        return self.pinned.dropped + self.ring.dropped


class Tiers:
    """All files, by number, object and tier.

    `max_files` are the maximum numbers of block files of each tier. `in_flight_bytes` and `adopted_bytes` are sums over
    all files.
    """

    def __init__(self, budgets: Sequence[int], block_bytes: int, max_files: Sequence[int], max_ring_files: int) -> None:
        tiers = enumerate(zip(budgets, max_files, strict=True))
        self.all = [Tier(number, budget, max_files=files) for number, (budget, files) in tiers]
        self.block_bytes, self.max_ring_files = block_bytes, max_ring_files
        self.in_flight_bytes = self.adopted_bytes = 0
        self.files: dict[int, CacheFile] = {}  # including those that are dropped but still held
        self.rings: dict[ObjectId, list[CacheFile]] = {}
        self.ring_files: dict[int, CacheFile] = {}  # live ones, oldest first
        self.versions: dict[tuple[str, str], ObjectId] = {}
        self.next_file = 1

    @property
    def budget(self) -> int:
        return sum(tier.budget for tier in self.all)

    @property
    def used(self) -> int:
        return sum(tier.used for tier in self.all)

    @property
    def open(self) -> list[Tier]:
        return [tier for tier in self.all if tier.open]

    def blocks(self, obj: ObjectId) -> Iterator[CacheFile]:
        """The block files of an object, the fastest first."""
        for tier in self.all:
            file = tier.linked.get(obj)
            if file is not None:
                yield file

    def live(self, file: CacheFile) -> bool:
        if file.ring:
            return file.id in self.ring_files
        return self.all[file.tier].linked.get(file.object) is file

    def source_bytes(self, source: str) -> int:
        return sum(tier.bytes_of.get(source, 0) for tier in self.all)

    def used_lately(self, file: CacheFile) -> None:
        self.all[file.tier].linked.move_to_end(file.object)

    # creating and dropping

    def create(self, tier: Tier, obj: ObjectId, parts: Ranges | None, out: list[Instruction]) -> CacheFile:
        if parts is None:
            self._supersede(obj, out)
        file = self.add(tier, obj, parts)
        out.append(Create(file.id, obj, not file.ring, tier.number))
        return file

    def add(self, tier: Tier, obj: ObjectId, parts: Ranges | None) -> CacheFile:
        counts = tier.pinned if parts is None else tier.ring
        file = CacheFile(self.next_file, obj, tier.number, counts, self.block_bytes, parts)
        self.files[file.id], self.next_file = file, self.next_file + 1
        if parts is None:
            tier.linked[obj] = file
            self.versions[obj.source, obj.key] = obj
        else:
            self.rings.setdefault(obj, []).append(file)
            self.ring_files[file.id] = file
        return file

    def drop(self, file: CacheFile, out: list[Instruction]) -> None:
        if file.ring:
            del self.ring_files[file.id]
            self.rings[file.object].remove(file)
            if not self.rings[file.object]:
                del self.rings[file.object]
        else:
            self._unlink(file)
        file.counts.dropped += file.bytes
        out.append(Drop(file.id, file.ring))
        if not file.holds:
            self._remove_file(file)

    def hold(self, file: CacheFile) -> None:
        file.holds += 1

    def release(self, file: CacheFile) -> None:
        file.holds -= 1
        if not file.holds and not self.live(file):
            self._remove_file(file)

    def charge(self, file: CacheFile, cost: int) -> None:
        file.bytes += cost
        file.counts.used += cost
        tier = self.all[file.tier]
        if not file.ring and tier.linked.get(file.object) is file:
            source = file.object.source
            tier.bytes_of[source] = tier.bytes_of.get(source, 0) + cost
            if file.stale:
                tier.stale_bytes += cost

    def _unlink(self, file: CacheFile) -> None:
        tier, source = self.all[file.tier], file.object.source
        if file.adopted:
            self.adopted_bytes -= file.cost(file.adopted)
        del tier.linked[file.object]
        tier.bytes_of[source] = tier.bytes_of.get(source, 0) - file.bytes
        if not tier.bytes_of[source]:
            del tier.bytes_of[source]
        if file.stale:
            tier.stale_bytes -= file.bytes
        name = (source, file.object.key)
        if self.versions.get(name) == file.object and next(self.blocks(file.object), None) is None:
            del self.versions[name]

    def _remove_file(self, file: CacheFile) -> None:
        file.counts.dropped -= file.bytes
        file.counts.used -= file.bytes
        del self.files[file.id]

    def _supersede(self, obj: ObjectId, out: list[Instruction]) -> None:
        """Drop older versions of the object."""
        older = self.versions.get((obj.source, obj.key), obj)
        for file in list(self.blocks(older)) if older != obj else ():
            if not file.in_flight:
                self.drop(file, out)
            elif not file.stale:
                file.stale = True
                self.all[file.tier].stale_bytes += file.bytes
