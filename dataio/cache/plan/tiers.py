"""The books: all files, the tiers they are in, and the bytes of each.

Purpose: a tier is a directory with a budget of its own, the fast one first (memory, then NVMe). An object has at most one
block file in each.
Invariants: `used` of a tier are its bytes present, in flight, adopted, and dropped but still held; whoever charges makes sure
that they do not pass the budget. A dropped file stays on the books until its last holder lets go.
Failure behaviour: a tier whose disk is in trouble is not `open`: what it has is served, nothing new comes into it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headrace.dataio.cache.events import Create, Drop, Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.files import Books, CacheFile


@dataclass(slots=True, eq=False)
class Tier:
    """One tier. `linked` are its block files, least recently used first."""

    number: int
    budget: int
    open: bool = True
    pinned: Books = field(default_factory=Books)
    ring: Books = field(default_factory=Books)
    linked: OrderedDict[ObjectId, CacheFile] = field(default_factory=OrderedDict)
    bytes_of: dict[str, int] = field(default_factory=dict)
    """Of block files, by source."""
    stale_bytes: int = 0

    @property
    def used(self) -> int:
        return self.pinned.used + self.ring.used

    @property
    def dropped(self) -> int:
        return self.pinned.dropped + self.ring.dropped


class Tiers:
    """All files by number, by object and by tier."""

    def __init__(self, budgets: Sequence[int], block_bytes: int, max_files: int) -> None:
        self.all = [Tier(number, budget) for number, budget in enumerate(budgets)]
        self.block_bytes, self.max_files = block_bytes, max_files
        self.files: dict[int, CacheFile] = {}  # all, and those dropped but still held
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

    @property
    def linked_files(self) -> int:
        return sum(len(tier.linked) for tier in self.all)

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

    # in and out

    def create(self, tier: Tier, obj: ObjectId, parts: Ranges | None, out: list[Instruction]) -> CacheFile:
        if parts is None:
            self._supersede(obj, out)
        file = self.add(tier, obj, parts)
        out.append(Create(file.id, obj, not file.ring, tier.number))
        return file

    def add(self, tier: Tier, obj: ObjectId, parts: Ranges | None) -> CacheFile:
        books = tier.pinned if parts is None else tier.ring
        file = CacheFile(self.next_file, obj, tier.number, books, self.block_bytes, parts)
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
        file.books.dropped += file.bytes
        out.append(Drop(file.id, file.ring))
        if not file.holds:
            self._bury(file)

    def hold(self, file: CacheFile) -> None:
        file.holds += 1

    def release(self, file: CacheFile) -> None:
        file.holds -= 1
        if not file.holds and not self.live(file):
            self._bury(file)

    def charge(self, file: CacheFile, cost: int) -> None:
        file.bytes += cost
        file.books.used += cost
        tier = self.all[file.tier]
        if not file.ring and tier.linked.get(file.object) is file:
            source = file.object.source
            tier.bytes_of[source] = tier.bytes_of.get(source, 0) + cost
            if file.stale:
                tier.stale_bytes += cost

    def _unlink(self, file: CacheFile) -> None:
        tier, source = self.all[file.tier], file.object.source
        del tier.linked[file.object]
        tier.bytes_of[source] = tier.bytes_of.get(source, 0) - file.bytes
        if not tier.bytes_of[source]:
            del tier.bytes_of[source]
        if file.stale:
            tier.stale_bytes -= file.bytes
        name = (source, file.object.key)
        if self.versions.get(name) == file.object and next(self.blocks(file.object), None) is None:
            del self.versions[name]

    def _bury(self, file: CacheFile) -> None:
        file.books.dropped -= file.bytes
        file.books.used -= file.bytes
        del self.files[file.id]

    def _supersede(self, obj: ObjectId, out: list[Instruction]) -> None:
        """An older version of the object is of no use any more."""
        older = self.versions.get((obj.source, obj.key), obj)
        for file in list(self.blocks(older)) if older != obj else ():
            if not file.flying:
                self.drop(file, out)
            elif not file.stale:
                file.stale = True
                self.all[file.tier].stale_bytes += file.bytes
