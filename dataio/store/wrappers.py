"""Wrappers of a store: metrics, a memory budget, pausable uploads, tracing.

Purpose: a wrapper adds one behaviour to any store. `Wrapper` passes every operation to `inner` through one hook,
`_through`. The modules `retry` and `hedge` have two more wrappers.

Invariants:

* A wrapper that overrides nothing is transparent.
* `_through` is called once per operation. It gets the operation's name in the contract, the key (a listing's prefix;
  "" for `delete_many`) and the bytes that the operation may hold in memory. A listing passes through it only for its
  first object or folder. The others are streamed. The name of both listings is `list`.
* Metric labels are from small fixed sets: the back end's name, the operation, and `ok`, an error's code or `raised`.
* The admitted requests never exceed a `Budget`. They are admitted in the order of arrival. A small request waits behind
  a large one, so that the large one is not starved.

Failure behaviour: errors of the wrapped store pass through. A request above the whole budget, or one that finds the
queue full, raises `CapacityError` at once. A request that waited longer than the budget's `timeout` raises
`DeadlineError`. A stream of parts that reads under the same budget can block itself until then. Give the source of a
copy another budget.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.dataio.core import limits
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import CapacityError, DeadlineError, HeadraceError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.metrics import store_bytes, store_requests, store_seconds
from headrace.dataio.store.base import Buffer, Location, ObjectInfo, Store, UploadLog

T = TypeVar("T")
Span = Callable[[str, Mapping[str, str | int]], AbstractContextManager[object]]
MULTIPART_BYTES = 64 * limits.MIB
"""The memory that `put_multipart` is assumed to hold: some parts in flight, and one part being filled."""
_WAIT_SECONDS = 1.0


class Wrapper(Store):
    """A store that passes every operation to `inner` through `_through`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        return work()

    @property
    def location(self) -> Location:
        return self.inner.location

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        return self._through("get", key, max_bytes, lambda: self.inner.get(key, max_bytes=max_bytes))

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self._through("get_into", key, buffer.nbytes, lambda: self.inner.get_into(key, offset, buffer))

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = sum(buffer.nbytes for _, buffer in ranges)
        self._through("get_into", key, size, lambda: self.inner.get_ranges_into(key, ranges))

    def open_file(self, key: str) -> int | None:
        return self._through("open_file", key, 0, lambda: self.inner.open_file(key))

    def read_once(self, prefix: str) -> None:
        self.inner.read_once(prefix)

    def put(self, key: str, data: Buffer) -> None:
        self._through("put", key, memoryview(data).nbytes, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        size = memoryview(data).nbytes
        return self._through("put_if_absent", key, size, lambda: self.inner.put_if_absent(key, data))

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self._through("put_multipart", key, MULTIPART_BYTES, lambda: self.inner.put_multipart(key, parts))

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self._through("put_multipart", key, MULTIPART_BYTES, lambda: self.inner.put_logged(key, parts, log))

    def abort_upload(self, key: str, upload: str) -> None:
        self._through("delete_many", key, 0, lambda: self.inner.abort_upload(key, upload))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        infos = self.inner.list(prefix)
        yield from self._through("list", prefix, 0, lambda: [*itertools.islice(infos, 1)])
        yield from infos

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        names = self.inner.list_folders(prefix, after=after)
        yield from self._through("list", prefix, 0, lambda: [*itertools.islice(names, 1)])
        yield from names

    def stat(self, key: str) -> ObjectInfo:
        return self._through("stat", key, 0, lambda: self.inner.stat(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        key_list = [*keys]
        self._through("delete_many", "", 0, lambda: self.inner.delete_many(key_list))

    def invalidate(self, key: str) -> bool:
        return self.inner.invalidate(key)

    def reconnect(self) -> None:
        self.inner.reconnect()

    def close(self) -> None:
        self.inner.close()

    def __repr__(self) -> str:
        return repr(self.inner)


class MetricsStore(Wrapper):
    """Counts operations, their duration and the bytes of the successful ones, under the label `backend`."""

    def __init__(self, inner: Store, backend: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._backend, self._clock = backend, clock
        # cached, because the look-up of a label takes two locks, which costs more than a small read
        self._requests = functools.cache(functools.partial(store_requests.labels, backend))
        self._seconds = functools.cache(functools.partial(store_seconds.labels, backend))
        self._bytes = functools.cache(functools.partial(store_bytes.labels, backend))

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        with self._counted(operation):
            return work()

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        self._read(len(data))
        return data

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        super().get_into(key, offset, buffer)
        self._read(buffer.nbytes)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().get_ranges_into(key, ranges)
        self._read(sum(buffer.nbytes for _, buffer in ranges))

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        self._through("get_into", key, buffer.nbytes, lambda: self.inner.get_pieces(key, offset, buffer, take))
        self._read(buffer.nbytes)

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        self._wrote(memoryview(data).nbytes)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        won = super().put_if_absent(key, data)
        self._wrote(memoryview(data).nbytes if won else 0)
        return won

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        size = super().put_multipart(key, parts)
        self._wrote(size)
        return size

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        size = super().put_logged(key, parts, log)
        self._wrote(size)
        return size

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._listed(lambda: self.inner.list(prefix))

    def list_folders(self, prefix: str = "", *, after: str = "") -> Iterator[str]:
        return self._listed(lambda: self.inner.list_folders(prefix, after=after))

    def _listed(self, work: Callable[[], Iterator[T]]) -> Iterator[T]:
        self._requests(
            "list", "ok"
        )  # looked up now: the garbage collector may close this generator in a thread that holds the look-up's lock
        self._seconds("list")
        with self._counted("list"):
            yield from work()

    @contextlib.contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        outcome, began = "ok", self._clock.monotonic()
        try:
            yield
        except GeneratorExit:  # the reader stopped the listing early
            raise
        except BaseException as error:
            outcome = error.code if isinstance(error, HeadraceError) else "raised"
            raise
        finally:
            self._requests(operation, outcome).inc()
            self._seconds(operation).observe(self._clock.monotonic() - began)

    def _read(self, size: int) -> None:
        self._bytes("read").inc(size)

    def _wrote(self, size: int) -> None:
        self._bytes("written").inc(size)


@dataclass(eq=False, slots=True)
class Ticket:
    """One request: its cost in bytes, its deadline in seconds of the clock, and whether it is admitted."""

    cost: int
    deadline: float
    admitted: bool = False


@dataclass(slots=True)
class Admission:
    """The state of a budget: a first-in, first-out queue. It uses no clock and no threads.

    `bytes` and `requests` limit the requests in flight. `waiting` limits the queue. `timeout` limits each wait, in
    seconds.
    """

    bytes: int
    requests: int
    waiting: int = 1024
    timeout: float = 60.0
    used: int = 0
    active: int = 0
    queue: deque[Ticket] = field(default_factory=deque)

    def ask(self, cost: int, now: float) -> Ticket:
        """Return a ticket for `cost` bytes, which is admitted at once or queued."""
        if cost > self.bytes:
            raise CapacityError(
                f"one request of {format_bytes(cost)} is above the budget of {format_bytes(self.bytes)} in flight",
                hint="raise the budget, or ask for less at once",
            )
        if len(self.queue) >= self.waiting:
            raise CapacityError(
                f"{len(self.queue)} requests are waiting for {format_bytes(self.bytes)} and {self.requests} requests in flight",
                hint="use fewer threads, or raise the budget",
            )
        ticket = Ticket(cost, now + self.timeout)
        self.queue.append(ticket)
        self._admit()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """Release the ticket: the request ended, or its caller stopped waiting."""
        if ticket.admitted:
            self.used, self.active = self.used - ticket.cost, self.active - 1
        else:
            self.queue.remove(ticket)
        self._admit()

    def expired(self, ticket: Ticket, now: float) -> bool:
        """Whether `ticket` is still queued at its deadline."""
        return not ticket.admitted and now >= ticket.deadline

    def _admit(self) -> None:
        while self.queue and self.active < self.requests and self.used + self.queue[0].cost <= self.bytes:
            ticket = self.queue.popleft()
            ticket.admitted = True
            self.used, self.active = self.used + ticket.cost, self.active + 1


class Budget:
    """A limit on bytes and requests in flight, shared by all the `Limit` stores that use it. Thread-safe.

    Args:
        bytes: The most bytes in flight.
        requests: The most requests in flight.
        waiting: The most requests in the queue. One more raises `CapacityError`.
        timeout: Seconds that a request waits before `DeadlineError`.
        clock: For tests.
    """

    def __init__(
        self,
        bytes: int,
        requests: int = 64,
        *,
        waiting: int = 1024,
        timeout: float = 60.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._state = Admission(bytes, requests, waiting, timeout)
        self._changed, self._clock = threading.Condition(), clock

    @property
    def bytes(self) -> int:
        return self._state.bytes

    @property
    def in_flight(self) -> tuple[int, int]:
        """Bytes and requests in flight now."""
        with self._changed:
            return self._state.used, self._state.active

    @contextlib.contextmanager
    def admitted(self, cost: int, doing: str) -> Iterator[None]:
        """Wait until the budget has `cost` bytes and one request free, and hold them for the block.

        `doing` describes the operation in errors.
        """
        with self._changed:
            ticket = self._state.ask(cost, self._clock.monotonic())
        try:
            with self._changed:
                while not ticket.admitted:
                    if self._state.expired(ticket, self._clock.monotonic()):
                        raise self._timeout_error(cost, doing)
                    self._changed.wait(min(_WAIT_SECONDS, max(0.001, ticket.deadline - self._clock.monotonic())))
            yield
        finally:
            with self._changed:
                self._state.leave(ticket)
                self._changed.notify_all()

    def _timeout_error(self, cost: int, doing: str) -> DeadlineError:
        state = self._state
        return DeadlineError(
            f"{doing}: waited {state.timeout:g} s for {limits.format_bytes(cost)} of a budget of "
            f"{limits.format_bytes(state.bytes)}, of which {state.active} requests use {limits.format_bytes(state.used)}",
            hint="raise the budget, use fewer threads, or check whether the store has become slow",
        )


class Limit(Wrapper):
    """Keeps the requests to `inner` within `budget`.

    Every operation counts with the memory that it may hold: the size of a buffer or a body, `max_bytes` for `get`,
    `MULTIPART_BYTES` for `put_multipart`, and nothing for the others.
    """

    def __init__(self, inner: Store, budget: Budget) -> None:
        super().__init__(inner)
        self._budget = budget

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        return super().get(key, max_bytes=min(max_bytes, self._budget.bytes))

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        cost = min(size, self._budget.bytes) if operation == "put_multipart" else size
        with self._budget.admitted(cost, f"{operation} {key!r}"):
            return work()


class PausableUploads(Wrapper):
    """Calls `wait` before each part of a multipart upload. `wait` returns when the upload may continue.

    Other operations and parts in flight are not delayed.
    """

    def __init__(self, inner: Store, wait: Callable[[], None]) -> None:
        super().__init__(inner)
        self._wait = wait

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        return self.inner.put_multipart(key, self._paced(parts))

    def put_logged(self, key: str, parts: Iterable[Buffer], log: UploadLog) -> int:
        return self.inner.put_logged(key, self._paced(parts), log)

    def _paced(self, parts: Iterable[Buffer]) -> Iterator[Buffer]:
        for part in parts:
            self._wait()
            yield part


class Trace(Wrapper):
    """Puts a span named `store.<operation>` around each operation, for any tracer.

    Args:
        inner: The store.
        span: Called with the span's name and its attributes (the store's URL, the key, the requested bytes; never a
            secret). It returns a context manager that encloses the operation. An error of the tracer is an error of the
            operation.

    With OpenTelemetry: `Trace(store, lambda name, about: tracer.start_as_current_span(name, attributes=about))`.
    """

    def __init__(self, inner: Store, span: Span) -> None:
        super().__init__(inner)
        self._span, self._url = span, inner.location.url

    def _through(self, operation: str, key: str, size: int, work: Callable[[], T]) -> T:
        with self._span(f"store.{operation}", {"store.url": self._url, "store.key": key, "store.bytes": size}):
            return work()
