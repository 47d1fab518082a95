"""Prefetching: threads plan batches, announce their reads to the cache and build them before the trainer needs them.

Purpose: keep the trainer from waiting, within bounded memory. `BatchExecutor` builds batches in threads. `Prefetcher`
plans batches, announces their reads and decides when they start. To change the position, the loader creates new ones.

Invariants:
- Batches are delivered in the order in which they were started, whichever sample is finished first. They continue into
  the next epoch without a pause. While the trainer works, `ahead` batches are in progress.
- The reads of these batches, and of at least `ANNOUNCED_BATCHES` more, are announced to the readers, soonest first.
- The threads that build batches also plan them, several together. They plan at most `ANNOUNCED_BATCHES` plus
  `PLANNED_AT_ONCE` batches beyond those in progress. The trainer's thread plans the first batch itself. Later it waits
  for a plan only if nothing else is in progress. There is no separate planning thread: it would wait for the GIL, and
  the other threads would wait for it after each read.
- No object of this module holds a reference to the loader.

Failure behaviour: `next` raises the first error of the batch that is due, and raises it again when called again. The
prefetcher is then unusable; the loader closes it and creates another. `next` raises `Closed` if the loader is closed
during the call, and `DeadlineError` if no sample of the batch is finished within `STALL_SECONDS`. `close` works in any
state: each thread stops after the frame that it is decoding, or after its sample if decoding cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from headrace.dataio.core.errors import DeadlineError, HeadraceError
from headrace.loaders.batch.batch import Batch, JoinedBatch, Output, RowBatch
from headrace.loaders.batch.field_batch import FieldBatch
from headrace.loaders.batch.memory import BufferPool, Closed, MemoryBudget
from headrace.loaders.batch.sample_builder import PlannedBatch, PlannedRead, SampleBuilder, Target
from headrace.loaders.cancellation import Cancelled, cancelled_by
from headrace.loaders.fetch.sample_reader import Range
from headrace.loaders.interfaces import BatchSource, ProcessedSample, SampleLayout, SampleRef

STALL_SECONDS = 600.0
Build = Callable[[Sequence[SampleRef], Sequence[Target], Sequence[PlannedRead]], list[ProcessedSample]]
"""`SampleBuilder.build`."""
GroupSlots = Callable[[Sequence[SampleRef]], Sequence[Sequence[int]]]
"""Returns the groups of a batch's slots that are each built together in one thread. Each slot is in one group."""
ANNOUNCED_BATCHES = 8
PLANNED_AT_ONCE, REFS_AT_ONCE = 8, 128
PAUSE_SECONDS = 0.001


class _Threads:
    """A thread pool that does not change the number of torch threads in the trainer's thread."""

    def __init__(self, count: int) -> None:
        self._torch_threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-loader", initializer=self._start)

    def _start(self) -> None:
        """Make torch use one thread in this thread only.

        `set_num_threads` sets the number for this thread, and also the number for threads that are started later. A
        helper thread restores the latter.
        """
        with self._lock:
            torch.set_num_threads(1)
            helper = threading.Thread(target=torch.set_num_threads, args=(self._torch_threads,))
            helper.start()
            helper.join()


