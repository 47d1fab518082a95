"""A second request for the slow tail of reads: whichever answers first serves.

Invariants: reads only, since only they may be sent twice at no risk. Both requests read into buffers of their own, never
the caller's, because the slower one goes on writing after the call has returned; so only reads up to `max_bytes` are
hedged, and memory stays below `threads * max_bytes`. The share of extra requests is that of `headrace.dataio.store.tail`. With no
thread free, a read is passed through as it is.
Failure behaviour: if one request fails the other decides; if both fail, the error of the first. `close` waits for the
slower ones.
"""

from __future__ import annotations

import concurrent.futures as futures
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.store.checks import writable_bytes
from headrace.dataio.store.contract import ObjectInfo, Store
from headrace.dataio.store.tail import Tail
from headrace.dataio.store.wrapper import Wrapper

T = TypeVar("T")


class Hedge(Wrapper):
    """`inner`, whose reads of at most `max_bytes` are asked for again when they are slow."""

    def __init__(
        self,
        inner: Store,
        tail: Tail | None = None,
        *,
        threads: int = 16,
        max_bytes: int = 8 * limits.MIB,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(inner)
        self.tail, self._max_bytes, self._clock = tail or Tail(), max_bytes, clock
        self._lock, self._free = threading.Lock(), threading.Semaphore(threads)
        self._pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="headrace-hedge")

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        if max_bytes > self._max_bytes:
            return self.inner.get(key, max_bytes=max_bytes)
        return self._first(0, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        targets = [writable_bytes(buffer) for _, buffer in ranges]
        size = sum(map(len, targets))
        if size > self._max_bytes:
            return self.inner.get_ranges_into(key, ranges)

        def read() -> list[memoryview]:
            own = [memoryview(bytearray(len(target))) for target in targets]
            self.inner.get_ranges_into(key, [(at, buffer) for (at, _), buffer in zip(ranges, own, strict=True)])
            return own

        for target, found in zip(targets, self._first(size, read), strict=True):
            target[:] = found
        return None

    def stat(self, key: str) -> ObjectInfo:
        return self._first(0, lambda: self.inner.stat(key))

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        self.inner.close()

    def _first(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, or of a second one begun when the first is slow."""
        began = self._clock.monotonic()
        with self._lock:
            slow_after = self.tail.begin(size)
        result = self._raced(work, slow_after) if slow_after is not None else work()
        with self._lock:
            self.tail.end(size, self._clock.monotonic() - began)
        return result

    def _raced(self, work: Callable[[], T], slow_after: float) -> T:
        first = self._started(work)
        if first is None:
            return work()
        if not futures.wait([first], slow_after).done and self._may_hedge() and (second := self._started(work)):
            return _earlier(first, second)
        return first.result()

    def _may_hedge(self) -> bool:
        with self._lock:
            return self.tail.spend()

    def _started(self, work: Callable[[], T]) -> futures.Future[T] | None:
        if not self._free.acquire(blocking=False):
            return None
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._free.release())
        return future


def _earlier(first: futures.Future[T], second: futures.Future[T]) -> T:
    """The result of whichever succeeds first."""
    done = futures.wait([first, second], return_when=futures.FIRST_COMPLETED).done
    winner = first if first in done else second
    if winner.exception() is None:
        return winner.result()
    other = second if winner is first else first
    return other.result() if other.exception() is None else first.result()
