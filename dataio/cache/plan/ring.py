"""The ring: files of single reads, each kept until every stream that announced the read has read it. Sans-I/O.

If there is no room for the blocks of an announced read, the read uses a small file in the fastest tier. The file holds
exactly the bytes of the read, not whole blocks. If a read is announced *again* before its first use (its source has a
higher weight), its file is kept between the uses. The next use of such reads is known. When room is short, the read
whose next use is latest is evicted first, which is Belady's rule.

Invariants: reads that are announced once use at most `base` bytes. Reads that are announced again also use the ring's
`reserve`, which grows in steps of a sixteenth of the tier's budget, and takes room from blocks. The ring uses at most
half of its tier.
Failure behaviour: if there is no room, `open` returns None. When room is short, an unread file is dropped if the last
`MISSED_ANNOUNCEMENTS` announcements of its streams did not name it.

Belady: "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5 (2), 1966.
"""

from __future__ import annotations

from headrace.dataio.cache.plan.events import Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.extents import extents_of
from headrace.dataio.cache.plan.files import Awaited, CacheFile, Readers, Tier, Tiers
from headrace.dataio.cache.plan.streams import Streams

SHARE = 64
"""The ring's share while a stream announces.

It is 1/`SHARE` of the budget of all tiers, or `BLOCKS` blocks if that is more, but at most half of the ring's tier.
"""
BLOCKS = 4
STEPS = 16
"""The reserve grows in steps of 1/`STEPS` of its tier's budget."""
MISSED_ANNOUNCEMENTS = 4
"""An unread file that this many announcements did not name may be dropped."""


