"""Reads that clients ask the daemon for: opens, answered when the cache has the bytes, and announcements.

Purpose: between the sessions' state machines and the cache engine, with the stores in between.
Invariants: lives on the loop's thread, which never waits for a store: one that must be opened first, and an open that must wait,
go on in tasks and threads. A store is in use for as long as an open of it is in progress.
Failure behaviour: whatever a location or a store does, the client that asked hears of it and nobody else. While the daemon
drains, opens are answered with "read it yourself" and announcements are dropped.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from dataio.cache.engine import Engine
from dataio.cache.lease import Lease
from dataio.core.log import get_logger
from dataio.sidecar import messages as m
from dataio.sidecar.board import Board
from dataio.sidecar.reporting import group_of
from dataio.sidecar.served import Client, Tasks
from dataio.sidecar.stores import Stores
from dataio.store.contract import Location, Store

_log = get_logger(__name__)


class Reads:
    """For all clients of one daemon."""

    def __init__(
        self, engine: Engine, stores: Stores, board: Board, loop: asyncio.AbstractEventLoop, tasks: Tasks
    ) -> None:
        self._engine, self._stores, self._board = engine, stores, board
        self._loop, self._tasks = loop, tasks
        self.draining = False

    def open(self, client: Client, request: m.Open) -> None:
        """Answer at once where all is present; else when it is."""
        if self.draining:
            client.carry_out(client.session.opened(request.id, None))
            return
        location = m.location(request.where)
        store = self._stores.acquire_open(location)
        if store is None:
            self._wait(client, request, location, None)
            return
        try:
            found = self._ask(client, request, store)
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            self._stores.release(location)
            client.carry_out(client.session.open_failed(request.id, error))
            return
        if isinstance(found, Future) and not found.done():
            self._wait(client, request, location, found)
            return
        self._stores.release(location)
        if isinstance(found, Future):
            self._opened(client, request.id, found)
        else:
            client.carry_out(client.session.opened(request.id, found))

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

    def _ask(self, client: Client, request: m.Open, store: Store) -> Lease | Future[Lease | None]:
        """A lease where all is present, which is the quick way for most reads."""
        lease = self._engine.open_present(store, request.key, request.ranges, id(client))
        if lease is not None:
            return lease
        self.assign(client, request.trace)
        return self._engine.open(store, request.key, request.ranges, id(client))

    def _wait(self, client: Client, request: m.Open, location: Location, future: Future[Lease | None] | None) -> None:
        self._board.waited(client.process, sum(length for _, length in request.ranges))
        self._tasks.spawn(self._finish_open(client, request, location, future))

    async def _finish_open(
        self, client: Client, request: m.Open, location: Location, future: Future[Lease | None] | None
    ) -> None:
        acquired = future is not None
        timer = self._loop.call_later(request.deadline, lambda: client.carry_out(client.session.late(request.id)))
        try:
            if future is None:
                store = await self._loop.run_in_executor(None, self._stores.acquire, location)
                acquired = True
                self.assign(client, request.trace)
                future = self._engine.open(store, request.key, request.ranges, id(client))
            wrapped = asyncio.wrap_future(future)
            await asyncio.wait([wrapped])
            self._opened(client, request.id, wrapped)
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            client.carry_out(client.session.open_failed(request.id, error))
        finally:
            timer.cancel()
            if acquired:
                self._stores.release(location)

    def _opened(
        self, client: Client, request: int, future: Future[Lease | None] | asyncio.Future[Lease | None]
    ) -> None:
        error = future.exception()
        if error is not None:
            client.carry_out(client.session.open_failed(request, error))
        else:
            client.carry_out(client.session.opened(request, future.result()))

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
