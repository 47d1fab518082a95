"""Samples to batches, by threads, a bounded number of batches ahead, always in order.

Purpose: keep the trainer from waiting, within bounded memory.

Invariants: batches come out in the order in which they were started, whichever sample was finished first. Only the
caller of `start` starts batches.
Failure behaviour: `next` raises the first error of the batch that is due, and raises it again when called again. It
raises `Closed` when the executor is closed meanwhile, and `DeadlineError` when no sample of the batch is finished
within `STALL_SECONDS`. `close` works from any state: each thread stops after the picture that it decodes, or after its
sample if that is not decoded picture by picture.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from headrace.dataio.core.errors import DeadlineError
from headrace.loaders.batch.batch import Batch, JoinedBatch, Output, RowBatch
from headrace.loaders.batch.memory import BufferPool, Closed
from headrace.loaders.batch.sample_builder import PlannedBatch, PlannedRead, Target
from headrace.loaders.cancellation import Cancelled, cancelled_by
from headrace.loaders.interfaces import ProcessedSample, SampleLayout, SampleRef

STALL_SECONDS = 600.0
Build = Callable[[Sequence[SampleRef], Sequence[Target], Sequence[PlannedRead]], list[ProcessedSample]]
"""`SampleBuilder.build`."""
GroupSlots = Callable[[Sequence[SampleRef]], Sequence[Sequence[int]]]
"""Which slots of a batch of these samples are built together in one thread. Each slot is in one group."""


class _Threads:
    """A thread pool that does not change the number of torch's own threads in the trainer."""

    def __init__(self, count: int) -> None:
        self._torch_threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-loader", initializer=self._start)

    def _start(self) -> None:
        """Make torch use one thread in this thread only.

        `set_num_threads` sets the number of this thread, and the number that threads started later will take. A helper
        thread restores the latter.
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
        layout: of the samples.
        output: device, dtype and axes of the batches.
        num_threads: number of threads.
        group: samples that are built together, e.g. because a GPU decodes them together.
        group_slots: decides which slots are built together, if `group` is 1.
        buffers: lend the batches their memory. Default: every batch has memory of its own.
    """

    def __init__(
        self,
        build: Build,
        layout: SampleLayout,
        output: Output,
        num_threads: int,
        *,
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
        """Batches that were started and not delivered."""
        return len(self._batches)

    def start(self, planned: PlannedBatch) -> None:
        """Start the next batch."""
        batch = self._empty(planned)
        futures = [self._pool.submit(self._fill, batch, planned, slots) for slots in self._groups(planned.refs)]
        self._batches.append((batch, futures))

    def _empty(self, planned: PlannedBatch) -> Batch:
        if planned.files is not None:
            return JoinedBatch(planned.files, self._layout, self._output, self._buffers)
        if self._layout.rows is not None:
            return RowBatch(planned.refs, self._layout, self._output, self._buffers)
        return Batch(len(planned.refs), self._layout, self._output, self._buffers)

    def _groups(self, refs: Sequence[SampleRef]) -> Sequence[Sequence[int]]:
        if self._group_slots is not None and self._group == 1:
            return self._group_slots(refs)
        return [range(n, min(n + self._group, len(refs))) for n in range(0, len(refs), self._group)]

    def next(self) -> Batch:
        """The oldest batch that was started, once all its samples are there."""
        batch, futures = self._batches[0]
        left = len(futures)
        while left:  # waiting for each in turn would take the interpreter from the threads as often
            _, unfinished = wait(futures, STALL_SECONDS)
            if len(unfinished) == left:
                raise DeadlineError(f"no sample was finished for {STALL_SECONDS:.0f} s", hint="is the store reachable?")
            left = len(unfinished)
        if self._stopped.is_set():  # closed meanwhile, by another thread or a signal handler: samples may be missing
            raise Closed
        for future in futures:
            future.result()
        del self._batches[0]
        return batch

    def run(self, task: Callable[..., None], *args: Any, **kwargs: Any) -> Future[None]:
        """Run something else in one of the threads, after everything that was started before."""
        return self._pool.submit(task, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes of the batches that were started and not delivered."""
        return sum(batch.nbytes for batch, _ in self._batches)

    def stop(self) -> None:
        """Start nothing more, and cancel what can be cancelled."""
        self._stopped.set()

    def close(self) -> None:
        """Drop the batches that were started, and end the threads."""
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
        refs, reads = [planned.refs[slot] for slot in slots], [planned.reads[slot] for slot in slots]
        with (
            contextlib.suppress(Closed, Cancelled),  # the batch is not wanted any more
            torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext(),
            cancelled_by(self._stopped),
        ):
            for slot, sample in zip(slots, self._build(refs, batch.targets(slots), reads), strict=True):
                batch.put(slot, sample)
            if self._stream is not None:
                self._stream.synchronize()  # from here on every other stream may read what this one wrote
