"""How much memory a loader may have in flight, and how much it has.

Purpose: sixteen threads that each decode a 4K clip must not fill the machine.
Invariants: what samples declare before they are read (compressed bytes, and pixels before they are scaled down) never
adds up to more than the limit, but for a single sample that is larger by itself, which then runs alone. Waiting is
first come, first served, and ends when the loader closes.
Failure behaviour: `Closed` to whoever waits when it is closed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Closed(Exception):
    """The loader was closed while this thread waited."""


class Memory:
    """Admits work by the bytes that it declares."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.peak = self.waits = 0
        self._turn = threading.Condition()
        self._queue: deque[object] = deque()
        self._closed = False

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Wait until `size` bytes fit, hold them inside the block, and give them back."""
        self._enter(size)
        try:
            yield
        finally:
            with self._turn:
                self.used -= size
                self._turn.notify_all()

    def close(self) -> None:
        """Nobody waits any more."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _enter(self, size: int) -> None:
        me = object()
        with self._turn:
            self._queue.append(me)
            try:
                if not self._may(me, size):
                    self.waits += 1
                self._turn.wait_for(lambda: self._closed or self._may(me, size))
            finally:
                self._queue.remove(me)
                self._turn.notify_all()
            if self._closed:
                raise Closed
            self.used += size
            self.peak = max(self.peak, self.used)

    def _may(self, me: object, size: int) -> bool:
        return self._queue[0] is me and (not self.used or self.used + size <= self.limit)
