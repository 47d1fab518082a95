"""Which fetch starts next, how many bytes may be in flight, and when a fetch counts as late. Sans-I/O.

`FairQueue` is start-time fair queueing: the job that has received the fewest bytes is next. So a job that requests a
thousand blocks at once does not delay another job's single block. `FetchWindow` measures bandwidth and latency. The
limit of bytes in flight is bandwidth × latency × `SAFETY`, from the best bandwidth and the shortest latency of the last
`KEPT` fetches. So the window grows while more requests increase the bandwidth, and stops when they only wait for each
other. A fetch is late when it takes longer than 95 % of the last fetches.

Invariants: a job has no more fetches and bytes in flight than its limits allow, but one fetch is always allowed. Over
time it receives no more bytes a second than its bandwidth. A job that was idle does not catch up. Work that belongs to
no job (an object's size, an announcement) goes first. The caller holds a lock.
Failure behaviour: it raises no errors. The callers bound the queues.

Start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")


class JobLimits(msgspec.Struct, frozen=True):
    """Limits of each job: requests in flight, bytes in flight, and bytes a second. 0 means no limit."""

    connections: int = 0
    bytes_in_flight: int = 0
    bandwidth: int = 0


@dataclass(slots=True, eq=False)
class _Job(Generic[T]):
    waiting: deque[tuple[T, int]] = field(default_factory=deque)
    virtual_time: float = 0.0
    """Virtual time: the bytes that the job received, or would have received while it was idle."""
    active: int = 0
    bytes: int = 0
    free_at: float = 0.0


class FairQueue(Generic[T]):
    """One queue per job.

    A job is removed when it has nothing waiting or in flight, and its bandwidth limit would not delay another fetch.
    """

    def __init__(self, limits: JobLimits | None = None) -> None:
        self._limits = limits or JobLimits()
        self._jobs: dict[str, _Job[T]] = {}
        self._without_job: deque[T] = deque()
        self._virtual_time = 0.0

    def limit(self, limits: JobLimits) -> None:
        """Set new limits; fetches in flight above them continue."""
        self._limits = limits
        if not limits.bandwidth:
            for job in self._jobs.values():
                job.free_at = 0.0

    def add_first(self, item: T) -> None:
        """Queue work that belongs to no job."""
        self._without_job.append(item)

    def add(self, item: T, name: str, cost: int) -> None:
        """Queue a fetch of `cost` bytes for a job."""
        job = self._jobs.setdefault(name, _Job())
        if not job.waiting:
            job.virtual_time = max(job.virtual_time, self._virtual_time)
        job.waiting.append((item, cost))

    def next(self, now: float, fits: Callable[[T], bool] = lambda _: True) -> T | None:
        """The next item, or None if none may start or the next one does not fit."""
        if self._without_job:
            return self._without_job.popleft() if fits(self._without_job[0]) else None
        ready_jobs = [job for job in self._jobs.values() if job.waiting and self._may_start(job, now)]
        if not ready_jobs:
            return None
        job = min(ready_jobs, key=lambda job: job.virtual_time)
        if not fits(job.waiting[0][0]):
            return None
        item, cost = job.waiting.popleft()
        self._virtual_time = job.virtual_time
        job.virtual_time += cost
        job.active, job.bytes = job.active + 1, job.bytes + cost
        if self._limits.bandwidth:
            job.free_at = max(job.free_at, now) + cost / self._limits.bandwidth
        return item

    def done(self, name: str, cost: int, now: float) -> None:
        """A fetch that `next` returned is finished."""
        job = self._jobs[name]
        job.active, job.bytes = job.active - 1, job.bytes - cost
        if not job.active and not job.waiting and job.free_at <= now:
            del self._jobs[name]

    def wake_in(self, now: float) -> float | None:
        """Seconds until a job that only its bandwidth limit delays may continue; None if there is no such job."""
        delays = [job.free_at - now for job in self._jobs.values() if job.waiting and self._has_room(job)]
        return max(0.0, min(delays)) if delays else None

    def report(self) -> dict[str, dict[str, int]]:
        """Waiting and running fetches of each job."""
        return {
            name: {"waiting": len(job.waiting), "connections": job.active, "bytes_in_flight": job.bytes}
            for name, job in self._jobs.items()
            if job.waiting or job.active
        }

    def __len__(self) -> int:
        return len(self._without_job) + sum(len(job.waiting) for job in self._jobs.values())

    def _may_start(self, job: _Job[T], now: float) -> bool:
        return self._has_room(job) and (not self._limits.bandwidth or job.free_at <= now)

    def _has_room(self, job: _Job[T]) -> bool:
        if not job.active:
            return True
        below_connections = not self._limits.connections or job.active < self._limits.connections
        cost = job.waiting[0][1]
        return below_connections and (
            not self._limits.bytes_in_flight or job.bytes + cost <= self._limits.bytes_in_flight
        )


KEPT = 64
MIN_SAMPLES = 20
"""Number of fetches that must be measured before one can be late."""
SAFETY = 2.0
"""Factor by which the window exceeds the product of bandwidth and latency."""
MIN_LATE_SECONDS = 0.02
HEDGED_SHARE = 0.01
"""Maximum share of fetches that are hedged, which bounds the extra bytes."""


class FetchWindow:
    """Measured bandwidth and latency of one engine's fetches."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._times: deque[float] = deque(maxlen=KEPT)
        self._store_times: deque[float] = deque(maxlen=KEPT)
        self.delivered = 0
        self.fetches = self.hedges = 0

    def fetched(self, size: int, seconds: float, delivered_before: int) -> None:
        """A fetch of `size` bytes took `seconds`; `delivered_before` is the value of `delivered` when it began."""
        seconds = max(seconds, 1e-6)
        self.delivered += size
        self.fetches += 1
        self._rates.append((self.delivered - delivered_before) / seconds)
        self._times.append(seconds)

    def stored(self, seconds: float) -> None:
        """A block was written to its file `seconds` after it was requested."""
        self._store_times.append(max(seconds, 1e-6))

    def bytes(self) -> int:
        """Maximum bytes in flight."""
        if not self._rates or not self._store_times:
            return self._least
        return int(min(self._most, max(self._least, max(self._rates) * min(self._store_times) * SAFETY)))

    def late_after(self) -> float | None:
        """Seconds after which a fetch counts as late and is hedged; None while no fetch may be hedged."""
        if len(self._times) < MIN_SAMPLES or self.hedges + 1 > self.fetches * HEDGED_SHARE:
            return None
        return max(MIN_LATE_SECONDS, sorted(self._times)[len(self._times) * 95 // 100])

    def report(self) -> dict[str, float | int]:
        times = sorted(self._times)
        return {
            "window_bytes": self.bytes(),
            "bandwidth_bytes_per_s": int(max(self._rates, default=0)),
            "fetch_median_s": round(times[len(times) // 2], 6) if times else 0.0,
            "hedged": self.hedges,
        }
