"""The engine's threads: they fetch parts of objects into cache files, verify adopted blocks, and hedge late requests.

Blocks of local files are fetched in batches of up to `BATCH_BLOCKS` through one buffer (`BatchedFetch`). The engine's decisions
and wake-ups take a good part of the time that reading a block from the page cache takes, and a batch needs them once.

Invariants: each fetch reports once, whichever of its attempts ends first. A second attempt is started only while a request waits
for the bytes, for at most one in a hundred fetches, and never for local files. Jobs take turns (`scheduling`). A fetch or a batch
takes one buffer of one block, and no other memory that grows.
Failure behaviour: a store's error is reported when no other attempt is running; an error of the cache's own disk is a
`DiskError`. A local file that cannot be read whole (truncated, gone, bad disk) is left to the store, whose errors pass through.
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

LOOK_SECONDS = 0.25
QUIET_LOOKS = 4

_log = get_logger(__name__)
Job = Callable[[], None]


class Fetcher:
    """`threads` threads, and `buffers` of `block_bytes`, which bound what is in memory. They call `landed`."""

    def __init__(
        self,
        threads: int,
        buffers: int,
        block_bytes: int,
        clock: Clock,
        landed: Callable[[Sequence[FetchResult]], None],
    ) -> None:
        self._clock, self._landed = clock, landed
        self._ahead = max(1, min(threads // 2, buffers * 2 // 3)), block_bytes
        self._together = BatchedFetch(clock)
        self._buffers = Buffers(block_bytes, buffers, clock)
        self.window = FetchWindow(2 * block_bytes, max(2, buffers) * block_bytes)
        self._lock = threading.Condition()
        self._flights: dict[FetchTask, None] = {}
        self._turns: FairQueue[Job | FetchTask] = FairQueue()
        self._turn = threading.Condition()
        self._closed = self._watching = self._woken = False
        self._mine = threading.local()
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-cache-{n}", daemon=True) for n in range(threads)
        ]
        self._watch = threading.Thread(target=self._hedge, name="headrace-cache-hedge", daemon=True)
        for thread in [*self._threads, self._watch]:
            thread.start()

    def submit(self, job: Job) -> None:
        """Run `job` in one of the threads."""
        with self._turn:
            self._turns.add_first(job)
            self._wake()

    def start(self, flight: FetchTask) -> None:
        """Fetch it when it is its turn. A thread of this fetcher's that ends a flight takes it by itself, and wakes another for
        whatever else there is: being woken and finding nothing costs as much as a small read."""
        with self._turn:
            self._turns.add(flight, flight.job, flight.cost)
            if not getattr(self._mine, "looks_again", False):
                self._wake()

    def limit(self, limits: JobLimits) -> None:
        """What each job may have in flight from now on."""
        with self._turn:
            self._turns.limit(limits)
            self._turn.notify_all()

    def turns(self) -> dict[str, dict[str, int]]:
        """What each job has waiting and in flight."""
        with self._turn:
            return self._turns.report()

    def ahead(self) -> tuple[int, int, int]:
        """How many prefetches may be in flight, bytes of them, and how many of them are best started together."""
        parts, block_bytes = self._ahead
        if self._together.lately and not self._flights:
            return 2 * BATCH_BLOCKS, 2 * BATCH_BLOCKS * block_bytes, BATCH_BLOCKS
        with self._lock:
            return parts, self.window.bytes(), 1

    def report(self) -> dict[str, float | int]:
        with self._lock:
            return self.window.report()

    def close(self) -> None:
        """Stop the threads after what they are doing and what waits."""
        with self._lock:
            self._closed = True
            self._lock.notify()
        self.limit(JobLimits())

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                if isinstance(job, list):
                    self._fly(job)
                else:
                    job()
            except Exception:
                _log.exception("a job of the cache failed")
            del job  # or it would keep its file open while this thread waits for the next one

    def _next(self) -> Job | list[FetchTask] | None:
        """The next job, or fetches that go together; None at the end."""
        with self._turn:
            idle = IDLE_SECONDS
            while (job := self._look(now := self._clock.monotonic())) is None:
                if self._closed and not self._turns:
                    return None
                soon = self._turns.wake_in(now)
                if not self._turn.wait(soon if soon is not None else idle or None) and soon is None:
                    self._together.rest()
                    idle = IDLE_SECONDS if self._buffers.trim() else 0.0  # an idle daemon is a small one
            found = [job, *self._more(job, now)] if isinstance(job, FetchTask) else job
            if self._turns:
                self._wake()  # what a limit held may go as well, now that something ended
            return found

    def _look(self, now: float) -> Job | FetchTask | None:
        self._woken = False
        return self._turns.next(now)

    def _wake(self) -> None:
        """Under the lock: let one thread look, who wakes the next one if there is more. One that has been woken and did not look
        yet is enough."""
        if not self._woken:
            self._woken = True
            self._turn.notify()

    def _more(self, first: FetchTask, now: float) -> Iterator[FetchTask]:
        fits, left = self._together.fits, BATCH_BLOCKS - 1
        while left and fits(first) and isinstance(more := self._turns.next(now, fits), FetchTask):
            yield more
            left -= 1

    def _fly(self, flights: list[FetchTask]) -> None:
        self._mine.looks_again = True
        try:
            left = self._pass_together(flights) if self._together.takes(flights[0]) else flights
            for flight in left:
                self._attempt(flight)
        finally:
            self._mine.looks_again = False
            with self._turn:
                now = self._clock.monotonic()
                for flight in flights:
                    self._turns.done(flight.job, flight.cost, now)

    def _pass_together(self, flights: list[FetchTask]) -> list[FetchTask]:
        """One after the other through one buffer, and told of at once; what somebody waits for goes first and is told of by
        itself. Returns what the store has to be asked for."""
        order = sorted([(not flight.wanted(), number) for number, flight in enumerate(flights)])
        done, left = list[FetchResult](), dict.fromkeys(flights)
        try:
            with self._buffers.one() as buffer:
                for later, number in order:
                    flight, began = flights[number], self._clock.monotonic()
                    landed = self._together.fetch(flight, buffer)
                    if landed is None:
                        continue
                    del left[flight]
                    self._passed(flight, landed, began)
                    done.append(landed)
                    if not later:
                        self._landed(done)
                        done = []
                        with self._turn:  # what follows need not wait for the rest
                            if self._turns:
                                self._wake()
        except Exception:  # no memory, at most: each that is left will say so
            _log.exception("blocks could not be fetched together")
        if done:
            self._landed(done)
        return list(left)

    def _passed(self, flight: FetchTask, landed: FetchResult, began: float) -> None:
        _, error, size = landed
        with self._lock:
            seconds = self._clock.monotonic() - began
            self.window.landed(size, seconds, self.window.delivered)
            self.window.stored(seconds)
        self._record(flight, began, size, error)

    # one attempt

    def _attempt(self, flight: FetchTask) -> None:
        if flight.done:
            return
        fetched, failed, began = 0, None, self._clock.monotonic()
        try:
            with self._buffers.one() as buffer:
                view = buffer[: flight.fetch.length]
                if not self._is_right(flight, view):
                    fetched = self._pass(flight, view)
                    self._stored(fetched, began)
                    self._together.lately = False
        except Exception as error:  # any error goes to those who wait
            failed = error
        if fetched or failed:
            self._record(flight, began, fetched, failed)
        self._end(flight, failed, fetched)

    def _is_right(self, flight: FetchTask, view: memoryview) -> bool:
        """Whether the part was left by an earlier daemon, and is what it said."""
        if not flight.fetch.adopted or not isinstance(flight.file, disks.PersistentFile):
            return False
        try:
            flight.file.read(flight.fetch.offset, view)
        except OSError:
            return False
        right = disks.digest(view) == flight.file.digests.get(flight.fetch.block)
        if not right:
            _log.warning("a block of %s on the cache's disk had other bytes than were written; fetching it", flight.key)
        return right

    def _pass(self, flight: FetchTask, view: memoryview) -> int:
        """Bring the part into its file; returns the bytes from the store."""
        if flight.fetch.here or flight.attempts > 1:
            fetched = self._gathered(flight, view)
            flight.part.whole(view)
            return fetched
        passing, fetched = flight.part.begin(), 0
        with contextlib.suppress(SupersededError):
            key, offset = flight.key, flight.fetch.offset
            fetched = self._timed(flight, len(view), lambda: flight.store.get_pieces(key, offset, view, passing.take))
            passing.end()
        return fetched

    def _gathered(self, flight: FetchTask, view: memoryview) -> int:
        """Fill `view`: from other cache files what they have, from the store the rest; returns the bytes from the store."""
        start, fetched, at = flight.fetch.offset, 0, flight.fetch.offset
        for (_, offset, length), file in zip(flight.fetch.here, flight.here, strict=True):
            fetched += self._get(flight, at, view[at - start : offset - start])
            file.read(offset, view[offset - start : offset - start + length])
            at = offset + length
        return fetched + self._get(flight, at, view[at - start :])

    def _get(self, flight: FetchTask, offset: int, view: memoryview) -> int:
        if not view:
            return 0
        return self._timed(flight, len(view), lambda: flight.store.get_into(flight.key, offset, view))

    def _timed(self, flight: FetchTask, size: int, read: Callable[[], None]) -> int:
        """A read of `size` bytes from the store, watched and measured; returns `size`."""
        began = self._clock.monotonic()
        with self._lock:
            delivered = self.window.delivered
            if flight.attempts == 1:
                flight.since = began
                self._flights[flight] = None
                if not self._watching:
                    self._watching = True
                    self._lock.notify()
        read()
        with self._lock:
            self.window.landed(size, self._clock.monotonic() - began, delivered)
        return size

    def _record(self, flight: FetchTask, began: float, fetched: int, error: BaseException | None) -> None:
        if not tracing.recording():
            return
        seconds = self._clock.monotonic() - began
        about: dict[str, tracing.Value] = {
            "key": flight.key,
            "offset": flight.fetch.offset,
            "bytes": fetched,
            "job": flight.job,
        }
        what = type(error).__name__ if error else ""
        tracing.record("cache.fetch", self._clock.time() - seconds, seconds, flight.within, error=what, **about)

    def _stored(self, fetched: int, began: float) -> None:
        if fetched:
            with self._lock:
                self.window.stored(self._clock.monotonic() - began)

    def _end(self, flight: FetchTask, error: BaseException | None, fetched: int) -> None:
        with self._lock:
            flight.attempts -= 1
            first = not flight.done and (error is None or not flight.attempts)
            if first:
                flight.done = True
                self._flights.pop(flight, None)
        self._landed([(flight.fetch if first else _NOTHING, error, fetched)])

    # asking again

    def _hedge(self) -> None:
        """Ask once more for what is late while somebody waits for it. Between two fetches it looks by itself, and has to be woken
        only after it has seen nothing for a while."""
        quiet = 0
        with self._lock:
            while not self._closed:
                late = self.window.late_after()
                if not self._flights or late is None:
                    self._watching = bool(self._flights) or quiet < QUIET_LOOKS
                    quiet = 0 if self._flights else quiet + 1
                    look = LOOK_SECONDS if late is None else min(LOOK_SECONDS, _often(late))
                    self._lock.wait(look if self._watching else None)
                    continue
                quiet = 0
                now = self._clock.monotonic()
                for flight in [f for f in self._flights if f.attempts == 1 and now - f.since >= late]:
                    if flight.wanted() and self.window.late_after() is not None:
                        flight.attempts += 1
                        self.window.hedges += 1
                        self.start(flight)
                self._lock.wait(_often(late))


def _often(late: float) -> float:
    """Seconds between two looks at what may be late."""
    return max(0.01, late / 4)


_NOTHING = Fetch(-1, 0, 0, 0)
"""Stands for the slower of two attempts: only its bytes count."""


FetchResult = tuple[Fetch, BaseException | None, int]
"""A fetch that is over, its error, and the bytes from the store."""


@dataclass(slots=True, eq=False)
class FetchTask:
    """A fetch for a job, asked for `within` a span. `here` are the files that have some of its bytes; `wanted()` whether
    somebody waits for it."""

    fetch: Fetch
    file: BlockFile
    store: Store
    key: str
    here: Sequence[BlockFile]
    wanted: Callable[[], bool]
    job: str = ""
    within: str = ""
    attempts: int = 1
    done: bool = False
    since: float = 0.0
    part: PendingBlock = field(init=False)

    def __post_init__(self) -> None:
        self.part = PendingBlock(self.file, self.fetch.block, self.fetch.offset)

    @property
    def plain(self) -> bool:
        """Whether all of it comes from the store, and is asked for the first time."""
        return self.attempts == 1 and not self.fetch.here and not self.fetch.adopted

    @property
    def cost(self) -> int:
        """Bytes that the store is asked for, as far as can be known: none where an earlier daemon left them."""
        return 0 if self.fetch.adopted else self.fetch.length - sum(size for _, _, size in self.fetch.here)


BATCH_BLOCKS = 4

_READ = metrics.store_bytes.labels("posix", "read")


class BatchedFetch:
    """Safe to share between threads. `lately`: the last fetch was one of these."""

    def __init__(self, clock: Clock) -> None:
        self._opened, self._clock, self._used = FdCache(clock), clock, 0.0
        self._here: weakref.WeakKeyDictionary[Store, bool] = weakref.WeakKeyDictionary()
        self.lately = False

    def fits(self, item: object) -> bool:
        """Whether it may go together with others."""
        return isinstance(item, FetchTask) and item.plain and self._here.get(item.store, False)

    def takes(self, flight: FetchTask) -> bool:
        """Whether it is to be fetched here: its store's objects are files of this machine."""
        if flight.plain and flight.store not in self._here:
            self._file(flight)
        return self.fits(flight)

    def fetch(self, flight: FetchTask, buffer: memoryview) -> FetchResult | None:
        """Bring it into its file; None where that is left to the store."""
        fetch, file = flight.fetch, self._file(flight)
        if file is None:
            return None
        view = buffer[: fetch.length]
        try:
            whole = os.preadv(file.fileno(), [view], fetch.offset) == fetch.length
        except OSError:
            whole = False
        if not whole:
            self._opened.forget(flight.store, flight.key)
            return None
        self.lately, self._used = True, self._clock.monotonic()
        _READ.inc(fetch.length)
        try:
            flight.part.whole(view)  # written at once, it is mapped by large pages
        except DiskError as error:
            return fetch, error, fetch.length
        return fetch, None, fetch.length

    def rest(self) -> None:
        """Let go of all files, if nobody asked for any in the last `IDLE_SECONDS`."""
        if self._clock.monotonic() - self._used >= IDLE_SECONDS:
            self._opened.clear()

    def _file(self, flight: FetchTask) -> Descriptor | None:
        try:
            file = self._opened.get(flight.store, flight.key)
        except HeadraceError:  # said by the store, when it is asked
            return None
        self._here[flight.store] = file is not None
        return file
