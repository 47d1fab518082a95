"""Fetches in flight, and the tickets and streams that they are for.

Invariants: one instruction fetches a part of a file, however many tickets (requests) need it. Bytes that other cache
files hold are copied from there. Prefetched bytes count for their stream until they arrive.
Failure behaviour: a part whose fetch failed is absent again. If an earlier daemon left it, it is unverified again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter

from headrace.dataio.cache.plan.events import Fetch, Instruction, ObjectId, Ranges
from headrace.dataio.cache.plan.extents import joined, without
from headrace.dataio.cache.plan.files import CacheFile, Tiers
from headrace.dataio.cache.plan.streams import Streams

_OFFSET = itemgetter(1)


@dataclass(slots=True)
class Ticket:
    """A request that waits for the `missing` parts of files.

    `file` will hold all of them. If it is None, the parts are in several tiers, and the plan handles the request again
    when all have arrived.
    """

    file: CacheFile | None
    missing: dict[tuple[int, int], CacheFile]
    object: ObjectId
    ranges: Ranges
    stream: int


class InFlight:
    """Fetches in flight. `prefetch_parts` and `prefetch_bytes` count the prefetches among them."""

    def __init__(self, tiers: Tiers, streams: Streams) -> None:
        self._tiers, self._streams = tiers, streams
        self.tickets: dict[int, Ticket] = {}
        self._prefetched_for: dict[tuple[int, int], int] = {}
        """The stream for which a part, (file, number), is prefetched."""
        self._checking: set[tuple[int, int]] = set()
        """Adopted parts that are being verified."""
        self._charged: dict[tuple[int, int], int] = {}
        """The bytes that were charged for a part: its bytes that were not in the file when its fetch began."""
        self.prefetch_parts = self.prefetch_bytes = 0

    def launch(self, file: CacheFile, numbers: Iterable[int], out: list[Instruction], stream: int) -> None:
        for number in numbers:
            offset, length = file.part(number)
            adopted = number >= 0 and number in file.adopted
            file.in_flight[number] = []
            self._tiers.in_flight_bytes += length
            if adopted:
                file.adopted.discard(number)
                self._tiers.adopted_bytes -= length
                self._checking.add((file.id, number))
            else:
                charged = length - _total(file.present_within(offset, length))
                self._charged[file.id, number] = charged
                self._tiers.charge(file, charged)
            out.append(Fetch(file.id, number, offset, length, self._copies(file, offset, length), adopted, stream))

    def wait(self, number: int, ticket: Ticket) -> None:
        """The ticket waits for its missing parts, which are in flight."""
        self.tickets[number] = ticket
        for (_, part), file in ticket.missing.items():
            file.in_flight[part].append(number)

    def mark_prefetch(self, file: CacheFile, number: int, stream: int) -> None:
        """This fetch is a prefetch for the stream."""
        cost = file.part(number)[1]
        self._prefetched_for[file.id, number] = stream
        self.prefetch_parts, self.prefetch_bytes = self.prefetch_parts + 1, self.prefetch_bytes + cost
        self._streams.charge(stream, cost)

    def fetched(self, file: CacheFile, number: int) -> list[int]:
        """The part has arrived; returns the tickets that are complete now."""
        (offset, length), charged = file.part(number), self._charged.get((file.id, number))
        waiting = self._end_fetch(file, number)
        if charged is not None:  # bytes that two overlapping parts brought count once
            self._tiers.charge(file, length - _total(file.present_within(offset, length)) - charged)
        file.arrived(number)
        for ticket in waiting:
            self.tickets[ticket].missing.pop((file.id, number), None)
        return [ticket for ticket in waiting if not self.tickets[ticket].missing]

    def failed(self, file: CacheFile, number: int) -> list[int]:
        """The fetch failed; removes and returns the tickets that wait for it."""
        checking, charged = (file.id, number) in self._checking, self._charged.get((file.id, number), 0)
        waiting = self._end_fetch(file, number)
        if checking:
            file.adopted.add(number)  # its bytes are still on the disk, and not verified
            self._tiers.adopted_bytes += file.part(number)[1]
        else:
            self._tiers.charge(file, -charged)
        file.forget_extent(number)
        for ticket in waiting:
            self._remove_ticket(ticket)
        return waiting

    def lost(self, file: CacheFile) -> list[int]:
        """The file cannot be written; removes and returns the tickets that wait for parts of it."""
        waiting = sorted({ticket for tickets in file.in_flight.values() for ticket in tickets})
        for number in list(file.in_flight):
            charged = self._charged.get((file.id, number), 0)  # 0 for an adopted part
            self._end_fetch(file, number)
            self._tiers.charge(file, -charged)
            file.forget_extent(number)
        for ticket in waiting:
            self._remove_ticket(ticket)
        return waiting

    def _copies(self, file: CacheFile, offset: int, length: int) -> tuple[tuple[int, int, int], ...]:
        """The byte ranges of a part that files hold, sorted and disjoint.

        The file itself may hold some, as extents. These are not read from another file. Otherwise, faster tiers are first.
        """
        files = [file, *self._tiers.blocks(file.object)]
        files += self._tiers.rings.get(file.object, ()) if file.ring else ()
        out, taken = list[tuple[int, int, int]](), list[tuple[int, int]]()
        for other in files:
            for at, size in without(other.present_within(offset, length), taken):
                out.append((other.id, at, size))
                taken = joined(taken, at, at + size)
        return tuple(sorted(out, key=_OFFSET))

    def _end_fetch(self, file: CacheFile, number: int) -> list[int]:
        cost = file.part(number)[1]
        self._checking.discard((file.id, number))
        self._charged.pop((file.id, number), None)
        self._tiers.in_flight_bytes -= cost
        stream = self._prefetched_for.pop((file.id, number), None)
        if stream is not None:
            self.prefetch_parts, self.prefetch_bytes = self.prefetch_parts - 1, self.prefetch_bytes - cost
            self._streams.charge(stream, -cost)
        return file.in_flight.pop(number)

    def _remove_ticket(self, ticket: int) -> None:
        for (_, number), file in self.tickets.pop(ticket).missing.items():
            waiting = file.in_flight.get(number)
            if waiting and ticket in waiting:
                waiting.remove(ticket)


def _total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(size for _, size in ranges)
