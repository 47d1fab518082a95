"""Converts a loader's announcements from ranges to the plan's reads, and predicts when those reads are due.

Purpose: with every batch a loader announces its next few hundred ranges, and it has announced most of them about seven
times before. A list that continues the last one keeps its `Want` objects, so the plan examines only the new ones. The
number of ranges that were dropped since the last announcement shows how fast the loader reads.
Invariants: the wants are those of the whole list, regardless of how much was known. Neighbouring ranges of one sample
are one want. All wants are recreated when the forecast has moved by more than `SHIFT` of the time that the list covers.
Memory is bounded by one announcement per stream and `KEPT` forecast errors.
Failure behaviour: a range outside its object, or of an object that cannot be found, is left out; the read itself
reports the error. A list that does not continue the last one (the loader's position was changed) starts a new forecast.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.dataio.cache.plan.events import ObjectId, Ranges, Want
from headrace.dataio.cache.plan.extents import HOLE_BYTES
from headrace.dataio.core.errors import HeadraceError, RangeError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

ANNOUNCED = 4096
"""Maximum number of ranges of one announcement. The engine ignores the rest."""
SHIFT = 0.25
T = TypeVar("T")
Upcoming = Sequence[tuple[str, int, int]]

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Group:
    """Neighbouring ranges of one object.

    `at` is the index of the first one among all ranges that the loader has announced. A group without `object` is left
    out.
    """

    at: int
    key: str
    ranges: Ranges
    object: ObjectId | None = None


class AnnouncementList:
    """The newest list of one loader.

    `_reads` and `_wants` are those of the groups that have an object. A list that continues the last one costs its new
    part, and copies of these lists.
    """

    def __init__(self) -> None:
        self._list: list[tuple[str, int, int]] = []
        self._first_index = 0  # its index among all ranges that the loader has announced
        self._groups: deque[_Group] = deque()
        self._reads: list[tuple[str, int]] = []
        self._wants: list[Want] = []
        self._new: list[_Group] = []  # the groups that have no want yet

    def renew(self, upcoming: Upcoming, at_most: int, find: Callable[[str], ObjectId]) -> list[tuple[str, int]]:
        """Replace the list by `upcoming`, and group neighbours of up to `at_most` bytes together.

        `find` returns the object of a key. Returns the (key, offset) of each group's first range.
        """
        new_list = list(upcoming)
        last_group = self._keep(new_list)
        start = last_group.at if last_group else self._first_index
        groups = [
            (start + at, key, ranges)
            for at, key, ranges in _group_neighbours(new_list[start - self._first_index :], at_most)
        ]
        if last_group is not None and groups[0][1:] == (last_group.key, last_group.ranges):
            self._groups.append(last_group)
            del groups[0]
        elif last_group is not None and last_group.object is not None:  # it has more neighbours now
            self._reads.pop()
            del self._wants[len(self._reads) :]
        added = [_Group(at, key, ranges, _find_object(key, ranges, find)) for at, key, ranges in groups]
        self._groups += added
        self._new = [group for group in added if group.object is not None]
        self._reads = [*self._reads, *((group.key, group.ranges[0][0]) for group in self._new)]
        self._list = new_list
        return self._reads

    def wants(self, due: DueTimes) -> list[Want]:
        """The reads that `renew` returned, as wants. `due` are the times at which they are due."""
        new_groups, known_wants = self._new, self._wants
        if _has_shifted(known_wants, due):
            new_groups, known_wants = [group for group in self._groups if group.object is not None], []
        due_times = due.from_to(len(known_wants), due.count)
        self._wants = [
            *known_wants,
            *(
                Want(group.object, group.ranges, when)
                for group, when in zip(new_groups, due_times, strict=True)
                if group.object
            ),
        ]
        self._new = []
        return self._wants

    def new_part(self, upcoming: Upcoming) -> Upcoming:
        """The ranges whose objects `renew` will look up."""
        dropped = dropped_count(self._list, list(upcoming))
        if dropped is None:
            return upcoming
        first_index = self._first_index + dropped
        continues = next((group.at for group in self._groups if group.at >= first_index), None) == first_index
        return upcoming[len(self._list) - dropped :] if continues else upcoming

    def _keep(self, new_list: Sequence[tuple[str, int, int]]) -> _Group | None:
        """Keep the groups that `new` continues, and drop the others.

        Removes and returns the last group, because it may have more neighbours now. Returns None if no group is kept.
        """
        dropped = dropped_count(self._list, new_list)
        if dropped is not None:
            self._first_index += dropped
            reads = 0
            while self._groups and self._groups[0].at < self._first_index:
                reads += self._groups.popleft().object is not None
            self._reads, self._wants = self._reads[reads:], self._wants[reads:]
            if self._groups and self._groups[0].at == self._first_index:
                return self._groups.pop()
        self._first_index += len(self._list)  # nothing is left of the old list; indices are not reused
        self._groups.clear()
        self._reads, self._wants = [], []
        return None


@dataclass(slots=True, eq=False)
class AnnouncingStream:
    """A loader that announces its reads.

    `newest` is the announcement that was not processed yet. `busy`: a thread processes announcements, or will soon.
    """

    announced: AnnouncementList = field(default_factory=AnnouncementList)
    newest: tuple[Store, Upcoming] | None = None
    busy: bool = False


def dropped_count(old: Sequence[T], new: Sequence[T]) -> int | None:
    """The number of items at the start of `old` that `new` lacks, if `new` continues the rest of `old`; else None.

    An item may occur several times: the header of a long video is announced with each of its clips.
    """
    dropped = -1
    while new:
        try:
            dropped = old.index(new[0], dropped + 1)
        except ValueError:
            return None
        if old[dropped:] == new[: len(old) - dropped]:
            return dropped
    return None


def _has_shifted(known_wants: Sequence[Want], due: DueTimes) -> bool:
    """Whether the known wants, which come first, are due at other times than before."""
    if not known_wants:
        return False
    differences = (known_wants[0].due - due.at(0), known_wants[-1].due - due.at(len(known_wants) - 1))
    return max(map(abs, differences)) > SHIFT * due.count * due.pace


def _group_neighbours(upcoming: Upcoming, at_most: int) -> Iterator[tuple[int, str, Ranges]]:
    """Yield groups of neighbours in `upcoming`, which usually belong to one sample, as (first index, key, ranges).

    The ranges of a part of a file, from its first empty range to the next one, are a group of their own. Other ranges that
    are far apart are not grouped: together they would be a part too, and their exact bytes would be fetched in addition to
    the blocks that other samples need.
    """
    first_index, key, ranges, size = 0, "", list[tuple[int, int]](), 0
    for number, (name, offset, length) in enumerate(upcoming):
        in_part = bool(ranges) and not ranges[0][1]
        part_ended = in_part and len(ranges) > 1 and not ranges[-1][1]
        too_long = size + length > at_most and not in_part
        far = bool(ranges) and not in_part and offset - ranges[0][0] - size >= HOLE_BYTES
        begins = part_ended or too_long or far or (not length and not in_part)
        if ranges and (begins or name != key or offset < ranges[-1][0]):
            yield first_index, key, tuple(ranges)
            first_index, ranges, size = number, [], 0
        key, size = name, size + length
        ranges.append((offset, length))
    if ranges:
        yield first_index, key, tuple(ranges)


def _find_object(key: str, ranges: Ranges, find: Callable[[str], ObjectId]) -> ObjectId | None:
    try:
        obj = find(key)
        check_inside(obj, ranges)
    except HeadraceError as error:
        _log.debug("not prefetching: %s", error)
        return None
    return obj


def check_inside(obj: ObjectId, ranges: Sequence[tuple[int, int]]) -> None:
    """Raise `RangeError` for a range that is not inside the object."""
    for offset, length in ranges:
        if offset < 0 or length < 0 or offset + length > obj.size:
            raise RangeError(
                f"bytes [{offset}, {offset + length}) are not inside {obj.key}, which has {obj.size} bytes",
                hint="the index does not match the shard: run headrace verify on the dataset",
            )


KEPT = 1024
FIRST_GUESS = 0.05
"""Seconds per read of a stream that has announced only once."""
WEIGHT = 0.3

Read = tuple[str, int]


@dataclass(frozen=True, slots=True)
class DueTimes:
    """The times at which `count` reads are due, `pace` seconds apart. The first is due at `now` + `pace`."""

    now: float
    pace: float
    count: int

    def at(self, number: int) -> float:
        """The time at which the read with this number is due."""
        return self.now + (number + 1) * self.pace

    def from_to(self, first: int, end: int) -> list[float]:
        """The times of the reads `first` … `end`-1, as far as they exist."""
        return [self.at(number) for number in range(first, min(end, self.count))]


@dataclass(slots=True)
class _Stream:
    at: float
    reads: list[Read]
    due: DueTimes
    pace: float = FIRST_GUESS
    judged: bool = False


class Forecast:
    """Predicts when announced reads are due, from the pace of each stream, and measures the error."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._errors: deque[float] = deque(maxlen=KEPT)

    def announced(self, stream: int, reads: Sequence[Read], now: float) -> DueTimes:
        """The time at which each of `reads` is due. `reads` are (key, offset), soonest first."""
        previous = self._streams.get(stream)
        current = _Stream(now, list(reads), DueTimes(now, 0.0, 0))
        dropped = dropped_count(previous.reads, current.reads) if previous is not None else None
        if previous is not None and dropped is not None:
            self._record_errors(previous, dropped, now)
            current.pace, current.judged = previous.pace, previous.judged
            if dropped:
                measured = (now - previous.at) / dropped
                current.pace, current.judged = (
                    measured if not previous.judged else previous.pace + WEIGHT * (measured - previous.pace),
                    True,
                )
            else:
                current.at = previous.at  # no range was dropped: keep measuring from the same time
        current.due = DueTimes(now, current.pace, len(reads))
        self._streams[stream] = current
        return current.due

    def forget(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def _record_errors(self, previous: _Stream, dropped: int, now: float) -> None:
        if previous.judged:
            self._errors.extend(now - due for due in previous.due.from_to(0, dropped))

    def report(self) -> dict[str, float | int]:
        """The forecast's error in seconds, actual minus predicted time: median, and 95th percentile of its size."""
        errors = sorted(self._errors)
        sizes = sorted(abs(error) for error in errors)
        return {
            "forecasts": len(errors),
            "forecast_error_median_s": round(statistics.median(errors), 6) if errors else 0.0,
            "forecast_error_p95_s": round(sizes[len(sizes) * 95 // 100], 6) if sizes else 0.0,
        }
