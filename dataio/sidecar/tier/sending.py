"""Copies for the buddy: what this node keeps is sent there, newest step first, for as long as the daemon runs.

Purpose: losing this node loses nothing that was kept here.
Invariants: a record is sent only after all objects that it names and this node has; a step counts as copied then, and not before.
Guests' steps are not sent on. One connection, one thread, at the configured pace.
Failure behaviour: a buddy that is away or has no room is said once each time that changes, shown in the status, and tried again
after 1 to `LONGEST` seconds; saves go on.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TypeVar

from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.tier import protocol as p
from headrace.dataio.sidecar.tier import tls
from headrace.dataio.sidecar.tier.client import Buddy
from headrace.dataio.sidecar.tier.config import TierConfig
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.tier import LocalTier

IDLE_SECONDS = 0.5
LONGEST = 30.0
RUNS = 32
"""Runs whose newest copy is remembered."""
K = TypeVar("K")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Copy:
    """The newest step of a run that the buddy has, when it was kept here and when all of it was there. Unix seconds."""

    step: int
    made: float
    sent: float


class Sending:
    """Runs from `start` to `close`. `trouble` is why the buddy gets nothing, empty while it does."""

    def __init__(self, config: TierConfig, shelf: LocalTier) -> None:
        self._config, self._shelf = config, shelf
        self._context, self._pace = tls.client_context(config), p.Pace(config.rate)
        self._sent: dict[tuple[str, str, bytes], None] = {}
        self._done: dict[tuple[str, int, bool], None] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-copies", daemon=True)
        self.trouble, self.waiting, self.bytes = "not reached yet", 0, 0
        self.copies: dict[str, Copy] = {}

    def has(self, record: Record) -> bool:
        """Whether the buddy has this rank's part of the step, whole."""
        return any((record.attempt, record.rank, committed) in self._done for committed in (False, True))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)  # it is in the middle of a piece at most, and ends with the process

    def _run(self) -> None:
        pause = 1.0
        while not self._stop.is_set():
            try:
                self._next()  # how much waits is shown also while the buddy is away
                with Buddy.connect(self._config, self._context, self._pace) as buddy:
                    self._well()
                    pause = 1.0
                    self._send_all(buddy)
            except (HeadraceError, OSError) as error:
                self._trouble(str(error))
                self._stop.wait(pause)
                pause = min(pause * 2, LONGEST)

    def _send_all(self, buddy: Buddy) -> None:
        idle = time.monotonic()
        while not self._stop.is_set():
            record = self._next()
            if record is not None:
                self._send(buddy, record)
                idle = time.monotonic()
            elif time.monotonic() - idle > p.IO_SECONDS / 3:
                buddy.records("-")  # so that neither side takes the silence for the end
                idle = time.monotonic()
            else:
                self._stop.wait(IDLE_SECONDS)

    def _next(self) -> Record | None:
        """The newest record that the buddy lacks, or has as it was before the commit."""
        left = [r for r in self._shelf.records() if not r.guest and not r.over and _name(r) not in self._done]
        self.waiting = len(left)
        return left[0] if left else None

    def _send(self, buddy: Buddy, record: Record) -> None:
        for key in record.keys:
            if self._stop.is_set():
                return
            held, before = self._shelf.open(record.source, key), buddy.sent
            if held is None:
                continue
            name = (record.source, key, held.label.digest)  # a second carrier's manifest has the first one's key
            if name not in self._sent and buddy.offer(self._shelf, record.source, key):
                _note(self._sent, name)
            self.bytes += buddy.sent - before
        buddy.keep(record)
        _note(self._done, _name(record))
        self._well()
        known = self.copies.get(record.run)
        if known is None or record.created >= known.made:
            self.copies.pop(record.run, None)
            self.copies[record.run] = Copy(record.step, record.created, time.time())
            while len(self.copies) > RUNS:
                del self.copies[next(iter(self.copies))]

    def _well(self) -> None:
        if self.trouble:
            _log.info("the buddy at %s takes copies", self._config.buddy)
        self.trouble = ""

    def _trouble(self, why: str) -> None:
        if why != self.trouble:
            _log.warning("the buddy gets no copies, saves go on: %s", why)
        self.trouble = why


def _name(record: Record) -> tuple[str, int, bool]:
    return record.attempt, record.rank, record.committed > 0


def _note(known: dict[K, None], name: K, most: int = 65536) -> None:
    known[name] = None
    while len(known) > most:
        del known[next(iter(known))]
