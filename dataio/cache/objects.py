"""The versions of objects: their sizes and modification times.

Purpose: the cache needs an object's size before it fetches a part of it. `KnownSizes` takes the sizes of a dataset's
shards from the dataset version, which saves a round trip for each shard.
Invariants: an object's size is trusted for `STAT_SECONDS`. Shards are immutable, but a dataset may be deleted and
created again under the same names. At most `KNOWN_OBJECTS` are remembered. Safe to share between threads. Stores are
queried outside the lock, and concurrent queries for one object are sent once.
Failure behaviour: the store's errors pass through and are not cached.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import cached_property

from headrace.dataio.cache.plan.events import ObjectId
from headrace.dataio.core.clock import Clock
from headrace.dataio.store.base import Location, ObjectInfo, Store
from headrace.dataio.store.wrappers import Wrapper

STAT_SECONDS = 30.0
KNOWN_OBJECTS = 100_000


class Objects:
    """The known objects of several stores."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._names: weakref.WeakKeyDictionary[Store, str] = weakref.WeakKeyDictionary()
        self._known: OrderedDict[tuple[str, str], tuple[ObjectId, float]] = OrderedDict()
        self._lookups: dict[tuple[str, str], Future[ObjectId]] = {}

    def source(self, store: Store) -> str:
        """The name of the store (`source_of`), computed once."""
        name = self._names.get(store)
        if name is None:
            with self._lock:
                name = self._names[store] = source_of(store.location)
        return name

    def known(self, store: Store, key: str) -> ObjectId | None:
        """The object, if it was looked up in the last `STAT_SECONDS`."""
        return self.known_as(self.source(store), key)

    def known_as(self, source: str, key: str) -> ObjectId | None:
        """As `known`, for a store given by name."""
        entry = self._known.get((source, key))  # no lock: this is on the path of every read
        if entry is None or self._clock.monotonic() - entry[1] > STAT_SECONDS:
            return None
        return entry[0]

    def unknown(self, store: Store, keys: Iterable[str]) -> list[str]:
        """Those of `keys` that must be looked up, in order."""
        source, since, known = self.source(store), self._clock.monotonic() - STAT_SECONDS, self._known
        return [key for key in keys if (entry := known.get((source, key))) is None or entry[1] < since]

    def finder(self, store: Store) -> Callable[[str], ObjectId]:
        """A faster `find` for many keys at about the same time."""
        source, since, known = self.source(store), self._clock.monotonic() - STAT_SECONDS, self._known

        def find(key: str) -> ObjectId:
            entry = known.get((source, key))
            return entry[0] if entry is not None and entry[1] >= since else self._stat(store, key)

        return find

    def find(self, store: Store, key: str) -> ObjectId:
        """The object as `known` returns it, else as the store reports it."""
        return self.known(store, key) or self._stat(store, key)

    def _stat(self, store: Store, key: str) -> ObjectId:
        source = self.source(store)
        with self._lock:
            pending = self._lookups.get((source, key))
            if pending is None:
                lookup = self._lookups[source, key] = Future[ObjectId]()
        if pending is not None:
            return pending.result()
        try:
            info = store.stat(key)
            obj = ObjectId(source, key, info.size, info.modified)
            self._remember(obj)
            lookup.set_result(obj)
        except BaseException as error:
            lookup.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._lookups[source, key]
        return obj

    def _remember(self, obj: ObjectId) -> None:
        with self._lock:
            self._known[obj.source, obj.key] = (obj, self._clock.monotonic())
            self._known.move_to_end((obj.source, obj.key))
            if len(self._known) > KNOWN_OBJECTS:
                self._known.popitem(last=False)


def source_of(location: Location) -> str:
    """The name of a location's store: its URL and its options, because the options may name an endpoint."""
    return source_name(location.url, location.options)


def source_name(url: str, options: Mapping[str, object]) -> str:
    """As `source_of`, for a URL and options."""
    return f"{url} {json.dumps(options, sort_keys=True, default=str) if options else ''}"


class KnownSizes(Wrapper):
    """`inner` with known object sizes, which `load` returns on first use.

    It is only for readers of one dataset version that cache nothing persistently, because for known objects `stat` checks
    neither the existence nor the modification time.
    """

    def __init__(self, inner: Store, load: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(inner)
        self._load = load

    def stat(self, key: str) -> ObjectInfo:
        size = self._sizes.get(key)
        return self.inner.stat(key) if size is None else ObjectInfo(key, size, 0.0)

    def get_pieces(self, key: str, offset: int, buffer: memoryview, take: Callable[[int, memoryview], None]) -> None:
        self.inner.get_pieces(key, offset, buffer, take)

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        return self._load()