class Ring:
    """The ring files."""

    def __init__(self, tiers: Tiers, streams: Streams) -> None:
        self._tiers, self._streams = tiers, streams
        self._reused: dict[int, CacheFile] = {}
        self.reserve = 0

    # sizes

    @property
    def tier(self) -> Tier | None:
        """The ring's tier: the fastest whose disk works."""
        return next(iter(self._tiers.open), None)

    def base(self, tier: Tier) -> int:
        """Bytes of the tier for reads that are announced once."""
        if not self._streams or tier is not self.tier:
            return 0
        return min(tier.budget // 2, max(self._tiers.budget // SHARE, BLOCKS * self._tiers.block_bytes))

    def room(self, tier: Tier) -> int:
        """Maximum bytes of the ring in the tier."""
        base = self.base(tier)
        return base + min(self.reserve, tier.budget // 2 - base) if base else 0

    def reused_bytes(self) -> int:
        """Bytes of live files that are kept because they are read again."""
        self._reused = {id: file for id, file in self._reused.items() if self._tiers.live(file)}
        return sum(file.bytes for file in self._reused.values())

    # finding and creating files

    def find(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        rings = self._tiers.rings.get(obj, ())
        return next((file for file in rings if file.whole and file.needs(ranges) is not None), None)

    def open(
        self, obj: ObjectId, ranges: Ranges, out: list[Instruction], *, due: float, requested: bool
    ) -> CacheFile | None:
        """A new file for this read, which is due at `due`; None if there is no room.

        `requested`: a request needs the file now. Prefetches leave a quarter of the ring to requests.
        """
        tier = self.tier
        parts = extents_of(ranges, self._tiers.block_bytes)
        cost = sum(length for _, length in parts)
        if tier is None:
            return None
        limit = self.base(tier) if requested else self.base(tier) * 3 // 4
        if cost > limit or len(self._tiers.ring_files) >= self._tiers.max_ring_files:
            return None
        self._make_room(tier, cost, limit, due, out)
        if self._exceeds(tier, cost, limit) or tier.used + cost > tier.budget:
            return None
        return self._tiers.create(tier, obj, parts, out)

    def _exceeds(self, tier: Tier, cost: int, limit: int) -> bool:
        reused = min(self.reused_bytes(), self.room(tier) - self.base(tier)) if self._reused else 0
        return tier.ring.used - reused + cost > limit

    def _make_room(self, tier: Tier, cost: int, limit: int, due: float, out: list[Instruction]) -> None:
        """Make room in these steps:

        1. Drop unread files that are no longer announced.
        2. Drop reused files whose next read is later than `due`.
        3. Drop blocks above their limit.
        """
        if self._exceeds(tier, cost, limit):
            for file in list(self._tiers.ring_files.values()):
                if not file.in_flight and all(
                    self._is_abandoned(stream, r.number) for stream, r in file.awaited.items()
                ):
                    self._tiers.drop(file, out)
        if self._reused and self._exceeds(tier, cost, limit):
            for file in sorted(self._reused.values(), key=lambda file: -file.next_use):
                if file.next_use <= due or not self._exceeds(tier, cost, limit):
                    break
                if not file.in_flight:
                    self._tiers.drop(file, out)
        self._shrink_blocks(tier, out)

    def _shrink_blocks(self, tier: Tier, out: list[Instruction]) -> None:
        limit = tier.budget - self.room(tier)
        for victim in list(tier.linked.values()) if tier.pinned.used > limit else ():
            if tier.pinned.used - tier.pinned.dropped <= limit:
                break
            if not victim.in_flight:
                self._tiers.drop(victim, out)

    def _is_abandoned(self, stream: int, named_in: int) -> bool:
        newest = self._streams.announced(stream)
        return not newest or newest - named_in >= MISSED_ANNOUNCEMENTS

    # which streams wait for which files

    def announced(self, stream: int, out: list[Instruction]) -> None:
        """Count how often the stream's new announcement names each file."""
        number = self._streams.announced(stream)
        if not self._tiers.ring_files:
            return
        for file in self._tiers.ring_files.values():
            if (readers := file.awaited.get(stream)) is not None:
                _renew(readers, float("inf"))
        rings = self._tiers.rings
        for want in [want for want in self._streams.named(stream) if want.object in rings]:
            ring_file = self.find(want.object, want.ranges)
            if ring_file is not None:
                self._await_ranges(ring_file, stream, number, want.ranges, want.due)
        self._mark_reused(out)

    def fetching(self, file: CacheFile, stream: int, ranges: Ranges, due: float) -> None:
        """The file is prefetched for the stream, whose newest announcement names it."""
        times = self._streams.times(stream, file.object, ranges)
        for _ in range(max(1, times)):
            self._await_ranges(file, stream, self._streams.announced(stream), ranges, due)
        if times > 1:
            self._keep(file)

    def requested(self, file: CacheFile, stream: int, ranges: Ranges) -> None:
        """The file was created for a read that the stream requests now.

        If the announcement names the read once, that may be this request. If it names it more often, the file is kept for
        the next read.
        """
        if self._streams.times(stream, file.object, ranges) > 1:
            self.fetching(file, stream, ranges, self._streams.due(stream, file.object, ranges))

    def was_read(self, obj: ObjectId, stream: int, ranges: Ranges) -> None:
        for file in self._tiers.rings.get(obj, ()):
            readers = file.awaited.get(stream)
            if readers is None:
                continue
            for byte_range in ranges:
                if (awaited := readers.ranges.get(byte_range)) is not None:
                    awaited.read()
                    if not awaited.left:
                        del readers.ranges[byte_range]
            if not readers.ranges:
                del file.awaited[stream]

    def withdrawn(self, stream: int, out: list[Instruction]) -> None:
        """The stream has ended: drop the files for which only it waited."""
        for file in list(self._tiers.ring_files.values()):
            if file.awaited.pop(stream, None) is not None and self._tiers.live(file):
                self.sweep(file.object, out)
        if not self._streams:
            self.reserve = 0

    def sweep(self, obj: ObjectId, out: list[Instruction]) -> None:
        """Drop the object's files that no stream waits for, and its incomplete files."""
        for file in list(self._tiers.rings.get(obj, ())):
            if not file.in_flight and (not file.awaited or not file.whole):
                self._tiers.drop(file, out)

    def _await_ranges(self, file: CacheFile, stream: int, number: int, ranges: Ranges, due: float) -> None:
        readers = file.awaited.setdefault(stream, Readers())
        if readers.number != number:
            _renew(readers, due)
            readers.number = number
        readers.due = min(readers.due, due)
        for byte_range in ranges:
            awaited = readers.ranges.setdefault(byte_range, Awaited())
            awaited.in_progress, awaited.announced = max(0, awaited.in_progress - 1), awaited.announced + 1

    def _mark_reused(self, out: list[Instruction]) -> None:
        for file in self._tiers.ring_files.values():
            if not file.reused and any(entry.left > 1 for r in file.awaited.values() for entry in r.ranges.values()):
                self._keep(file)
        if self._reused and (tier := self.tier) is not None:
            self._shrink_blocks(tier, out)

    def _keep(self, file: CacheFile) -> None:
        """The file will be read again: count it for the reserve, which grows if necessary."""
        file.reused = True
        self._reused[file.id] = file
        step = max(1, self._tiers.all[file.tier].budget // STEPS)
        self.reserve = max(self.reserve, -(-self.reused_bytes() // step) * step)


def _renew(readers: Readers, due: float) -> None:
    """Reads that were announced until now count as in progress, unless they are announced again."""
    readers.due = due
    for entry in readers.ranges.values():
        entry.in_progress, entry.announced = entry.in_progress + entry.announced, 0
