"""The stores that the daemon has open, by location; opened with the daemon's own credentials.

Invariant: at most `limit` stores are open; a store in use is never closed.
Failure behaviour: `CapacityError` when all are in use; the errors of `open_location` pass through, and are not kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from headrace.dataio.cache.objects import source_of
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Location, Store

OLD_SECONDS = 60.0
_log = get_logger(__name__)


@dataclass(slots=True)
class _Open:
    store: Store
    users: int = 0


class Stores:
    """Safe to use from several threads: opening a store may take a while. `closing` hears of a store before it closes."""

    def __init__(
        self, opener: Callable[[Location], Store], closing: Callable[[str], None] = lambda _: None, limit: int = 32
    ) -> None:
        self._opener, self._closing, self._limit = opener, closing, limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()

    def acquire_open(self, location: Location) -> Store | None:
        """The store, in use until `release`, when it is open already."""
        with self._lock:
            entry = self._open.get(source_of(location))
            return self._use(source_of(location), entry) if entry else None

    def acquire(self, location: Location) -> Store:
        """The store, in use until `release`."""
        if found := self.acquire_open(location):
            return found
        made = self._opener(location)
        source = source_of(location)
        with self._lock:
            spare = self._make_room(source)
            entry = self._open.setdefault(source, _Open(made))
            store = self._use(source, entry)
        for gone, old in spare:
            self._closing(gone)
            old.close()
        if store is not made:
            made.close()
        return store

    def release(self, location: Location) -> None:
        with self._lock:
            self._open[source_of(location)].users -= 1

    def renew(self, replaced: Callable[[str, Store], None]) -> None:
        """Open every store again, with the credentials of now; `replaced` hears of the new ones. The old ones are closed after
        `OLD_SECONDS`, when what they were doing is done. One that cannot be opened stays as it is."""
        with self._lock:
            locations = {source: entry.store.location for source, entry in self._open.items()}
        for source, location in locations.items():
            try:
                fresh = self._opener(location)
            except Exception as error:  # whatever a back-end does
                _log.error("%s cannot be opened again and is used as it was: %s", location.url, error)
                continue
            with self._lock:
                entry = self._open.get(source)
                old = fresh if entry is None else entry.store
                if entry is not None:
                    entry.store = fresh
                    replaced(source, fresh)
            timer = threading.Timer(OLD_SECONDS, old.close)
            timer.daemon = True
            timer.start()

    def __len__(self) -> int:
        return len(self._open)

    def _use(self, source: str, entry: _Open) -> Store:
        entry.users += 1
        self._open.move_to_end(source)
        return entry.store

    def _make_room(self, source: str) -> list[tuple[str, Store]]:
        if source in self._open or len(self._open) < self._limit:
            return []
        for name, entry in self._open.items():
            if not entry.users:
                del self._open[name]
                return [(name, entry.store)]
        raise CapacityError(f"the sidecar uses {self._limit} stores at once; the most is {self._limit}")
