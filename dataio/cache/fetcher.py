"""The engine's threads: fetch parts of objects into cache files, check what an earlier daemon left, ask again when it is late.

Invariants: each fetch reports once, whichever of its attempts ends first; a second attempt is started only while somebody waits
for the bytes, for at most one in a hundred fetches, and not of files of this machine, of which several go together (`together`).
Jobs take turns (`turns`). A fetch, or those that go together, takes one buffer of a block, and nothing else that grows.
Failure behaviour: the store's error is reported when no other attempt is under way; trouble with the
cache's own disk comes as `DiskError`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from headrace.dataio.cache import kept
from headrace.dataio.cache.buffers import IDLE_SECONDS, Buffers
from headrace.dataio.cache.events import Fetch
from headrace.dataio.cache.flight import Flight, Landed
from headrace.dataio.cache.passing import OvertakenError
from headrace.dataio.cache.together import TOGETHER, Together
from headrace.dataio.cache.turns import JobLimits, Turns
from headrace.dataio.cache.window import Window
from headrace.dataio.core import tracing
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.log import get_logger

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
        landed: Callable[[Sequence[Landed]], None],
    ) -> None:
        self._clock, self._landed = clock, landed
        self._ahead = max(1, min(threads // 2, buffers * 2 // 3)), block_bytes
        self._together = Together(clock)
        self._buffers = Buffers(block_bytes, buffers, clock)
        self.window = Window(2 * block_bytes, max(2, buffers) * block_bytes)
        self._lock = threading.Condition()
        self._flights: dict[Flight, None] = {}
        self._turns: Turns[Job | Flight] = Turns()
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

    def start(self, flight: Flight) -> None:
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
            return 2 * TOGETHER, 2 * TOGETHER * block_bytes, TOGETHER
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

    def _next(self) -> Job | list[Flight] | None:
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
            found = [job, *self._more(job, now)] if isinstance(job, Flight) else job
            if self._turns:
                self._wake()  # what a limit held may go as well, now that something ended
            return found

    def _look(self, now: float) -> Job | Flight | None:
        self._woken = False
        return self._turns.next(now)

    def _wake(self) -> None:
        """Under the lock: let one thread look, who wakes the next one if there is more. One that has been woken and did not look
        yet is enough."""
        if not self._woken:
            self._woken = True
            self._turn.notify()

    def _more(self, first: Flight, now: float) -> Iterator[Flight]:
        fits, left = self._together.fits, TOGETHER - 1
        while left and fits(first) and isinstance(more := self._turns.next(now, fits), Flight):
            yield more
            left -= 1

    def _fly(self, flights: list[Flight]) -> None:
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

    def _pass_together(self, flights: list[Flight]) -> list[Flight]:
        """One after the other through one buffer, and told of at once; what somebody waits for goes first and is told of by
        itself. Returns what the store has to be asked for."""
        order = sorted([(not flight.wanted(), number) for number, flight in enumerate(flights)])
        done, left = list[Landed](), dict.fromkeys(flights)
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

    def _passed(self, flight: Flight, landed: Landed, began: float) -> None:
        _, error, size = landed
        with self._lock:
            seconds = self._clock.monotonic() - began
            self.window.landed(size, seconds, self.window.delivered)
            self.window.stored(seconds)
        self._record(flight, began, size, error)

    # one attempt

    def _attempt(self, flight: Flight) -> None:
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

    def _is_right(self, flight: Flight, view: memoryview) -> bool:
        """Whether the part was left by an earlier daemon, and is what it said."""
        if not flight.fetch.adopted or not isinstance(flight.file, kept.KeptFile):
            return False
        try:
            flight.file.read(flight.fetch.offset, view)
        except OSError:
            return False
        right = kept.digest(view) == flight.file.digests.get(flight.fetch.block)
        if not right:
            _log.warning("a block of %s on the cache's disk had other bytes than were written; fetching it", flight.key)
        return right

    def _pass(self, flight: Flight, view: memoryview) -> int:
        """Bring the part into its file; returns the bytes from the store."""
        if flight.fetch.here or flight.attempts > 1:
            fetched = self._gathered(flight, view)
            flight.part.whole(view)
            return fetched
        passing, fetched = flight.part.begin(), 0
        with contextlib.suppress(OvertakenError):
            key, offset = flight.key, flight.fetch.offset
            fetched = self._timed(flight, len(view), lambda: flight.store.get_pieces(key, offset, view, passing.take))
            passing.end()
        return fetched

    def _gathered(self, flight: Flight, view: memoryview) -> int:
        """Fill `view`: from other cache files what they have, from the store the rest; returns the bytes from the store."""
        start, fetched, at = flight.fetch.offset, 0, flight.fetch.offset
        for (_, offset, length), file in zip(flight.fetch.here, flight.here, strict=True):
            fetched += self._get(flight, at, view[at - start : offset - start])
            file.read(offset, view[offset - start : offset - start + length])
            at = offset + length
        return fetched + self._get(flight, at, view[at - start :])

    def _get(self, flight: Flight, offset: int, view: memoryview) -> int:
        if not view:
            return 0
        return self._timed(flight, len(view), lambda: flight.store.get_into(flight.key, offset, view))

    def _timed(self, flight: Flight, size: int, read: Callable[[], None]) -> int:
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

    def _record(self, flight: Flight, began: float, fetched: int, error: BaseException | None) -> None:
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

    def _end(self, flight: Flight, error: BaseException | None, fetched: int) -> None:
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
