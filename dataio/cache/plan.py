"""Decides what the node cache fetches, keeps and drops. Sans-I/O: events go in by method calls, instructions come out.

Purpose: blocks of immutable objects under one byte budget. A block is absent, in flight or present; it lives in the one
*file* of its object. Eviction is by whole file, least recently used first, and a file is *dropped* (forgotten and
unlinked), never punched: whoever still holds a descriptor or mapping of it keeps every byte it had. Such a file stays
on the books until its last holder lets go.

Invariants: `used` (present, in flight, and dropped but still held) never passes the budget; a block of a live file is
fetched by one instruction however many tickets want it; every ticket gets exactly one of `Ready`, `Bypass` and `Failed`,
at once or when its last block's fetch ends; a file with a fetch in flight is not evicted.
Failure behaviour: what finds no room is told to `Bypass` the cache (read the store directly), so nothing ever waits for
room. A failed fetch fails the tickets that wait for it and leaves the block absent, to be fetched again when next asked for.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dataio.core import limits


@dataclass(frozen=True, slots=True)
class ObjectId:
    """One version of one object. `source` names its store; size in bytes; `modified` tells it from an older one."""

    source: str
    key: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Create:
    """Make an empty sparse file, before anything else is done to it."""

    file: int
    object: ObjectId


@dataclass(frozen=True, slots=True)
class Fetch:
    """Read bytes [offset, offset + length) of the object into the file; answer with `fetched`, `failed` or `lost`."""

    file: int
    block: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Unlink the file and forget it; holders keep it."""

    file: int


@dataclass(frozen=True, slots=True)
class Ready:
    """All blocks of the ticket are in the file. It counts as held once; answer with `released` when that ends."""

    ticket: int
    file: int


@dataclass(frozen=True, slots=True)
class Bypass:
    """There is no room for the ticket's blocks: read the store directly."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The fetch of this block failed, and so did the ticket."""

    ticket: int
    file: int
    block: int


Instruction = Create | Fetch | Drop | Ready | Bypass | Failed


@dataclass(slots=True)
class _File:
    id: int
    object: ObjectId
    present: set[int] = field(default_factory=set)
    flying: dict[int, list[int]] = field(default_factory=dict)  # block -> tickets that wait for it
    prefetching: set[int] = field(default_factory=set)
    holds: int = 0
    bytes: int = 0  # present and in flight


@dataclass(slots=True)
class _Ticket:
    file: _File
    missing: set[int]


