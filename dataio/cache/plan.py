"""Decides what the node cache fetches, keeps and drops. Sans-I/O: events go in by method calls, instructions come out.

Purpose: bytes of immutable objects under one budget. Where every sample is read once an epoch, every reuse lies an epoch
away, so no policy beats "keep what came first, and let the rest pass by": its hit rate is the share that is kept, where
least-recently-used gets a third of that. Hence two tiers. *Pinned*: whole blocks of 4 MiB, one sparse file an object; blocks of
a store that some loader announced are never evicted while it lives. What nobody announced is evicted least recently used
first, by whole file. *Ring*: when no room is left, an announced read passes through a small file of its own, which holds
exactly its bytes (those that the pinned tier has are copied from there) and is dropped once everybody who announced it has
read it. So a byte that is not kept is fetched once for each time it is read, and never in blocks that are thrown away.

A file is only ever *dropped* (forgotten and unlinked), never punched: whoever still holds a descriptor or mapping of it
keeps every byte it had. Such a file stays on the books until its last holder lets go. Everything in the cache has a copy in
a store; staged checkpoints are not in it.

Invariants: the bytes on the books (present, in flight, adopted, and dropped but still held) never pass the budget; a block
of a live file is fetched by one instruction however many tickets want it; every ticket gets exactly one of `Ready`, `Bypass`
and `Failed`, at once or when its last part's fetch ends; a file with a fetch in flight is not evicted.
Failure behaviour: what finds no room is told to `Bypass` the cache (read the store directly), so nothing ever waits for
room; prefetching alone waits (back-pressure). A failed fetch fails the tickets that wait for it and leaves the block absent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataio.cache.events import (
    Bypass,
    Create,
    Drop,
    Failed,
    Fetch,
    Instruction,
    ObjectId,
    Ranges,
    Ready,
    Want,
)
from dataio.cache.files import CacheFile, Tier, blocks_of, extents_of
from dataio.cache.streams import Streams
from dataio.core import limits

__all__ = ["Bypass", "CachePlan", "Create", "Drop", "Failed", "Fetch", "Instruction", "ObjectId", "Ready", "Want"]

RING_SHARE = 64
"""The ring is this part of the budget while somebody announces, but at least `RING_BLOCKS` blocks or half of the budget."""
RING_BLOCKS = 4
PATIENCE = 4
"""A read that so many announcements no longer named, and that was not read, will not be."""


@dataclass(slots=True)
class _Ticket:
    file: CacheFile
    missing: set[int]


class CachePlan:
    """The state of one cache. Not thread-safe: its engine calls it under a lock."""

    def __init__(
        self,
        budget: int,
        *,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        max_files: int = 4096,
        prefetch_parts: int = 4,
    ) -> None:
        self.budget, self.block_bytes, self.max_files = budget, block_bytes, max_files
        self.prefetch_parts = prefetch_parts
        """Prefetches in flight at once: fewer than the engine has threads, so that a fetch somebody waits for gets one."""
        self.prefetch_bytes = prefetch_parts * block_bytes
        """Bytes that prefetches may have in flight; the engine sets it to what the store's bandwidth and latency ask for."""
        self.admitting = True
        """False while the cache's disk is in trouble: what is present is still served, nothing new is fetched into it."""
        self._pinned, self._ring = Tier(), Tier()
        self._linked: OrderedDict[ObjectId, CacheFile] = OrderedDict()  # block files, least recently used first
        self._rings: dict[ObjectId, list[CacheFile]] = {}
        self._ring_files: dict[int, CacheFile] = {}  # live ones, oldest first
        self._versions: dict[tuple[str, str], ObjectId] = {}
        self._bytes_of: dict[str, int] = {}  # of block files, by source
        self._files: dict[int, CacheFile] = {}  # all, and those dropped but still held
        self._tickets: dict[int, _Ticket] = {}
        self._streams = Streams()
        self._ordered: set[str] = set()  # sources that were announced and have blocks here
        self._stale_bytes = 0
        self._ahead_parts = self._ahead_bytes = 0
        self._next_file = 1

    # events

    def request(self, ticket: int, obj: ObjectId, ranges: Ranges, stream: int = 0) -> list[Instruction]:
        """`ticket` (never used before) wants these ranges of `obj` in one file; `stream` is who asks, if it announces."""
        out: list[Instruction] = []
        file = self._place(obj, ranges, out, asked=True)
        if file is None:
            return [*out, Bypass(ticket)]
        wanted = file.needs(ranges) or set()
        self._launch(file, sorted(wanted - file.present - file.flying.keys()), out)
        self._was_read(obj, stream, ranges)
        missing = wanted - file.present
        if not missing:
            self._ready(ticket, file, out)
            self._sweep(obj, out)
            return out
        self._tickets[ticket] = _Ticket(file, missing)
        for number in missing:
            file.flying[number].append(ticket)
        return out

    def take(self, obj: ObjectId, ranges: Ranges) -> int | None:
        """The block file of `obj` if all of `ranges` are present: held once more, as by `Ready`. The quick way for most reads."""
        file = self._linked.get(obj)
        if file is None or not blocks_of(ranges, self.block_bytes) <= file.present:
            return None
        self._linked.move_to_end(obj)
        file.holds += 1
        return file.id

    def fetched(self, file_id: int, block: int) -> list[Instruction]:
        """A `Fetch` is done: its bytes are in the file."""
        file = self._files.get(file_id)
        if file is None or block not in file.flying:  # the file was lost meanwhile
            return []
        out: list[Instruction] = []
        waiting = self._landed(file, block)
        file.present.add(block)
        file.listed = None
        for ticket in waiting:
            entry = self._tickets[ticket]
            entry.missing.discard(block)
            if not entry.missing:
                del self._tickets[ticket]
                self._ready(ticket, file, out)
        if file.ring:
            self._sweep(file.object, out)
        return [*out, *self._prefetch()]

    def failed(self, file_id: int, block: int) -> list[Instruction]:
        """A `Fetch` failed at the store."""
        file = self._files.get(file_id)
        if file is None or block not in file.flying:
            return []
        checking = block in file.checking
        waiting = self._landed(file, block)
        if checking:
            file.adopted.add(block)  # its bytes, good or bad, are still on the disk
        else:
            self._charge(file, -file.part(block)[1])
        out: list[Instruction] = [Failed(ticket, file_id, block) for ticket in waiting]
        for ticket in waiting:
            self._forget_ticket(ticket)
        if file.ring:
            self._sweep(file.object, out)
        return [*out, *self._prefetch()]

    def lost(self, file_id: int) -> list[Instruction]:
        """The file cannot be created or written: those who wait for it bypass, and it is dropped."""
        file = self._files.get(file_id)
        if file is None or not self._live(file):
            return []
        waiting = sorted({ticket for tickets in file.flying.values() for ticket in tickets})
        for block in list(file.flying):
            checking = block in file.checking
            self._landed(file, block)
            if not checking:
                self._charge(file, -file.part(block)[1])
        for ticket in waiting:
            del self._tickets[ticket]
        out: list[Instruction] = []
        self._drop(file, out)
        return [*out, *(Bypass(ticket) for ticket in waiting), *self._prefetch()]

    def released(self, file_id: int) -> list[Instruction]:
        """One hold that a `Ready` had given out ended."""
        file = self._files[file_id]
        file.holds -= 1
        if not file.holds and not self._live(file):
            self._bury(file)
        return self._prefetch()

    def touch(self, file_id: int) -> None:
        """A holder read from the file without asking."""
        file = self._files.get(file_id)
        if file is not None and not file.ring and self._live(file):
            self._linked.move_to_end(file.object)

    def announce(self, stream: int, source: str, wants: Sequence[Want]) -> list[Instruction]:
        """`stream` reads `source` to an order, and these come next, soonest first; replaces what it announced before."""
        number = self._streams.announce(stream, source, wants)
        self._ordered.add(source)
        for want in wants:
            ring = self._find_ring(want.object, want.ranges)
            if ring is not None:
                self._await(ring, stream, number, want.ranges)
        return self._prefetch()

    def reads_in_order(self, stream: int, source: str) -> list[Instruction]:
        """`stream` is about to announce what it reads of `source`; known at once, since its first read may be as quick."""
        return [] if self._streams.reads(stream, source) else self.announce(stream, source, [])

    def withdraw(self, stream: int) -> list[Instruction]:
        """The stream is over: nothing is prefetched for it any more, and its store's blocks may be evicted."""
        self._streams.withdraw(stream)
        self._ordered = {source for source in self._ordered if source in self._bytes_of or self._streams.uses(source)}
        out: list[Instruction] = []
        for file in list(self._ring_files.values()):
            if file.awaited.pop(stream, None) is not None and self._live(file):
                self._sweep(file.object, out)
        return [*out, *self._prefetch()]

    def adopt(self, obj: ObjectId, blocks: Iterable[int]) -> int | None:
        """An earlier daemon left these blocks of `obj`. Returns the file's number, or None when there is no room for it."""
        blocks = set(blocks)
        cost = sum(min(self.block_bytes, obj.size - block * self.block_bytes) for block in blocks)
        known = (obj.source, obj.key) in self._versions
        if known or len(self._files) >= self.max_files or self.used + cost > self.budget - self._slack:
            return None
        file = self._add(obj, None)
        file.adopted = blocks
        self._charge(file, cost)
        return file.id

    def resize(self, budget: int) -> list[Instruction]:
        """Another budget. What is held or in flight above a smaller one goes as soon as it can; until then nothing comes."""
        self.budget = budget
        out: list[Instruction] = []
        for file in list(self._linked.values()):
            if self.used - self._pinned.dropped - self._ring.dropped <= budget:
                break
            if not file.flying:
                self._drop(file, out)
        return [*out, *self._prefetch()]

    # questions

    @property
    def used(self) -> int:
        """Bytes on the books."""
        return self._pinned.used + self._ring.used

    @property
    def ring_bytes(self) -> int:
        """What the ring may hold."""
        if not self._streams:
            return 0
        return min(self.budget // 2, max(self.budget // RING_SHARE, RING_BLOCKS * self.block_bytes))

    def runs(self, file_id: int, at_most: int) -> list[tuple[int, int]]:
        """The file's present bytes as (first, end) runs, sorted; the first `at_most` of them."""
        return self._files[file_id].runs(at_most)

    def object_of(self, file_id: int) -> ObjectId:
        return self._files[file_id].object

    def waited_for(self, file_id: int, block: int) -> bool:
        """Whether somebody waits for this fetch now."""
        file = self._files.get(file_id)
        return file is not None and bool(file.flying.get(block))

    def has_all(self, obj: ObjectId, ranges: Ranges) -> bool:
        """Whether these ranges are all present."""
        for file in (self._linked.get(obj), self._find_ring(obj, ranges)):
            needed = file.needs(ranges) if file is not None else None
            if file is not None and needed is not None and needed <= file.present:
                return True
        return False

    def counts(self) -> dict[str, int]:
        """Sizes for status: bytes and numbers."""
        live = [*self._linked.values(), *self._ring_files.values()]
        return {
            "budget_bytes": self.budget,
            "used_bytes": self.used,
            "pinned_bytes": self._pinned.used - self._pinned.dropped,
            "ring_bytes": self._ring.used - self._ring.dropped,
            "adopted_bytes": sum(file.cost(file.adopted) for file in self._linked.values()),
            "in_flight_bytes": sum(file.cost(file.flying) for file in live),
            "dropped_but_held_bytes": self._pinned.dropped + self._ring.dropped,
            "files": len(live),
            "waiting": len(self._tickets),
            "streams": len(self._streams),
            "announced": self._streams.waiting(),
        }

    # where a read finds its place

    def _place(self, obj: ObjectId, ranges: Ranges, out: list[Instruction], *, asked: bool) -> CacheFile | None:
        """The file that has, gets, or has room for `ranges`; None when there is no room in either tier. Prefetching leaves a
        quarter of the ring to reads that are asked for now."""
        file = self._admit_if_cheap(obj, ranges)
        file = file or self._find_ring(obj, ranges) or self._admit(obj, ranges, out)
        if file is None and self._streams.uses(obj.source):
            return self._open_ring(obj, ranges, self.ring_bytes if asked else self.ring_bytes * 3 // 4, out)
        if file is not None and not file.ring:
            self._linked.move_to_end(obj)
        return file

    def _admit_if_cheap(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        """The block file if it needs no more room."""
        file = self._linked.get(obj)
        needed = file.needs(ranges) if file else None
        if file is None or needed is None or needed - file.present - file.flying.keys() - file.adopted:
            return None
        return file if self.admitting or needed <= file.present | file.flying.keys() else None

    def _admit(self, obj: ObjectId, ranges: Ranges, out: list[Instruction]) -> CacheFile | None:
        """The block file of `obj` with room for all of `ranges`, or None. Evicts others first, then, where nobody announced
        the store, the object's own old file."""
        if not self.admitting:
            return None
        file = self._linked.get(obj)
        blank = file or CacheFile(0, obj, self._pinned, self.block_bytes)
        wanted = blank.needs(ranges) or set()
        missing = wanted - blank.present - blank.flying.keys() - blank.adopted
        if blank.cost(wanted) > self._limit:
            return None
        if self._make_room(blank.cost(missing), obj, out) and file:
            return file
        if (
            file
            and not file.flying
            and not self._protected(obj.source, obj.source)
            and not self._fits(blank.cost(missing))
        ):
            self._drop(file, out)  # an object larger than the budget: begin it anew
            file = None
        fits = file is None and self._fits(blank.cost(wanted))
        return self._create(obj, None, out) if fits and self._files_free else None

    @property
    def _limit(self) -> int:
        """What the pinned tier may hold."""
        return self.budget - self.ring_bytes

    @property
    def _slack(self) -> int:
        """Evict this much ahead, so that holders have time to let go before the room is needed."""
        return self.budget // 16

    @property
    def _files_free(self) -> bool:
        return len(self._linked) < self.max_files

    def _fits(self, cost: int) -> bool:
        return self._pinned.used + cost <= self._limit and self.used + cost <= self.budget

    def _make_room(self, need: int, keep: ObjectId, out: list[Instruction]) -> bool:
        """Evict until `need` bytes fit with some slack; whether they fit at all. What is dropped but held is counted as
        good as gone when choosing victims, or one stubborn holder would empty the cache."""
        new_file = keep not in self._linked
        if self._crowded(need, new_file) and self._evictable(keep.source):
            for victim in list(self._linked.values()):
                if not self._crowded(need, new_file):
                    break
                if victim.object != keep and self._may_go(victim, keep.source):
                    self._drop(victim, out)
        return self._fits(need)

    def _crowded(self, need: int, new_file: bool) -> bool:
        full = self._pinned.used - self._pinned.dropped + need > self._limit - self._slack
        return full or (new_file and not self._files_free)

    def _may_go(self, file: CacheFile, new: str) -> bool:
        return not file.flying and (file.stale or not self._protected(file.object.source, new))

    def _protected(self, source: str, new: str) -> bool:
        """Whether blocks of `source` stay when something of the store `new` comes: while a loader announces it, and, when it
        has stopped (its trainer starts again, as a rule), against reads of the store itself."""
        return self._streams.uses(source) or (source == new and source in self._ordered)

    def _evictable(self, new: str) -> bool:
        """Whether anything may be evicted: or every read of a full cache would look through all its files."""
        return bool(self._stale_bytes) or any(
            total for source, total in self._bytes_of.items() if not self._protected(source, new)
        )

    # the ring

    def _find_ring(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        return next((file for file in self._rings.get(obj, ()) if file.whole and file.needs(ranges) is not None), None)

    def _open_ring(self, obj: ObjectId, ranges: Ranges, limit: int, out: list[Instruction]) -> CacheFile | None:
        parts = extents_of(ranges, self.block_bytes)
        cost = sum(length for _, length in parts)
        if not self.admitting or cost > limit or len(self._ring_files) >= max(4, self.max_files // 4):
            return None
        self._make_ring_room(cost, limit, out)
        if self._ring.used + cost > limit or self.used + cost > self.budget:
            return None
        file = self._create(obj, parts, out)
        self._launch(file, range(len(parts)), out)
        return file

    def _make_ring_room(self, cost: int, limit: int, out: list[Instruction]) -> None:
        """Drop reads that were announced, and then neither announced again nor read; and, where the pinned tier is larger than
        it may be since somebody announces, some of that."""
        if self._ring.used + cost > limit:
            for file in list(self._ring_files.values()):
                if not file.flying and all(self._given_up(stream, entry[0]) for stream, entry in file.awaited.items()):
                    self._drop(file, out)
        for victim in list(self._linked.values()) if self._pinned.used > self._limit else ():
            if self._pinned.used - self._pinned.dropped <= self._limit:
                break
            if not victim.flying:
                self._drop(victim, out)

    def _given_up(self, stream: int, number: int) -> bool:
        now = self._streams.announced(stream)
        return not now or now - number >= PATIENCE

    def _await(self, ring: CacheFile, stream: int, number: int, ranges: Ranges) -> None:
        _, left = ring.awaited.get(stream, (0, set()))
        ring.awaited[stream] = (number, left | set(ranges))

    def _was_read(self, obj: ObjectId, stream: int, ranges: Ranges) -> None:
        for file in self._rings.get(obj, ()):
            if stream in file.awaited:
                _, left = file.awaited[stream]
                left.difference_update(ranges)
                if not left:
                    del file.awaited[stream]

    def _sweep(self, obj: ObjectId, out: list[Instruction]) -> None:
        """Drop this object's ring files that nobody awaits, and those with a hole, which serve nobody."""
        for file in list(self._rings.get(obj, ())):
            if not file.flying and (not file.awaited or not file.whole):
                self._drop(file, out)

    # files

    def _create(self, obj: ObjectId, parts: Ranges | None, out: list[Instruction]) -> CacheFile:
        if parts is None:
            self._supersede(obj, out)
        file = self._add(obj, parts)
        out.append(Create(file.id, obj, not file.ring))
        return file

    def _supersede(self, obj: ObjectId, out: list[Instruction]) -> None:
        """An older version of the object is of no use any more."""
        older = self._linked.get(self._versions.get((obj.source, obj.key), obj))
        if older is None:
            return
        if not older.flying:
            self._drop(older, out)
            return
        older.stale = True
        self._stale_bytes += older.bytes

    def _add(self, obj: ObjectId, parts: Ranges | None) -> CacheFile:
        tier = self._pinned if parts is None else self._ring
        file = self._files[self._next_file] = CacheFile(self._next_file, obj, tier, self.block_bytes, parts)
        self._next_file += 1
        if parts is None:
            self._linked[obj] = file
            self._versions[obj.source, obj.key] = obj
        else:
            self._rings.setdefault(obj, []).append(file)
            self._ring_files[file.id] = file
        return file

    def _live(self, file: CacheFile) -> bool:
        return file.id in self._ring_files if file.ring else self._linked.get(file.object) is file

    def _drop(self, file: CacheFile, out: list[Instruction]) -> None:
        if file.ring:
            del self._ring_files[file.id]
            self._rings[file.object].remove(file)
            if not self._rings[file.object]:
                del self._rings[file.object]
        else:
            del self._linked[file.object]
            self._unlink_accounts(file)
        file.tier.dropped += file.bytes
        out.append(Drop(file.id, file.ring))
        if not file.holds:
            self._bury(file)

    def _unlink_accounts(self, file: CacheFile) -> None:
        source, name = file.object.source, (file.object.source, file.object.key)
        self._bytes_of[source] = self._bytes_of.get(source, 0) - file.bytes
        if not self._bytes_of[source]:
            del self._bytes_of[source]
        if file.stale:
            self._stale_bytes -= file.bytes
        if self._versions.get(name) == file.object:
            del self._versions[name]

    def _bury(self, file: CacheFile) -> None:
        file.tier.dropped -= file.bytes
        file.tier.used -= file.bytes
        del self._files[file.id]

    def _ready(self, ticket: int, file: CacheFile, out: list[Instruction]) -> None:
        file.holds += 1
        out.append(Ready(ticket, file.id, file.ring))

    # fetches

    def _launch(self, file: CacheFile, numbers: Iterable[int], out: list[Instruction]) -> None:
        for number in numbers:
            offset, length = file.part(number)
            adopted = number in file.adopted
            file.flying[number] = []
            if adopted:
                file.adopted.discard(number)
                file.checking.add(number)
            else:
                self._charge(file, length)
            out.append(Fetch(file.id, number, offset, length, self._here(file, offset, length), adopted))

    def _here(self, file: CacheFile, offset: int, length: int) -> tuple[tuple[int, int, int], ...]:
        """What other files have of a ring file's part: sorted and disjoint."""
        if not file.ring:
            return ()
        pinned = self._linked.get(file.object)
        others = [*([pinned] if pinned else ()), *(ring for ring in self._rings[file.object] if ring is not file)]
        found = sorted((at, size, other.id) for other in others for at, size in other.there(offset, length))
        out: list[tuple[int, int, int]] = []
        for at, size, other in found:
            start = max(at, out[-1][1] + out[-1][2]) if out else at
            if start < at + size:
                out.append((other, start, at + size - start))
        return tuple(out)

    def _landed(self, file: CacheFile, number: int) -> list[int]:
        file.checking.discard(number)
        stream = file.ahead.pop(number, None)
        if stream is not None:
            cost = file.part(number)[1]
            self._ahead_parts, self._ahead_bytes = self._ahead_parts - 1, self._ahead_bytes - cost
            self._streams.charge(stream, -cost)
        return file.flying.pop(number)

    def _prefetch(self) -> list[Instruction]:
        """Start announced fetches, the one due first before the others, while there is room in the air and in the cache."""
        out: list[Instruction] = []
        while self.admitting and self._ahead_parts < self.prefetch_parts and self._ahead_bytes < self.prefetch_bytes:
            stream = self._streams.next(self.prefetch_bytes)
            if stream is None or not self._prefetch_for(stream, self._streams.head(stream), out):
                break
            self._streams.pop(stream)
        return out

    def _prefetch_for(self, stream: int, want: Want, out: list[Instruction]) -> bool:
        """Start what `want` needs; False when it must wait for room."""
        first_new = self._next_file
        file = self._place(want.object, want.ranges, out, asked=False)
        if file is None:
            return (
                sum(length for _, length in want.ranges) > self.ring_bytes * 3 // 4
            )  # this one will never fit: leave it out
        if file.ring:
            self._await(file, stream, self._streams.announced(stream), want.ranges)
            started = set(file.flying) if file.id >= first_new else set()
        else:
            started = (file.needs(want.ranges) or set()) - file.present - file.flying.keys()
            self._launch(file, sorted(started), out)
        for number in started:
            file.ahead[number] = stream
            self._ahead_bytes += file.part(number)[1]
            self._streams.charge(stream, file.part(number)[1])
        self._ahead_parts += len(started)
        return True

    def _forget_ticket(self, ticket: int) -> None:
        entry = self._tickets.pop(ticket)
        for number in entry.missing:
            waiting = entry.file.flying.get(number)
            if waiting and ticket in waiting:
                waiting.remove(ticket)

    # arithmetic

    def _charge(self, file: CacheFile, cost: int) -> None:
        file.bytes += cost
        file.tier.used += cost
        if not file.ring and self._linked.get(file.object) is file:
            source = file.object.source
            self._bytes_of[source] = self._bytes_of.get(source, 0) + cost
            if file.stale:
                self._stale_bytes += cost
