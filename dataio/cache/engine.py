"""Runs the cache plan: threads that fetch blocks from stores into files, and futures for the requests that wait.

Purpose: the same engine serves a single trainer process and the daemon.
Invariants: the plan is used only under the lock; stores and futures are used only outside it. A block that several
requests need at the same time is fetched once, and all of them get the bytes or the store's error. Errors are not
cached.
Failure behaviour: when a tier's disk fails (full, missing, read-only), the engine logs one warning, and the tier admits
no new blocks for `disks.RECOVER_SECONDS`. Without a working tier the future of `open` gives None: read the store
directly. When another program deleted a cache file, the engine drops it. When the process has no free descriptor,
requests get None, and nothing is dropped. After `close` every pending future fails.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from headrace.dataio.cache import disks
from headrace.dataio.cache.announcements import ANNOUNCED, AnnouncingStream, Forecast, Upcoming, check_inside
from headrace.dataio.cache.blocks import Lease
from headrace.dataio.cache.counters import ReadCounters
from headrace.dataio.cache.disks import DiskError, Disks, TierDirectory
from headrace.dataio.cache.fetcher import Fetcher, FetchResult, FetchTask
from headrace.dataio.cache.objects import Objects
from headrace.dataio.cache.plan import CachePlan
from headrace.dataio.cache.plan.events import Bypass, Create, Drop, Failed, Fetch, Instruction, ObjectId, Ready
from headrace.dataio.cache.scheduling import JobLimits
from headrace.dataio.core import limits, metrics
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError, RangeError, TransientError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

ENDED = 256
"""Maximum number of ended leases that wait to be processed."""
RUNS = 256
"""Maximum number of present runs that a lease lists."""
GROWN_KNOWN, GROWN_FILES, GROWN_RUNS = 256, 16, 32
"""Maximum number of files that `grown` checks and returns, and of runs of each."""

_log = get_logger(__name__)
Ranges = Sequence[tuple[int, int]]


class Engine:
    """A cache of `budget` bytes in `directory`, and in the further tiers `slower`. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        budget: int,
        *,
        threads: int = 8,
        max_files: int = 1024,
        max_kept_files: int | None = None,
        descriptors: int = 256,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        clock: Clock = SYSTEM_CLOCK,
        keep: bool = False,
        slower: Sequence[TierDirectory] = (),
        buffers: int | None = None,
    ) -> None:
        """Create the engine, adopt the files of an earlier one, and start the threads.

        Args:
            directory: Directory of the fastest tier's files.
            budget: Maximum size of that tier in bytes.
            threads: Maximum number of concurrent requests to stores.
            max_files: Maximum number of cache files of a tier that keeps no files. Each has a descriptor.
            max_kept_files: Maximum number of files of a tier that keeps them; by default `max_files`. They have no
                descriptor while they are not used.
            descriptors: Maximum number of descriptors that stay open for the files that were used last.
            block_bytes: Size of a block.
            clock: Replaced in tests.
            keep: Whether files outlive the engine and are adopted by the next one.
            slower: Further tiers, fastest first.
            buffers: Maximum number of blocks in flight; by default as many as threads.
        """
        buffers = buffers or threads
        tiers = (TierDirectory(directory, budget, keep), *slower)
        self._clock, self._objects = clock, Objects(clock)
        self._disks = Disks(tiers, block_bytes, clock, descriptors)
        self._listeners: dict[int, Callable[[int], None]] = {}
        self._plan = CachePlan(
            [tier.budget for tier in tiers],
            block_bytes=block_bytes,
            max_files=[(max_kept_files or max_files) if tier.keep else max_files for tier in tiers],
            max_ring_files=max(4, max_files // 4),
        )
        self._lock = threading.Lock()
        self._sources: dict[str, Store] = {}
        self._waiting: dict[int, Future[Lease | None]] = {}
        self._ended_holds: deque[int] = deque()
        self._jobs: dict[int, str] = {}  # by stream
        self._trace_parents: dict[int, str] = {}  # by stream: the span of its last request
        self._announcing: dict[int, AnnouncingStream] = {}
        self._tickets, self._listener_numbers = itertools.count(), itertools.count()
        self._closed = False
        self._counters = ReadCounters(len(tiers))
        self._forecast = Forecast()
        self._adopt()
        self._num_lookups = max(1, threads // 2)
        self._fetcher = Fetcher(
            threads=threads, buffers=buffers, block_bytes=block_bytes, clock=clock, on_fetched=self._on_fetched
        )
        self._plan.set_prefetch_limits(*self._fetcher.prefetch_limits())

    def open(self, store: Store, key: str, ranges: Ranges, stream: int = 0) -> Future[Lease | None]:
        """Get ranges of an object into a cache file.

        Args:
            store: The store of the object.
            key: The object's key.
            ranges: (offset, length) in bytes.
            stream: The stream under which the caller announces reads, 0 for none.

        Returns:
            A future of a lease on a file that holds the ranges, or of None: read the store directly. It fails with
            `RangeError` for a range past the end of the object, and with the store's own errors.
        """
        future: Future[Lease | None] = Future()
        future.set_running_or_notify_cancel()  # cancel() has no effect from here on
        obj = self._objects.known(store, key)
        if obj is not None:
            self._request(store, obj, ranges, future, stream)
        else:
            request = partial(self._stat_then_request, store, key, ranges, future, stream)
            self._fetcher.submit(lambda: self._guard(future, request))
        return future

    def open_present(self, store: Store, key: str, ranges: Ranges, stream: int = 0) -> Lease | None:
        """The lease that `open` would give, if all ranges are present now; None otherwise, also for an invalid range."""
        return self.present(self._objects.source(store), key, ranges, stream)

    def present(self, source: str, key: str, ranges: Ranges, stream: int = 0) -> Lease | None:
        """As `open_present`, for a store given by name (`objects.source_of`), which need not be open."""
        obj = self._objects.known_as(source, key)
        if obj is None:
            return None
        size, end = 0, obj.size
        for offset, length in ranges:
            if offset + length > end:
                return None
            size += length
        if len(self._ended_holds) > ENDED:
            self._run([])
        with self._lock:
            file = self._plan.take(obj, ranges)  # type: ignore[arg-type]  # any sequence of pairs works
            if file is None or file not in self._disks.files:
                return None
            lease = self._lease(file, False)
            if lease is not None:
                self._counters.add(size, present=True, bypassed=False, announced=bool(stream))
                self._counters.hit(self._plan.tier_of(file), size)
            return lease

    def grown(self, known_runs: Mapping[int, Sequence[tuple[int, int]]]) -> list[tuple[int, list[tuple[int, int]]]]:
        """Some of the files in `known_runs` that have more present bytes now, with their runs.

        `known_runs` maps a file to the run list that the client got last. It must be the same list object that
        `Lease.present` or `grown` returned.
        """
        if len(known_runs) > GROWN_KNOWN:
            return []
        with self._lock:
            return self._plan.grown(known_runs, GROWN_FILES, GROWN_RUNS)

    def announce(self, stream: int, store: Store, upcoming: Upcoming) -> None:
        """Prefetch these (key, offset, length), soonest first. Replaces the last announcement of `stream`."""
        with self._lock:
            announcing = self._announcing.setdefault(stream, AnnouncingStream())
            announcing.newest, scheduled, announcing.busy = (store, upcoming[:ANNOUNCED]), announcing.busy, True
            actions = self._execute(self._plan.reads_in_order(stream, self._objects.source(store)))
        _run_all(actions)
        if scheduled:
            return
        unknown = self._objects.unknown(
            store, dict.fromkeys([key for key, _, _ in announcing.announced.new_part(upcoming)])
        )
        if not unknown:
            self._announce(stream)  # needs no request to a store, and waking a thread would take as long
            return
        self._fetcher.submit(lambda: self._announce(stream))
        remaining = deque(unknown[1:])  # in parallel: each is a round trip
        for _ in range(min(self._num_lookups, len(remaining))):
            self._fetcher.submit(partial(self._look_up, store, remaining))

    def withdraw(self, stream: int) -> None:
        """End the stream: forget its announcement, job and trace context."""
        with self._lock:
            self._announcing.pop(stream, None)
            self._jobs.pop(stream, None)
            self._trace_parents.pop(stream, None)
            self._forecast.forget(stream)
            actions = self._execute(self._plan.withdraw(stream))
        _run_all(actions)

    def assign(self, stream: int, job: str) -> None:
        """Count the stream's fetches for this job's queue and limits, until `withdraw`.

        By default each stream is a job of its own.
        """
        with self._lock:
            self._jobs[stream] = job

    def set_trace_parent(self, stream: int, trace: str) -> None:
        """Record the stream's fetches under this trace context (`headrace.dataio.core.tracing.context`)."""
        with self._lock:
            self._trace_parents[stream] = trace

    def limit(self, limits: JobLimits) -> None:
        """Set the limits of each job."""
        self._fetcher.limit(limits)

    def queue_stats(self) -> dict[str, dict[str, int]]:
        """Waiting and running fetches of each job."""
        return self._fetcher.queue_stats()

    def subscribe(self, dropped: Callable[[int], None]) -> Callable[[], None]:
        """Call `dropped(file)`, from any thread, when the cache drops a file; returns a function that unsubscribes."""
        # atomic dict operations instead of the lock: the garbage collector may unsubscribe while this thread holds it
        self._listeners[number := next(self._listener_numbers)] = dropped
        return lambda: self._listeners.pop(number, None) and None

    def live(self, file: int) -> bool:
        """Whether the cache still has this file."""
        return file in self._disks.files

    def touch(self, files: Sequence[int]) -> None:
        """Mark files as recently used; their holders read from them without a request."""
        with self._lock:
            for file in files:
                self._plan.touch(file)

    def forget(self, source: str) -> None:
        """Stop fetching from the store until a request passes it again. Call this before the store is closed."""
        with self._lock:
            self._sources.pop(source, None)

    def resize(self, *budgets: int) -> None:
        """Set the budget of each tier in bytes; a smaller one takes effect as holders close their files."""
        with self._lock:
            actions = self._execute(self._plan.resize(budgets))
        _run_all(actions)

    def fetches_from(self, store: Store) -> bool:
        """Whether a fetch from this store is queued or running."""
        return self._fetcher.fetches_from(store)

    def replace(self, source: str, store: Store) -> None:
        """Fetch from `store` instead of the store that the engine uses for `source`, if there is one."""
        with self._lock:
            if source in self._sources:
                self._sources[source] = store

    def stats(self) -> dict[str, int | bool]:
        """Byte and file counts for the status."""
        self._run([])
        with self._lock:
            self._counters.report()
            return {**self._plan.counts(), **self._counters.totals, "paused": self._disks.paused}

    def tier_stats(self) -> list[dict[str, object]]:
        """Each tier's directory, its budget, usage and hits in bytes, and whether it is paused after a disk error."""
        with self._lock:
            return self._counters.tier_stats(self._disks.tiers, self._plan.tiers)

    def prefetch_stats(self) -> dict[str, float | int]:
        """Statistics of prefetching: the window, reads that were ready in time, and the forecast's error."""
        with self._lock:
            ready, late = self._counters.totals["reads_ready"], self._counters.totals["reads_late"]
            return {
                "reads_ready": ready,
                "reads_late": late,
                **self._forecast.report(),
                **self._fetcher.report(),
            }

    def close(self) -> None:
        """Close the engine; requests that still wait fail with `TransientError`.

        The threads end when their queued work is done. This does not wait for them.
        """
        with self._lock:
            self._closed = True
            self._counters.report()
            waiting, self._waiting = list(self._waiting.values()), {}
            self._disks.clear()
        self._fetcher.close()
        for future in waiting:
            future.set_exception(TransientError("the cache was closed"))

    # requests

    def _stat_then_request(
        self, store: Store, key: str, ranges: Ranges, future: Future[Lease | None], stream: int
    ) -> None:
        self._request(store, self._objects.find(store, key), ranges, future, stream)

    def _request(self, store: Store, obj: ObjectId, ranges: Ranges, future: Future[Lease | None], stream: int) -> None:
        try:
            check_inside(obj, ranges)
        except RangeError as error:
            future.set_exception(error)
            return
        ticket, pairs = next(self._tickets), tuple((offset, length) for offset, length in ranges)
        size = sum(length for _, length in pairs)
        with self._lock:
            self._waiting[ticket] = future
            self._recover()
            self._sources[obj.source] = store
            present = self._plan.has_all(obj, pairs)
            instructions = [] if self._closed else self._plan.request(ticket, obj, pairs, stream)
            for ready in (instruction for instruction in instructions if present and isinstance(instruction, Ready)):
                self._counters.hit(self._plan.tier_of(ready.file), size if ready.ticket == ticket else 0)
            actions = self._execute(instructions)
            bypassed = Bypass(ticket) in instructions
            self._counters.add(size, present=present, bypassed=bypassed, announced=bool(stream))
        if self._closed:
            actions = [self._resolve(ticket, TransientError("the cache is closed"))]
        _run_all(actions)

    def _announce(self, stream: int) -> None:
        """Process a stream's announcements until there is no newer one.

        At most one thread does so per stream, which keeps the announcements in order.
        """
        while True:
            with self._lock:
                announcing = self._announcing.get(stream)
                if announcing is None:  # withdrawn
                    return
                announcing.busy = announcing.newest is not None
                if announcing.newest is None:
                    return
                (store, upcoming), announcing.newest = announcing.newest, None
            try:
                self._renew_announcement(stream, announcing, store, upcoming)
            except Exception:  # an announcement is a hint: the reads report the error
                _log.exception("not prefetching from %s", store.location.url)

    def _look_up(self, store: Store, keys: deque[str]) -> None:
        """Look up objects before they are needed. Errors are raised by the reads that need them."""
        while not self._closed:
            try:
                self._objects.find(store, keys.popleft())
            except IndexError:
                return
            except HeadraceError as error:
                _log.debug("not prefetching: %s", error)

    def _renew_announcement(self, stream: int, announcing: AnnouncingStream, store: Store, upcoming: Upcoming) -> None:
        reads = announcing.announced.renew(upcoming, self._plan.block_bytes, self._objects.finder(store))
        with self._lock:
            if self._closed or stream not in self._announcing:
                return
            self._recover()
            source, now = self._objects.source(store), self._clock.monotonic()
            self._sources[source] = store
            self._plan.set_prefetch_limits(*self._fetcher.prefetch_limits())
            wants = announcing.announced.wants(self._forecast.announced(stream, reads, now))
            actions = self._execute(self._plan.announce(stream, source, wants))
        _run_all(actions)

    # instructions

    def _run(self, instructions: list[Instruction], error: BaseException | None = None) -> None:
        with self._lock:
            actions = self._execute(instructions, error)
        _run_all(actions)

    def _execute(self, instructions: list[Instruction], error: BaseException | None = None) -> list[Callable[[], None]]:
        """Execute `instructions`, and the further ones that they cause, under the lock.

        Returns the actions to run outside the lock.
        """
        todo, actions = deque(instructions), list[Callable[[], None]]()
        while todo or self._ended_holds:
            if not todo:
                todo.extend(self._plan.released(*[self._ended_holds.popleft() for _ in range(len(self._ended_holds))]))
                continue
            match todo.popleft():
                case Create() as create:
                    self._create(create)
                case Fetch() as fetch:
                    self._submit_fetch(fetch, todo)
                case Drop(file, once):
                    self._disks.drop(file)
                    actions.extend(partial(listener, file) for listener in list(self._listeners.values()) if not once)
                case Ready(ticket, file, once):
                    actions.append(self._resolve(ticket, self._lease(file, once, todo)))
                case Bypass(ticket):
                    actions.append(self._resolve(ticket, None))
                case Failed(ticket):
                    # the object is shorter than expected, but may contain the requested range; or the cache failed
                    direct = isinstance(error, RangeError | DiskError)
                    actions.append(self._resolve(ticket, None if direct else error))
        metrics.cache_resident_bytes.set(self._plan.used)
        return actions

    def _create(self, create: Create) -> None:
        try:
            self._disks.create(create)
        except OSError as error:  # the file's first fetch reports it as lost
            if not disks.out_of_descriptors(error):
                self._pause(create.tier, error)

    def _adopt(self) -> None:
        """Adopt the files of an earlier engine."""
        for tier, adopted_file in self._disks.remaining():
            file = self._plan.adopt(adopted_file.object, adopted_file.blocks, tier, unlisted=adopted_file.unlisted)
            if file is None:
                adopted_file.file.unlink()
            else:
                self._disks.files[file] = adopted_file.file

    def _submit_fetch(self, fetch: Fetch, todo: deque[Instruction]) -> None:
        block_file = self._disks.files.get(fetch.file)
        obj = self._plan.object_of(fetch.file) if block_file is not None else None
        store = self._sources.get(obj.source) if obj is not None else None
        copies = [self._disks.files.get(file) for file, _, _ in fetch.copies]
        if block_file is None or obj is None or None in copies:
            todo.extend(self._plan.lost(fetch.file))
            return
        if store is None:  # the store was closed; this can only be a prefetch
            todo.extend(self._plan.failed(fetch.file, fetch.block))
            return
        is_awaited = partial(self._plan.is_awaited, fetch.file, fetch.block)
        sources = [file for file in copies if file is not None]
        job = self._jobs.get(fetch.stream, str(fetch.stream))
        trace_parent = self._trace_parents.get(fetch.stream, "")
        self._fetcher.start(FetchTask(fetch, block_file, store, obj.key, sources, is_awaited, job, trace_parent))

    def _lease(self, file: int, once: bool, todo: deque[Instruction] | None = None) -> Lease | None:
        """A lease on the file; None if it cannot be opened. `todo` gets the instructions that this causes."""
        block_file = self._disks.files.get(file)
        try:
            if block_file is not None:  # else an empty object whose file could not be created
                present = self._plan.runs(file, RUNS)
                return Lease(
                    file, block_file.reader(), block_file.size, present=present, ended=self._ended_holds, once=once
                )
        except OSError as error:
            if not disks.out_of_descriptors(error) and todo is not None:
                todo.extend(self._plan.lost(file))  # it was deleted
        self._ended_holds.append(file)
        return None

    def _resolve(self, ticket: int, outcome: Lease | BaseException | None) -> Callable[[], None]:
        future = self._waiting.pop(ticket, None)
        if future is None:
            return lambda: None
        if isinstance(outcome, BaseException):
            return lambda: future.set_exception(outcome)
        return lambda: future.set_result(outcome)

    # threads

    def _on_fetched(self, results: Sequence[FetchResult]) -> None:
        """Pass the fetches that one thread has finished to the plan, all at once; then resolve the waiting requests."""
        actions = list[Callable[[], None]]()
        with self._lock:
            for fetch, error, from_store in results:
                self._counters.totals["fetched_bytes"] += from_store
                if isinstance(error, DiskError) and not disks.out_of_descriptors(error.error):
                    if error.error.errno != errno.ENOENT:  # else the file was dropped, or another program deleted it
                        self._pause(self._plan.tier_of(fetch.file), error.error)
                    actions += self._execute(self._plan.lost(fetch.file), error)
                elif error is not None:
                    actions += self._execute(self._plan.failed(fetch.file, fetch.block), error)
            succeeded = [(fetch.file, fetch.block) for fetch, error, _ in results if error is None]
            actions += self._execute(self._plan.fetched(*succeeded))
        _run_all(actions)

    def _guard(self, future: Future[Lease | None], job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # any error goes to the request that waits
            future.set_exception(error)

    # disk errors

    def _pause(self, tier: int | None, error: OSError) -> None:
        if tier is None:  # the file was dropped meanwhile
            return
        self._plan.set_open(tier, open=False)
        self._disks.pause(tier, error)

    def _recover(self) -> None:
        for tier in self._disks.recovered():
            self._plan.set_open(tier, open=True)


def _run_all(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()
