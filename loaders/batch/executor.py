"""Samples to batches, by threads, a bounded number of batches ahead, always in order.

Purpose: keep the trainer from waiting without ever running away from it.

Invariants: batches come out in the order they were asked for, whichever sample was finished first. A batch is started
only by the one who asks for batches.
Failure behaviour: the first error of a batch is raised where that batch would be delivered, and again if it is asked
for again, and `Closed` to who waits when it is closed; what was waited for during `STALL_SECONDS` and is not finished
is a `DeadlineError`. `close` stops threads, from any state, after the picture that each has in hand, or the sample
where that is not decoded picture by picture.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from headrace.dataio.core.errors import DeadlineError
from headrace.dataio.shards.contract import Files
from headrace.loaders.batch.batch import Batch, JoinedBatch, Output, RowBatch
from headrace.loaders.batch.memory import BufferPool, Closed
from headrace.loaders.cancellation import Cancelled, cancelled_by
from headrace.loaders.interfaces import FileTarget, PixelTarget, ProcessedSample, SampleLayout, SampleRef

STALL_SECONDS = 600.0
Make = Callable[[Sequence[SampleRef], Sequence[PixelTarget | FileTarget | None]], list[ProcessedSample]]
"""Samples of these places, each maybe already in the room that its batch has for it."""
Grouped = Callable[[Sequence[SampleRef]], Sequence[Sequence[int]]]
"""Which slots of a batch of these places are made together, each slot once."""


class _Threads:
    """A pool whose threads leave torch's own threads to the trainer."""

    def __init__(self, count: int) -> None:
        self._torch_threads = torch.get_num_threads()
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(count, thread_name_prefix="headrace-loader", initializer=self._start)

    def _start(self) -> None:
        """Make torch use one thread in this thread only.

        `set_num_threads` sets this thread's number and the one that threads yet to start will take; a helper thread
        puts the latter back.
        """
        with self._lock:
            torch.set_num_threads(1)
            helper = threading.Thread(target=torch.set_num_threads, args=(self._torch_threads,))
            helper.start()
            helper.join()


class BatchExecutor:
    """Makes batches ahead of the trainer; used by one thread at a time. `group` samples are made together, or the slots
    that `grouped` puts together.

    `buffers` lend the batches their memory; by default, each gets its own.
    """

    def __init__(
        self,
        make: Make,
        layout: SampleLayout,
        output: Output,
        threads: int,
        group: int = 1,
        buffers: BufferPool | None = None,
        grouped: Grouped | None = None,
    ) -> None:
        self._make, self._layout, self._output, self._group = make, layout, output, group
        self._grouped = grouped
        self._buffers = buffers or BufferPool(output.device, pinned=output.pinned, reuse=False)
        self._pool = _Threads(threads).pool
        self._stopped = threading.Event()
        self._batches: list[tuple[Batch, list[Future[None]]]] = []
        self._stream: Any = torch.cuda.Stream(output.device) if output.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Batches that were started and not delivered."""
        return len(self._batches)

    def start(self, places: Sequence[SampleRef], files: Sequence[Files] | None = None) -> None:
        """Begin the next batch; `files` are what its samples are where they are delivered as they are."""
        batch = self._begun(places, files)
        groups = self._groups(places)
        self._batches.append(
            (batch, [self._pool.submit(self._fill, batch, group, [places[n] for n in group]) for group in groups])
        )

    def _begun(self, places: Sequence[SampleRef], files: Sequence[Files] | None) -> Batch:
        if files is not None:
            return JoinedBatch(files, self._layout, self._output, self._buffers)
        if self._layout.rows is not None:
            return RowBatch(places, self._layout, self._output, self._buffers)
        return Batch(len(places), self._layout, self._output, self._buffers)

    def _groups(self, places: Sequence[SampleRef]) -> Sequence[Sequence[int]]:
        """Which slots are made together."""
        if self._grouped is not None and self._group == 1:
            return self._grouped(places)
        return [range(n, min(n + self._group, len(places))) for n in range(0, len(places), self._group)]

    def next(self) -> Batch:
        """The oldest batch that was started, whole."""
        batch, futures = self._batches[0]
        left = len(futures)
        while left:  # waiting for one after the other would take the interpreter from the threads as often
            _, unfinished = wait(futures, STALL_SECONDS)
            if len(unfinished) == left:
                raise DeadlineError(f"no clip was finished for {STALL_SECONDS:.0f} s", hint="is the store reachable?")
            left = len(unfinished)
        if self._stopped.is_set():  # meanwhile, by another thread or a signal's handler: not all samples are there
            raise Closed
        for future in futures:
            future.result()
        del self._batches[0]
        return batch

    def run(self, do: Callable[..., None], *arguments: Any, **options: Any) -> Future[None]:
        """Have one of the threads do something else, once what was begun before is taken up."""
        return self._pool.submit(do, *arguments, **options)

    @property
    def nbytes(self) -> int:
        """Bytes of the batches that were started and not delivered."""
        return sum(batch.nbytes for batch, _ in self._batches)

    def stop(self) -> None:
        """Begin nothing more, and give up what can be given up."""
        self._stopped.set()

    def close(self) -> None:
        """Drop what was started and end the threads."""
        self.stop()
        self._pool.shutdown(cancel_futures=True)
        for future in itertools.chain.from_iterable(futures for _, futures in self._batches):
            if future.cancelled():
                future.set_running_or_notify_cancel()  # who waits for it hears of it by this alone
        self._batches.clear()
        self._buffers.clear()

    def _fill(self, batch: Batch, slots: Sequence[int], places: Sequence[SampleRef]) -> None:
        if self._stopped.is_set():
            return
        with cancelled_by(self._stopped):
            self._fill_now(batch, slots, places)

    def _fill_now(self, batch: Batch, slots: Sequence[int], places: Sequence[SampleRef]) -> None:
        if self._output.device.type != "cuda":
            self._put(batch, slots, places)
            return
        with torch.cuda.stream(self._stream):
            self._put(batch, slots, places)
            self._stream.synchronize()  # what this stream wrote, every other may read from here on

    def _put(self, batch: Batch, slots: Sequence[int], places: Sequence[SampleRef]) -> None:
        try:
            made = self._make(places, batch.rooms(slots))
            for slot, sample in zip(slots, made, strict=True):
                batch.put(slot, sample)
        except (Closed, Cancelled):
            return  # nobody asks for this batch any more
