"""Batches that are planned, announced to the cache and started ahead of the trainer.

Purpose: the running half of a loader, which can be thrown away and made again at any position.

Invariants:
- Batches follow each other over the ends of epochs without a pause. `ahead` of them are in progress while the trainer
  works.
- The reads of these and of at least `ANNOUNCED_BATCHES` more are announced to the readers, soonest first.
- The threads that build batches also plan them, several in one go, at most `ANNOUNCED_BATCHES` and `PLANNED_AT_ONCE`
  ahead of those in progress. The trainer's thread plans the first batch itself. Later it waits for a plan only when
  nothing else is in progress. A thread of its own for planning would be one more that wants the interpreter, and the
  others would wait for it after each read.
- Nothing here refers to the loader.

Failure behaviour: after `next` raised, the prefetcher is unusable; the loader closes it and makes another.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from headrace.dataio.core.errors import HeadraceError
from headrace.loaders.batch.batch import Batch
from headrace.loaders.batch.executor import BatchExecutor
from headrace.loaders.batch.memory import Closed, MemoryBudget
from headrace.loaders.batch.sample_builder import PlannedBatch, SampleBuilder
from headrace.loaders.fetch.sample_reader import Range
from headrace.loaders.interfaces import BatchSource, SampleRef

ANNOUNCED_BATCHES = 8
PLANNED_AT_ONCE, REFS_AT_ONCE = 8, 128
PAUSE_SECONDS = 0.001


def batches_from(source: BatchSource, epoch: int, batch: int) -> Iterator[Sequence[SampleRef]]:
    """A rank's batches from a position on, without end.

    One batch is looked up first, then more and more at once, up to `PLANNED_AT_ONCE` batches or `REFS_AT_ONCE` samples.
    If one of them fails, they are looked up one by one, so that those before it can be delivered.
    """
    count = 1
    for later in itertools.count(epoch):
        end = source.batches_in(later)
        while batch < end:
            some = range(batch, min(batch + count, end))
            try:
                found = source.refs(later, some)
            except HeadraceError:
                if len(some) == 1:
                    raise
                count = 1
                continue
            yield from found
            batch = some.stop
            count = max(1, min(2 * count, PLANNED_AT_ONCE, REFS_AT_ONCE // max(1, len(found[-1]))))
        batch = 0


class Prefetcher:
    """Delivers a rank's batches from a position on. Used by one thread at a time.

    Args:
        batches: the samples of each batch, without end.
        builder: builds samples; closed with the prefetcher.
        executor: runs the builder in threads; closed with the prefetcher.
        ahead: batches in progress behind the one that the trainer waits for.
        memory: the budget of the samples in flight; closed with the prefetcher.
    """

    def __init__(
        self,
        batches: Iterator[Sequence[SampleRef]],
        builder: SampleBuilder,
        executor: BatchExecutor,
        *,
        ahead: int,
        memory: MemoryBudget,
    ) -> None:
        self._batches, self._builder, self._executor = batches, builder, executor
        self._ahead, self._memory = ahead, memory
        self._batch_bytes = 0
        self._lock = threading.Lock()  # one thread at a time plans, appends to `_planned` and announces
        self._planned: deque[PlannedBatch] = deque()
        self._in_progress: deque[PlannedBatch] = deque()
        self._plans: deque[Future[None]] = deque()  # calls of `_plan` in the executor's threads, oldest first
        self._failed: BaseException | None = None

    def next(self) -> Batch:
        """The next batch, whole. Planned batches behind it are started before it is returned."""
        if not len(self._executor):
            self._start(self._next_planned())
        self._start_planned(self._room() + 1)
        batch = self._executor.next()
        self._in_progress.popleft()
        self._batch_bytes = max(self._batch_bytes, batch.nbytes)
        self._start_planned(self._room())
        return batch

    def close(self) -> None:
        """End the threads. Nothing is delivered afterwards."""
        self._failed = self._failed or Closed()  # ends planning
        self._memory.close()
        self._executor.stop()
        with contextlib.ExitStack() as ends:  # in reverse order, and each even if one before it fails
            ends.callback(self._builder.close)
            ends.callback(self._executor.close)

    @property
    def in_flight(self) -> dict[str, int]:
        """Bytes in flight: "samples" in progress, their peak, and how often one waited for memory; "batches" ahead;
        "heads" of long files in memory."""
        memory = self._memory
        return {
            "limit": memory.limit,
            "samples": memory.used,
            "samples_peak": memory.peak,
            "waits": memory.waits,
            "batches": self._executor.nbytes,
            "heads": self._builder.held,
        }

    def plan(self) -> None:
        """Have more batches planned and announced, if it is time and no thread is planning already.

        Call this once the batch that `next` returned is ready: until then the first batch has all cores to itself.
        """
        while self._plans and self._plans[0].done():
            self._plans.popleft()
        if len(self._planned) > ANNOUNCED_BATCHES or self._plans or self._failed is not None:
            return
        if self._planned:
            self._plan_further()
        else:  # e.g. after the first batch: plan what is due next, and more only after that
            self._plans.append(self._executor.run(self._plan_next, max(1, self._room())))

    def _room(self) -> int:
        """Batches that may be in progress behind the next one: `ahead`, or as many as the memory limit holds."""
        if not self._batch_bytes:
            return self._ahead
        return max(0, min(self._ahead, self._memory.limit // self._batch_bytes - 1))

    def _start_planned(self, count: int) -> None:
        """Have `count` batches in progress, as far as they are planned."""
        while len(self._executor) < count and self._planned:
            self._start(self._planned.popleft())

    def _start(self, planned: PlannedBatch) -> None:
        self._in_progress.append(planned)
        self._executor.start(planned)

    def _next_planned(self) -> PlannedBatch:
        """The plan of the next batch. Errors of planning are raised here."""
        while not self._planned and self._plans:
            self._plans.popleft().result()
        if not self._planned and self._failed is None:  # one only: the trainer waits
            self._plan(1, announce=True)
        if self._failed is not None and not self._planned:
            raise self._failed
        return self._planned.popleft()

    def _plan_next(self, count: int) -> None:
        """Plan, and then ask for more. Runs in a thread of the executor, since submitting in the trainer's thread would
        wait for the interpreter.

        It begins after `PAUSE_SECONDS`: the trainer's first steps with its batch would otherwise wait until this thread
        is made to release the interpreter, which takes five times as long.
        """
        time.sleep(PAUSE_SECONDS)
        self._plan(count)
        if self._failed is None:
            self._plan_further()

    def _plan_further(self) -> None:
        self._plans.append(self._executor.run(self._plan, ANNOUNCED_BATCHES + PLANNED_AT_ONCE, announce=True))

    def _plan(self, count: int, *, announce: bool = False) -> None:
        """Plan until `count` batches are planned, in any thread. Errors are kept for the call of `next` in which they
        are due."""
        try:
            with self._lock:
                while len(self._planned) < count and self._failed is None:
                    self._planned.append(self._builder.plan(next(self._batches)))
                if announce and self._failed is None:
                    # each copied in one step: the trainer's thread takes from them meanwhile
                    self._announce([*self._in_progress.copy(), *self._planned.copy()])
        except BaseException as error:
            self._failed = self._failed or error
            if not isinstance(error, Exception):  # a Ctrl-C while the trainer's thread plans the first batch
                raise

    def _announce(self, batches: Sequence[PlannedBatch]) -> None:
        ranges = dict[int, list[Range]]()
        for batch in batches:
            for source, some in batch.ranges.items():
                ranges.setdefault(source, []).extend(some)
        self._builder.announce(ranges)
