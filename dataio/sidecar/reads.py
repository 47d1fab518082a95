"""Reads that clients request from the daemon: opens, answered when the cache has the bytes, and announcements.

Purpose: connects the sessions' state machines with the cache engine, and keeps the stores open that clients read from.
Invariants: runs on the loop's thread, which never waits for a store. A store is opened in another thread, and an open
that must wait continues in a task. Stores are opened with the daemon's own credentials. At most `limit` stores are kept
open, and none is closed while an open of it is in progress, also after its credentials were renewed.
Failure behaviour: any error of a location or a store goes only to the client that sent the request. `CapacityError`
when all stores are in use. While the daemon drains, opens are answered with `bypassed` and announcements are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from headrace.dataio.cache.blocks import Lease
from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.objects import source_name, source_of
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import session
from headrace.dataio.sidecar.job_stats import JobStats
from headrace.dataio.sidecar.meters import group_of
from headrace.dataio.store.base import Location, Store

if TYPE_CHECKING:
    from headrace.dataio.sidecar.connections import BackgroundTasks, ClientState

_log = get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    """An open in progress. `opened` is its store, which stays open meanwhile."""

    client: ClientState
    request: int
    opened: OpenStore | None
    timer: asyncio.TimerHandle


class ReadService:
    """Serves the reads of all clients."""

    def __init__(
        self,
        engine: Engine,
        *,
        stores: StoreCache,
        job_stats: JobStats,
        loop: asyncio.AbstractEventLoop,
        tasks: BackgroundTasks,
    ) -> None:
        self._engine, self._stores, self._job_stats = engine, stores, job_stats
        self._loop, self._tasks = loop, tasks
        self._results_lock = threading.Lock()
        self._results: list[tuple[_Waiting, Future[Lease | None]]] = []
        self.draining = False

    def present(self, client: ClientState, request: m.Open) -> Lease | None:
        """A lease if all ranges are present, else None. The fast path of most reads: it uses no store."""
        if self.draining:
            return None
        try:
            source = source_name(request.where.url, request.where.options)
        except Exception:  # invalid options: `open` reports them
            return None
        return self._engine.present(source, request.key, request.ranges, id(client))

    def grown(self, client: ClientState) -> session.Grown:
        """Files with more present bytes than the client knows. If it gets their runs, it needs fewer requests."""
        return self._engine.grown(client.session.sent_runs)

    def open(self, client: ClientState, request: m.Open) -> None:
        """Answer when all ranges are present."""
        if self.draining:
            client.execute(client.session.opened(request.id, None))
            return
        location = m.location(request.where)
        try:
            opened = self._stores.acquire_open(location)
        except Exception as error:  # for example, invalid options
            client.execute(client.session.open_failed(request.id, error))
            return
        if opened is None:
            timer = self._start_timer(client, request)
            self._tasks.spawn(self._open_store(client, request, location, timer))
            return
        try:
            self.assign(client, request.trace)
            future = self._engine.open(opened.store, request.key, request.ranges, id(client))
        except Exception as error:  # any error of a location or store goes to this client only
            self._stores.release(opened)
            client.execute(client.session.open_failed(request.id, error))
            return
        if not future.done():
            self._answer_when_done(_Waiting(client, request.id, opened, self._start_timer(client, request)), future)
            return
        self._stores.release(opened)
        client.execute(self._answer_of(client, request.id, future))

    def prefetch(self, client: ClientState, request: m.Announce) -> None:
        """Process an announcement. It is dropped while the store of an earlier one is being opened."""
        if self.draining or client.opening:
            return
        location = m.location(request.where)
        opened = self._stores.acquire_open(location)
        if opened is not None:
            self._announce(client, opened, request)
        else:
            client.opening = True
            self._tasks.spawn(self._open_and_announce(client, location, request))

    def assign(self, client: ClientState, trace: str = "") -> None:
        """Assign the client's reads to the job that it reported; until it reports one, to its process group."""
        job = self._job_stats.job_of(client.process) or client.job or group_of(client.process)
        if job != client.job and client.ready:
            client.job = job
            self._engine.assign(id(client), job)
        if trace and client.job:
            self._engine.set_trace_parent(id(client), trace)

    def ended(self, client: ClientState) -> None:
        """The client has disconnected."""
        if client.job:
            self._engine.withdraw(id(client))

    def _start_timer(self, client: ClientState, request: m.Open) -> asyncio.TimerHandle:
        """Count an open that must wait, and start the timer that ends it at its deadline."""
        self._job_stats.waited(client.process, sum(length for _, length in request.ranges))
        return self._loop.call_later(
            request.deadline, lambda: client.execute(client.session.open_timed_out(request.id))
        )

    async def _open_store(
        self, client: ClientState, request: m.Open, location: Location, timer: asyncio.TimerHandle
    ) -> None:
        """Open the store in a thread, then handle the open."""
        waiting = _Waiting(client, request.id, None, timer)
        try:
            waiting.opened = await self._loop.run_in_executor(None, self._stores.acquire, location)
            self.assign(client, request.trace)
            future = self._engine.open(waiting.opened.store, request.key, request.ranges, id(client))
        except Exception as error:  # any error of a location or store goes to this client only
            self._finish(waiting, partial(client.session.open_failed, request.id, error))
        else:
            self._answer_when_done(waiting, future)

    def _answer_when_done(self, waiting: _Waiting, future: Future[Lease | None]) -> None:
        """Answer when the cache has the bytes.

        Results are delivered together, because waking the loop costs as much as an answer.
        """

        def on_result(future: Future[Lease | None]) -> None:
            with self._results_lock:
                is_first = not self._results
                self._results.append((waiting, future))
            if is_first:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._deliver)

        future.add_done_callback(on_result)

    def _deliver(self) -> None:
        with self._results_lock:
            results, self._results = self._results, []
        for waiting, future in results:
            try:
                self._finish(waiting, partial(self._answer_of, waiting.client, waiting.request, future))
            except Exception:
                _log.exception("an answer could not be sent")

    def _finish(self, waiting: _Waiting, get_answer: Callable[[], list[session.Instruction]]) -> None:
        waiting.timer.cancel()
        if waiting.opened is not None:
            self._stores.release(waiting.opened)
        waiting.client.execute(get_answer())

    def _answer_of(self, client: ClientState, request: int, future: Future[Lease | None]) -> list[session.Instruction]:
        error = future.exception()
        if error is not None:
            return client.session.open_failed(request, error)
        return client.session.opened(request, future.result(), self.grown(client))

    async def _open_and_announce(self, client: ClientState, location: Location, request: m.Announce) -> None:
        try:
            opened = await self._loop.run_in_executor(None, self._stores.acquire, location)
            self._announce(client, opened, request)
        except Exception as error:  # an announcement is a hint: the open reports the error
            _log.debug("not prefetching from %s: %s", location.url, error)
        finally:
            client.opening = False

    def _announce(self, client: ClientState, opened: OpenStore, request: m.Announce) -> None:
        try:
            if client.ready:
                self.assign(client, request.trace)
                self._engine.announce(id(client), opened.store, request.upcoming)
        finally:
            self._stores.release(opened)


