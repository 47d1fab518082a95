"""What comes next, started ahead of the trainer and announced to the cache further ahead.

Purpose: the running half of a loader, which can be thrown away and made again at any position.
Invariants: batches follow each other over the ends of epochs without a pause; `prefetch` of them are in the making
while the trainer works. Their bytes and those of at least `ANNOUNCED_BATCHES` more are named to the readers, soonest
first: what of the former nobody has read yet goes before what is due later. What batches hold is looked up in the index
by the threads that make them, several in one go and at most `ANNOUNCED_BATCHES` and `AT_ONCE` ahead of those in the
making: the trainer waits for a look-up only when nothing else is in the making, and the first batch it looks up itself.
A thread of its own would be one more that wants the interpreter, for which the others then wait whenever they have read
something. Nothing here refers to the loader.
Failure behaviour: what `next` raises makes the whole unusable; the loader closes it and makes another.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.shards.contract import Files
from headrace.loaders.batch.batch import Batch
from headrace.loaders.batch.executor import BatchExecutor
from headrace.loaders.batch.memory import Closed, MemoryBudget
from headrace.loaders.fetch.sample_reader import Range, SampleReader, spans
from headrace.loaders.interfaces import BatchSource, SampleRef
from headrace.loaders.works.foreseen import Foreseen

ANNOUNCED_BATCHES = 8
AT_ONCE, AT_ONCE_PLACES = 8, 128
MOMENT_SECONDS = 0.001
Places = Sequence[SampleRef]


def batches_from(plan: BatchSource, epoch: int, batch: int) -> Iterator[Sequence[SampleRef]]:
    """A rank's batches from a position on, without end. One is looked up first, then more and more at once, up to
    `AT_ONCE` or `AT_ONCE_PLACES`; where something is wrong with one of them, one by one, so that those before it can be
    delivered."""
    count = 1
    for later in itertools.count(epoch):
        end = plan.batches_in(later)
        while batch < end:
            some = range(batch, min(batch + count, end))
            try:
                found = plan.places(later, some)
            except HeadraceError:
                if len(some) == 1:
                    raise
                count = 1
                continue
            yield from found
            batch = some.stop
            count = max(1, min(2 * count, AT_ONCE, AT_ONCE_PLACES // max(1, len(found[-1]))))
        batch = 0


class _Planned(msgspec.Struct, frozen=True):
    """A batch that was looked up; `files` where it is delivered as it is; `reads` by the number of the source."""

    places: Places
    files: Sequence[Files] | None
    reads: Mapping[int, Sequence[Range]]


class Prefetcher:
    """Delivers a rank's batches from a position on. Used by one thread at a time."""

    def __init__(
        self,
        batches: Iterator[Sequence[SampleRef]],
        work: Foreseen,
        sources: Sequence[SampleReader],
        prefetcher: BatchExecutor,
        prefetch: int,
        memory: MemoryBudget,
    ) -> None:
        self._batches, self._work, self._sources = batches, work, sources
        self._prefetcher, self._prefetch, self._memory = prefetcher, prefetch, memory
        self._batch_bytes = 0
        self._looking = threading.Lock()  # one thread at a time looks up, appends to what is planned, and announces
        self._planned: deque[_Planned] = deque()
        self._making: deque[_Planned] = deque()
        self._planning: deque[Future[None]] = deque()  # look-ups that were asked for, soonest first
        self._failed: BaseException | None = None

    def next(self) -> Batch:
        """The next batch, whole. What comes behind it, as far as that is known, is begun before it is returned."""
        if not len(self._prefetcher):
            self._begin(self._next_planned())
        self._start(self._room() + 1)
        batch = self._prefetcher.next()
        self._making.popleft()
        self._batch_bytes = max(self._batch_bytes, batch.nbytes)
        self._start(self._room())
        return batch

    def close(self) -> None:
        """End the threads; nothing is delivered afterwards."""
        self._failed = self._failed or Closed()  # ends what is being looked up
        self._memory.close()
        self._prefetcher.stop()
        with contextlib.ExitStack() as ends:  # what is last in it is first, and each comes although one before it fails
            for source in reversed(self._sources):
                ends.callback(source.close)
            ends.callback(self._work.close)
            ends.callback(self._prefetcher.close)

    @property
    def in_flight(self) -> dict[str, int]:
        """Bytes of samples in the making and of batches ahead, the most of the former so far, and how often one waited;
        and bytes held of the heads of long files."""
        memory = self._memory
        return {
            "limit": memory.limit,
            "samples": memory.used,
            "samples_peak": memory.peak,
            "waits": memory.waits,
            "batches": self._prefetcher.nbytes,
            "heads": sum(source.held for source in self._sources),
        }

    def _room(self) -> int:
        """How many batches may be in the making behind the next one: `prefetch`, or as many as the memory's limit
        holds."""
        if not self._batch_bytes:
            return self._prefetch
        return max(0, min(self._prefetch, self._memory.limit // self._batch_bytes - 1))

    def _start(self, count: int) -> None:
        """Have so many batches in the making, as far as it is known what they hold."""
        while len(self._prefetcher) < count and self._planned:
            self._begin(self._planned.popleft())

    def _begin(self, planned: _Planned) -> None:
        self._making.append(planned)
        self._prefetcher.start(planned.places, planned.files)

    def _next_planned(self) -> _Planned:
        """What the next batch holds; what went wrong when it was looked up is raised here."""
        while not self._planned and self._planning:
            self._planning.popleft().result()
        if not self._planned and self._failed is None:  # one by itself, for which nobody waits longer than he must
            self._look_up(1, announce=True)
        if self._failed is not None and not self._planned:
            raise self._failed
        return self._planned.popleft()

    def plan(self) -> None:
        """Have more batches looked up and announced, where it is time, and none are already or nothing came of it. To
        be called once the batch that `next` gave is done with: the first one, which is announced by itself, has the
        cores to itself."""
        while self._planning and self._planning[0].done():
            self._planning.popleft()
        if len(self._planned) > ANNOUNCED_BATCHES or self._planning or self._failed is not None:
            return
        if self._planned:
            self._plan_further()
        else:  # as after the first batch: what is due next is not waited for longer than it takes
            self._planning.append(self._prefetcher.run(self._plan_next, max(1, self._room())))

    def _plan_next(self, count: int) -> None:
        """In a thread that makes batches. What follows is asked for there too: the trainer, who has his batch, would
        wait for a thread to start while this one has the interpreter. It begins after `MOMENT_SECONDS`: for what he
        does first with his batch, too, he would wait until this thread is made to let go, which takes five times as
        long."""
        time.sleep(MOMENT_SECONDS)
        self._look_up(count)
        if self._failed is None:
            self._plan_further()

    def _plan_further(self) -> None:
        self._planning.append(self._prefetcher.run(self._look_up, ANNOUNCED_BATCHES + AT_ONCE, announce=True))

    def _look_up(self, count: int, *, announce: bool = False) -> None:
        """In any thread, until so many batches are known. What goes wrong is raised where the next batch is due."""
        try:
            with self._looking:
                while len(self._planned) < count and self._failed is None:
                    self._planned.append(self._look_at(next(self._batches)))
                if announce and self._failed is None:
                    # copied in one step each: the trainer takes from them meanwhile, and what he has in hand is not named
                    self._announce([*self._making.copy(), *self._planned.copy()])
        except BaseException as error:
            self._failed = self._failed or error
            if not isinstance(error, Exception):  # a Ctrl-C of the trainer, who looks up the first batch himself
                raise

    def _announce(self, planned: Sequence[_Planned]) -> None:
        for number, source in enumerate(self._sources):
            source.announce([read for one in planned for read in one.reads.get(number, ())])

    def _look_at(self, places: Places) -> _Planned:
        """What is read for a batch."""
        reads, joined = dict[int, list[Range]](), self._work.layout.joined
        files = None if joined is None else [joined(place.sample) for place in places]
        for number, place in enumerate(places):
            sample = place.sample
            if files is None:
                source = self._sources[place.source]
                read = source.ranges(sample, self._work.members(sample), self._work.foresee(place))
            else:
                read = spans(files[number])
            reads.setdefault(place.source, []).extend(read)
        return _Planned(places, files, reads)
