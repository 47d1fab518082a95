"""The reader's side of the tier: what is kept here, or on the buddy, is not asked of the store.

Invariant: only objects for which `keeps(key)` holds, which never change, are read near; everything else is the store's word. What
is read is not checked here: who finds it wrong says `distrust`, and reads again.
Failure behaviour: a copy that is missing, short, unreadable or distrusted is dropped; the next one is the buddy's, then the
store's, whose errors go up.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

from headrace.dataio.core import limits, metrics
from headrace.dataio.store.checks import writable_bytes
from headrace.dataio.store.contract import Store
from headrace.dataio.store.tier.kept import Held
from headrace.dataio.store.tier.shelf import Shelf
from headrace.dataio.store.wrapper import Wrapper

_OPEN = 64
"""Objects that are kept open."""
Recall = Callable[[str, str], bool]
"""Bring the object (source, key) from the buddy into the tier; whether it is there now."""


class Near(Wrapper):
    """`inner` behind `shelf`. `bytes`: how many came from "tier", "buddy" and "store" so far. Safe between threads."""

    def __init__(
        self,
        inner: Store,
        shelf: Shelf,
        keeps: Callable[[str], bool],
        recall: Recall = lambda _source, _key: False,
    ) -> None:
        super().__init__(inner)
        self._shelf, self._keeps, self._recall = shelf, keeps, recall
        self._source = inner.location.url
        self._open: OrderedDict[str, Held] = OrderedDict()
        self._asked, self._far = set[str](), set[str]()
        self._lock, self._locks = threading.Lock(), defaultdict[str, threading.Lock](threading.Lock)
        self.bytes = {"tier": 0, "buddy": 0, "store": 0}

    def get(self, key: str, *, max_bytes: int = limits.SMALL_OBJECT_BYTES) -> bytes:
        held = self._find(key)
        if held is not None and held.size <= max_bytes:
            data = bytearray(held.size)
            if _fill(held, 0, memoryview(data)):
                self._count(key, len(data))
                return bytes(data)
        found = super().get(key, max_bytes=max_bytes)
        self._count(None, len(found))
        return found

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.get_ranges_into(key, [(offset, buffer)])

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        held, size = self._find(key), sum(buffer.nbytes for _, buffer in ranges)
        if held is not None and all(_fill(held, offset, buffer) for offset, buffer in ranges):
            self._count(key, size)
            return
        super().get_ranges_into(key, ranges)
        self._count(None, size)

    def distrust(self, key: str) -> bool:
        with self._lock_of(key):
            if not self._keeps(key) or key in self._far:
                return super().distrust(key)
            self._open.pop(key, None)
            self._shelf.drop(self._source, key)
            if key in self._asked:  # it was the buddy's
                self._far.add(key)
            return True

    def _find(self, key: str) -> Held | None:
        if not self._keeps(key) or key in self._far:
            return None
        with self._lock_of(key):
            held = self._open.get(key) or self._shelf.open(self._source, key)
            if held is None and key not in self._asked:
                self._asked.add(key)
                if self._recall(self._source, key):
                    held = self._shelf.open(self._source, key)
            if held is None:
                self._far.add(key)
                return None
            self._remember(key, held)
            return held

    def _remember(self, key: str, held: Held) -> None:
        with self._lock:
            self._open[key] = held
            self._open.move_to_end(key)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)  # closed with its last reader

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks[key]

    def _count(self, key: str | None, size: int) -> None:
        where = "store" if key is None else "buddy" if key in self._asked else "tier"
        with self._lock:
            self.bytes[where] += size
        metrics.tier_read_bytes.labels(where).inc(size)


def _fill(held: Held, offset: int, buffer: memoryview) -> bool:
    try:
        return held.fill(offset, writable_bytes(buffer))
    except OSError:  # a disk that fails: the next copy will do
        return False
