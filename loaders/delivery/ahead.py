"""What comes next, started ahead of the trainer and announced to the cache further ahead.

Purpose: the running half of a loader, which can be thrown away and made again at any position.
Invariants: batches follow each other over the ends of epochs without a pause; `prefetch` of them are in the making while the
trainer works, and the bytes of `ANNOUNCED_BATCHES` more are named to the readers, soonest first. What batches hold is looked
up in the index by a thread of its own, at most `prefetch` and `ANNOUNCED_BATCHES` ahead: the trainer waits for a look-up
only when nothing else is in the making. Nothing here refers to the loader.
Failure behaviour: what `next` raises makes the whole unusable; the loader closes it and makes another.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from dataio.core.errors import MillraceError
from loaders.contract import Coming, Place, Work
from loaders.delivery.batch import Batch
from loaders.delivery.memory import Memory
from loaders.delivery.prefetch import Prefetcher
from loaders.samples.source import Range, Source, ranges, spans

ANNOUNCED_BATCHES = 8
AT_ONCE, AT_ONCE_PLACES = 8, 128
_THREAD = "millrace-loader-plan"
Places = Sequence[Place]


def batches_from(plan: Coming, epoch: int, batch: int) -> Iterator[Sequence[Place]]:
    """A rank's batches from a position on, without end. One is looked up first, then more and more at once, up to `AT_ONCE` or
    `AT_ONCE_PLACES`; where something is wrong with one of them, one by one, so that those before it can be delivered."""
    count = 1
    for later in itertools.count(epoch):
        end = plan.batches_in(later)
        while batch < end:
            some = range(batch, min(batch + count, end))
            try:
                found = plan.places(later, some)
            except MillraceError:
                if len(some) == 1:
                    raise
                count = 1
                continue
            yield from found
            batch = some.stop
            count = max(1, min(2 * count, AT_ONCE, AT_ONCE_PLACES // max(1, len(found[-1]))))
        batch = 0


class _Planned(msgspec.Struct, frozen=True):
    """A batch that was looked up; `reads` by the number of the source."""

    places: Places
    reads: Mapping[int, Sequence[Range]]


class Ahead:
    """Delivers a rank's batches from a position on. Used by one thread at a time."""

    def __init__(
        self,
        batches: Iterator[Sequence[Place]],
        work: Work,
        sources: Sequence[Source],
        prefetcher: Prefetcher,
        prefetch: int,
        memory: Memory,
    ) -> None:
        self._batches, self._work, self._sources = batches, work, sources
        self._prefetcher, self._prefetch, self._memory = prefetcher, prefetch, memory
        self._batch_bytes = 0
        self._planner = ThreadPoolExecutor(1, _THREAD)
        self._planned: deque[Future[_Planned]] = deque()
        self._announced: Future[None] | None = None

    def next(self) -> Batch:
        """The next batch, whole. What comes behind it is begun before it is returned, and what comes later is looked up and
        announced only then: the first batch has the cores for itself."""
        self._plan(self._room() + 1 - len(self._prefetcher))
        while len(self._prefetcher) <= self._room() and (self._planned[0].done() or not len(self._prefetcher)):
            self._prefetcher.start(self._planned.popleft().result().places)
        batch = self._prefetcher.next()
        self._batch_bytes = max(self._batch_bytes, batch.nbytes)
        self._plan(ANNOUNCED_BATCHES + self._room() + 1 - len(self._prefetcher))
        while len(self._prefetcher) < self._room() and _is_there(self._planned[0]):
            self._prefetcher.start(self._planned.popleft().result().places)
        self._announce()
        return batch

    def close(self) -> None:
        """End the threads; nothing is delivered afterwards."""
        self._memory.close()
        self._prefetcher.stop()
        inside = threading.current_thread().name.startswith(_THREAD)  # a collected loader may be finalised there
        self._planner.shutdown(wait=not inside, cancel_futures=True)
        self._prefetcher.close()
        self._work.close()
        for source in self._sources:
            source.close()

    @property
    def in_flight(self) -> dict[str, int]:
        """Bytes of samples in the making and of batches ahead, the most of the former so far, and how often one waited."""
        memory = self._memory
        return {
            "limit": memory.limit,
            "samples": memory.used,
            "samples_peak": memory.peak,
            "waits": memory.waits,
            "batches": self._prefetcher.nbytes,
        }

    def _room(self) -> int:
        """How many batches may be in the making behind the next one: `prefetch`, or as many as the memory's limit holds."""
        if not self._batch_bytes:
            return self._prefetch
        return max(0, min(self._prefetch, self._memory.limit // self._batch_bytes - 1))

    def _plan(self, count: int) -> None:
        """Have so many batches looked up."""
        while len(self._planned) < count:
            self._planned.append(self._planner.submit(self._look_up))

    def _look_up(self) -> _Planned:
        """In the planner's thread: the next batch, and what is read for it."""
        places = next(self._batches)
        reads = dict[int, list[Range]]()
        joined = self._work.layout.joined
        for place in places:
            sample = place.sample
            read = ranges(sample, self._work.members(sample)) if joined is None else spans(joined(sample))
            reads.setdefault(place.source, []).extend(read)
        return _Planned(places, reads)

    def _announce(self) -> None:
        """Have the batches that are planned announced, unless the last time is not over yet."""
        if self._announced is None or self._announced.done():
            if self._announced is not None:
                self._announced.result()
            self._announced = self._planner.submit(self._name, tuple(self._planned))

    def _name(self, planned: Sequence[Future[_Planned]]) -> None:
        """In the planner's thread, after these were looked up. What went wrong there is raised where the batch is due."""
        done = [future.result() for future in planned if not future.exception()]
        for number, source in enumerate(self._sources):
            source.announce([read for one in done for read in one.reads.get(number, ())])


def _is_there(planned: Future[_Planned]) -> bool:
    """Whether these places are known; what went wrong is raised where the batch is due."""
    return planned.done() and not planned.exception()
