"""One memory budget for all that reads and writes: bytes and requests in flight, over any number of stores and threads.

Invariants: those of `headrace.dataio.store.admission`: never more in flight than the budget, first come first served. Every
operation declares what it may hold: a buffer's size, a body's, `max_bytes` for `get`, some parts for `put_multipart`,
nothing for the others.
Failure behaviour: a request above the whole budget, or behind a full queue, is a `CapacityError` at once; one that waited
longer than `patience` is a `DeadlineError`. A stream of parts that reads from the same budget can come to wait for
itself, until then: give the copy's source another budget.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import DeadlineError
from headrace.dataio.store.admission import Admission
from headrace.dataio.store.contract import Store
from headrace.dataio.store.wrapper import Wrapper

T = TypeVar("T")
_TURN_SECONDS = 1.0


class Budget:
    """`bytes` and `requests` in flight, shared by every `Limit` that is given it. Safe between threads."""

    def __init__(
        self,
        bytes: int,
        requests: int = 64,
        *,
        waiting: int = 1024,
        patience: float = 60.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._state = Admission(bytes, requests, waiting, patience)
        self._changed, self._clock = threading.Condition(), clock

    @property
    def bytes(self) -> int:
        return self._state.bytes

    @property
    def in_flight(self) -> tuple[int, int]:
        """Bytes and requests admitted now."""
        with self._changed:
            return self._state.used, self._state.active

    @contextlib.contextmanager
    def admitted(self, cost: int, doing: str) -> Iterator[None]:
        """Wait for `cost` bytes and one request, and hold them for the block."""
        with self._changed:
            ticket = self._state.ask(cost, self._clock.monotonic())
        try:
            with self._changed:
                while not ticket.admitted:
                    if self._state.expired(ticket, self._clock.monotonic()):
                        raise self._too_long(cost, doing)
                    self._changed.wait(min(_TURN_SECONDS, max(0.001, ticket.deadline - self._clock.monotonic())))
            yield
        finally:
            with self._changed:
                self._state.leave(ticket)
                self._changed.notify_all()

    def _too_long(self, cost: int, doing: str) -> DeadlineError:
        state = self._state
        return DeadlineError(
            f"{doing}: waited {state.patience:g} s for {limits.format_bytes(cost)} of a budget of "
            f"{limits.format_bytes(state.bytes)}, of which {state.active} requests use {limits.format_bytes(state.used)}",
            hint="raise the budget, use fewer threads, or see whether the store has become slow",
        )


class Limit(Wrapper):
    """`inner` within `budget`."""

    def __init__(self, inner: Store, budget: Budget) -> None:
        super().__init__(inner)
        self._budget = budget

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        return super().get(key, max_bytes=min(max_bytes, self._budget.bytes))

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        cost = min(size, self._budget.bytes) if operation == "put_multipart" else size
        with self._budget.admitted(cost, f"{operation} {key!r}"):
            return work()