class CachePlan:
    """The state of one cache. Not thread-safe: its engine calls it under a lock."""

    def __init__(
        self,
        budget: int,
        *,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        max_files: int = 4096,
        prefetch_blocks: int = 4,
    ) -> None:
        self.budget, self.block_bytes, self.max_files = budget, block_bytes, max_files
        self.prefetch_blocks = prefetch_blocks
        """Prefetches in flight at once: fewer than the engine has threads, so that a fetch somebody waits for gets one."""
        self.used = 0
        self.admitting = True
        """False while the cache's disk is in trouble: what is present is still served, nothing new is fetched into it."""
        self._slack = (
            budget // 16
        )  # evict this much ahead, so that holders have time to let go before the room is needed
        self._linked: OrderedDict[ObjectId, _File] = OrderedDict()  # least recently used first
        self._files: dict[int, _File] = {}  # linked, and dropped but still held
        self._tickets: dict[int, _Ticket] = {}
        self._dropped_bytes = 0
        self._wanted: OrderedDict[int, deque[tuple[ObjectId, int]]] = OrderedDict()
        self._prefetching = 0
        self._next_file = 1

    # events

    def request(self, ticket: int, obj: ObjectId, blocks: Iterable[int]) -> list[Instruction]:
        """`ticket` (never used before) wants these blocks of `obj` in one file."""
        wanted = set(blocks)
        out: list[Instruction] = []
        file = self._admit(obj, wanted, out)
        if file is None:
            return [*out, Bypass(ticket)]
        self._linked.move_to_end(obj)
        self._launch(file, sorted(wanted - file.present - file.flying.keys()), out)
        missing = wanted - file.present
        if not missing:
            file.holds += 1
            return [*out, Ready(ticket, file.id)]
        self._tickets[ticket] = _Ticket(file, missing)
        for block in missing:
            file.flying[block].append(ticket)
        return out

    def fetched(self, file_id: int, block: int) -> list[Instruction]:
        """A `Fetch` is done: its bytes are in the file."""
        file = self._files.get(file_id)
        if file is None or block not in file.flying:  # the file was lost meanwhile
            return []
        out: list[Instruction] = []
        waiting = self._landed(file, block)
        file.present.add(block)
        for ticket in waiting:
            entry = self._tickets[ticket]
            entry.missing.discard(block)
            if not entry.missing:
                del self._tickets[ticket]
                file.holds += 1
                out.append(Ready(ticket, file.id))
        return [*out, *self._prefetch()]

    def failed(self, file_id: int, block: int) -> list[Instruction]:
        """A `Fetch` failed at the store."""
        file = self._files.get(file_id)
        if file is None or block not in file.flying:
            return []
        waiting = self._landed(file, block)
        self._charge(file, -self._cost(file.object, block))
        out: list[Instruction] = [Failed(ticket, file_id, block) for ticket in waiting]
        for ticket in waiting:
            self._forget_ticket(ticket)
        return [*out, *self._prefetch()]

    def lost(self, file_id: int) -> list[Instruction]:
        """The file cannot be created or written: those who wait for it bypass, and it is dropped."""
        file = self._files.get(file_id)
        if file is None or self._linked.get(file.object) is not file:
            return []
        waiting = sorted({ticket for tickets in file.flying.values() for ticket in tickets})
        for block in list(file.flying):
            self._landed(file, block)
            self._charge(file, -self._cost(file.object, block))
        for ticket in waiting:
            del self._tickets[ticket]
        out: list[Instruction] = []
        self._drop(file, out)
        return [*out, *(Bypass(ticket) for ticket in waiting), *self._prefetch()]

    def released(self, file_id: int) -> list[Instruction]:
        """One hold that a `Ready` had given out ended."""
        file = self._files[file_id]
        file.holds -= 1
        if not file.holds and self._linked.get(file.object) is not file:
            self._bury(file)
        return self._prefetch()

    def touch(self, file_id: int) -> None:
        """A holder read from the file without asking."""
        file = self._files.get(file_id)
        if file is not None and self._linked.get(file.object) is file:
            self._linked.move_to_end(file.object)

    def announce(self, stream: int, upcoming: Sequence[tuple[ObjectId, int]]) -> list[Instruction]:
        """`stream` will want these (object, block) next; replaces what it announced before. Beyond a quarter of the budget
        the rest is ignored, so that prefetching cannot push out what it has just brought."""
        horizon = max(1, self.budget // 4 // self.block_bytes)
        self._wanted.pop(stream, None)
        if upcoming:
            self._wanted[stream] = deque(upcoming[:horizon])
        return self._prefetch()

    # questions

    def runs(self, file_id: int, at_most: int) -> list[tuple[int, int]]:
        """The file's present bytes as (first, end) runs, sorted; the first `at_most` of them."""
        file, out = self._files[file_id], list[tuple[int, int]]()
        for block in sorted(file.present):
            first = block * self.block_bytes
            end = first + self._cost(file.object, block)
            if out and out[-1][1] == first:
                out[-1] = (out[-1][0], end)
            elif len(out) == at_most:
                break
            else:
                out.append((first, end))
        return out

    def object_of(self, file_id: int) -> ObjectId:
        return self._files[file_id].object

    def has_all(self, obj: ObjectId, blocks: Iterable[int]) -> bool:
        """Whether these blocks are all present."""
        file = self._linked.get(obj)
        return file is not None and file.present.issuperset(blocks)

    def counts(self) -> dict[str, int]:
        """Sizes for status: bytes and numbers."""
        flying = sum(self._cost(f.object, b) for f in self._linked.values() for b in f.flying)
        return {
            "budget_bytes": self.budget,
            "used_bytes": self.used,
            "in_flight_bytes": flying,
            "dropped_but_held_bytes": self._dropped_bytes,
            "files": len(self._linked),
            "waiting": len(self._tickets),
        }

    # room

    def _admit(self, obj: ObjectId, wanted: set[int], out: list[Instruction]) -> _File | None:
        """The file for `obj` with room for all of `wanted`, or None. Evicts others first, then the object's own old file."""
        file = self._linked.get(obj)
        missing = wanted - file.present - file.flying.keys() if file else wanted
        if file and not missing:
            return file
        if not self.admitting or self._bytes(obj, wanted) > self.budget:
            return None
        if self._make_room(self._bytes(obj, missing), obj, out) and file:
            return file
        if file and not file.flying and self._bytes(obj, missing) + self.used > self.budget:
            self._drop(file, out)  # an object larger than the budget: begin it anew
            file = None
        fits = file is None and self.used + self._bytes(obj, wanted) <= self.budget
        return self._create(obj, out) if fits and len(self._linked) < self.max_files else None

    def _make_room(self, need: int, keep: ObjectId, out: list[Instruction]) -> bool:
        """Evict until `need` bytes fit with some slack; whether they fit at all. What is dropped but held is counted as
        good as gone when choosing victims, or one stubborn holder would empty the cache."""
        new_file = keep not in self._linked
        for victim in list(self._linked.values()) if self._crowded(need, new_file) else ():
            if not self._crowded(need, new_file):
                break
            if victim.object != keep and not victim.flying:
                self._drop(victim, out)
        return self.used + need <= self.budget

    def _crowded(self, need: int, new_file: bool) -> bool:
        full = self.used - self._dropped_bytes + need > self.budget - self._slack
        return full or (new_file and len(self._linked) >= self.max_files)

    def _create(self, obj: ObjectId, out: list[Instruction]) -> _File:
        file = self._linked[obj] = self._files[self._next_file] = _File(self._next_file, obj)
        self._next_file += 1
        out.append(Create(file.id, obj))
        return file

    def _drop(self, file: _File, out: list[Instruction]) -> None:
        del self._linked[file.object]
        self._dropped_bytes += file.bytes
        out.append(Drop(file.id))
        if not file.holds:
            self._bury(file)

    def _bury(self, file: _File) -> None:
        self._dropped_bytes -= file.bytes
        self.used -= file.bytes
        del self._files[file.id]

    # fetches

    def _launch(self, file: _File, blocks: Iterable[int], out: list[Instruction]) -> None:
        for block in blocks:
            cost = self._cost(file.object, block)
            file.flying[block] = []
            self._charge(file, cost)
            out.append(Fetch(file.id, block, block * self.block_bytes, cost))

    def _landed(self, file: _File, block: int) -> list[int]:
        if block in file.prefetching:
            file.prefetching.discard(block)
            self._prefetching -= 1
        return file.flying.pop(block)

    def _prefetch(self) -> list[Instruction]:
        """Start announced fetches, the streams in turn, while fewer than `prefetch_blocks` are in flight."""
        out: list[Instruction] = []
        while self.admitting and self._wanted and self._prefetching < self.prefetch_blocks:
            stream, queue = self._wanted.popitem(last=False)
            obj, block = queue.popleft()
            if queue:
                self._wanted[stream] = queue
            file = self._admit(obj, {block}, out)
            if file is None or block in file.present or block in file.flying:
                continue
            self._linked.move_to_end(obj)
            file.prefetching.add(block)
            self._prefetching += 1
            self._launch(file, [block], out)
        return out

    def _forget_ticket(self, ticket: int) -> None:
        entry = self._tickets.pop(ticket)
        for block in entry.missing:
            waiting = entry.file.flying.get(block)
            if waiting and ticket in waiting:
                waiting.remove(ticket)

    # arithmetic

    def _cost(self, obj: ObjectId, block: int) -> int:
        return min(self.block_bytes, obj.size - block * self.block_bytes)

    def _bytes(self, obj: ObjectId, blocks: Iterable[int]) -> int:
        return sum(self._cost(obj, block) for block in blocks)

    def _charge(self, file: _File, cost: int) -> None:
        file.bytes += cost
        self.used += cost
