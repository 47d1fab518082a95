"""Announcements of the node's loaders: which read is prefetched next, and which stores are in use. Sans-I/O.

Invariants: the read that is due first is next. A stream with its fair share of the bytes in flight or more waits while
another one has something to fetch, so no job starves another. Reads of one stream keep their order. An announcement
continues the last one if it has the same `Want` objects, without some at the start and with more at the end. Such an
announcement costs only its new part, and has the same result as a complete one. A stream has at most the wants of one
announcement, which bounds the memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, is_

from headrace.dataio.cache.plan.events import ObjectId, Ranges, Want

Read = tuple[ObjectId, Ranges]
_read_of: Callable[[Want], Read] = attrgetter("object", "ranges")


@dataclass(eq=False)
class Stream:
    """The announcements of one loader.

    `wants` are the reads that are not prefetched yet. `in_flight_bytes` counts the bytes that are being prefetched.
    `number` counts the announcements, and `named` is the newest one. `placed` are its reads that were handled already,
    because an announcement repeats most of the last one.
    """

    source: str
    wants: deque[Want] = field(default_factory=deque)
    in_flight_bytes: int = 0
    number: int = 0
    named: Sequence[Want] = ()
    placed: set[Read] = field(default_factory=set)
    times: Counter[Read] = field(default_factory=Counter)
    """How often the newest announcement names each read."""
    _placed_twice: bool = False
    """Whether a read was placed since the last announcement, which names it more than once."""
    reread: set[Read] = field(default_factory=set)
    """Reads that were handled and then read. If the next announcement contains one, it is handled again."""

    @cached_property
    def due(self) -> dict[Read, float]:
        """The time at which each read of the newest announcement is due first."""
        return {(want.object, want.ranges): want.due for want in reversed(self.named)}

    def announce(self, wants: Sequence[Want]) -> None:
        dropped = continued(self.named, wants)
        if dropped is not None:
            self._advance(dropped, wants)
        if dropped is None or any(self.times[read] for read in self.reread):
            self._begin(wants)
        self.named, self.number = wants, self.number + 1
        self.reread.clear()
        self.__dict__.pop("due", None)

    def pop(self) -> None:
        """The next want is placed: it is being fetched, or needs no fetch."""
        read = _read_of(self.wants.popleft())
        self.placed.add(read)
        if len(self.times) < len(self.named) and self.times[read] > 1:
            self._placed_twice = True

    def read(self, read: Read) -> None:
        if read in self.placed:
            self.placed.discard(read)
            self.reread.add(read)

    def _begin(self, wants: Sequence[Want]) -> None:
        reads = list(map(_read_of, wants))
        self.times = Counter(reads)
        self.placed &= self.times.keys()
        self.wants = deque(self._not_placed(wants, reads) if self.placed else wants)
        self._placed_twice = False

    def _advance(self, dropped: int, wants: Sequence[Want]) -> None:
        """Drop the first `dropped` wants, and append the new ones."""
        new_wants = wants[len(self.named) - dropped :]
        reads = list(map(_read_of, new_wants))
        self.times.update(reads)
        for want in self.named[:dropped]:
            if self.wants and self.wants[0] is want:
                self.wants.popleft()
            read = (want.object, want.ranges)
            self.times[read] -= 1
            if not self.times[read]:
                del self.times[read]
                self.placed.discard(read)
        self.wants.extend(self._not_placed(new_wants, reads))
        if self._placed_twice:  # the second want of a read that is placed
            self.wants = deque(self._not_placed(self.wants, map(_read_of, self.wants)))
        self._placed_twice = False

    def _not_placed(self, wants: Iterable[Want], reads: Iterable[Read]) -> list[Want]:
        return [want for want, read in zip(wants, reads, strict=True) if read not in self.placed]


class Streams:
    """All streams by number."""

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._sources: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    def uses(self, source: str) -> bool:
        """Whether a stream announces reads of this store."""
        return source in self._sources

    def reads(self, number: int, source: str) -> bool:
        """Whether the stream is known, with this source."""
        stream = self._streams.get(number)
        return stream is not None and stream.source == source

    def announced(self, stream: int) -> int:
        """Number of the stream's announcements; 0 for an unknown stream."""
        state = self._streams.get(stream)
        return state.number if state else 0

    def announce(self, number: int, source: str, wants: Sequence[Want]) -> int:
        """Replace the stream's announcement; returns the number of its announcements so far."""
        stream = self._streams.get(number)
        if stream is None or stream.source != source:
            self.withdraw(number)
            stream = self._streams[number] = Stream(source)
            self._sources[source] = self._sources.get(source, 0) + 1
        stream.announce(wants)
        return stream.number

    def named(self, number: int) -> Sequence[Want]:
        """The stream's newest announcement."""
        return self._streams[number].named

    def read(self, number: int, obj: ObjectId, ranges: Ranges) -> None:
        """The stream reads this now. If the stream announces it again, it is prefetched again."""
        stream = self._streams.get(number)
        if stream is not None:
            stream.read((obj, ranges))

    def times(self, number: int, obj: ObjectId, ranges: Ranges) -> int:
        """How often the stream's newest announcement names this read."""
        stream = self._streams.get(number)
        return stream.times[obj, ranges] if stream is not None else 0

    def due(self, number: int, obj: ObjectId, ranges: Ranges) -> float:
        """The time at which this read is due first, by the stream's newest announcement; infinity if it is not named."""
        stream = self._streams.get(number)
        return stream.due.get((obj, ranges), float("inf")) if stream is not None else float("inf")

    def withdraw(self, number: int) -> None:
        """The stream has ended."""
        stream = self._streams.pop(number, None)
        if stream is None:
            return
        self._sources[stream.source] -= 1
        if not self._sources[stream.source]:
            del self._sources[stream.source]

    def next(self, in_flight_bytes: int) -> int | None:
        """The stream to prefetch for, if at most `in_flight_bytes` may be in flight for all streams together."""
        waiting = [(number, stream) for number, stream in self._streams.items() if stream.wants]
        if not waiting:
            return None
        share = in_flight_bytes // len(waiting)
        below = [entry for entry in waiting if entry[1].in_flight_bytes < share] or waiting
        return min(below, key=lambda entry: (entry[1].wants[0].due, entry[1].in_flight_bytes))[0]

    def head(self, number: int) -> Want:
        return self._streams[number].wants[0]

    def pop(self, number: int) -> None:
        """The stream's next want is being fetched, or needs no fetch."""
        self._streams[number].pop()

    def skip(self, number: int, present: Callable[[Want], bool], at_most: int) -> int:
        """Remove up to `at_most` of the stream's next wants, as long as they are `present`; returns how many."""
        stream, skipped = self._streams[number], 0
        while stream.wants and skipped < at_most and present(stream.wants[0]):
            stream.pop()
            skipped += 1
        return skipped

    def charge(self, number: int, cost: int) -> None:
        """Add to the stream's bytes in flight. The stream may have ended."""
        if number in self._streams:
            self._streams[number].in_flight_bytes += cost

    def waiting(self) -> int:
        """Number of announced reads that are not prefetched yet."""
        return sum(len(stream.wants) for stream in self._streams.values())


def continued(old: Sequence[Want], new: Sequence[Want]) -> int | None:
    """The number of items at the start of `old` that `new` lacks, if `new` continues with the same objects; else None."""
    if not old or not new:
        return None
    dropped = next((place for place, want in enumerate(old) if want is new[0]), None)
    if dropped is None or len(new) < len(old) - dropped or not all(map(is_, old[dropped:], new)):
        return None
    return dropped
