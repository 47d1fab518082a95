"""The daemon: one process per node that owns the cache and the staged checkpoints, in one asyncio loop.

Purpose: the daemon's life cycle, from the lock of the socket to the drain, and its status. `connections`, `reads` and
`staging` serve the clients' requests.
Invariants: the daemon's state belongs to the loop's thread. Only the cache engine, the open stores and the local tier
have locks of their own. A daemon without clients and jobs records no history (`Ticker`).
Failure behaviour: SIGTERM and SIGINT drain the daemon. It accepts no new clients or jobs, answers opens with
`bypassed`, and waits up to `drain_seconds` for staged checkpoints. `serve` returns True if all of them have ended, else
False; running workers continue without the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from headrace.dataio.cache.engine import Engine
from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, UsageError
from headrace.dataio.core.files import storage_kind
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar import paths, systemd
from headrace.dataio.sidecar.cache_directory import CacheDirectories
from headrace.dataio.sidecar.connections import BackgroundTasks, ConnectionManager
from headrace.dataio.sidecar.job_stats import POINT_SECONDS
from headrace.dataio.sidecar.jobs.job_service import JobService
from headrace.dataio.sidecar.jobs.schedule import RetrySchedule, Schedule
from headrace.dataio.sidecar.metrics import Figures
from headrace.dataio.sidecar.protocol import VERSION
from headrace.dataio.sidecar.reads import ReadService, StoreCache
from headrace.dataio.sidecar.settings import RESTART, Config
from headrace.dataio.sidecar.staging import StagingService
from headrace.dataio.sidecar.status import StatusView
from headrace.dataio.sidecar.status_server import MetricsServer, StatusServer
from headrace.dataio.sidecar.tier.tier_service import TierService
from headrace.dataio.store.base import Location, Store

MAX_KEPT_FILES, MAX_UNNAMED_FILES, MAX_CACHE_DESCRIPTORS = 1 << 18, 8192, 4096
"""Maximum numbers of named cache files, of unnamed ones (each has a descriptor), and of descriptors of files in use.

