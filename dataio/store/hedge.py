"""Hedged reads: a slow read is sent a second time, and the first response is used.

Invariants:

* Only reads are hedged, because only reads may be sent twice without risk.
* Both requests read into their own buffers, never the caller's, because the slower one continues after the call
  returns. Therefore only reads of at most `max_bytes` are hedged. The requests in the background hold at most
  `threads * max_bytes`.
* At most `HedgePolicy.share` of all requests since the start are sent twice, plus `burst`.
* A request is slow when it takes longer than the given percentile of the last `_WINDOW` requests of its size class.
  Until `_ENOUGH` of them were measured, no request of that class is slow.
* If no thread is free, the caller's thread sends the read once, without hedging.

Failure behaviour: if one request fails, the result of the other is used. If both fail, the first one's error is raised.
`close` waits for the slower requests.
"""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.store.base import ObjectInfo, Store, writable_bytes
from headrace.dataio.store.wrappers import Wrapper

T = TypeVar("T")
_WINDOW, _ENOUGH = 256, 20
_SMALLEST_CLASS = 16  # reads up to 64 KiB take about the same time


@dataclass(slots=True)
class HedgePolicy:
    """Decides when a read is slow and whether a second request may be sent, from the measured latencies.

    It uses no clock and no threads.

    Args:
        percentile: In (0, 1): a request is slow above this percentile of the latencies.
        share: In [0, 1]: the fraction of requests that may be sent twice.
        burst: How many requests may be sent twice in addition to `share`.
        floor: Seconds. A faster request is never slow.
    """

    percentile: float = 0.95
    share: float = 0.05
    burst: int = 2
    floor: float = 0.01
    requests: int = 0
    hedged: int = 0
    _latencies: dict[int, deque[float]] = field(default_factory=dict)

    def begin(self, size: int) -> float | None:
        """Count a request of `size` bytes and return the seconds after which it is slow; None if not known yet."""
        self.requests += 1
        latencies = self._latencies.get(_size_class(size), ())
        if len(latencies) < _ENOUGH:
            return None
        return max(self.floor, sorted(latencies)[min(len(latencies) - 1, int(len(latencies) * self.percentile))])

    def spend(self) -> bool:
        """Return whether a second request may be sent now. If so, count it."""
        allowed = self.hedged + 1 <= self.burst + self.share * self.requests
        self.hedged += allowed
        return allowed

    def end(self, size: int, seconds: float) -> None:
        """Record that a request of `size` bytes was answered after `seconds`."""
        self._latencies.setdefault(_size_class(size), deque(maxlen=_WINDOW)).append(seconds)


class Hedge(Wrapper):
    """Sends slow reads of at most `max_bytes` to `inner` a second time.

    Args:
        inner: The store.
        policy: When to hedge (default: `HedgePolicy()`).
        threads: How many requests may run in the background.
        max_bytes: Larger reads are passed through.
        clock: For tests.
    """

    def __init__(
        self,
        inner: Store,
        policy: HedgePolicy | None = None,
        *,
        threads: int = 16,
        max_bytes: int = 8 * limits.MIB,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(inner)
        self.policy, self._max_bytes, self._clock = policy or HedgePolicy(), max_bytes, clock
        self._lock, self._free = threading.Lock(), threading.Semaphore(threads)
        self._pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="headrace-hedge")

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        if max_bytes > self._max_bytes:
            return self.inner.get(key, max_bytes=max_bytes)
        return self._first_result(0, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        targets = [writable_bytes(buffer) for _, buffer in ranges]
        size = sum(map(len, targets))
        if size > self._max_bytes:
            return self.inner.get_ranges_into(key, ranges)

        def read() -> list[memoryview]:
            buffers = [memoryview(bytearray(len(target))) for target in targets]
            self.inner.get_ranges_into(key, [(at, buffer) for (at, _), buffer in zip(ranges, buffers, strict=True)])
            return buffers

        for target, data in zip(targets, self._first_result(size, read), strict=True):
            target[:] = data
        return None

    def stat(self, key: str) -> ObjectInfo:
        return self._first_result(0, lambda: self.inner.stat(key))

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self.inner.close()

    def _first_result(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, or of a second call of it if the first one is slow."""
        began = self._clock.monotonic()
        with self._lock:
            slow_after = self.policy.begin(size)
        result = self._race(work, slow_after) if slow_after is not None else work()
        with self._lock:
            self.policy.end(size, self._clock.monotonic() - began)
        return result

    def _race(self, work: Callable[[], T], slow_after: float) -> T:
        first = self._submit(work)
        if first is None:
            return work()
        if not futures.wait([first], slow_after).done and self._may_hedge() and (second := self._submit(work)):
            return _earlier(first, second)
        return first.result()

    def _may_hedge(self) -> bool:
        with self._lock:
            return self.policy.spend()

    def _submit(self, work: Callable[[], T]) -> futures.Future[T] | None:
        if not self._free.acquire(blocking=False):
            return None
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._free.release())
        return future


def _earlier(first: futures.Future[T], second: futures.Future[T]) -> T:
    """Return the result of the request that succeeds first."""
    completed = futures.wait([first, second], return_when=futures.FIRST_COMPLETED).done
    winner = first if first in completed else second
    if winner.exception() is None:
        return winner.result()
    other = second if winner is first else first
    return other.result() if other.exception() is None else first.result()


def _size_class(size: int) -> int:
    """The size class: sizes within a factor of four share one, and there are at most 24."""
    return max(_SMALLEST_CLASS, min(size, 1 << 62).bit_length()) // 2
