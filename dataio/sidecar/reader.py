"""Reads shards through the node's daemon, and falls back to reading without it.

Purpose: the bytes come from a mapping of the daemon's cache file. So the trainers of a node share what the daemon
fetched, and `read` copies nothing.
Invariants: the bytes are the same with and without the daemon. A view stays valid while it is referenced, even when the
daemon evicts the file or dies. Ranges that are known to be present are read without a message to the daemon, and
without waiting for another thread.
Failure behaviour: the daemon may have ended, may have no credentials or no room, or may be too slow. Then this process
serves the read itself. Errors are logged once. The reader tries to reconnect every `RETRY_SECONDS`, less often if the
daemon hangs.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from headrace.dataio.cache.announcements import dropped_count
from headrace.dataio.cache.blocks import MappedFile, map_file
from headrace.dataio.cache.readers.base import Read, ShardReader, copy_into, one_by_one, open_local_reader
from headrace.dataio.cache.readers.cached import Ranges, covered, stream
from headrace.dataio.core import limits, metrics
from headrace.dataio.core.cleanup import Finalizer
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.core.tracing import context, span
from headrace.dataio.sidecar import paths
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.connection import Sidecar, SidecarName
from headrace.dataio.sidecar.meters import LoaderMeter
from headrace.dataio.sidecar.wire import close_all
from headrace.dataio.store.base import Store

RETRY_SECONDS = 3.0
_CONNECT_SHARE = 0.05
"""Maximum share of time that the reader spends on connecting to a daemon that does not answer."""
OPEN_SECONDS = 60.0
MAPPED_FILES = 128
TALLY_READS = 64
"""Number of reads after which their bytes are passed to the metrics."""
NEW_SHARE = 4
"""An announcement is sent if at least 1/`NEW_SHARE` of it is new."""
_ANNOUNCE_BYTES = limits.MESSAGE_BYTES - 16 * limits.KIB

_log = get_logger(__name__)
_FROM_CACHE = metrics.cache_bytes.labels("cache")


class _Hold:
    """A hold on one of the daemon's files.

    When it is garbage-collected, the connection tells the daemon that the hold has ended.
    """

    __slots__ = ("_connection", "_file")

    def __init__(self, connection: Sidecar, file: int) -> None:
        self._connection, self._file = connection, file

    def __del__(self) -> None:
        self._connection.closed_files.append(self._file)


class _CachedFile:
    """A mapped file of the daemon, and its present runs.

    `used`: it was read since it was last considered for eviction. `first` and `end` are its only run, if it has just one.
    """

    __slots__ = ("data", "end", "file", "first", "mapped", "present", "used")

    def __init__(self, file: int, mapped: MappedFile | None, present: Sequence[tuple[int, int]]) -> None:
        self.file, self.mapped, self.present, self.used = file, mapped, present, True
        self.data = memoryview(mapped) if mapped is not None else memoryview(b"")
        self.first, self.end = present[0] if len(present) == 1 else (0, 0)

    def views(self, ranges: Ranges) -> list[memoryview] | None:
        """Read-only views, or None if some bytes are not known to be present.

        Every read calls this, so the most common case, a single run, is checked first.
        """
        data, first, end, parts = self.data, self.first, self.end, list[memoryview]()
        for offset, length in ranges:
            if offset < first or offset + length > end:
                return self.cut(ranges) if covered(self.present, ranges) else None
            parts.append(data[offset : offset + length])
        return parts

    def cut(self, ranges: Ranges) -> list[memoryview]:
        return [self.data[offset : offset + length] for offset, length in ranges]


class _Tally:
    """Counts bytes that were read, and passes them to the metrics and the loader's meter in batches."""

    def __init__(self, meter: LoaderMeter | None) -> None:
        self._meter, self._lock = meter, threading.Lock()
        self._reads = self._delivered = self._cached = 0

    def read(self, size: int, cached: int) -> None:
        """Count `size` bytes that were read, `cached` of them without a request to the daemon."""
        with self._lock:
            self._delivered += size
            self._cached += cached
            self._reads += 1
            if self._reads < TALLY_READS:
                return
        self.send()

    def send(self) -> None:
        """Pass the counts to the metrics and the meter."""
        with self._lock:
            delivered, cached = self._delivered, self._cached
            self._reads = self._delivered = self._cached = 0
        if cached:
            _FROM_CACHE.inc(cached)
        if self._meter is not None and delivered:
            self._meter.read(delivered)

    def report(self) -> m.Report | None:
        """The report that is sent to the daemon once a second."""
        self.send()
        return self._meter.report() if self._meter is not None else None