The last two are at most a fifth of the process's limit each.
"""

_log = get_logger(__name__)


class Daemon:
    """One daemon. Call `serve` once."""

    def __init__(
        self, config: Config, opener: Callable[[Location], Store], reload: Callable[[], Config] | None = None
    ) -> None:
        """`reload` reads the configuration again, for SIGHUP."""
        self._config, self._reload_config = config, reload
        self._started = time.time()
        self._version = version("headrace")
        self._port: int | None = None
        self._metrics_port: int | None = None
        self._stopping = False
        self._opener = opener
        self._view = StatusView(self._figures)
        self._tier: TierService | None = None

    async def serve(self, ready: Callable[[], None] = lambda: None) -> bool:
        """Run until SIGTERM or SIGINT. Returns whether every staged checkpoint has ended."""
        limit_malloc_arenas()
        self._inherited = systemd.listening()
        if self._inherited is not None:
            self._config = replace(self._config, socket=systemd.path_of(self._inherited))
        lock = paths.claim(self._config.socket, keep=self._inherited is not None)
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
        self._build_cache()
        self._build_jobs()
        self._view.saves.room = self._jobs.room
        self._ticker = Ticker(POINT_SECONDS, record=self._view.tick, busy=self._busy, later=self._loop.call_later)
        self._tasks, job_stats = BackgroundTasks(self._loop), self._view.job_stats
        self._reads = ReadService(
            self._engine, stores=self._stores, job_stats=job_stats, loop=self._loop, tasks=self._tasks
        )
        staging = StagingService(
            self._jobs, tier=self._tier, saves=self._view.saves, loop=self._loop, tasks=self._tasks
        )
        self._clients = ConnectionManager(
            self._loop,
            self._engine,
            job_stats=job_stats,
            reads=self._reads,
            staging=staging,
            limit=lambda: self._config.clients,
            status=self.status,
            on_connect=self._ticker.wake,
        )
        self._engine.subscribe(lambda file: self._call(partial(self._clients.dropped, file)))
        self._jobs.adopt(staging.show)

    def _build_cache(self) -> None:
        files = _raise_descriptor_limit() // 5
        self._cache = CacheDirectories.claim(self._config.tiers, self._config.keep_cache)
        fastest, *slower = self._cache.places(self._config.cache_bytes)
        self._engine = Engine(
            fastest.path,
            fastest.budget,
            threads=self._config.fetch_threads,
            max_files=max(16, min(MAX_UNNAMED_FILES, files)),
            max_kept_files=MAX_KEPT_FILES,
            descriptors=max(16, min(MAX_CACHE_DESCRIPTORS, files)),
            keep=fastest.keep,
            slower=slower,
            buffers=max(2, self._config.fetch_memory // limits.CACHE_BLOCK_BYTES),
        )
        self._engine.limit(self._config.job_limits)
        self._media = {str(place.path): storage_kind(place.path) for place in (fastest, *slower)}
        self._stores = StoreCache(self._opener, closing=self._engine.forget, busy=self._engine.fetches_from)

    def _build_jobs(self) -> None:
        config, tier = self._config, self._config.tier
        self._tier = TierService(tier) if tier is not None else None
        self._jobs = JobService(
            Path(f"{config.socket}.jobs"),
            commands=config.commands if self._tier is None else self._tier.commands(config.commands),
            call=self._call,
            later=self._later,
            schedule=Schedule(config.running_jobs, config.queued_jobs, config.arena_bytes),
            lost_seconds=config.lost_seconds,
            retry_schedule=RetrySchedule(config.retry_seconds),
        )

    async def _serve(self, ready: Callable[[], None]) -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, stop.set)
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        await self._serve_http()
        listening = self._inherited or _listen(self._config.socket)
        self._clients.listen(listening)
        _log.info("ready on %s, cache in %s, status on port %s", self._config.socket, self._cache_names, self._port)
        self._ticker.wake()
        if self._tier is not None:
            self._tier.start()
        ready()
        await stop.wait()
        self._stopping = self._reads.draining = True
        self._clients.stop_listening()
        if self._inherited is None:
            self._config.socket.unlink(missing_ok=True)

    async def _serve_http(self) -> None:
        self._http = StatusServer(self.status, self._view.history, lambda: not self._stopping)
        self._metrics = MetricsServer(lambda: not self._stopping)
        if self._config.http_port is not None:
            try:
                self._port = await self._http.start(self._config.http_port)
            except OSError as error:
                raise UsageError(
                    f"port {self._config.http_port} cannot be used: {error.strerror}",
                    hint="give another --http-port, or off",
                ) from None
        if (address := self._config.metrics_listen) is not None:
            try:
                self._metrics_port = await self._metrics.start(address.port, address.host)
            except OSError as error:
                raise UsageError(
                    f"{address} cannot be used: {error.strerror}", hint="give another --metrics-listen, or off"
                ) from None

    def _reload(self) -> None:
        """Handle SIGHUP: apply the configuration's limits, and reopen the stores with the current credentials."""
        try:
            config = self._reload_config() if self._reload_config is not None else self._config
        except HeadraceError as error:
            _log.error("the configuration is unchanged: %s", error)
            return
        if self._inherited is not None:
            config = replace(config, socket=self._config.socket)
        fixed = [name for name in RESTART if getattr(config, name) != getattr(self._config, name)]
        if fixed:
            _log.warning("%s can only be changed by a restart", ", ".join(fixed))
        self._config = replace(config, **{name: getattr(self._config, name) for name in RESTART})
        in_use = [int(str(tier["used_bytes"])) for tier in self._engine.tier_stats()]
        self._engine.resize(*(place.budget for place in self._cache.places(self._config.cache_bytes, in_use)))
        self._engine.limit(self._config.job_limits)
        self._jobs.schedule.budget = self._config.arena_bytes
        self._loop.run_in_executor(None, self._stores.renew, self._engine.replace)
        _log.info("configuration and credentials were read again")

    async def _drain(self) -> bool:
        self._jobs.drain()
        until = self._loop.time() + self._config.drain_seconds
        _log.info("draining: %s to finish", limits.counted(self._jobs.busy, "staged checkpoint"))
        while self._jobs.busy and self._loop.time() < until:
            await asyncio.sleep(0.05)
        if unfinished := self._jobs.busy:
            _log.error(
                "stopping with %d staged checkpoints unfinished; running workers continue without the daemon",
                unfinished,
            )
        self._clients.close()
        self._tasks.cancel()
        self._http.close()
        self._metrics.close()
        self._jobs.close()
        self._engine.close()
        return not unfinished

    # state

    def status(self) -> dict[str, object]:
        """The daemon's state, as JSON values of bounded size."""
        return {
            "pid": os.getpid(),
            "protocol": VERSION,
            "version": self._version,
            "socket": str(self._config.socket),
            "http_port": self._port,
            "metrics_port": self._metrics_port,
            "draining": self._stopping,
            "uptime_seconds": round(time.time() - self._started, 3),
            "cache": {
                "directory": self._cache_names,
                **self._engine.stats(),
                "tiers": [
                    {**tier, "medium": self._media[str(tier["directory"])]} for tier in self._engine.tier_stats()
                ],
            },
            "prefetch": self._engine.prefetch_stats(),
            "fetching": self._engine.queue_stats(),
            "stores": len(self._stores),
            "clients": len(self._clients),
            "client_list": list(self._clients.listed()),
            "jobs": self._jobs.status(),
            "tier": self._tier.status() if self._tier is not None else None,
            **self._view.status(time.time()),
        }

    @property
    def _cache_names(self) -> str:
        return ", ".join(str(tier) for tier in self._config.tiers)

    def _figures(self) -> Figures:
        return self._engine.stats(), self._engine.tier_stats()

    def _busy(self) -> bool:
        """Whether there are clients or jobs, so the state may change without a new client."""
        return bool(len(self._clients) or self._jobs.busy)

    def _later(self, seconds: float, action: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(seconds, action).cancel

    def _call(self, action: Callable[[], None]) -> None:
        """Run `action` on the loop's thread, from any thread. Does nothing when the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)


def _listen(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    sock.bind(os.fspath(path))
    path.chmod(0o600)  # an additional protection: the directory is private
    sock.listen(1024)
    return sock


def _raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard limit; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = hard if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < target:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_M_ARENA_MAX = -8


def limit_malloc_arenas() -> None:
    """Limit malloc to one arena, which saves memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


class Ticker:
    """Records a point of the history every `seconds`, while something changes.

    `record()` records a point, and returns whether it differs from the last one. `busy()` returns whether the state may
    change without a `wake`. `later(seconds, action)` schedules a call.
    """

    def __init__(
        self,
        seconds: float,
        *,
        record: Callable[[], bool],
        busy: Callable[[], bool],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._seconds, self._record, self._busy, self._later = seconds, record, busy, later
        self._scheduled = False

    def wake(self) -> None:
        """The state may change from now on: record a point now, and further ones every `seconds`."""
        if not self._scheduled:
            self._scheduled = True
            self._record()
            self._later(self._seconds, self._tick)

    def _tick(self) -> None:
        self._scheduled = self._record() or self._busy()
        if self._scheduled:
            self._later(self._seconds, self._tick)
