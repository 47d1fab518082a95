"""Block files: which tier takes an object's blocks, and which files are evicted for them.

Purpose: blocks of a store that a loader announced go into the fastest tier with room, and are not evicted while the
loader reads the store. If every sample is read once an epoch, no policy has a higher hit rate: the hit rate is the
share of the data that is kept. Blocks of other stores are evicted least recently used first, by whole file, from the
slowest tier first.
Invariants: a file with a fetch in flight is not evicted. A dropped file that is still held counts as used. But the
choice of files to evict counts it as free; otherwise one holder that keeps files open could empty the cache.
Failure behaviour: if no tier has room, `admit` returns None. It never waits.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.dataio.cache.plan.events import Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.extents import is_part
from headrace.dataio.cache.plan.files import CacheFile, Tier, Tiers, blocks_of
from headrace.dataio.cache.plan.ring import Ring
from headrace.dataio.cache.plan.streams import Streams

CostIn = Callable[[CacheFile], tuple[int, int]]
"""The bytes that a read adds to this block file, and those that it would add to an empty one."""


class Pinned:
    """The block files."""

    def __init__(self, tiers: Tiers, ring: Ring, streams: Streams) -> None:
        self._tiers, self._ring, self._streams = tiers, ring, streams
        self._ordered: set[str] = set()  # announced sources with blocks here

    def announced(self, source: str) -> None:
        self._ordered.add(source)

    def withdrawn(self) -> None:
        """Forget the sources that no stream reads and that have no blocks left."""
        self._ordered = {s for s in self._ordered if self._tiers.source_bytes(s) or self._streams.uses(s)}

    def find(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        """A file of the object that needs no more room for `ranges`."""
        needed, part = blocks_of(ranges, self._tiers.block_bytes), is_part(ranges)
        for file in self._tiers.blocks(obj):  # no set unions: this runs for every announced read
            if part:
                if not file.lacking(ranges, adopted=self._tiers.all[file.tier].open):
                    return file
                continue
            missing = needed - file.present
            if missing and self._tiers.all[file.tier].open:
                missing -= file.adopted.among(missing)
            if not missing or missing <= file.in_flight.keys():
                return file
        return None

    def spread(self, obj: ObjectId, ranges: Ranges) -> dict[int, CacheFile]:
        """The file that holds or fetches each block of `ranges`, by block; empty if there is only one tier."""
        files = list(self._tiers.blocks(obj))
        if len(self._tiers.all) < 2 or not files:
            return {}
        needed, out = blocks_of(ranges, self._tiers.block_bytes), dict[int, CacheFile]()
        for file in reversed(files):  # a faster tier replaces a slower one
            tier_works = self._tiers.all[file.tier].open
            usable = (needed & file.present) | (needed & file.in_flight.keys())
            out.update(dict.fromkeys(usable | (file.adopted.among(needed) if tier_works else set()), file))
        return out

    def admit(self, obj: ObjectId, ranges: Ranges, out: list[Instruction]) -> CacheFile | None:
        """An existing or new file of the object with room for all of `ranges`; None if no tier has room."""
        return self._admit(obj, lambda file: file.cost_of(ranges), out)

    def admit_blocks(self, obj: ObjectId, blocks: set[int], out: list[Instruction]) -> CacheFile | None:
        """As `admit`, for whole blocks, also if they leave out as much as the ranges of a part do."""
        return self._admit(obj, lambda file: file.cost_of_blocks(blocks), out)

    def limit(self, tier: Tier) -> int:
        """Maximum bytes of blocks in the tier."""
        return tier.budget - self._ring.room(tier)

    def slack(self, tier: Tier) -> int:
        """Bytes to evict in advance, so that holders have time to close the evicted files before their room is needed."""
        return tier.budget // 16

    def _admit(self, obj: ObjectId, cost_in: CostIn, out: list[Instruction]) -> CacheFile | None:
        tiers = self._tiers.open
        if self._streams.uses(obj.source):
            return self._admit_to_first(tiers, obj, cost_in, out, evict=True)
        if len(tiers) > 1 and (file := self._admit_to_first(tiers, obj, cost_in, out, evict=False)):
            return file
        return self._admit_to_first(tiers[::-1], obj, cost_in, out, evict=True)

    def _admit_to_first(
        self, tiers: list[Tier], obj: ObjectId, cost_in: CostIn, out: list[Instruction], *, evict: bool
    ) -> CacheFile | None:
        for tier in tiers:
            file = self._admit_to(tier, obj, cost_in, out, evict=evict)
            if file is not None:
                return file
            if tier.pinned.dropped and not self._is_crowded(tier, 0, new_file=False):
                evict = False  # there will be room when holders close files: evict nothing from the next tier
        return None

    def _admit_to(
        self, tier: Tier, obj: ObjectId, cost_in: CostIn, out: list[Instruction], *, evict: bool
    ) -> CacheFile | None:
        """A file in this tier, or None. Evicts other files first, then the object's own file if it is not protected."""
        file = tier.linked.get(obj)
        probe = file or CacheFile(0, obj, tier.number, tier.pinned, self._tiers.block_bytes)
        cost, whole_cost = cost_in(probe)
        if whole_cost > self.limit(tier):
            return None
        if evict:
            self._make_room(tier, cost, obj, out)
        if file and self._fits(tier, cost):
            return file
        if file and evict and not file.in_flight and not self._protected(obj.source, obj.source):
            self._tiers.drop(file, out)  # the object is larger than the budget: start a new file for it
            file = None
        fits = file is None and self._fits(tier, whole_cost) and tier.has_room_for_files
        return self._tiers.create(tier, obj, None, out) if fits else None

    def _fits(self, tier: Tier, cost: int) -> bool:
        return tier.pinned.used + cost <= self.limit(tier) and tier.used + cost <= tier.budget

    def _make_room(self, tier: Tier, need: int, keep: ObjectId, out: list[Instruction]) -> None:
        """Evict until `need` bytes fit with some slack, if enough may be evicted."""
        new_file = keep not in tier.linked
        if not self._is_crowded(tier, need, new_file) or not self._has_evictable(tier, keep.source):
            return
        victims, freed = list[CacheFile](), 0
        for victim in tier.linked.values():  # no copy: a tier may have a hundred thousand files
            if not self._is_crowded(tier, need - freed, new_file and not victims):
                break
            if victim.object != keep and self._is_evictable(victim, keep.source):
                victims.append(victim)
                freed += victim.bytes
        for victim in victims:
            self._tiers.drop(victim, out)

    def _is_crowded(self, tier: Tier, need: int, new_file: bool) -> bool:
        full = tier.pinned.used - tier.pinned.dropped + need > self.limit(tier) - self.slack(tier)
        return full or (new_file and not tier.has_room_for_files)

    def _is_evictable(self, file: CacheFile, new_source: str) -> bool:
        return not file.in_flight and (file.stale or not self._protected(file.object.source, new_source))

    def _protected(self, source: str, new_source: str) -> bool:
        """Whether reads of the store `new_source` must not evict blocks of `source`.

        While a loader announces `source`, no read may evict them. Afterwards, reads of other stores may. Reads of
        `source` itself still may not, because the trainer usually restarts.
        """
        return self._streams.uses(source) or (source == new_source and source in self._ordered)

    def _has_evictable(self, tier: Tier, new_source: str) -> bool:
        """Whether anything may be evicted. With this check, a read of a full cache need not search all files."""
        return bool(tier.stale_bytes) or any(
            total for source, total in tier.bytes_of.items() if not self._protected(source, new_source)
        )
