"""Runs the cache plan: threads that fetch blocks from stores into files, and futures for those who wait.

Purpose: the one cache engine, the same inside a trainer and inside the daemon.
Invariants: the plan is touched only under the lock; stores and futures are touched only outside it. A block that several
ask for at once is fetched once and all of them are woken, with the bytes or with the store's error; errors are not kept.
Failure behaviour: a cache disk that fails (full, gone) costs one warning; from then on, for `RECOVER_SECONDS`, nothing new
is admitted and `open` answers None: read the store directly. After `close` every open future ends with an error.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from dataio.cache.blocks import BlockDirectory, BlockFile, Descriptor
from dataio.cache.plan import Bypass, CachePlan, Create, Drop, Failed, Fetch, Instruction, ObjectId, Ready
from dataio.core import limits, metrics
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.errors import MillraceError, TransientError, UsageError
from dataio.core.log import get_logger, warn_once
from dataio.store.contract import Location, Store

RECOVER_SECONDS = 30.0
STAT_SECONDS = 30.0
"""How long an object's size is believed: shards are immutable, but a dataset may be deleted and made again."""
KNOWN_OBJECTS = 100_000
ANNOUNCED = 4096
"""Ranges of one announcement that are looked at."""
RUNS = 256
"""Present runs that a lease lists."""

_log = get_logger(__name__)
Ranges = Sequence[tuple[int, int]]


class Lease:
    """A file that holds the asked-for ranges. While it lives, its bytes count as held."""

    __slots__ = ("_ended", "descriptor", "file", "present", "size")

    def __init__(self, file: int, opened: BlockFile, present: list[tuple[int, int]], ended: deque[int]) -> None:
        self.file, self.size, self.present = file, opened.size, present
        self.descriptor: Descriptor = opened.reader
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self.file)  # runs in any thread, under any lock: the engine reads it later