CLOSE_DELAY_SECONDS = 60.0
"""Seconds after which a replaced store is closed if it is not in use. If it is, it is checked again after as long."""


@dataclass(slots=True, eq=False)
class OpenStore:
    """A store of a `StoreCache`. `users`: the number of calls of `acquire` without a `release` yet."""

    store: Store
    users: int = 0


class StoreCache:
    """The open stores by location. Thread-safe.

    Args:
        opener: Opens the store at a location.
        closing: Called with a store's name before the store is closed to make room for another one.
        busy: Whether a replaced store is still in use without an `OpenStore`.
        limit: The maximum number of open stores.
        close_delay: Seconds from the replacement of a store to its close.
    """

    def __init__(
        self,
        opener: Callable[[Location], Store],
        *,
        closing: Callable[[str], None] = lambda _: None,
        busy: Callable[[Store], bool] = lambda _: False,
        limit: int = 32,
        close_delay: float = CLOSE_DELAY_SECONDS,
    ) -> None:
        self._opener, self._closing, self._busy = opener, closing, busy
        self._limit, self._close_delay = limit, close_delay
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenStore] = OrderedDict()

    def acquire_open(self, location: Location) -> OpenStore | None:
        """The store if it is open; it stays open until `release`."""
        with self._lock:
            entry = self._open.get(source_of(location))
            return self._use(source_of(location), entry) if entry else None

    def acquire(self, location: Location) -> OpenStore:
        """The store, opened if necessary; it stays open until `release`."""
        if already_open := self.acquire_open(location):
            return already_open
        opened = self._opener(location)
        source = source_of(location)
        try:
            with self._lock:
                to_close = self._make_room(source)
                entry = self._use(source, self._open.setdefault(source, OpenStore(opened)))
        except CapacityError:
            opened.close()
            raise
        for closed_source, closed_store in to_close:
            self._closing(closed_source)
            closed_store.close()
        if entry.store is not opened:
            opened.close()
        return entry

    def release(self, entry: OpenStore) -> None:
        with self._lock:
            entry.users -= 1

    def renew(self, replaced: Callable[[str, Store], None]) -> None:
        """Reopen every store with the current credentials; `replaced` is called for each.

        An old store is closed when its last user is done, and not before `close_delay` seconds. A store that cannot be
        reopened stays in use.
        """
        with self._lock:
            locations = {source: entry.store.location for source, entry in self._open.items()}
        for source, location in locations.items():
            try:
                reopened = OpenStore(self._opener(location))
            except Exception as error:  # any error of a back end
                _log.error("%s cannot be reopened and stays in use with the old credentials: %s", location.url, error)
                continue
            with self._lock:
                old_store = self._open.get(source)
                if old_store is not None:
                    self._open[source] = reopened
                    replaced(source, reopened.store)
            self._close_later(old_store or reopened)

    def _close_later(self, old_store: OpenStore) -> None:
        timer = threading.Timer(self._close_delay, self._close_unused, [old_store])
        timer.daemon = True
        timer.start()

    def _close_unused(self, old_store: OpenStore) -> None:
        """Close a replaced store, now or after another delay."""
        with self._lock:
            users = old_store.users
        if users or self._busy(old_store.store):
            self._close_later(old_store)
        else:
            old_store.store.close()

    def __len__(self) -> int:
        return len(self._open)

    def _use(self, source: str, entry: OpenStore) -> OpenStore:
        entry.users += 1
        self._open.move_to_end(source)
        return entry

    def _make_room(self, source: str) -> list[tuple[str, Store]]:
        if source in self._open or len(self._open) < self._limit:
            return []
        for name, entry in self._open.items():
            if not entry.users:
                del self._open[name]
                return [(name, entry.store)]
        raise CapacityError(
            f"all {self._limit} stores that the sidecar may open are in use",
            hint="read it without the sidecar, or try again later",
        )
