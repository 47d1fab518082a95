"""Objects that are files of this machine, kept open: what is read of them again and again is then one system call.

Invariants: at most `FILES` descriptors are open, and a file is believed to be the object of its name for `BELIEVED_SECONDS`, like
an object's size in the cache. One that is let go of stays open for who is reading it. Safe to share between threads; a store is
asked outside the lock.
Failure behaviour: the store's errors pass through. Where too many files are open, ours are given back first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from headrace.dataio.cache.blocks import Descriptor
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.store.base import Store

FILES = 128
BELIEVED_SECONDS = 30.0


class _File:
    """An open object; without a descriptor one that is no file of this machine."""

    __slots__ = ("descriptor", "since")

    def __init__(self, descriptor: Descriptor | None, since: float) -> None:
        self.descriptor, self.since = descriptor, since


class Opened:
    """The descriptors that were used last, of any stores."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._files: OrderedDict[tuple[Store, str], _File] = OrderedDict()

    def get(self, store: Store, key: str) -> Descriptor | None:
        """The object's file; None where it is none of this machine."""
        now = self._clock.monotonic()
        with self._lock:
            file = self._files.get((store, key))
            if file is not None and now - file.since < BELIEVED_SECONDS:
                self._files.move_to_end((store, key))
                return file.descriptor
        return self._open(store, key, now)

    def forget(self, store: Store, key: str) -> None:
        """Open it anew the next time."""
        with self._lock:
            gone = self._files.pop((store, key), None)
        del gone

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            gone, self._files = self._files, OrderedDict()
        del gone

    def _open(self, store: Store, key: str, now: float) -> Descriptor | None:
        try:
            fd = store.open_file(key)
        except CapacityError:  # too many open files, of which some may be ours
            self.clear()
            fd = store.open_file(key)
        file = _File(None if fd is None else Descriptor(fd), now)
        with self._lock:
            before = self._files.pop((store, key), None)
            self._files[store, key] = file
            oldest = self._files.popitem(last=False) if len(self._files) > FILES else None
        del before, oldest  # closed outside the lock, when the last read of them is over
        return file.descriptor