class Engine:
    """A cache of `budget` bytes in `directory`."""

    def __init__(
        self,
        directory: Path,
        budget: int,
        *,
        threads: int = 8,
        max_files: int = 1024,
        block_bytes: int = limits.CACHE_BLOCK_BYTES,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._directory, self._clock = BlockDirectory(directory), clock
        self._listeners: list[Callable[[int], None]] = []
        self._plan = CachePlan(
            budget, block_bytes=block_bytes, max_files=max_files, prefetch_blocks=max(1, threads // 2)
        )
        self._lock = threading.Lock()
        self._files: dict[int, BlockFile] = {}
        self._sources: dict[str, Store] = {}
        self._waiting: dict[int, Future[Lease | None]] = {}
        self._ended: deque[int] = deque()
        self._announced: dict[int, tuple[Store, list[tuple[str, int, int]]]] = {}
        self._known: OrderedDict[tuple[str, str], tuple[ObjectId, float]] = OrderedDict()
        self._tickets = itertools.count()
        self._paused_until = 0.0
        self._closed = False
        self._fetched_bytes = 0
        self._jobs: queue.SimpleQueue[Callable[[memoryview], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"millrace-cache-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, store: Store, key: str, ranges: Ranges) -> Future[Lease | None]:
        """A lease on a file that holds `ranges` ((offset, length)) of the object `key`, or None: read the store directly.

        `UsageError` for a range past the end; otherwise the store's own errors.
        """
        future: Future[Lease | None] = Future()
        future.set_running_or_notify_cancel()  # from here on a cancel() has no effect, and set_result never meets one
        known = self._lookup(store, key)
        if known is not None:
            self._request(store, known, ranges, future)
        else:
            self._submit(lambda _: self._guard(future, lambda: self._stat_then_request(store, key, ranges, future)))
        return future

    def announce(self, stream: int, store: Store, upcoming: Sequence[tuple[str, int, int]]) -> None:
        """Prefetch (key, offset, length), soonest first; replaces what `stream` announced before."""
        budget, cut = self._plan.budget // 4, list[tuple[str, int, int]]()
        for key, offset, length in upcoming[:ANNOUNCED]:
            if budget <= 0:
                break
            cut.append((key, offset, length))
            budget -= length
        with self._lock:
            scheduled = stream in self._announced
            self._announced[stream] = (store, cut)
        if not scheduled:  # at most one job for each stream, whatever the number of announcements
            self._submit(lambda _: self._announce(stream))

    def withdraw(self, stream: int) -> None:
        """Forget what `stream` announced."""
        with self._lock:
            self._announced.pop(stream, None)
            later = self._execute(self._plan.announce(stream, []))
        _finish(later)

    def subscribe(self, dropped: Callable[[int], None]) -> Callable[[], None]:
        """Call `dropped(file)`, from any thread, when the cache drops a file; returns what ends that."""
        with self._lock:
            self._listeners.append(dropped)
        return lambda: self._listeners.remove(dropped)

    def live(self, file: int) -> bool:
        """Whether the cache still has this file."""
        return file in self._files

    def touch(self, files: Sequence[int]) -> None:
        """These files were read from without asking: they are recently used."""
        with self._lock:
            for file in files:
                self._plan.touch(file)

    def forget(self, source: str) -> None:
        """Its store is about to be closed: fetch nothing more from it until it is given again."""
        with self._lock:
            self._sources.pop(source, None)

    def stats(self) -> dict[str, int | bool]:
        """Bytes and numbers for status."""
        self._run([])
        with self._lock:
            return {**self._plan.counts(), "fetched_bytes": self._fetched_bytes, "paused": not self._plan.admitting}

    def close(self) -> None:
        """Stop the threads after what they are doing; whoever still waits gets a `TransientError`."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
            self._files.clear()
        for _ in self._threads:
            self._jobs.put(None)
        for future in waiting:
            future.set_exception(TransientError("the cache was closed"))

    # what an object is

    def _lookup(self, store: Store, key: str) -> ObjectId | None:
        with self._lock:
            found = self._known.get((source_of(store.location), key))
        if found is None or self._clock.monotonic() - found[1] > STAT_SECONDS:
            return None
        return found[0]

    def _stat(self, store: Store, key: str) -> ObjectId:
        info = store.stat(key)
        obj = ObjectId(source_of(store.location), key, info.size, info.modified)
        with self._lock:
            self._known[obj.source, key] = (obj, self._clock.monotonic())
            self._known.move_to_end((obj.source, key))
            if len(self._known) > KNOWN_OBJECTS:
                self._known.popitem(last=False)
        return obj

    def _stat_then_request(self, store: Store, key: str, ranges: Ranges, future: Future[Lease | None]) -> None:
        known = self._lookup(store, key)  # somebody may have asked meanwhile
        self._request(store, known or self._stat(store, key), ranges, future)

    # requests

    def _request(self, store: Store, obj: ObjectId, ranges: Ranges, future: Future[Lease | None]) -> None:
        try:
            blocks = self._blocks(obj, ranges)
        except UsageError as error:
            future.set_exception(error)
            return
        ticket = next(self._tickets)
        with self._lock:
            self._waiting[ticket] = future
            self._recover()
            self._sources[obj.source] = store
            there = self._plan.has_all(obj, blocks)
            instructions = [] if self._closed else self._plan.request(ticket, obj, blocks)
            later = self._execute(instructions)
        if self._closed:
            later = [self._settle(ticket, TransientError("the cache is closed"))]
        source = "bypass" if Bypass(ticket) in instructions else "cache" if there else "store"
        metrics.cache_bytes.labels(source).inc(sum(length for _, length in ranges))
        _finish(later)

    def _blocks(self, obj: ObjectId, ranges: Ranges) -> set[int]:
        blocks: set[int] = set()
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > obj.size:
                raise UsageError(
                    f"bytes [{offset}, {offset + length}) are not inside {obj.key}, which has {obj.size} bytes",
                    hint="the index does not fit the shard: run verify on the dataset",
                )
            if length:
                size = self._plan.block_bytes
                blocks.update(range(offset // size, (offset + length - 1) // size + 1))
        return blocks

    def _announce(self, stream: int) -> None:
        with self._lock:
            announced = self._announced.pop(stream, None)
        if announced is None:  # withdrawn
            return
        store, upcoming = announced
        wanted: dict[tuple[ObjectId, int], None] = {}
        try:
            for key, offset, length in upcoming:
                obj = self._lookup(store, key) or self._stat(store, key)
                wanted.update(dict.fromkeys((obj, block) for block in sorted(self._blocks(obj, [(offset, length)]))))
        except MillraceError as error:
            _log.debug("not prefetching: %s", error)
        with self._lock:
            if self._closed:
                return
            self._recover()
            self._sources[source_of(store.location)] = store
            later = self._execute(self._plan.announce(stream, list(wanted)))
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
                todo.extend(self._plan.released(self._ended.popleft()))
                continue
            match todo.popleft():
                case Create(file, obj):
                    self._create(file, obj)
                case Fetch() as fetch:
                    self._submit_fetch(fetch, todo)
                case Drop(file):
                    self._files.pop(file, None)
                    later.extend(partial(listener, file) for listener in self._listeners)
                case Ready(ticket, file):
                    later.append(self._settle(ticket, self._lease(file)))
                case Bypass(ticket):
                    later.append(self._settle(ticket, None))
                case Failed(ticket):
                    later.append(self._settle(ticket, error))
        metrics.cache_resident_bytes.set(self._plan.used)
        return later

    def _create(self, file: int, obj: ObjectId) -> None:
        try:
            self._files[file] = self._directory.create(obj.size)
        except OSError as error:
            self._pause(error)

    def _submit_fetch(self, fetch: Fetch, todo: deque[Instruction]) -> None:
        opened = self._files.get(fetch.file)
        obj = self._plan.object_of(fetch.file) if opened is not None else None
        store = self._sources.get(obj.source) if obj is not None else None
        if opened is None or obj is None or store is None:
            todo.extend(self._plan.lost(fetch.file))
            return
        self._submit(lambda buffer: self._fetch(fetch, opened, store, obj.key, buffer))

    def _lease(self, file: int) -> Lease | None:
        opened = self._files.get(file)
        if opened is None:  # an object of no bytes whose file could not be made
            self._ended.append(file)
            return None
        return Lease(file, opened, self._plan.runs(file, RUNS), self._ended)

    def _settle(self, ticket: int, outcome: Lease | BaseException | None) -> Callable[[], None]:
        future = self._waiting.pop(ticket, None)
        if future is None:
            return lambda: None
        if isinstance(outcome, BaseException):
            return lambda: future.set_exception(outcome)
        return lambda: future.set_result(outcome)

    # threads

    def _fetch(self, fetch: Fetch, opened: BlockFile, store: Store, key: str, buffer: memoryview) -> None:
        view = buffer[: fetch.length]
        try:
            store.get_into(key, fetch.offset, view)
        except Exception as error:  # any error goes to those who wait
            self._after(fetch, error)
            return
        try:
            opened.write(fetch.offset, view)
        except OSError as error:
            with self._lock:
                self._pause(error)
                later = self._execute(self._plan.lost(fetch.file))
            _finish(later)
            return
        self._after(fetch, None)

    def _after(self, fetch: Fetch, error: BaseException | None) -> None:
        with self._lock:
            if error is None:
                self._fetched_bytes += fetch.length
                instructions = self._plan.fetched(fetch.file, fetch.block)
            else:
                instructions = self._plan.failed(fetch.file, fetch.block)
            later = self._execute(instructions, error)
        _finish(later)

    def _submit(self, job: Callable[[memoryview], None]) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        buffer = memoryview(bytearray(self._plan.block_bytes))
        while (job := self._jobs.get()) is not None:
            try:
                job(buffer)
            except Exception:
                _log.exception("a job of the cache failed")
            del job  # or it would keep its file open while this thread waits for the next one

    def _guard(self, future: Future[Lease | None], job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:  # any error goes to the one who waits
            future.set_exception(error)

    # trouble with the disk

    def _pause(self, error: OSError) -> None:
        self._plan.admitting = False
        self._paused_until = self._clock.monotonic() + RECOVER_SECONDS
        warn_once(
            _log,
            f"the cache in {self._directory.path} cannot be written ({error.strerror}): reading from the store directly",
        )

    def _recover(self) -> None:
        if not self._plan.admitting and self._clock.monotonic() >= self._paused_until:
            self._plan.admitting = True


def source_of(location: Location) -> str:
    """Which store a location names: its URL, and its options, since an endpoint may be one of them."""
    options = json.dumps(location.options, sort_keys=True, default=str) if location.options else ""
    return f"{location.url} {options}"


def _finish(later: list[Callable[[], None]]) -> None:
    for action in later:
        action()
