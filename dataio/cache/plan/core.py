"""Decides which bytes of immutable objects the cache holds, within the budgets of one or more tiers.

Purpose: the plan keeps whole blocks of announced stores while there is room (`pinned`). Of parts of long files it keeps
only their bytes (`extents`). A read for which there is no room passes through a file of its own (`ring`). The plan
evicts blocks of stores that no stream announced, least recently used first.

The plan only *drops* files (forgets and unlinks them) and never punches holes into them, so holders of a descriptor or
mapping keep every byte. A dropped file stays accounted for until its last holder closes it. Everything in the cache has
a copy in a store; staged checkpoints are not in it.

Invariants:

- The bytes accounted for (present, in flight, adopted, and dropped but still held) never exceed the budget, except
  after `resize` to a smaller one.
- One instruction fetches a block of a live file, however many requests (tickets) need it.
- Every ticket gets exactly one of `Ready`, `Bypass` and `Failed`, at once or when the fetches end that it waits for.
- A file with a fetch in flight is not evicted.

Failure behaviour: a request for which there is no room gets `Bypass` (read the store directly), so requests never wait
for room. Only prefetching waits (back-pressure). A failed fetch fails the tickets that wait for it, and its block is
absent again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headrace.dataio.cache.plan.events import Bypass, Failed, Instruction, ObjectId, Ranges, Ready, Want
from headrace.dataio.cache.plan.extents import is_part
from headrace.dataio.cache.plan.files import BlockSet, CacheFile, Tiers, blocks_of
from headrace.dataio.cache.plan.in_flight import InFlight, Ticket
from headrace.dataio.cache.plan.pinned import Pinned
from headrace.dataio.cache.plan.ring import Ring
from headrace.dataio.cache.plan.streams import Streams
from headrace.dataio.core import limits

LOOK_AHEAD = 1024
"""Maximum number of present reads that one event examines, which bounds the time under the engine's lock."""