class BatchExecutor:
    """Builds batches in threads. Used by one thread at a time.

    Args:
        build: builds some samples of a batch.
        layout: layout of the samples.
        output: device, dtype and axes of the batches.
        num_threads: number of threads.
        group: number of samples that are built together, for example because a GPU decodes them together.
        group_slots: decides which slots are built together, if `group` is 1.
        buffers: memory of the batches. Default: new memory for every batch.
    """

    def __init__(
        self,
        build: Build,
        *,
        layout: SampleLayout,
        output: Output,
        num_threads: int,
        group: int = 1,
        group_slots: GroupSlots | None = None,
        buffers: BufferPool | None = None,
    ) -> None:
        self._build, self._layout, self._output = build, layout, output
        self._group, self._group_slots = group, group_slots
        self._buffers = buffers or BufferPool(output.device, pinned=output.pinned, reuse=False)
        self._pool = _Threads(num_threads).pool
        self._stopped = threading.Event()
        self._batches: list[tuple[Batch, list[Future[None]]]] = []
        self._stream: Any = torch.cuda.Stream(output.device) if output.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Number of batches that were started and not delivered."""
        return len(self._batches)

    def start(self, planned: PlannedBatch) -> None:
        batch = self._empty(planned)
        futures = [self._pool.submit(self._fill, batch, planned, slots) for slots in self._groups(planned.refs)]
        self._batches.append((batch, futures))

    def _empty(self, planned: PlannedBatch) -> Batch:
        if planned.files is not None:
            return JoinedBatch(planned.files, layout=self._layout, output=self._output, buffers=self._buffers)
        if self._layout.fields is not None:
            return FieldBatch(len(planned.refs), layout=self._layout, output=self._output, buffers=self._buffers)
        if self._layout.rows is not None:
            return RowBatch(planned.refs, layout=self._layout, output=self._output, buffers=self._buffers)
        return Batch(len(planned.refs), layout=self._layout, output=self._output, buffers=self._buffers)

    def _groups(self, refs: Sequence[SampleRef]) -> Sequence[Sequence[int]]:
        if self._group_slots is not None and self._group == 1:
            return self._group_slots(refs)
        return [range(n, min(n + self._group, len(refs))) for n in range(0, len(refs), self._group)]

    def next(self) -> Batch:
        """Wait for the oldest started batch, and return it."""
        batch, futures = self._batches[0]
        pending = len(futures)
        while pending:  # waiting for each future in turn would take the GIL from the threads each time
            _, unfinished = wait(futures, STALL_SECONDS)
            if len(unfinished) == pending:
                raise DeadlineError(f"no sample was finished for {STALL_SECONDS:.0f} s", hint="is the store reachable?")
            pending = len(unfinished)
        if self._stopped.is_set():  # closed by another thread or a signal handler, so samples may be missing
            raise Closed
        for future in futures:
            future.result()
        del self._batches[0]
        return batch

    def run(self, task: Callable[..., None], *args: Any, **kwargs: Any) -> Future[None]:
        """Run another task in one of the threads, after everything that was submitted before."""
        return self._pool.submit(task, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the batches that were started and not delivered."""
        return sum(batch.nbytes for batch, _ in self._batches)

    def stop(self) -> None:
        """Start no more samples, and cancel the running ones where possible."""
        self._stopped.set()

    def close(self) -> None:
        """Discard the batches that were started, and end the threads."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
        for future in itertools.chain.from_iterable(futures for _, futures in self._batches):
            if future.cancelled():
                future.set_running_or_notify_cancel()  # wakes threads that wait for it
        self._batches.clear()
        self._buffers.clear()

    def _fill(self, batch: Batch, planned: PlannedBatch, slots: Sequence[int]) -> None:
        """Build the samples of these slots and put them into the batch. Runs in the pool."""
        if self._stopped.is_set():
            return
        with (
            contextlib.suppress(Closed, Cancelled),  # the batch is no longer needed
            torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext(),
            cancelled_by(self._stopped),
        ):
            for part in batch.parts(slots):
                refs, reads = [planned.refs[slot] for slot in part], [planned.reads[slot] for slot in part]
                for slot, sample in zip(part, self._build(refs, batch.targets(part), reads), strict=True):
                    batch.put(slot, sample)
            if self._stream is not None:
                self._stream.synchronize()  # other streams may now read what this one wrote


def batches_from(source: BatchSource, epoch: int, batch: int) -> Iterator[Sequence[SampleRef]]:
    """Yield a rank's batches from a position on, without end.

    The first lookup is for one batch. Each later lookup is for up to twice as many batches, at most `PLANNED_AT_ONCE`
    batches or `REFS_AT_ONCE` samples. If a lookup fails, its batches are looked up one by one, so that the batches
    before the failing one can be delivered.
    """
    count = 1
    for later_epoch in itertools.count(epoch):
        end = source.batches_in(later_epoch)
        while batch < end:
            numbers = range(batch, min(batch + count, end))
            try:
                batches = source.refs(later_epoch, numbers)
            except HeadraceError:
                if len(numbers) == 1:
                    raise
                count = 1
                continue
            yield from batches
            batch = numbers.stop
            count = max(1, min(2 * count, PLANNED_AT_ONCE, REFS_AT_ONCE // max(1, len(batches[-1]))))
        batch = 0


class Prefetcher:
    """Delivers a rank's batches from a position on. Used by one thread at a time.

    Args:
        batches: the samples of each batch, without end.
        builder: builds samples; closed with the prefetcher.
        executor: runs the builder in threads; closed with the prefetcher.
        ahead: number of batches in progress after the one that the trainer waits for.
        memory: the budget of the samples in processing; closed with the prefetcher.
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
        self._lock = threading.Lock()  # held to plan, to append to `_planned` and to announce
        self._planned: deque[PlannedBatch] = deque()
        self._in_progress: deque[PlannedBatch] = deque()
        self._plans: deque[Future[None]] = deque()  # calls of `_plan` in the executor's threads, oldest first
        self._failed: BaseException | None = None

    def next(self) -> Batch:
        """The next batch, complete. The planned batches after it are started before it is returned."""
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
        self._failed = self._failed or Closed()  # stops planning
        self._memory.close()
        self._executor.stop()
        with contextlib.ExitStack() as ends:  # in reverse order; each one is closed even if another fails
            ends.callback(self._builder.close)
            ends.callback(self._executor.close)

    @property
    def in_flight(self) -> dict[str, int]:
        """Memory in use, in bytes, and the number of waits.

        The values are the "limit", the "samples" in processing, their peak, the number of "waits" for memory, the
        "batches" in progress, and the "heads" of long files.
        """
        memory = self._memory
        return {
            "limit": memory.limit,
            "samples": memory.used,
            "samples_peak": memory.peak,
            "waits": memory.waits,
            "batches": self._executor.nbytes,
            "heads": self._builder.head_bytes,
        }

    def plan(self) -> None:
        """Start planning and announcing more batches, if few are planned and no thread is planning.

        Call this when the batch that `next` returned is ready. Until then, the first batch has all cores to itself.
        """
        while self._plans and self._plans[0].done():
            self._plans.popleft()
        if len(self._planned) > ANNOUNCED_BATCHES or self._plans or self._failed is not None:
            return
        if self._planned:
            self._plan_further()
        else:  # e.g. after the first batch: plan the batches that are due next, and only then more
            self._plans.append(self._executor.run(self._plan_next, max(1, self._room())))

    def _room(self) -> int:
        """How many batches may be in progress after the next one: `ahead`, or fewer if the memory limit requires it."""
        if not self._batch_bytes:
            return self._ahead
        return max(0, min(self._ahead, self._memory.limit // self._batch_bytes - 1))

    def _start_planned(self, count: int) -> None:
        """Start planned batches until `count` are in progress."""
        while len(self._executor) < count and self._planned:
            self._start(self._planned.popleft())

    def _start(self, planned: PlannedBatch) -> None:
        self._in_progress.append(planned)
        self._executor.start(planned)

    def _next_planned(self) -> PlannedBatch:
        """The plan of the next batch. Errors of planning are raised here."""
        while not self._planned and self._plans:
            self._plans.popleft().result()
        if not self._planned and self._failed is None:  # only one batch, since the trainer waits
            self._plan(1, announce=True)
        if self._failed is not None and not self._planned:
            raise self._failed
        return self._planned.popleft()

    def _plan_next(self, count: int) -> None:
        """Plan `count` batches, then submit the planning of more.

        This runs in a thread of the executor, since submitting in the trainer's thread would wait for the GIL. It
        begins after `PAUSE_SECONDS`. Otherwise the trainer's first operations on its batch would wait until this thread
        is forced to release the GIL, which takes five times as long.
        """
        time.sleep(PAUSE_SECONDS)
        self._plan(count)
        if self._failed is None:
            self._plan_further()

    def _plan_further(self) -> None:
        self._plans.append(self._executor.run(self._plan, ANNOUNCED_BATCHES + PLANNED_AT_ONCE, announce=True))

    def _plan(self, count: int, *, announce: bool = False) -> None:
        """Plan until `count` batches are planned, in any thread.

        An error is stored, and `next` raises it when its batch is due.
        """
        try:
            with self._lock:
                while len(self._planned) < count and self._failed is None:
                    self._planned.append(self._builder.plan(next(self._batches)))
                if announce and self._failed is None:
                    # copied in one step each, since the trainer's thread removes items concurrently
                    self._announce([*self._in_progress.copy(), *self._planned.copy()])
        except BaseException as error:
            self._failed = self._failed or error
            if not isinstance(error, Exception):  # Ctrl-C while the trainer's thread plans the first batch
                raise

    def _announce(self, batches: Sequence[PlannedBatch]) -> None:
        ranges = dict[int, list[Range]]()
        for batch in batches:
            for source, source_ranges in batch.ranges.items():
                ranges.setdefault(source, []).extend(source_ranges)
        self._builder.announce(ranges)
