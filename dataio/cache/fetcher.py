"""The engine's threads: they fetch parts of objects into cache files, verify adopted blocks, and hedge late requests.

Blocks of local files are fetched in batches of up to `BATCH_BLOCKS` through one buffer (`BatchedFetch`). The engine's
decisions and wake-ups cost a large part of the time that reading a block from the page cache takes. A batch needs them
once.

Invariants: each fetch reports its outcome once: from the first attempt that succeeds, or from the last one if all fail.
A second attempt (a hedge) is started only while a request waits for the bytes, and for at most one in a hundred fetches.
Batched blocks have none. Jobs share the threads fairly (`scheduling`). A fetch or a batch uses one buffer of one block,
and no other memory that grows with its size.
Failure behaviour: a store's error is reported when no other attempt is running; an error of the cache's own disk is a
`DiskError`. When a local file cannot be read completely (truncated, deleted, bad disk), the store reads it instead, and
its errors pass through.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from headrace.dataio.cache import disks
from headrace.dataio.cache.blocks import IDLE_SECONDS, BlockFile, Buffers, Descriptor, FdCache
from headrace.dataio.cache.disks import DiskError, PendingBlock, SupersededError
from headrace.dataio.cache.plan.events import Fetch
from headrace.dataio.cache.scheduling import FairQueue, FetchWindow, JobLimits
from headrace.dataio.core import metrics, tracing
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

CHECK_SECONDS = 0.25
"""Longest interval between two checks for late fetches."""
QUIET_CHECKS = 4
"""After this many checks without a running fetch, the hedging thread sleeps until it is woken."""

_log = get_logger(__name__)
Job = Callable[[], None]


class Fetcher:
    """Runs fetches in `threads` threads with `buffers` buffers of `block_bytes` each.

    The threads call `on_fetched` with the finished fetches.
    """

    def __init__(
        self,
        *,
        threads: int,
        buffers: int,
        block_bytes: int,
        clock: Clock,
        on_fetched: Callable[[Sequence[FetchResult]], None],
    ) -> None:
        self._clock, self._on_fetched = clock, on_fetched
        self._prefetch = max(1, min(threads // 2, buffers * 2 // 3)), block_bytes
        self._batched = BatchedFetch(clock)
        self._buffers = Buffers(block_bytes, buffers, clock)
        self.window = FetchWindow(2 * block_bytes, max(2, buffers) * block_bytes)
        self._lock = threading.Condition()
        self._running: dict[FetchTask, None] = {}
        self._queue: FairQueue[Job | FetchTask] = FairQueue()
        self._fetches: dict[int, int] = {}  # the number of queued and running fetches, by the store's id
        self._queue_changed = threading.Condition()
        self._closed = self._watching = self._woken = False
        self._local = threading.local()
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-cache-{n}", daemon=True) for n in range(threads)
        ]
        self._watch = threading.Thread(target=self._hedge, name="headrace-cache-hedge", daemon=True)
        for thread in [*self._threads, self._watch]:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` in one of the threads, before all queued fetches."""
        with self._queue_changed:
            self._queue.add_first(job)
            self._wake()

    def start(self, task: FetchTask) -> None:
        """Queue a fetch.

        If the calling thread is one of the fetcher's own and polls the queue next, no other thread is woken. A wake-up that
        finds nothing costs as much as a small read.
        """
        with self._queue_changed:
            self._queue.add(task, task.job, task.cost)
            self._fetches[id(task.store)] = self._fetches.get(id(task.store), 0) + 1
            if not getattr(self._local, "polls_again", False):
                self._wake()

    def fetches_from(self, store: Store) -> bool:
        """Whether a fetch from this store is queued or running."""
        with self._queue_changed:
            return id(store) in self._fetches

    def limit(self, limits: JobLimits) -> None:
        """Set the limits of each job."""
        with self._queue_changed:
            self._queue.limit(limits)
            self._queue_changed.notify_all()

    def queue_stats(self) -> dict[str, dict[str, int]]:
        """Waiting and running fetches of each job."""
        with self._queue_changed:
            return self._queue.report()

    def prefetch_limits(self) -> tuple[int, int, int]:
        """The maximum number and bytes of prefetches in flight, and the number of prefetches to start together."""
        parts, block_bytes = self._prefetch
        if self._batched.recently_used and not self._running:
            return 2 * BATCH_BLOCKS, 2 * BATCH_BLOCKS * block_bytes, BATCH_BLOCKS
        with self._lock:
            return parts, self.window.bytes(), 1

    def report(self) -> dict[str, float | int]:
        with self._lock:
            return self.window.report()

    def close(self) -> None:
        """Make the threads end after the queued work. Removes the limits of the jobs, so nothing delays that work."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self.limit(JobLimits())

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, list):
                    self._process(job)
                else:
                    job()
            except Exception:
                _log.exception("a job of the cache failed")
            del job  # otherwise it would keep its file open while this thread waits

    def _next(self) -> Job | list[FetchTask] | None:
        """The next job, or a batch of fetches; None after `close`."""
        with self._queue_changed:
            idle = IDLE_SECONDS
            while (job := self._poll(now := self._clock.monotonic())) is None:
                if self._closed and not self._queue:
                    return None
                wake_after = self._queue.wake_in(now)
                if (
                    not self._queue_changed.wait(wake_after if wake_after is not None else idle or None)
                    and wake_after is None
                ):
                    self._batched.close_idle()
                    idle = IDLE_SECONDS if self._buffers.trim() else 0.0  # an idle daemon needs little memory
            work = [job, *self._next_of_batch(job, now)] if isinstance(job, FetchTask) else job
            if self._queue:
                self._wake()  # a fetch that a limit held back may start now
            return work

    def _poll(self, now: float) -> Job | FetchTask | None:
        self._woken = False
        return self._queue.next(now)

    def _wake(self) -> None:
        """Wake one thread, unless a woken one has not polled yet. Called under the lock.

        A woken thread wakes the next one if the queue has more work.
        """
        if not self._woken:
            self._woken = True
            self._queue_changed.notify()

    def _next_of_batch(self, first: FetchTask, now: float) -> Iterator[FetchTask]:
        fits, remaining = self._batched.fits, BATCH_BLOCKS - 1
        while remaining and fits(first) and isinstance(task := self._queue.next(now, fits), FetchTask):
            yield task
            remaining -= 1

    def _process(self, tasks: list[FetchTask]) -> None:
        self._local.polls_again = True
        try:
            remaining = self._fetch_batch(tasks) if self._batched.accepts(tasks[0]) else tasks
            for task in remaining:
                self._attempt(task)
        finally:
            self._local.polls_again = False
            with self._queue_changed:
                now = self._clock.monotonic()
                for task in tasks:
                    self._queue.done(task.job, task.cost, now)
                    self._forget_fetch(task)

    def _forget_fetch(self, task: FetchTask) -> None:
        remaining = self._fetches[id(task.store)] - 1
        if remaining:
            self._fetches[id(task.store)] = remaining
        else:
            del self._fetches[id(task.store)]

    def _fetch_batch(self, tasks: list[FetchTask]) -> list[FetchTask]:
        """Fetch a batch through one buffer, and report the results together.

        Blocks that a request waits for go first, and each is reported immediately. Returns the fetches that the store must
        serve.
        """
        order = sorted([(not task.is_awaited(), number) for number, task in enumerate(tasks)])
        results, remaining = list[FetchResult](), dict.fromkeys(tasks)
        try:
            with self._buffers.borrow() as buffer:
                for can_wait, number in order:
                    task, began = tasks[number], self._clock.monotonic()
                    result = self._batched.fetch(task, buffer)
                    if result is None:
                        continue
                    del remaining[task]
                    self._record_batched(task, result, began)
                    results.append(result)
                    if not can_wait:
                        self._on_fetched(results)
                        results = []
                        with self._queue_changed:  # other threads need not wait for the rest
                            if self._queue:
                                self._wake()
        except Exception:  # such as a lack of memory; the attempts of the remaining fetches report it
            _log.exception("a batch of blocks could not be fetched")
        if results:
            self._on_fetched(results)
        return list(remaining)

    def _record_batched(self, task: FetchTask, result: FetchResult, began: float) -> None:
        _, error, size = result
        with self._lock:
            seconds = self._clock.monotonic() - began
            self.window.fetched(size, seconds, self.window.delivered)
            self.window.stored(seconds)
        self._record(task, began, size, error)

    # one attempt

    def _attempt(self, task: FetchTask) -> None:
        if task.done:
            return
        fetched, failed, began = 0, None, self._clock.monotonic()
        try:
            with self._buffers.borrow() as buffer:
                view = buffer[: task.fetch.length]
                if not self._matches_digest(task, view):
                    fetched = self._fetch(task, view)
                    self._record_stored(fetched, began)
                    self._batched.recently_used = False
        except Exception as error:  # any error goes to the requests that wait
            failed = error
        if fetched or failed:
            self._record(task, began, fetched, failed)
        self._end(task, failed, fetched)

    def _matches_digest(self, task: FetchTask, view: memoryview) -> bool:
        """Whether an earlier daemon left this block, and its bytes match its digest."""
        if not task.fetch.adopted or not isinstance(task.file, disks.PersistentFile):
            return False
        try:
            task.file.read(task.fetch.offset, view)
        except OSError:
            return False
        matches = disks.digest(view) == task.file.digest_of(task.fetch.block)
        if not matches:
            _log.warning("a block of %s on the cache's disk is corrupt; fetching it again", task.key)
        return matches

    def _fetch(self, task: FetchTask, view: memoryview) -> int:
        """Fetch the block into its file; returns the bytes read from the store."""
        if task.fetch.copies or task.attempts > 1:
            fetched = self._gather(task, view)
            task.part.write_all(view)
            return fetched
        writer, fetched = task.part.start_writer(), 0
        with contextlib.suppress(SupersededError):
            key, offset = task.key, task.fetch.offset
            fetched = self._timed(task, len(view), lambda: task.store.get_pieces(key, offset, view, writer.write))
            writer.finish()
        return fetched

    def _gather(self, task: FetchTask, view: memoryview) -> int:
        """Fill `view` from other cache files, and the rest from the store; returns the bytes read from the store."""
        start, fetched, at = task.fetch.offset, 0, task.fetch.offset
        for (_, offset, length), file in zip(task.fetch.copies, task.copy_sources, strict=True):
            fetched += self._get(task, at, view[at - start : offset - start])
            part = view[offset - start : offset - start + length]
            try:
                file.read(offset, part)
            except OSError:  # it was deleted meanwhile, or cannot be opened now
                fetched += self._get(task, offset, part)
            at = offset + length
        return fetched + self._get(task, at, view[at - start :])

    def _get(self, task: FetchTask, offset: int, view: memoryview) -> int:
        if not view:
            return 0
        return self._timed(task, len(view), lambda: task.store.get_into(task.key, offset, view))

    def _timed(self, task: FetchTask, size: int, read: Callable[[], None]) -> int:
        """Run `read`, which reads `size` bytes from the store; returns `size`. Measures it, and registers it for hedging."""
        began = self._clock.monotonic()
        with self._lock:
            delivered = self.window.delivered
            if task.attempts == 1:
                task.since = began
                self._running[task] = None
                if not self._watching:
                    self._watching = True
                    self._lock.notify()
        read()
        with self._lock:
            self.window.fetched(size, self._clock.monotonic() - began, delivered)
        return size

    def _record(self, task: FetchTask, began: float, fetched: int, error: BaseException | None) -> None:
        if not tracing.recording():
            return
        seconds = self._clock.monotonic() - began
        attributes: dict[str, tracing.Value] = {
            "key": task.key,
            "offset": task.fetch.offset,
            "bytes": fetched,
            "job": task.job,
        }
        error_name = type(error).__name__ if error else ""
        tracing.record(
            "cache.fetch", self._clock.time() - seconds, seconds, task.trace_parent, error=error_name, **attributes
        )

    def _record_stored(self, fetched: int, began: float) -> None:
        if fetched:
            with self._lock:
                self.window.stored(self._clock.monotonic() - began)

    def _end(self, task: FetchTask, error: BaseException | None, fetched: int) -> None:
        with self._lock:
            task.attempts -= 1
            decides = not task.done and (error is None or not task.attempts)
            if decides:
                task.done = True
                self._running.pop(task, None)
        self._on_fetched([(task.fetch if decides else _NO_FETCH, error, fetched)])

    # hedging

    def _hedge(self) -> None:
        """Start second attempts of late fetches that a request waits for.

        The thread checks periodically. `_timed` needs to wake it only after `QUIET_CHECKS` checks without a running fetch.
        """
        quiet = 0
        with self._lock:
            while not self._closed:
                late_after = self.window.late_after()
                if not self._running or late_after is None:
                    self._watching = bool(self._running) or quiet < QUIET_CHECKS
                    quiet = 0 if self._running else quiet + 1
                    pause = CHECK_SECONDS if late_after is None else min(CHECK_SECONDS, _check_interval(late_after))
                    self._lock.wait(pause if self._watching else None)
                    continue
                quiet = 0
                now = self._clock.monotonic()
                for task in [f for f in self._running if f.attempts == 1 and now - f.since >= late_after]:
                    if task.is_awaited() and self.window.late_after() is not None:
                        task.attempts += 1
                        self.window.hedges += 1
                        self.start(task)
                self._lock.wait(_check_interval(late_after))


def _check_interval(late_after: float) -> float:
    """Seconds between two checks for late fetches."""
    return max(0.01, late_after / 4)


_NO_FETCH = Fetch(-1, 0, 0, 0)
"""Reported for the slower of two attempts, because only its bytes count."""


FetchResult = tuple[Fetch, BaseException | None, int]
"""A finished fetch, its error, and the bytes read from the store."""


@dataclass(slots=True, eq=False)
class FetchTask:
    """A fetch of a job, traced below the span `trace_parent`.

    `copy_sources` are the cache files that it copies from. `is_awaited()` returns whether a request waits for it. The
    first attempt that writes the whole block determines its bytes.
    """

    fetch: Fetch
    file: BlockFile
    store: Store
    key: str
    copy_sources: Sequence[BlockFile]
    is_awaited: Callable[[], bool]
    job: str = ""
    trace_parent: str = ""
    attempts: int = 1
    done: bool = False
    since: float = 0.0
    part: PendingBlock = field(init=False)

    def __post_init__(self) -> None:
        self.part = PendingBlock(self.file, self.fetch.block, self.fetch.offset)

    @property
    def plain(self) -> bool:
        """Whether all bytes come from the store, and this is the first attempt."""
        return self.attempts == 1 and not self.fetch.copies and not self.fetch.adopted

    @property
    def cost(self) -> int:
        """Expected bytes from the store: none for a block that an earlier daemon left."""
        return 0 if self.fetch.adopted else self.fetch.length - sum(size for _, _, size in self.fetch.copies)


BATCH_BLOCKS = 4
"""Maximum number of blocks in a batch."""

_READ = metrics.store_bytes.labels("posix", "read")


class BatchedFetch:
    """Fetches blocks of local files. Safe to share between threads.

    `recently_used`: the fetcher's last fetch used this class.
    """

    def __init__(self, clock: Clock) -> None:
        self._open_files, self._clock, self._used = FdCache(clock), clock, 0.0
        self._local_stores: weakref.WeakKeyDictionary[Store, bool] = weakref.WeakKeyDictionary()
        self.recently_used = False

    def fits(self, item: object) -> bool:
        """Whether this is a fetch that may be part of a batch."""
        return isinstance(item, FetchTask) and item.plain and self._local_stores.get(item.store, False)

    def accepts(self, task: FetchTask) -> bool:
        """Whether this class can do the fetch: the object is a local file, and the fetch is plain."""
        if task.plain and task.store not in self._local_stores:
            self._file(task)
        return self.fits(task)

    def fetch(self, task: FetchTask, buffer: memoryview) -> FetchResult | None:
        """Fetch the block into its file; None if the store must do it."""
        fetch, file = task.fetch, self._file(task)
        if file is None:
            return None
        view = buffer[: fetch.length]
        try:
            complete = os.preadv(file.fileno(), [view], fetch.offset) == fetch.length
        except OSError:
            complete = False
        if not complete:
            self._open_files.forget(task.store, task.key)
            return None
        self.recently_used, self._used = True, self._clock.monotonic()
        _READ.inc(fetch.length)
        try:
            task.part.write_all(view)  # written in one call, so the file can use large pages
        except DiskError as error:
            return fetch, error, fetch.length
        return fetch, None, fetch.length

    def close_idle(self) -> None:
        """Close all files if none was used in the last `IDLE_SECONDS`."""
        if self._clock.monotonic() - self._used >= IDLE_SECONDS:
            self._open_files.clear()

    def _file(self, task: FetchTask) -> Descriptor | None:
        try:
            file = self._open_files.get(task.store, task.key)
        except HeadraceError:  # the store reports it
            return None
        self._local_stores[task.store] = file is not None
        return file
