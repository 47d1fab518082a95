"""Reads that clients ask the daemon for: opens, answered when the cache has the bytes, and announcements.

Purpose: between the sessions' state machines and the cache engine, with the stores in between.
Invariants: lives on the loop's thread, which never waits for a store: one that must be opened first, and an open that must wait,
go on in tasks and threads. A store is in use for as long as an open of it is in progress.
Failure behaviour: whatever a location or a store does, the client that asked hears of it and nobody else. While the daemon
drains, opens are answered with "read it yourself" and announcements are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.lease import Lease
from headrace.dataio.cache.objects import source_named
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import machine
from headrace.dataio.sidecar import messages as m
from headrace.dataio.sidecar.board import Board
from headrace.dataio.sidecar.reporting import group_of
from headrace.dataio.sidecar.served import Client, Tasks
from headrace.dataio.sidecar.stores import Stores
from headrace.dataio.store.base import Location, Store

_log = get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    """An open in progress. `location` is the store that is in use for it."""

    client: Client
    request: int
    location: Location | None
    timer: asyncio.TimerHandle


class Reads:
    """For all clients of one daemon."""

    def __init__(
        self, engine: Engine, stores: Stores, board: Board, loop: asyncio.AbstractEventLoop, tasks: Tasks
    ) -> None:
        self._engine, self._stores, self._board = engine, stores, board
        self._loop, self._tasks = loop, tasks
        self._arriving = threading.Lock()
        self._arrived: list[tuple[_Waiting, Future[Lease | None]]] = []
        self.draining = False

    def present(self, client: Client, request: m.Open) -> Lease | None:
        """A lease where all is present, the quick way for most reads: no store is looked at."""
        if self.draining:
            return None
        try:
            source = source_named(request.where.url, request.where.options)
        except Exception:  # options that nobody understands: said by `open`
            return None
        return self._engine.present(source, request.key, request.ranges, id(client))

    def grown(self, client: Client) -> machine.Grown:
        """Files that the client holds of which more is there than it knows: each that is told saves it a question."""
        return self._engine.grown(client.session.told)

    def open(self, client: Client, request: m.Open) -> None:
        """Answer when all is present."""
        if self.draining:
            client.carry_out(client.session.opened(request.id, None))
            return
        location = m.location(request.where)
        try:
            store = self._stores.acquire_open(location)
        except Exception as error:  # as below
            client.carry_out(client.session.open_failed(request.id, error))
            return
        if store is None:
            self._wait(client, request, location, None)
            return
        try:
            self.assign(client, request.trace)
            found = self._engine.open(store, request.key, request.ranges, id(client))
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            self._stores.release(location)
            client.carry_out(client.session.open_failed(request.id, error))
            return
        if not found.done():
            self._wait(client, request, location, found)
            return
        self._stores.release(location)
        client.carry_out(self._outcome(client, request.id, found))

    def prefetch(self, client: Client, request: m.Announce) -> None:
        """Follow an announcement."""
        if self.draining or client.opening:
            return
        location = m.location(request.where)
        store = self._stores.acquire_open(location)
        if store is not None:
            self._announce(client, store, location, request)
        else:
            client.opening = True
            self._tasks.spawn(self._open_and_announce(client, location, request))

    def assign(self, client: Client, trace: str = "") -> None:
        """What the client reads from stores counts for its job: by its own report, before that for its process group."""
        job = self._board.job_of(client.process) or client.job or group_of(client.process)
        if job != client.job and client.ready:
            client.job = job
            self._engine.assign(id(client), job)
        if trace and client.job:
            self._engine.asked_within(id(client), trace)

    def ended(self, client: Client) -> None:
        """The client is gone."""
        if client.job:
            self._engine.withdraw(id(client))

    def _wait(self, client: Client, request: m.Open, location: Location, future: Future[Lease | None] | None) -> None:
        self._board.waited(client.process, sum(length for _, length in request.ranges))
        timer = self._loop.call_later(request.deadline, lambda: client.carry_out(client.session.late(request.id)))
        if future is None:
            self._tasks.spawn(self._open_store(client, request, location, timer))
        else:
            self._await(_Waiting(client, request.id, location, timer), future)

    async def _open_store(
        self, client: Client, request: m.Open, location: Location, timer: asyncio.TimerHandle
    ) -> None:
        """The open of a store that must be opened first, in one of the loop's threads."""
        waiting = _Waiting(client, request.id, None, timer)
        try:
            store = await self._loop.run_in_executor(None, self._stores.acquire, location)
            waiting.location = location
            self.assign(client, request.trace)
            future = self._engine.open(store, request.key, request.ranges, id(client))
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            self._over(waiting, partial(client.session.open_failed, request.id, error))
        else:
            self._await(waiting, future)

    def _await(self, waiting: _Waiting, future: Future[Lease | None]) -> None:
        """Answer when the cache has the bytes. What its threads have at once is handed over together: waking the loop costs as
        much as an answer."""

        def arrived(future: Future[Lease | None]) -> None:
            with self._arriving:
                first = not self._arrived
                self._arrived.append((waiting, future))
            if first:
                with contextlib.suppress(RuntimeError):  # the daemon is over
                    self._loop.call_soon_threadsafe(self._deliver)

        future.add_done_callback(arrived)

    def _deliver(self) -> None:
        with self._arriving:
            arrived, self._arrived = self._arrived, []
        for waiting, future in arrived:
            try:
                self._over(waiting, partial(self._outcome, waiting.client, waiting.request, future))
            except Exception:
                _log.exception("an answer could not be given")

    def _over(self, waiting: _Waiting, answer: Callable[[], list[machine.Instruction]]) -> None:
        waiting.timer.cancel()
        if waiting.location is not None:
            self._stores.release(waiting.location)
        waiting.client.carry_out(answer())

    def _outcome(self, client: Client, request: int, future: Future[Lease | None]) -> list[machine.Instruction]:
        error = future.exception()
        if error is not None:
            return client.session.open_failed(request, error)
        return client.session.opened(request, future.result(), self.grown(client))

    async def _open_and_announce(self, client: Client, location: Location, request: m.Announce) -> None:
        try:
            store = await self._loop.run_in_executor(None, self._stores.acquire, location)
            self._announce(client, store, location, request)
        except Exception as error:  # a hint that cannot be followed; the open that comes will say why
            _log.debug("not prefetching from %s: %s", location.url, error)
        finally:
            client.opening = False

    def _announce(self, client: Client, store: Store, location: Location, request: m.Announce) -> None:
        if client.ready:
            self.assign(client, request.trace)
            self._engine.announce(id(client), store, request.upcoming)
        self._stores.release(location)