class CachePlan:
    """The state of one cache. Not thread-safe: its engine calls it under a lock."""

    def __init__(
        self,
        budgets: int | Sequence[int],
        *,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        max_files: int | Sequence[int] = 4096,
        max_ring_files: int | None = None,
        prefetch_parts: int = 4,
    ) -> None:
        """`budgets`: bytes of each tier, fastest first. `max_files`: maximum number of block files of each tier.

        `max_ring_files` is by default a quarter of that.
        """
        self.block_bytes, self.prefetch_parts = block_bytes, prefetch_parts
        """Maximum number of prefetches in flight.

        It is less than the number of threads, so a fetch that a request waits for gets a thread.
        """
        self.prefetch_batch = 1
        """Prefetches start in batches of this size, when there is room for the whole batch."""
        self.prefetch_bytes = prefetch_parts * block_bytes
        """Maximum bytes of prefetches in flight; the engine derives it from the store's bandwidth and latency."""
        budgets = [budgets] if isinstance(budgets, int) else budgets
        files = [max_files] * len(budgets) if isinstance(max_files, int) else max_files
        self._tiers = Tiers(budgets, block_bytes, files, max_ring_files or max(4, max(files) // 4))
        self._streams = Streams()
        self._ring = Ring(self._tiers, self._streams)
        self._pinned = Pinned(self._tiers, self._ring, self._streams)
        self._in_flight = InFlight(self._tiers, self._streams)

    # events

    def request(self, ticket: int, obj: ObjectId, ranges: Ranges, stream: int = 0) -> list[Instruction]:
        """Handle a request for ranges of `obj`, which must be in one file.

        `ticket` is a new number for the request. `stream` is the stream that announces the reads, 0 for none.
        """
        out: list[Instruction] = []
        self._streams.read(stream, obj, ranges)
        self._request(ticket, obj, ranges, stream, out)
        return out

    def take(self, obj: ObjectId, ranges: Ranges) -> int | None:
        """The number of a block file with all of `ranges` present, or None: the fast path of most reads.

        The file counts as held once more, as after `Ready`.
        """
        for tier in self._tiers.all:
            file = tier.linked.get(obj)
            if file is not None and file.has(ranges):
                self._tiers.used_lately(file)
                self._tiers.hold(file)
                return file.id
        return None

    def fetched(self, *parts: tuple[int, int]) -> list[Instruction]:
        """The fetches of these parts, (file, block), succeeded: their bytes are in the files."""
        out: list[Instruction] = []
        for file_id, block in parts:
            file = self._tiers.files.get(file_id)
            if file is not None and block in file.in_flight:  # else the file was lost meanwhile
                self._complete_part(file, block, out)
        return [*out, *self._prefetch()] if parts else out

    def _complete_part(self, file: CacheFile, block: int, out: list[Instruction]) -> None:
        for number in self._in_flight.fetched(file, block):
            ticket = self._in_flight.tickets.pop(number)
            if ticket.file is not None:
                self._ready(number, ticket.file, out)
            else:
                self._request(number, ticket.object, ticket.ranges, ticket.stream, out)
        if file.ring:
            self._ring.sweep(file.object, out)

    def failed(self, file_id: int, block: int) -> list[Instruction]:
        """The store could not supply this part."""
        file = self._tiers.files.get(file_id)
        if file is None or block not in file.in_flight:
            return []
        out: list[Instruction] = [Failed(ticket, file_id, block) for ticket in self._in_flight.failed(file, block)]
        if file.ring:
            self._ring.sweep(file.object, out)
        return [*out, *self._prefetch()]

    def lost(self, file_id: int) -> list[Instruction]:
        """The file cannot be created or written: its waiting requests bypass the cache, and it is dropped."""
        file = self._tiers.files.get(file_id)
        if file is None or not self._tiers.live(file):
            return []
        waiting = self._in_flight.lost(file)
        out: list[Instruction] = []
        self._tiers.drop(file, out)
        return [*out, *(Bypass(ticket) for ticket in waiting), *self._prefetch()]

    def released(self, *file_ids: int) -> list[Instruction]:
        """For each of these files, one hold has ended, which a `Ready` or `take` began."""
        for file_id in file_ids:
            self._tiers.release(self._tiers.files[file_id])
        return self._prefetch()

    def touch(self, file_id: int) -> None:
        """A holder read from the file without a request."""
        file = self._tiers.files.get(file_id)
        if file is not None and not file.ring and self._tiers.live(file):
            self._tiers.used_lately(file)

    def announce(self, stream: int, source: str, wants: Sequence[Want]) -> list[Instruction]:
        """Replace the stream's announcement: the ranges of `source` that it will read next, soonest first.

        A read may occur several times.
        """
        out: list[Instruction] = []
        self._streams.announce(stream, source, wants)
        self._pinned.announced(source)
        self._ring.announced(stream, out)
        return [*out, *self._prefetch()]

    def reads_in_order(self, stream: int, source: str) -> list[Instruction]:
        """Register that `stream` is about to announce reads of `source`: its first read may arrive earlier."""
        return [] if self._streams.reads(stream, source) else self.announce(stream, source, [])

    def withdraw(self, stream: int) -> list[Instruction]:
        """The stream has ended: prefetching for it stops, and its store's blocks may be evicted."""
        out: list[Instruction] = []
        self._streams.withdraw(stream)
        self._pinned.withdrawn()
        self._ring.withdrawn(stream, out)
        return [*out, *self._prefetch()]

    def adopt(self, obj: ObjectId, blocks: Iterable[int], tier: int = 0, *, unlisted: int = 0) -> int | None:
        """Adopt blocks of `obj` that an earlier daemon left in the tier, in a file with `unlisted` other bytes.

        Returns the file's number. Returns None if there is no room, the tier has a file of the object, or another version
        of the object is known.
        """
        target, blocks = self._tiers.all[tier], set(blocks)
        last_block = (obj.size - 1) // self.block_bytes
        cost = len(blocks) * self.block_bytes - (
            (last_block + 1) * self.block_bytes - obj.size if last_block in blocks else 0
        )
        conflicts = self._tiers.versions.get((obj.source, obj.key), obj) != obj or obj in target.linked
        full = target.used + cost + unlisted > target.budget - self._pinned.slack(target)
        if conflicts or full or not target.has_room_for_files:
            return None
        file = self._tiers.add(target, obj, None)
        file.adopted = BlockSet(blocks)
        self._tiers.adopted_bytes += cost
        self._tiers.charge(file, cost + unlisted)
        return file.id

    def resize(self, budgets: int | Sequence[int]) -> list[Instruction]:
        """Set new budgets.

        If a budget is smaller, files above it are dropped, except those with a fetch in flight. Until the tier fits its
        budget, it admits no blocks.
        """
        out: list[Instruction] = []
        for tier, budget in zip(self._tiers.all, [budgets] if isinstance(budgets, int) else budgets, strict=True):
            tier.budget = budget
            for file in list(tier.linked.values()):
                if tier.used - tier.dropped <= budget:
                    break
                if not file.in_flight:
                    self._tiers.drop(file, out)
        return [*out, *self._prefetch()]

    def set_open(self, tier: int, *, open: bool) -> None:
        """Set whether the tier's disk can be written. If not, present blocks are served and no new ones admitted."""
        self._tiers.all[tier].open = open

    def set_prefetch_limits(self, parts: int, size: int, together: int) -> None:
        """Set the maximum number of prefetches in flight, their bytes, and the batch size."""
        self.prefetch_parts, self.prefetch_bytes, self.prefetch_batch = parts, size, together

    # queries

    @property
    def used(self) -> int:
        """Bytes accounted for."""
        return self._tiers.used

    @property
    def budget(self) -> int:
        return self._tiers.budget

    @property
    def tiers(self) -> list[tuple[int, int, bool]]:
        """(budget, used bytes, whether the disk can be written) of each tier."""
        return [(tier.budget, tier.used, tier.open) for tier in self._tiers.all]

    @property
    def ring_bytes(self) -> int:
        """Maximum bytes of the ring."""
        return sum(self._ring.room(tier) for tier in self._tiers.all)

    def tier_of(self, file_id: int) -> int | None:
        """The file's tier; None if the file no longer exists."""
        file = self._tiers.files.get(file_id)
        return file.tier if file is not None else None

    def runs(self, file_id: int, at_most: int) -> list[tuple[int, int]]:
        """The file's present bytes as (first, end) runs, sorted; the first `at_most` of them."""
        return self._tiers.files[file_id].runs(at_most)

    def grown(
        self, known_runs: Mapping[int, Sequence[tuple[int, int]]], files: int, runs: int
    ) -> list[tuple[int, list[tuple[int, int]]]]:
        """Up to `files` files with more present bytes than `known_runs` lists, in at most `runs` runs each.

        `known_runs` must contain the list objects that `runs` returned.
        """
        out: list[tuple[int, list[tuple[int, int]]]] = []
        for id, last_runs in known_runs.items():
            file = self._tiers.files.get(id)
            if file is not None and file.listed is not last_runs and len(file.listed) <= runs:
                out.append((id, file.listed))
                if len(out) == files:
                    break
        return out

    def object_of(self, file_id: int) -> ObjectId:
        return self._tiers.files[file_id].object

    def is_awaited(self, file_id: int, block: int) -> bool:
        """Whether a request waits for this fetch now."""
        file = self._tiers.files.get(file_id)
        return file is not None and bool(file.in_flight.get(block))

    def has_all(self, obj: ObjectId, ranges: Ranges) -> bool:
        """Whether these ranges are all present."""
        blocks, files = blocks_of(ranges, self.block_bytes), list(self._tiers.blocks(obj))
        if blocks <= set[int]().union(*(file.present for file in files)) or any(file.has(ranges) for file in files):
            return True
        ring = self._ring.find(obj, ranges)
        needed = ring.needs(ranges) if ring is not None else None
        return ring is not None and needed is not None and needed <= ring.present

    def counts(self) -> dict[str, int]:
        """Sizes for status: bytes and numbers."""
        tiers = self._tiers.all
        return {
            "budget_bytes": self.budget,
            "used_bytes": self.used,
            "pinned_bytes": sum(tier.pinned.used - tier.pinned.dropped for tier in tiers),
            "ring_bytes": sum(tier.ring.used - tier.ring.dropped for tier in tiers),
            "reused_bytes": self._ring.reused_bytes(),
            "adopted_bytes": self._tiers.adopted_bytes,
            "in_flight_bytes": self._tiers.in_flight_bytes,
            "dropped_but_held_bytes": sum(tier.dropped for tier in tiers),
            "files": sum(len(tier.linked) for tier in tiers) + len(self._tiers.ring_files),
            "waiting": len(self._in_flight.tickets),
            "streams": len(self._streams),
            "announced": self._streams.waiting(),
        }

    # choosing files and prefetching

    def _request(self, number: int, obj: ObjectId, ranges: Ranges, stream: int, out: list[Instruction]) -> None:
        first_new = self._tiers.next_file
        file = self._find(obj, ranges)
        parts = self._spread_over_tiers(obj, ranges, out, stream) if file is None else {}
        missing = {(other.id, part): other for part, other in parts.items() if part not in other.present}
        if missing:  # `_complete_part` repeats the request when it has all of them
            self._in_flight.wait(number, Ticket(None, missing, obj, ranges, stream))
            return
        if parts:
            file = self._open_ring_file(obj, ranges, out, stream, due=0.0, requested=True)
        file = file or self._place(obj, ranges, out, stream, due=0.0, requested=True)
        if file is None:
            out.append(Bypass(number))
            return
        if file.ring and file.id >= first_new:
            self._ring.requested(file, stream, ranges)
        self._in_flight.launch(file, file.begin(ranges), out, stream)
        self._ring.was_read(obj, stream, ranges)
        missing = dict.fromkeys(((file.id, part) for part in file.unfinished(ranges)), file)
        if missing:
            self._in_flight.wait(number, Ticket(file, missing, obj, ranges, stream))
            return
        self._ready(number, file, out)
        self._ring.sweep(obj, out)

    def _spread_over_tiers(
        self, obj: ObjectId, ranges: Ranges, out: list[Instruction], stream: int
    ) -> dict[int, CacheFile]:
        """The files of several tiers that hold, or now fetch, the blocks of `ranges`, by block.

        Each block is in one tier. A read that spans tiers is assembled from copies in a ring file, so its blocks are not
        stored twice. The result is empty in these cases:

        - No stream announces the store, there is only one tier, or no tier has blocks of the object.
        - Blocks are missing and the read is a part, or no tier has room for them.
        """
        parts = self._pinned.spread(obj, ranges) if self._streams.uses(obj.source) else {}
        lacking = blocks_of(ranges, self.block_bytes) - parts.keys()
        if not parts or (lacking and is_part(ranges)):
            return {}
        if lacking:
            file = self._pinned.admit_blocks(obj, lacking, out)
            if file is None:
                return {}
            parts.update(dict.fromkeys(lacking, file))
        for part, file in sorted(parts.items(), key=lambda entry: entry[0]):
            if part not in file.present and part not in file.in_flight:
                self._in_flight.launch(file, [part], out, stream)
        return parts

    def _find(self, obj: ObjectId, ranges: Ranges) -> CacheFile | None:
        """The file that holds or is fetching `ranges`."""
        file = self._pinned.find(obj, ranges) or self._ring.find(obj, ranges)
        if file is not None and not file.ring:
            self._tiers.used_lately(file)
        return file

    def _place(
        self, obj: ObjectId, ranges: Ranges, out: list[Instruction], stream: int, *, due: float, requested: bool
    ) -> CacheFile | None:
        """A file that holds or will hold `ranges`; None when no tier has room."""
        file = self._find(obj, ranges) or self._pinned.admit(obj, ranges, out)
        if file is None and self._streams.uses(obj.source):
            file = self._open_ring_file(obj, ranges, out, stream, due=due, requested=requested)
        elif file is not None and not file.ring:
            self._tiers.used_lately(file)
        return file

    def _open_ring_file(
        self, obj: ObjectId, ranges: Ranges, out: list[Instruction], stream: int, *, due: float, requested: bool
    ) -> CacheFile | None:
        file = self._ring.open(obj, ranges, out, due=due, requested=requested)
        if file is not None:
            self._in_flight.launch(file, range(len(file.parts or ())), out, stream)
        return file

    def _ready(self, ticket: int, file: CacheFile, out: list[Instruction]) -> None:
        self._tiers.hold(file)
        out.append(Ready(ticket, file.id, file.ring))

    def _prefetch(self) -> list[Instruction]:
        """Start announced fetches, soonest due first, within the limits in flight and while there is room.

        At most `LOOK_AHEAD` present reads are passed over. The next event, such as the end of a read, continues.
        """
        out: list[Instruction] = []
        examinable = LOOK_AHEAD
        flights = self._in_flight
        if flights.prefetch_parts > self.prefetch_parts - self.prefetch_batch:
            return out
        while flights.prefetch_parts < self.prefetch_parts and flights.prefetch_bytes < self.prefetch_bytes:
            stream = self._streams.next(self.prefetch_bytes) if self._tiers.open else None
            if stream is None:
                break
            if skipped := self._streams.skip(stream, self._is_present, examinable):
                examinable -= skipped
                if not examinable:
                    break
            elif self._prefetch_for(stream, self._streams.head(stream), out):
                self._streams.pop(stream)
            else:
                break
        return out

    def _is_present(self, want: Want) -> bool:
        """Whether one file of blocks has the whole read. Runs for each announced read."""
        for tier in self._tiers.all:
            file = tier.linked.get(want.object)
            if file is not None and file.has(want.ranges):
                tier.linked.move_to_end(want.object)
                return True
        return False

    def _prefetch_for(self, stream: int, want: Want, out: list[Instruction]) -> bool:
        """Start the fetches that `want` needs; returns False if it must wait for room."""
        first_new = self._tiers.next_file
        file = self._find(want.object, want.ranges)
        if file is not None and not file.ring and not file.adopted:
            return True  # all present or in flight
        if file is None:
            in_flight_before = set(self._parts_in_flight(want.object))
            if self._spread_over_tiers(want.object, want.ranges, out, stream):
                for id, number in set(self._parts_in_flight(want.object)) - in_flight_before:
                    self._in_flight.mark_prefetch(self._tiers.files[id], number, stream)
                return True
            file = self._place(want.object, want.ranges, out, stream, due=want.due, requested=False)
        if file is None:  # a read that will never fit is skipped
            return sum(length for _, length in want.ranges) > self._ring_for_prefetch
        if not file.ring:
            started = set(file.begin(want.ranges))
            self._in_flight.launch(file, sorted(started), out, stream)
        elif file.id >= first_new:
            self._ring.fetching(file, stream, want.ranges, want.due)
            started = set(file.in_flight)
        else:
            if stream not in file.awaited:  # the file was created for another stream
                self._ring.fetching(file, stream, want.ranges, want.due)
            started = set()
        for number in started:
            self._in_flight.mark_prefetch(file, number, stream)
        return True

    def _parts_in_flight(self, obj: ObjectId) -> Iterator[tuple[int, int]]:
        return ((file.id, number) for file in self._tiers.blocks(obj) for number in file.in_flight)

    @property
    def _ring_for_prefetch(self) -> int:
        return max((self._ring.base(tier) for tier in self._tiers.all), default=0) * 3 // 4