class SidecarReader:
    """A `ShardReader` of `store` through the daemon at `sidecar`, or inside this process while no daemon answers."""

    def __init__(
        self, store: Store, sidecar: SidecarName, clock: Clock = SYSTEM_CLOCK, *, meter: LoaderMeter | None = None
    ) -> None:
        self._store, self._sidecar, self._clock = store, sidecar, clock
        self._tally = _Tally(meter)
        self._where = m.where(store.location)
        self._lock = threading.Lock()
        self._connection: Sidecar | None = None
        self._next_try = clock.monotonic()
        self._missed = False
        self._cached_files: OrderedDict[str, _CachedFile] = OrderedDict()
        self._dropped: deque[int] = deque(maxlen=256)  # files that the daemon dropped recently
        self._fallback_reader: ShardReader | None = None
        self._announced_on: Sidecar | None = None  # the connection that received the last announcement
        self._announced: list[tuple[str, int, int]] = []  # the list that was sent last
        self._announcing = threading.Lock()
        self._closed = False
        self._get_connection()

    def read(self, key: str, ranges: Ranges) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        connection = self._get_connection()
        if connection is not None:
            cached_file = self._cached_files.get(key)
            data = cached_file.views(ranges) if cached_file is not None else None
            if cached_file is not None and data is not None:
                cached_file.used = True
                connection.touched_files.add(cached_file.file)
                self._tally.read(size := sum([length for _, length in ranges]), size)
                return data
            try:
                data = self._ask(connection, key, ranges, cached_file)
                if data is not None:
                    self._tally.read(sum([length for _, length in ranges]), 0)
                    return data
                # no room in the daemon's cache: read exactly these bytes
                return stream(self._store, key, ranges)
            except (HeadraceError, OSError) as error:
                problem = f"the sidecar could not serve {self._where.url}; this process reads it directly: {error}"
                warn_once(_log, problem, "node")
        return self._fallback().read(key, ranges)

    def read_into(self, key: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        copy_into(self, key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each."""
        return one_by_one(self, reads)

    def announce(self, upcoming: Sequence[tuple[str, int, int]]) -> None:
        """Make the daemon prefetch the ranges that will be read next."""
        connection = self._get_connection()
        if connection is None:
            self._fallback().announce(upcoming)
            return
        if self._announced_on is connection and (self._mostly_announced(upcoming) or self._all_present(upcoming)):
            return  # little or nothing is left to prefetch, as in most of a later epoch
        with self._announcing:  # each announcement continues the one before
            try:
                connection.send(self._build_announcement(connection, upcoming))
            except HeadraceError as error:
                self._announced_on = None
                _log.debug("not announced: %s", error)

    def close(self) -> None:
        """Close the connection and all mappings; views stay valid."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
            fallback, self._fallback_reader = self._fallback_reader, None
            cached_files, self._cached_files = self._cached_files, OrderedDict()
        del cached_files
        if connection is not None:
            connection.close()
        if fallback is not None:
            fallback.close()
        self._tally.send()

    # through the daemon

    def _all_present(self, upcoming: Sequence[tuple[str, int, int]]) -> bool:
        """Whether all ranges are known to be present. Checks from the end, where missing ranges are most likely."""
        name, first, end = "", 0, -1
        for key, offset, length in reversed(upcoming):
            if key != name:
                cached_file = self._cached_files.get(key)
                name, first, end = key, *((cached_file.first, cached_file.end) if cached_file is not None else (0, -1))
            if length and (offset < first or offset + length > end):  # an empty range bounds a file
                return False
        return True

    def _mostly_announced(self, upcoming: Sequence[tuple[str, int, int]]) -> bool:
        """Whether most of the list was announced already.

        If so, it is not sent: handling an announcement costs the daemon about a tenth of a block's fetch.
        """
        few = len(upcoming) // NEW_SHARE
        return few > 0 and bool(self._announced) and self._announced[-1] in upcoming[-few:]

    def _build_announcement(self, connection: Sidecar, upcoming: Sequence[tuple[str, int, int]]) -> m.Announce:
        """The message for this list. It has only the new part if the daemon knows the rest."""
        last_list = self._announced if self._announced_on is connection and connection.incremental else []
        self._announced_on = connection
        num_dropped = dropped_count(last_list, list(upcoming))
        num_dropped = len(last_list) if num_dropped is None else num_dropped
        num_known = len(last_list) - num_dropped
        new_part = _longest_fitting(upcoming[num_known : m.RANGES])
        self._announced = [*last_list[num_dropped:], *new_part]
        return m.Announce(self._where, new_part, context(), num_dropped if num_known else None)

    def _ask(
        self, connection: Sidecar, key: str, ranges: Ranges, cached_file: _CachedFile | None
    ) -> list[memoryview] | None:
        with span("sidecar.open", key=key):
            cached_file = self._open(connection, key, ranges, cached_file)
        return cached_file.cut(ranges) if cached_file is not None else None

    def _open(
        self, connection: Sidecar, key: str, ranges: Ranges, cached_file: _CachedFile | None
    ) -> _CachedFile | None:
        """Ask the daemon for ranges, in as many messages as they need; None when its cache has no room."""
        for start in range(0, max(1, len(ranges)), m.RANGES):
            part = list(ranges[start : start + m.RANGES])
            have = cached_file.file if cached_file else 0
            message = m.Open(0, self._where, key, part, OPEN_SECONDS, have, context())
            answer, descriptors = connection.call(
                lambda id, message=message: _with_id(message, id),  # type: ignore[misc]  # the default binds it now
                timeout=OPEN_SECONDS + 5,
            )
            try:
                if not isinstance(answer, m.Opened):
                    return None
                previous = cached_file
                cached_file = self._remember_file(connection, key, answer, descriptors, cached_file)
                if start and previous and cached_file.file != previous.file:
                    return None  # evicted between two messages: the earlier ranges are not in this file
            finally:
                close_all(descriptors)
        return cached_file

    def _remember_file(
        self,
        connection: Sidecar,
        key: str,
        answer: m.Opened,
        descriptors: tuple[int, ...],
        cached_file: _CachedFile | None,
    ) -> _CachedFile:
        if not descriptors and cached_file is not None and cached_file.file == answer.file:
            mapped = cached_file.mapped
        else:
            hold = _Hold(connection, answer.file)
            mapped = map_file(descriptors[0], answer.size, hold) if answer.size else None
        updated = _CachedFile(answer.file, mapped, answer.present)
        if answer.also:
            self._update_runs(connection, answer.also)
        if answer.once:
            return updated
        with self._lock:
            removed = self._cached_files.get(key)
            if self._connection is connection and answer.file not in self._dropped:
                self._cached_files[key] = updated
                self._cached_files.move_to_end(key)
            oldest = self._evict_oldest() if len(self._cached_files) > MAPPED_FILES else None
        del removed, oldest  # their holds are released outside the lock
        return updated

    def _update_runs(self, connection: Sidecar, also: Sequence[tuple[int, Sequence[tuple[int, int]]]]) -> None:
        """Update the present runs of files that are mapped here."""
        grown = dict(also)
        with self._lock:
            if self._connection is not connection:
                return
            for key, cached_file in list(self._cached_files.items()):
                if cached_file.file in grown:
                    self._cached_files[key] = updated = _CachedFile(
                        cached_file.file, cached_file.mapped, grown[cached_file.file]
                    )
                    updated.used = cached_file.used

    def _evict_oldest(self) -> _CachedFile:
        """Remove and return the oldest entry that was not used since it was last considered (the clock algorithm).

        So reads need not reorder the entries.
        """
        while True:
            key, cached_file = self._cached_files.popitem(last=False)
            if not cached_file.used:
                return cached_file
            cached_file.used = False
            self._cached_files[key] = cached_file

    def _forget(self, file: int) -> None:
        with self._lock:
            self._dropped.append(file)
            removed = [
                self._cached_files.pop(key)
                for key in [k for k, cached_file in self._cached_files.items() if cached_file.file == file]
            ]
        del removed

    # connecting and falling back

    def _get_connection(self) -> Sidecar | None:
        """The connection; reconnects when `RETRY_SECONDS` have passed."""
        connection = self._connection
        if connection is not None and not connection.broken:
            return connection
        with self._lock:
            if self._closed or self._clock.monotonic() < self._next_try:
                return None
            self._next_try = self._clock.monotonic() + RETRY_SECONDS
            cached_files, self._cached_files = self._cached_files, OrderedDict()
            previous, self._connection = self._connection, None
        del cached_files
        began = self._clock.monotonic()
        connected = Sidecar.find(self._sidecar)
        if connected is None:
            seconds = self._clock.monotonic() - began
            self._next_try = max(self._next_try, began + seconds / _CONNECT_SHARE)
            self._warn_no_sidecar(lost=previous is not None)
            return None
        forget = weakref.WeakMethod(self._forget)  # the connection's thread must not keep this reader alive
        connected.forgotten = lambda file: (call := forget()) and call(file)
        connected.reporting = self._tally.report
        Finalizer(self, connected.close)
        if not self._use(connected):
            connected.close()
            return None
        if self._missed or previous is not None:  # the daemon may have restarted between two attempts
            warn_once(
                _log, f"the sidecar on {paths.chosen(self._sidecar)} answers again: shards are read through it", "node"
            )
        _log.info("reading %s through the sidecar of process %d", self._where.url, connected.daemon_pid)
        return connected

    def _use(self, connection: Sidecar) -> bool:
        """Use this connection. False if the reader was closed meanwhile."""
        with self._lock:
            if not self._closed:
                self._connection = connection
                self._dropped.clear()
            return not self._closed

    def _warn_no_sidecar(self, *, lost: bool) -> None:
        self._missed = True
        problem = "lost the connection to the sidecar on" if lost else "no sidecar answers on"
        warn_once(
            _log,
            f"{problem} {paths.chosen(self._sidecar)}: this process reads shards directly (start one: headrace sidecar run)",
            "node",
        )

    def _fallback(self) -> ShardReader:
        with self._lock:
            if self._fallback_reader is None:
                self._fallback_reader = open_local_reader(self._store)
            return self._fallback_reader


def _longest_fitting(upcoming: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The longest prefix that fits into a message."""
    sizes = [24 + (len(key) if key.isascii() else len(key.encode())) for key, _, _ in upcoming]
    return list(upcoming[: bisect_right(list(accumulate(sizes)), _ANNOUNCE_BYTES)])


def _with_id(message: m.Open, id: int) -> m.Open:
    return m.Open(id, message.where, message.key, message.ranges, message.deadline, message.have, message.trace)
