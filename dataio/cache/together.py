"""Blocks of files of this machine: several go together, through one buffer, and are told of at once.

Purpose: deciding what follows from a block, and waking those who wait for it, takes a good part of the time in which a block that
the page cache has is read, digested and written; four that are told of at once are decided on once. Where a store has to be
waited for, that is lost in the wait, and blocks go side by side.
Invariants: at most `TOGETHER` blocks, so that who begins to wait for one of them waits for a few milliseconds more at most;
what somebody waits for already goes first. The bytes are those of the store's object: a store says which file that is.
Failure behaviour: what cannot be read whole (truncated, gone, a bad disk) is left to the store, whose errors pass through.
"""

from __future__ import annotations

import os
import weakref

from headrace.dataio.cache.blocks import Descriptor
from headrace.dataio.cache.buffers import IDLE_SECONDS
from headrace.dataio.cache.flight import Flight, Landed
from headrace.dataio.cache.opened import Opened
from headrace.dataio.cache.passing import DiskError
from headrace.dataio.core import metrics
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.base import Store

TOGETHER = 4

_READ = metrics.store_bytes.labels("posix", "read")


class Together:
    """Safe to share between threads. `lately`: the last fetch was one of these."""

    def __init__(self, clock: Clock) -> None:
        self._opened, self._clock, self._used = Opened(clock), clock, 0.0
        self._here: weakref.WeakKeyDictionary[Store, bool] = weakref.WeakKeyDictionary()
        self.lately = False

    def fits(self, item: object) -> bool:
        """Whether it may go together with others."""
        return isinstance(item, Flight) and item.plain and self._here.get(item.store, False)

    def takes(self, flight: Flight) -> bool:
        """Whether it is to be fetched here: its store's objects are files of this machine."""
        if flight.plain and flight.store not in self._here:
            self._file(flight)
        return self.fits(flight)

    def fetch(self, flight: Flight, buffer: memoryview) -> Landed | None:
        """Bring it into its file; None where that is left to the store."""
        fetch, file = flight.fetch, self._file(flight)
        if file is None:
            return None
        view = buffer[: fetch.length]
        try:
            whole = os.preadv(file.fileno(), [view], fetch.offset) == fetch.length
        except OSError:
            whole = False
        if not whole:
            self._opened.forget(flight.store, flight.key)
            return None
        self.lately, self._used = True, self._clock.monotonic()
        _READ.inc(fetch.length)
        try:
            flight.part.whole(view)  # written at once, it is mapped by large pages
        except DiskError as error:
            return fetch, error, fetch.length
        return fetch, None, fetch.length

    def rest(self) -> None:
        """Let go of all files, if nobody asked for any in the last `IDLE_SECONDS`."""
        if self._clock.monotonic() - self._used >= IDLE_SECONDS:
            self._opened.clear()

    def _file(self, flight: Flight) -> Descriptor | None:
        try:
            file = self._opened.get(flight.store, flight.key)
        except HeadraceError:  # said by the store, when it is asked
            return None
        self._here[flight.store] = file is not None
        return file
