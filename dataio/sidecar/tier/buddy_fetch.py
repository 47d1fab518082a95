"""Fetches objects from the buddy that a trainer on this node lacks, and prefetches those that it will need next.

Purpose: a restore requests one object after the other. The record of a rank names all its objects. So when the first
one is requested, the others are fetched too, over several connections, while the trainer reads.
Invariants: concurrent requests for one object fetch it once. Requested objects go before prefetched ones. At most
`CONNECTIONS` objects are in flight, each in pieces of `protocol.PIECE` bytes, which bounds the memory. At most `AHEAD`
prefetches wait.
Failure behaviour: if the buddy is unreachable or the connection breaks, `recall` returns False at once for
`UNREACHABLE_SECONDS`. Waiting callers get False too, and read from the store. If the tier has no room or an object is
corrupt, only that object fails.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier.client import BuddyClient
from headrace.dataio.sidecar.tier.config import TierConfig
from headrace.dataio.store.local_tier.records import Record, as_guest
from headrace.dataio.store.local_tier.tier import LocalTier

CONNECTIONS = 4
AHEAD = 1024
FOLLOWED = 256
"""Maximum number of records that are remembered as prefetched."""
UNREACHABLE_SECONDS = 5.0
"""How long no new request is sent after the buddy could not be reached."""
_Name = tuple[str, str]
_log = get_logger(__name__)


class BuddyFetch:
    """Fetches in its own threads; `recall` blocks the caller's thread. `counts` are the fetches by outcome."""

    def __init__(self, config: TierConfig, local_tier: LocalTier, context: ssl.SSLContext) -> None:
        self._config, self._local_tier, self._context = config, local_tier, context
        self._pace = p.RateLimit(None)  # no limit, because a trainer waits for these bytes
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="headrace-fetch")
        self._lock, self._unreachable_until, self._closed = threading.Lock(), 0.0, False
        self._in_flight: dict[_Name, Future[bool]] = {}
        self._queue: deque[_Name] = deque()
        self._fetchers = 0
        self._followed: dict[tuple[str, int], None] = {}
        self.counts = {"found": 0, "absent": 0, "failed": 0}

    def recall(self, source: str, key: str) -> bool:
        """Fetch an object, or with an empty key the records of a store; returns whether the tier has it now."""
        if time.monotonic() < self._unreachable_until:
            return False
        if not key:
            return self._fetch_records(source)
        if self._local_tier.has(source, key):
            return True
        requested = self._request((source, key), urgent=True)
        for name in self._needed_with(source, key):
            self._request(name, urgent=False)
        return requested.result()

    def close(self) -> None:
        """Stop; pending requests return False."""
        self._closed = True
        self._drop_queue()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # the queue

    def _needed_with(self, source: str, key: str) -> list[_Name]:
        """The other objects of the records that name this one. A record is used only once, for its first request."""
        names: dict[_Name, None] = {}
        for record in self._local_tier.records(source):
            if key in record.keys and self._is_new(record):
                names.update(dict.fromkeys((source, other) for other in record.keys))
        return [name for name in names if name[1] != key and not self._local_tier.has(*name)][:AHEAD]

    def _is_new(self, record: Record) -> bool:
        name = (record.attempt, record.rank)
        with self._lock:
            is_new = name not in self._followed
            self._followed[name] = None
            while len(self._followed) > FOLLOWED:
                del self._followed[next(iter(self._followed))]
        return is_new

    def _request(self, name: _Name, *, urgent: bool) -> Future[bool]:
        with self._lock:
            pending = self._in_flight.get(name)
            if pending is None:
                pending = Future()
                unreachable = time.monotonic() < self._unreachable_until
                if self._closed or (not urgent and (unreachable or len(self._queue) >= AHEAD)):
                    pending.set_result(False)
                    return pending
                self._in_flight[name] = pending
                self._queue.append(name)
            if urgent and name in self._queue:
                self._queue.remove(name)
                self._queue.appendleft(name)
            if self._queue and self._fetchers < CONNECTIONS:
                self._fetchers += 1
                self._pool.submit(self._fetch_all)
        return pending

    # fetching

    def _fetch_all(self) -> None:
        """Fetch over one connection until the queue is empty. Runs in a thread of the pool."""
        with ExitStack() as stack:
            buddy: BuddyClient | None = None
            while (name := self._next()) is not None:
                found = False
                try:
                    buddy = buddy or stack.enter_context(BuddyClient.connect(self._config, self._context, self._pace))
                    found = buddy.fetch(self._local_tier, *name)
                    self._count("found" if found else "absent")
                except (HeadraceError, OSError) as error:
                    buddy = None  # the connection may still deliver the rest of that object
                    self._report_failure(name, error)
                finally:
                    self._complete(name, found)

    def _next(self) -> _Name | None:
        with self._lock:
            if not self._queue:
                self._fetchers -= 1
                return None
            return self._queue.popleft()

    def _complete(self, name: _Name, found: bool) -> None:
        with self._lock:
            pending = self._in_flight.pop(name, None)
        if pending is not None:
            pending.set_result(found)

    def _report_failure(self, name: _Name, error: Exception) -> None:
        _log.warning("the buddy could not supply %s: %s", name[1] or "its records", error)
        self._count("failed")
        if not isinstance(error, CapacityError | CorruptionError):
            with self._lock:
                self._unreachable_until = time.monotonic() + UNREACHABLE_SECONDS
            self._drop_queue()

    def _drop_queue(self) -> None:
        with self._lock:
            dropped = [self._in_flight.pop(name) for name in self._queue]
            self._queue.clear()
        for pending in dropped:
            pending.set_result(False)

    def _fetch_records(self, source: str) -> bool:
        try:
            with BuddyClient.connect(self._config, self._context, self._pace) as buddy:
                records = buddy.records(source)
            for record in records:
                self._local_tier.put_record(as_guest(record))
        except (HeadraceError, OSError) as error:
            self._report_failure((source, ""), error)
            return False
        self._count("found" if records else "absent")
        return bool(records)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.counts[outcome] += 1
