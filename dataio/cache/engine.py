"""Runs the cache plan: threads that fetch blocks from stores into files, and futures for those who wait.

Purpose: the one cache engine, the same inside a trainer and inside the daemon.
Invariants: the plan is touched only under the lock; stores and futures are touched only outside it. A block that several
ask for at once is fetched once and all of them are woken, with the bytes or with the store's error; errors are not kept.
Failure behaviour: a tier whose disk fails (full, gone, read-only) costs one warning, and for a while nothing new is admitted
there (`disks`); where no tier is left `open` answers None: read the store directly. After `close` every open future ends with
an error.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from headrace.dataio.cache.announcements import AnnouncementList, Forecast, Upcoming, check_inside
from headrace.dataio.cache.blocks import Lease
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

ANNOUNCED = 4096
"""Ranges of one announcement that are looked at."""
ENDED = 256
"""Ended leases that may wait to be looked at."""
TOLD_READS = 64
RUNS = 256
"""Present runs that a lease lists."""
GROWN_LOOKS, GROWN_FILES, GROWN_RUNS = 256, 16, 32
"""Files that are looked at for more of them to tell of, how many are told of, and the runs of each."""

_log = get_logger(__name__)
_CACHE_BYTES = {source: metrics.cache_bytes.labels(source) for source in ("bypass", "cache", "store")}
Ranges = Sequence[tuple[int, int]]


@dataclass(slots=True, eq=False)
class _Stream:
    """A loader that announces. `newest` is what nobody has looked at yet, `busy` whether somebody is about to."""

    announced: AnnouncementList = field(default_factory=AnnouncementList)
    newest: tuple[Store, Upcoming] | None = None
    busy: bool = False


class Engine:
    """A cache of `budget` bytes in `directory`, or of several tiers: that one is the fastest, then come the `slower` ones."""

    def __init__(
        self,
        directory: Path,
        budget: int,
        *,
        threads: int = 8,
        max_files: int = 1024,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        clock: Clock = SYSTEM_CLOCK,
        keep: bool = False,
        slower: Sequence[TierDirectory] = (),
        buffers: int | None = None,
    ) -> None:
        """At most `threads` requests to stores and `buffers` blocks (as many as threads by default) are in flight."""
        buffers = buffers or threads
        places = (TierDirectory(directory, budget, keep), *slower)
        self._clock, self._disks, self._objects = clock, Disks(places, block_bytes, clock), Objects(clock)
        self._listeners: list[Callable[[int], None]] = []
        self._plan = CachePlan(
            [place.budget for place in places],
            block_bytes=block_bytes,
            max_files=max_files,
        )
        self._lock = threading.Lock()
        self._sources: dict[str, Store] = {}
        self._waiting: dict[int, Future[Lease | None]] = {}
        self._ended: deque[int] = deque()
        self._jobs: dict[int, str] = {}  # of streams
        self._within: dict[int, str] = {}  # of streams: the span in which they asked last
        self._announcing: dict[int, _Stream] = {}
        self._tickets = itertools.count()
        self._closed = False
        self._counts = {"fetched_bytes": 0, "asked_bytes": 0, "hit_bytes": 0, "reads_ready": 0, "reads_late": 0}
        self._untold = dict.fromkeys(_CACHE_BYTES, 0)
        self._reads = 0
        self._tier_hits = [0] * len(places)
        self._forecast = Forecast()
        self._adopt()
        self._asking = max(1, threads // 2)
        self._fetcher = Fetcher(threads, buffers, block_bytes, clock, self._landed)
        self._plan.ahead(*self._fetcher.ahead())

    def open(self, store: Store, key: str, ranges: Ranges, stream: int = 0) -> Future[Lease | None]:
        """A lease on a file that holds `ranges` ((offset, length)) of the object `key`, or None: read the store directly.
        `stream` is what the asker announces as.

        `UsageError` for a range past the end; otherwise the store's own errors.
        """
        future: Future[Lease | None] = Future()
        future.set_running_or_notify_cancel()  # from here on a cancel() has no effect, and set_result never meets one
        known = self._objects.known(store, key)
        if known is not None:
            self._request(store, known, ranges, future, stream)
        else:
            later = partial(self._stat_then_request, store, key, ranges, future, stream)
            self._fetcher.submit(lambda: self._guard(future, later))
        return future

    def open_present(self, store: Store, key: str, ranges: Ranges, stream: int = 0) -> Lease | None:
        """What `open` gives, at once, if it is all present; None for everything else, errors among them."""
        return self.present(self._objects.source(store), key, ranges, stream)

    def present(self, source: str, key: str, ranges: Ranges, stream: int = 0) -> Lease | None:
        """The same, for a store that is called by its name (`objects.source_of`) and not asked for anything."""
        known = self._objects.known_as(source, key)
        if known is None:
            return None
        size, end = 0, known.size
        for offset, length in ranges:
            if offset + length > end:
                return None
            size += length
        if len(self._ended) > ENDED:
            self._run([])
        with self._lock:
            file = self._plan.take(known, ranges)  # type: ignore[arg-type]  # any sequence of pairs will do
            if file is None or file not in self._disks.files:
                return None
            self._count(size, True, False, stream)
            self._hit(file, size)
            return self._lease(file, False)

    def grown(self, told: Mapping[int, Sequence[tuple[int, int]]]) -> list[tuple[int, list[tuple[int, int]]]]:
        """Of files with the runs that somebody was told of last (the very lists), some of those of which more is present."""
        if len(told) > GROWN_LOOKS:
            return []
        with self._lock:
            return self._plan.grown(told, GROWN_FILES, GROWN_RUNS)

    def announce(self, stream: int, store: Store, upcoming: Upcoming) -> None:
        """Prefetch (key, offset, length), soonest first; replaces what `stream` announced before."""
        with self._lock:
            found = self._announcing.setdefault(stream, _Stream())
            found.newest, scheduled, found.busy = (store, upcoming[:ANNOUNCED]), found.busy, True
            later = self._execute(self._plan.reads_in_order(stream, self._objects.source(store)))
        _finish(later)
        if scheduled:
            return
        unknown = self._objects.unknown(store, dict.fromkeys([key for key, _, _ in upcoming]))
        if not unknown:
            self._announce(stream)  # no store is asked, and waking a thread for it would take as long
            return
        self._fetcher.submit(lambda: self._announce(stream))
        others = deque(unknown[1:])  # asked after meanwhile: one after the other is a round trip for each
        for _ in range(min(self._asking, len(others))):
            self._fetcher.submit(partial(self._ask, store, others))

    def withdraw(self, stream: int) -> None:
        """Forget what `stream` announced."""
        with self._lock:
            self._announcing.pop(stream, None)
            self._jobs.pop(stream, None)
            self._within.pop(stream, None)
            self._forecast.over(stream)
            later = self._execute(self._plan.withdraw(stream))
        _finish(later)

    def assign(self, stream: int, job: str) -> None:
        """The stream belongs to this job, with which it shares turns and limits; ends with `withdraw`. Without it a stream is a
        job of its own."""
        with self._lock:
            self._jobs[stream] = job

    def asked_within(self, stream: int, trace: str) -> None:
        """The span (`headrace.dataio.core.tracing.context`) within which the stream asks; what is fetched for it is
        recorded below that."""
        with self._lock:
            self._within[stream] = trace

    def limit(self, limits: JobLimits) -> None:
        """What each job may have in flight at stores from now on."""
        self._fetcher.limit(limits)

    def turns(self) -> dict[str, dict[str, int]]:
        """What each job has waiting and in flight at stores."""
        return self._fetcher.turns()

    def subscribe(self, dropped: Callable[[int], None]) -> Callable[[], None]:
        """Call `dropped(file)`, from any thread, when the cache drops a file; returns what ends that."""
        with self._lock:
            self._listeners.append(dropped)
        return lambda: self._listeners.remove(dropped)

    def live(self, file: int) -> bool:
        """Whether the cache still has this file."""
        return file in self._disks.files

    def touch(self, files: Sequence[int]) -> None:
        """These files were read from without asking: they are recently used."""
        with self._lock:
            for file in files:
                self._plan.touch(file)

    def forget(self, source: str) -> None:
        """Its store is about to be closed: fetch nothing more from it until it is given again."""
        with self._lock:
            self._sources.pop(source, None)

    def resize(self, *budgets: int) -> None:
        """Another budget in bytes for each tier; a smaller one takes effect as soon as holders let go."""
        with self._lock:
            later = self._execute(self._plan.resize(budgets))
        _finish(later)

    def replace(self, source: str, store: Store) -> None:
        """Fetch from `store` instead of the one known for `source`, if one is."""
        with self._lock:
            if source in self._sources:
                self._sources[source] = store

    def stats(self) -> dict[str, int | bool]:
        """Bytes and numbers for status."""
        self._run([])
        with self._lock:
            self._tell()
            return {**self._plan.counts(), **self._counts, "paused": self._disks.paused}

    def tier_stats(self) -> list[dict[str, object]]:
        """Of each tier: where it is, budget, use and hits (what was there when it was asked for) in bytes, and whether its disk
        is in trouble."""
        with self._lock:
            return [
                {
                    "directory": str(place.path),
                    "budget_bytes": budget,
                    "used_bytes": used,
                    "hit_bytes": hits,
                    "paused": not well,
                }
                for place, hits, (budget, used, well) in zip(
                    self._disks.places, self._tier_hits, self._plan.tiers, strict=True
                )
            ]

    def prefetch_stats(self) -> dict[str, float | int]:
        """How prefetching does: the window, and predicted against actual need."""
        with self._lock:
            ready, late = self._counts["reads_ready"], self._counts["reads_late"]
            return {
                "reads_ready": ready,
                "reads_late": late,
                **self._forecast.report(),
                **self._fetcher.report(),
            }

    def close(self) -> None:
        """Stop the threads after what they are doing; whoever still waits gets a `TransientError`."""
        with self._lock:
            self._closed = True
            self._tell()
            waiting, self._waiting = list(self._waiting.values()), {}
            self._disks.files.clear()
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
        ticket, wanted = next(self._tickets), tuple((offset, length) for offset, length in ranges)
        with self._lock:
            self._waiting[ticket] = future
            self._recover()
            self._sources[obj.source] = store
            there = self._plan.has_all(obj, wanted)
            instructions = [] if self._closed else self._plan.request(ticket, obj, wanted, stream)
            for ready in (found for found in instructions if there and isinstance(found, Ready)):
                self._hit(ready.file, sum(length for _, length in wanted) if ready.ticket == ticket else 0)
            later = self._execute(instructions)
            self._count(sum(length for _, length in wanted), there, Bypass(ticket) in instructions, stream)
        if self._closed:
            later = [self._settle(ticket, TransientError("the cache is closed"))]
        _finish(later)

    def _count(self, size: int, there: bool, bypassed: bool, stream: int) -> None:
        self._untold["bypass" if bypassed else "cache" if there else "store"] += size
        self._reads += 1
        if self._reads >= TOLD_READS:
            self._tell()
        self._counts["asked_bytes"] += size
        self._counts["hit_bytes"] += size if there else 0
        if stream:
            self._counts["reads_ready" if there else "reads_late"] += 1

    def _tell(self) -> None:
        """Tell the process's metrics what was read: a few reads at a time, as that costs more than counting here."""
        self._reads = 0
        for source, size in self._untold.items():
            if size:
                _CACHE_BYTES[source].inc(size)
                self._untold[source] = 0

    def _hit(self, file: int, size: int) -> None:
        tier = self._plan.tier_of(file)
        if tier is not None:
            self._tier_hits[tier] += size

    def _announce(self, stream: int) -> None:
        """Follow what the stream announces, until there is nothing newer: one job for each stream, so that they stay in order."""
        while True:
            with self._lock:
                found = self._announcing.get(stream)
                if found is None:  # withdrawn
                    return
                found.busy = found.newest is not None
                if found.newest is None:
                    return
                (store, upcoming), found.newest = found.newest, None
            try:
                self._follow(stream, found.announced, store, upcoming)
            except Exception:  # a hint that cannot be followed; the reads that come will say why
                _log.exception("not prefetching from %s", store.location.url)

    def _ask(self, store: Store, keys: deque[str]) -> None:
        """Find out about objects before they are needed. What goes wrong is said to those who need them."""
        while not self._closed:
            try:
                self._objects.find(store, keys.popleft())
            except IndexError:
                return
            except HeadraceError as error:
                _log.debug("not prefetching: %s", error)

    def _follow(self, stream: int, announced: AnnouncementList, store: Store, upcoming: Upcoming) -> None:
        reads = announced.renew(upcoming, self._plan.block_bytes, self._objects.finder(store))
        with self._lock:
            if self._closed or stream not in self._announcing:
                return
            self._recover()
            source, now = self._objects.source(store), self._clock.monotonic()
            self._sources[source] = store
            self._plan.ahead(*self._fetcher.ahead())
            wants = announced.wants(self._forecast.announced(stream, reads, now), now)
            later = self._execute(self._plan.announce(stream, source, wants))
        _finish(later)

    # instructions

    def _run(self, instructions: list[Instruction], error: BaseException | None = None) -> None:
        with self._lock:
            later = self._execute(instructions, error)
        _finish(later)

    def _execute(self, instructions: list[Instruction], error: BaseException | None = None) -> list[Callable[[], None]]:
        """Under the lock: carry out `instructions` and what follows from them; return what must be done outside it."""
        todo, later = deque(instructions), list[Callable[[], None]]()
        while todo or self._ended:
            if not todo:
                todo.extend(self._plan.released(*[self._ended.popleft() for _ in range(len(self._ended))]))
                continue
            match todo.popleft():
                case Create() as create:
                    self._create(create)
                case Fetch() as fetch:
                    self._submit_fetch(fetch, todo)
                case Drop(file, once):
                    self._disks.drop(file)
                    later.extend(partial(listener, file) for listener in self._listeners if not once)
                case Ready(ticket, file, once):
                    later.append(self._settle(ticket, self._lease(file, once)))
                case Bypass(ticket):
                    later.append(self._settle(ticket, None))
                case Failed(ticket):  # of an object that is shorter than was said, what is asked for may be there
                    later.append(self._settle(ticket, None if isinstance(error, RangeError) else error))
        metrics.cache_resident_bytes.set(self._plan.used)
        return later

    def _create(self, create: Create) -> None:
        try:
            self._disks.create(create)
        except OSError as error:
            self._pause(create.tier, error)

    def _adopt(self) -> None:
        """Take over what an earlier engine left."""
        for tier, found in self._disks.left():
            file = self._plan.adopt(found.object, found.file.digests, tier)
            if file is None:
                found.file.unlink()
            else:
                self._disks.files[file] = found.file

    def _submit_fetch(self, fetch: Fetch, todo: deque[Instruction]) -> None:
        opened = self._disks.files.get(fetch.file)
        obj = self._plan.object_of(fetch.file) if opened is not None else None
        store = self._sources.get(obj.source) if obj is not None else None
        here = [self._disks.files.get(file) for file, _, _ in fetch.here]
        if opened is None or obj is None or None in here:
            todo.extend(self._plan.lost(fetch.file))
            return
        if store is None:  # its store was closed: only a prefetch comes so late
            todo.extend(self._plan.failed(fetch.file, fetch.block))
            return
        waited_for = partial(self._plan.waited_for, fetch.file, fetch.block)
        sources = [file for file in here if file is not None]
        job = self._jobs.get(fetch.stream, str(fetch.stream))
        within = self._within.get(fetch.stream, "")
        self._fetcher.start(FetchTask(fetch, opened, store, obj.key, sources, waited_for, job, within))

    def _lease(self, file: int, once: bool) -> Lease | None:
        opened = self._disks.files.get(file)
        if opened is None:  # an object of no bytes whose file could not be made
            self._ended.append(file)
            return None
        return Lease(file, opened, self._plan.runs(file, RUNS), self._ended, once)

    def _settle(self, ticket: int, outcome: Lease | BaseException | None) -> Callable[[], None]:
        future = self._waiting.pop(ticket, None)
        if future is None:
            return lambda: None
        if isinstance(outcome, BaseException):
            return lambda: future.set_exception(outcome)
        return lambda: future.set_result(outcome)

    # threads

    def _landed(self, landed: Sequence[FetchResult]) -> None:
        """All that one thread has done is told at once: what follows from it is decided once, and wakes others once."""
        later = list[Callable[[], None]]()
        with self._lock:
            for fetch, error, from_store in landed:
                self._counts["fetched_bytes"] += from_store
                if isinstance(error, DiskError):
                    self._pause(self._plan.tier_of(fetch.file), error.error)
                    later += self._execute(self._plan.lost(fetch.file), error)
                elif error is not None:
                    later += self._execute(self._plan.failed(fetch.file, fetch.block), error)
            fine = [(fetch.file, fetch.block) for fetch, error, _ in landed if error is None]
            later += self._execute(self._plan.fetched(*fine))
        _finish(later)

    def _guard(self, future: Future[Lease | None], job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # any error goes to the one who waits
            future.set_exception(error)

    # trouble with the disk

    def _pause(self, tier: int | None, error: OSError) -> None:
        if tier is None:  # of a file that was given up meanwhile
            return
        self._plan.set_open(tier, open=False)
        self._disks.pause(tier, error)

    def _recover(self) -> None:
        for tier in self._disks.recovered():
            self._plan.set_open(tier, open=True)


def _finish(later: list[Callable[[], None]]) -> None:
    for action in later:
        action()
