"""Where blocks stay: which tier takes an object's blocks, and what must go for them.

Purpose: blocks of a store that a loader announced come first into the fastest tier that has room, and are not evicted
while it is read. Where every sample is read once an epoch no policy hits more often than that: the hit rate is the
share that is kept. What nobody announces is evicted least recently used first, by whole file, from the slowest tier
before the others.
Invariants: a file with a fetch in flight is not evicted; what has been dropped and is still held counts as used, but as
good as gone when victims are chosen, or one stubborn holder would empty the cache.
Failure behaviour: None where there is no room; nothing waits.
"""

from __future__ import annotations

from headrace.dataio.cache.plan.events import Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.files import CacheFile, Tier, Tiers, blocks_of
from headrace.dataio.cache.plan.ring import Ring
from headrace.dataio.cache.plan.streams import Streams


class Pinned:
    """The block files."""

    def __init__(self, tiers: Tiers, ring: Ring, streams: Streams) -> None:
        self._tiers, self._ring, self._streams = tiers, ring, streams
        self._ordered: set[str] = set()  # sources that were announced and have blocks here

    def announced(self, source: str) -> None:
        self._ordered.add(source)

    def withdrawn(self) -> None:
        """Forget the sources that nobody reads any more, and of which nothing is left."""
        self._ordered = {s for s in self._ordered if self._tiers.source_bytes(s) or self._streams.uses(s)}

    def find(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        """A file of the object that needs no more room for `ranges`."""
        needed = blocks_of(ranges, self._tiers.block_bytes)
        for file in self._tiers.blocks(
            obj
        ):  # no unions of sets: this is done for every read that is announced, again and again
            lacking = needed - file.present
            if lacking and self._tiers.all[file.tier].open:
                lacking -= file.adopted
            if not lacking or lacking <= file.in_flight.keys():
                return file
        return None

    def spread(self, obj: ObjectId, ranges: Ranges) -> dict[int, CacheFile]:
        """Which tier's file has each block of `ranges` that any has or gets; nothing where the object lies in one
        tier."""
        files = list(self._tiers.blocks(obj))
        if len(self._tiers.all) < 2 or not files:
            return {}
        wanted, out = blocks_of(ranges, self._tiers.block_bytes), dict[int, CacheFile]()
        for file in reversed(files):  # the fastest counts
            well = self._tiers.all[file.tier].open
            known = file.present | file.in_flight.keys() | (file.adopted if well else set())
            out.update(dict.fromkeys(wanted & known, file))
        return out

    def admit(self, obj: ObjectId, ranges: Ranges, out: list[Instruction]) -> CacheFile | None:
        """A file of the object with room for all of `ranges`, made or found."""
        tiers = self._tiers.open
        if self._streams.uses(obj.source):
            return self._first(tiers, obj, ranges, out, evict=True)
        if len(tiers) > 1 and (found := self._first(tiers, obj, ranges, out, evict=False)):
            return found
        return self._first(tiers[::-1], obj, ranges, out, evict=True)

    def limit(self, tier: Tier) -> int:
        """What the tier may hold of blocks."""
        return tier.budget - self._ring.room(tier)

    def slack(self, tier: Tier) -> int:
        """Evict this much ahead, so that holders have time to let go before the room is needed."""
        return tier.budget // 16

    def _first(
        self, tiers: list[Tier], obj: ObjectId, ranges: Ranges, out: list[Instruction], *, evict: bool
    ) -> CacheFile | None:
        for tier in tiers:
            file = self._into(tier, obj, ranges, out, evict=evict)
            if file is not None:
                return file
            if tier.pinned.dropped and not self._crowded(tier, 0, new_file=False):
                evict = False  # there is room as soon as holders let go: the next tier need not be emptied for it
        return None

    def _into(
        self, tier: Tier, obj: ObjectId, ranges: Ranges, out: list[Instruction], *, evict: bool
    ) -> CacheFile | None:
        """Evicts others first, then, where nobody announced the store, the object's own old file."""
        file = tier.linked.get(obj)
        blank = file or CacheFile(0, obj, tier.number, tier.pinned, self._tiers.block_bytes)
        wanted = blank.needs(ranges) or set()
        missing = blank.cost(wanted - blank.present - blank.in_flight.keys() - blank.adopted)
        if blank.cost(wanted) > self.limit(tier):
            return None
        if evict:
            self._make_room(tier, missing, obj, out)
        if file and self._fits(tier, missing):
            return file
        if file and evict and not file.in_flight and not self._protected(obj.source, obj.source):
            self._tiers.drop(file, out)  # an object larger than the budget: begin it anew
            file = None
        fits = file is None and self._fits(tier, blank.cost(wanted)) and self._files_free
        return self._tiers.create(tier, obj, None, out) if fits else None

    @property
    def _files_free(self) -> bool:
        return self._tiers.linked_files < self._tiers.max_files

    def _fits(self, tier: Tier, cost: int) -> bool:
        return tier.pinned.used + cost <= self.limit(tier) and tier.used + cost <= tier.budget

    def _make_room(self, tier: Tier, need: int, keep: ObjectId, out: list[Instruction]) -> None:
        """Evict until `need` bytes fit with some slack, if that much may go."""
        new_file = keep not in tier.linked
        if not self._crowded(tier, need, new_file) or not self._evictable(tier, keep.source):
            return
        for victim in list(tier.linked.values()):
            if not self._crowded(tier, need, new_file):
                break
            if victim.object != keep and self._may_go(victim, keep.source):
                self._tiers.drop(victim, out)

    def _crowded(self, tier: Tier, need: int, new_file: bool) -> bool:
        full = tier.pinned.used - tier.pinned.dropped + need > self.limit(tier) - self.slack(tier)
        return full or (new_file and not self._files_free)

    def _may_go(self, file: CacheFile, new: str) -> bool:
        return not file.in_flight and (file.stale or not self._protected(file.object.source, new))

    def _protected(self, source: str, new: str) -> bool:
        """Whether blocks of `source` stay when something of the store `new` comes: while a loader announces it, and,
        when it has stopped (its trainer starts again, as a rule), against reads of the store itself."""
        return self._streams.uses(source) or (source == new and source in self._ordered)

    def _evictable(self, tier: Tier, new: str) -> bool:
        """Whether anything may be evicted: or every read of a full cache would look through all its files."""
        return bool(tier.stale_bytes) or any(
            total for source, total in tier.bytes_of.items() if not self._protected(source, new)
        )
