"""The daemon: carries out what the sessions' state machines decide, in one asyncio loop.

Purpose: one process a node that holds the cache and the staged checkpoints.
Invariants: all state but the cache engine's lives on the loop's thread; a client can cost no more than its bounds (opens,
held files, outbox), and its end lets go of all it held. Jobs belong to the daemon: no client's end touches them.
Failure behaviour: SIGTERM and SIGINT drain: no new clients or jobs, opens are answered with "read it yourself", and staged
checkpoints are finished within `drain_seconds`; then `serve` returns True, or False when some were still running, which
then go on by themselves. A client that misbehaves loses its connection and nobody else notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dataio.cache.engine import Engine, Lease
from dataio.core import limits
from dataio.core.errors import MillraceError, UsageError
from dataio.core.log import get_logger
from dataio.sidecar import activation, machine, memory, paths, wire
from dataio.sidecar import messages as m
from dataio.sidecar.board import POINT_SECONDS
from dataio.sidecar.cachedir import CacheDirectories
from dataio.sidecar.config import RESTART, Config
from dataio.sidecar.peer import Peer
from dataio.sidecar.reporting import group_of
from dataio.sidecar.spans import job_span
from dataio.sidecar.status import StatusServer
from dataio.sidecar.stores import Stores
from dataio.sidecar.tier.room import Tier
from dataio.sidecar.transfer.job import Job
from dataio.sidecar.transfer.jobs import Jobs
from dataio.sidecar.transfer.schedule import Schedule
from dataio.sidecar.view import View, fitting
from dataio.store.contract import Location, Store

HELLO_SECONDS = 10.0
LISTED_CLIENTS = 64
STATUS_BYTES = limits.MESSAGE_BYTES - 1024

_log = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Client:
    session: machine.Session
    pid: int
    peer: Peer | None = None
    listener: Callable[[m.JobEvent], None] | None = None
    opening: bool = False  # the store of an announcement
    job: str = ""  # with which it shares limits
    staging: list[Job] = field(default_factory=list)
    """Jobs that were not answered yet."""

    @property
    def process(self) -> int:
        """The kernel's word for who it is; the client's own from another pid namespace, where the kernel has none."""
        return self.pid or self.session.client_pid


class Daemon:
    """One daemon; `serve` runs it to its end."""

    def __init__(
        self, config: Config, opener: Callable[[Location], Store], reload: Callable[[], Config] | None = None
    ) -> None:
        """`reload` reads the configuration again, for SIGHUP."""
        self._config, self._reload_config = config, reload
        self._clients: dict[int, _Client] = {}
        self._next = 1
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = time.time()
        self._port: int | None = None
        self._stopping = False
        self._opener = opener
        self._view = View()
        self._tier: Tier | None = None

    async def serve(self, ready: Callable[[], None] = lambda: None) -> bool:
        """Run until SIGTERM or SIGINT; whether every staged checkpoint was finished."""
        memory.settle()
        self._given = activation.listening()
        if self._given is not None:
            self._config = replace(self._config, socket=activation.path_of(self._given))
        lock = paths.claim(self._config.socket, there=self._given is not None)
        self._cache = CacheDirectories()
        try:
            self._loop = asyncio.get_running_loop()
            self._view.start()
            self._build()
            await self._serve(ready)
            return await self._drain()
        finally:
            if self._tier is not None:
                self._tier.close()
            self._view.close()
            self._cache.close()
            os.close(lock)

    def _build(self) -> None:
        files = _raise_descriptor_limit() // 4
        self._cache = CacheDirectories.claim(self._config.tiers, self._config.keep_cache)
        first, *slower = self._cache.places(self._config.cache_bytes)
        self._engine = Engine(
            first.path,
            first.budget,
            threads=self._config.fetch_threads,
            max_files=max(16, min(8192, files)),
            keep=first.keep,
            slower=slower,
            buffers=max(2, self._config.fetch_memory // limits.CACHE_BLOCK_BYTES),
        )
        self._engine.limit(self._config.job_limits)
        self._engine.subscribe(lambda file: self._call(partial(self._dropped, file)))
        self._stores = Stores(self._opener, self._engine.forget)
        wanted = self._config.tier
        self._tier = Tier(wanted) if wanted is not None else None
        commands = self._config.commands if self._tier is None else self._tier.commands(self._config.commands)
        self._jobs = Jobs(
            Path(f"{self._config.socket}.jobs"),
            commands,
            self._call,
            self._later,
            Schedule(self._config.running_jobs, self._config.queued_jobs, self._config.arena_bytes),
            self._config.lost_seconds,
        )
        self._view.saves.room = self._jobs.schedule.room
        self._jobs.adopt(self._show)

    async def _serve(self, ready: Callable[[], None]) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        http = StatusServer(self.status, self._view.history, lambda: not self._stopping)
        if self._config.http_port is not None:
            try:
                self._port = await http.start(self._config.http_port)
            except OSError as error:
                raise UsageError(
                    f"port {self._config.http_port} cannot be used: {error.strerror}",
                    hint="give another --http-port, or off",
                ) from None
        listening = self._given or _listen(self._config.socket)
        self._loop.add_reader(listening.fileno(), self._accept, listening)
        _log.info("ready on %s, cache in %s, status on port %s", self._config.socket, self._cache_names, self._port)
        self._tick()
        if self._tier is not None:
            self._tier.start()
        ready()
        await stop.wait()
        self._stopping = True
        self._loop.remove_reader(listening.fileno())
        listening.close()
        if self._given is None:
            self._config.socket.unlink(missing_ok=True)
        self._http = http

    def _reload(self) -> None:
        """SIGHUP: limits from the configuration, and stores opened anew, with the credentials of now."""
        try:
            config = self._reload_config() if self._reload_config is not None else self._config
        except MillraceError as error:
            _log.error("the configuration stays as it was: %s", error)
            return
        if self._given is not None:
            config = replace(config, socket=self._config.socket)
        fixed = [name for name in RESTART if getattr(config, name) != getattr(self._config, name)]
        if fixed:
            _log.warning("%s can only be changed by a restart", ", ".join(fixed))
        self._config = replace(config, **{name: getattr(self._config, name) for name in RESTART})
        self._engine.resize(*(place.budget for place in self._cache.places(self._config.cache_bytes)))
        self._engine.limit(self._config.job_limits)
        self._jobs.schedule.budget = self._config.arena_bytes
        self._loop.run_in_executor(None, self._stores.renew, self._engine.replace)
        _log.info("configuration and credentials were read again")

    async def _drain(self) -> bool:
        self._jobs.drain()
        until = self._loop.time() + self._config.drain_seconds
        if self._jobs.busy:
            _log.info("finishing %d staged checkpoints", self._jobs.busy)
        while self._jobs.busy and self._loop.time() < until:
            await asyncio.sleep(0.05)
        if left := self._jobs.busy:
            _log.error("stopping with %d staged checkpoints unfinished; those that run go on by themselves", left)
        for client in list(self._clients.values()):
            if client.peer is not None:
                client.peer.close("")
        for task in list(self._tasks):
            task.cancel()
        self._http.close()
        self._jobs.close()
        self._engine.close()
        return not left

    # connections

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, _ = listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptors left, as a rule: look again in a second, and not at once
            _log.error("cannot accept a client: %s", error.strerror)
            self._loop.remove_reader(listening.fileno())
            self._loop.call_later(1.0, self._accept_again, listening)
            return
        pid, uid = wire.peer(sock)
        if uid != os.geteuid():
            _log.warning("refusing process %d of user %d", pid, uid)
            sock.close()
        elif len(self._clients) >= self._config.clients:
            refusal = m.Refused(
                "capacity", f"the sidecar has {len(self._clients)} clients; the most is {len(self._clients)}"
            )
            sock.setblocking(False)
            with contextlib.suppress(OSError):
                wire.send(sock, wire.frame(m.encode(refusal)))
            sock.close()
        else:
            self._welcome(sock, pid)

    def _accept_again(self, listening: socket.socket) -> None:
        if not self._stopping:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _welcome(self, sock: socket.socket, pid: int) -> None:
        number, self._next = self._next, self._next + 1
        client = _Client(machine.Session(os.getpid()), pid)
        client.listener = lambda event: self._carry_out(client, client.session.job(event))
        self._clients[number] = client
        client.peer = Peer(
            sock, self._loop, lambda payload, fds: self._received(client, payload, fds), lambda: self._ended(number)
        )
        self._loop.call_later(HELLO_SECONDS, self._expect_hello, number)

    def _expect_hello(self, number: int) -> None:
        client = self._clients.get(number)
        if client is not None and client.peer is not None and client.session.state == "new":
            client.peer.close("it did not say hello")

    def _received(self, client: _Client, payload: bytes, descriptors: tuple[int, ...]) -> None:
        try:
            message = m.decode_from_client(payload)
        except MillraceError as error:
            wire.close_all(descriptors)
            self._carry_out(client, [machine.HangUp(error.message)])
            return
        self._carry_out(client, client.session.received(message, descriptors))

    def _ended(self, number: int) -> None:
        client = self._clients.pop(number)
        client.session.over()
        self._view.board.ended(id(client), client.process)
        if client.listener is not None:
            self._jobs.leave(client.listener)
        for job in client.staging:
            self._jobs.withdraw(job)
        if client.job:
            self._engine.withdraw(id(client))

    def _dropped(self, file: int) -> None:
        for client in list(self._clients.values()):
            self._carry_out(client, client.session.dropped(file))

    # instructions

    def _carry_out(self, client: _Client, instructions: list[machine.Instruction]) -> None:
        peer = client.peer
        if peer is None:
            return
        for instruction in instructions:
            match instruction:
                case machine.Send(message, lease):
                    descriptor = lease.descriptor if isinstance(lease, Lease) else None
                    peer.send(m.encode(message), descriptor)
                case machine.StartOpen(request):
                    self._open(client, request)
                case machine.Prefetch(request):
                    self._prefetch(client, request)
                case machine.Touch(files):
                    self._engine.touch(files)
                case machine.StartJob():
                    self._stage(client, instruction)
                case machine.FollowJob(id, token):
                    self._follow(client, id, token)
                case machine.StartRecall(request):
                    self._spawn(self._recall(client, request))
                case machine.Report(id):
                    peer.send(m.encode(m.Status(id, fitting(self.status(), STATUS_BYTES))))
                case machine.Record(report):
                    self._reported(client, report)
                case machine.Discard(descriptors):
                    wire.close_all(descriptors)
                case machine.HangUp(reason):
                    peer.hang_up(reason)

    def _open(self, client: _Client, request: m.Open) -> None:
        if self._stopping:
            self._carry_out(client, client.session.opened(request.id, None))
            return
        location = m.location(request.where)
        try:
            store = self._stores.acquire_open(location)
            if store is not None:
                lease = self._engine.open_present(store, request.key, request.ranges, id(client))
                if lease is not None:
                    self._stores.release(location)
                    self._carry_out(client, client.session.opened(request.id, lease))
                    return
                self._assign(client, request.trace)
                future = self._engine.open(store, request.key, request.ranges, id(client))
                if future.done():
                    self._stores.release(location)
                    self._opened(client, request.id, future)
                    return
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            self._carry_out(client, client.session.open_failed(request.id, error))
            return
        self._view.board.waited(client.process, sum(length for _, length in request.ranges))
        self._spawn(self._finish_open(client, request, location, future if store is not None else None))

    async def _finish_open(
        self, client: _Client, request: m.Open, location: Location, future: Future[Lease | None] | None
    ) -> None:
        acquired = future is not None
        timer = self._loop.call_later(
            request.deadline, lambda: self._carry_out(client, client.session.late(request.id))
        )
        try:
            if future is None:
                store = await self._loop.run_in_executor(None, self._stores.acquire, location)
                acquired = True
                self._assign(client, request.trace)
                future = self._engine.open(store, request.key, request.ranges, id(client))
            wrapped = asyncio.wrap_future(future)
            await asyncio.wait([wrapped])
            self._opened(client, request.id, wrapped)
        except Exception as error:  # whatever a location or a store does, this client alone hears of it
            self._carry_out(client, client.session.open_failed(request.id, error))
        finally:
            timer.cancel()
            if acquired:
                self._stores.release(location)

    def _opened(
        self, client: _Client, request: int, future: Future[Lease | None] | asyncio.Future[Lease | None]
    ) -> None:
        error = future.exception()
        if error is not None:
            self._carry_out(client, client.session.open_failed(request, error))
        else:
            self._carry_out(client, client.session.opened(request, future.result()))

    def _prefetch(self, client: _Client, request: m.Announce) -> None:
        if self._stopping or client.opening:
            return
        location = m.location(request.where)
        store = self._stores.acquire_open(location)
        if store is not None:
            self._announce(client, store, location, request)
        else:
            client.opening = True
            self._spawn(self._open_and_announce(client, location, request))

    async def _open_and_announce(self, client: _Client, location: Location, request: m.Announce) -> None:
        try:
            store = await self._loop.run_in_executor(None, self._stores.acquire, location)
            self._announce(client, store, location, request)
        except Exception as error:  # a hint that cannot be followed; the open that comes will say why
            _log.debug("not prefetching from %s: %s", location.url, error)
        finally:
            client.opening = False

    def _announce(self, client: _Client, store: Store, location: Location, request: m.Announce) -> None:
        if client.session.state == "ready":
            self._assign(client, request.trace)
            self._engine.announce(id(client), store, request.upcoming)
        self._stores.release(location)

    def _stage(self, client: _Client, request: machine.StartJob) -> None:
        job = self._jobs.submit(
            request.kind,
            request.arena,
            request.plan,
            lambda answer: self._staged(client, request.id, answer),
            about=request.about,
            urgent=request.urgent,
            wait=request.wait,
        )
        if job is not None:
            client.staging.append(job)
            self._show(job)
            self._jobs.follow(job, job_span(request.kind, request.about, request.trace))

    def _show(self, job: Job) -> None:
        """On the page, from now on."""
        listener = self._view.saves.listener(job.token, job.entry.about, lambda: self._jobs.state(job))
        self._jobs.follow(job, listener)

    def _staged(self, client: _Client, request: int, answer: Job | MillraceError) -> None:
        client.staging = [job for job in client.staging if job is not answer]
        if isinstance(answer, MillraceError):
            self._carry_out(client, client.session.refused(request, answer))
            return
        self._carry_out(client, client.session.staged(request, answer.token))
        if client.listener is not None and client.session.state == "ready":
            self._jobs.follow(answer, client.listener)

    async def _recall(self, client: _Client, request: m.Recall) -> None:
        there = False
        if self._tier is not None:
            there = await self._loop.run_in_executor(self._tier.pool, self._tier.recall, request.source, request.key)
        self._carry_out(client, client.session.recalled(request.id, there))

    def _follow(self, client: _Client, request: int, token: str) -> None:
        try:
            job = self._jobs.find(token)
        except MillraceError as error:
            self._carry_out(client, client.session.refused(request, error))
            return
        self._carry_out(client, client.session.staged(request, token))
        if client.listener is not None and client.session.state == "ready":
            self._jobs.follow(job, client.listener)

    def _reported(self, client: _Client, report: m.Report) -> None:
        self._view.board.report(id(client), client.process, report)
        if client.job:
            self._assign(client)

    def _assign(self, client: _Client, trace: str = "") -> None:
        """What the client reads from stores counts for its job: by its own report, before that for its process group."""
        job = self._view.board.job_of(client.process) or client.job or group_of(client.process)
        if job != client.job and client.session.state == "ready":
            client.job = job
            self._engine.assign(id(client), job)
        if trace and client.job:
            self._engine.asked_within(id(client), trace)

    # state

    def status(self) -> dict[str, object]:
        """The daemon's state, fit for JSON and bounded in size."""
        clients = list(self._clients.values())
        return {
            "pid": os.getpid(),
            "protocol": m.VERSION,
            "socket": str(self._config.socket),
            "http_port": self._port,
            "draining": self._stopping,
            "uptime_seconds": round(time.time() - self._started, 3),
            "cache": {
                "directory": self._cache_names,
                **self._engine.stats(),
                "tiers": self._engine.tier_stats(),
            },
            "prefetch": self._engine.prefetch_stats(),
            "fetching": self._engine.turns(),
            "stores": len(self._stores),
            "clients": len(clients),
            "client_list": [
                {"pid": c.pid, "held_files": c.session.held, "opens": c.session.opens} for c in clients[:LISTED_CLIENTS]
            ],
            "jobs": self._jobs.status(),
            "tier": self._tier.status() if self._tier is not None else None,
            **self._view.status(time.time()),
        }

    @property
    def _cache_names(self) -> str:
        return ", ".join(str(tier) for tier in self._config.tiers)

    def _tick(self) -> None:
        """A point of the charts."""
        self._view.tick(self._engine.stats(), self._engine.tier_stats())
        self._loop.call_later(POINT_SECONDS, self._tick)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(seconds, action).cancel

    def _call(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread, from any thread; nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(os.fspath(path))
    path.chmod(0o600)  # the directory is private already
    sock.listen(1024)
    return sock


def _raise_descriptor_limit() -> int:
    """As many descriptors as this user may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
