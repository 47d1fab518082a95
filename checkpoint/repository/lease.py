"""Leases: a saver or a reader states that it is alive, and which steps it references.

Invariant: the holder renews its lease after a third of the lease's lifetime. It trusts the lease until one lifetime
after the *start* of the last successful renewal, by its own monotonic clock. So it stops before other processes
consider the lease expired. A holder that cannot renew in time stops before the decision. A collection compares dates
that the store gave to objects, not the clocks of machines.
Failure behaviour: a failed renewal is retried until the lease has expired; then `require_alive` raises
`TransientError`. `release` never raises: a lease that is not deleted expires.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Self

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import VERSION, Base, Lease, encode, this_process
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError, TransientError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

DEFAULT_LIFE = 300.0
_log = get_logger(__name__)


class LeaseTimes:
    """The times of one lease, without I/O. `life`: the lifetime of the lease in seconds."""

    def __init__(self, life: float) -> None:
        self.life = life
        self._renewed = float("-inf")

    def renewed(self, started: float) -> None:
        """Record that a write of the lease, begun at `started`, has succeeded."""
        self._renewed = max(self._renewed, started)

    def due(self, now: float) -> bool:
        return now - self._renewed >= self.life / 3

    def alive(self, now: float) -> bool:
        return now - self._renewed < self.life

    def wait(self, now: float) -> float:
        """Seconds until the next renewal; at least a hundredth of the lifetime."""
        return max(self._renewed + self.life / 3 - now, self.life / 100)


class LeaseKeeper:
    """Writes a lease on entry, renews it in a thread, and deletes it on `release`.

    All holders of one key name the same bases, so the order of their renewals does not matter. A process that names
    other bases gives a `holder`, and so gets its own key.
    """

    def __init__(
        self,
        store: Store,
        attempt: str,
        *,
        run: str,
        timeline: int,
        step: int,
        bases: Sequence[Base],
        life: float = DEFAULT_LIFE,
        clock: Clock = SYSTEM_CLOCK,
        holder: str = "",
    ) -> None:
        self._store, self._clock, self._times, self._pid = store, clock, LeaseTimes(life), os.getpid()
        self._key = names.lease(attempt, holder)
        self._attempt, self._run, self._timeline, self._step = attempt, run, timeline, step
        self._bases = tuple(bases)
        # the finalizer below uses this; an Event would take a lock, and the garbage collector may run while it is held
        self._stop = SimpleQueue[None]()
        name = f"headrace-lease-{attempt}"
        self._thread = threading.Thread(
            target=_renew_until_stopped, args=(weakref.ref(self), self._stop), name=name, daemon=True
        )
        weakref.finalize(self, self._stop.put, None)  # a keeper that is dropped lets its lease expire

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Stop renewing.

        Unless `release` was called the lease itself stays, to protect what the attempt has stored.
        """
        self._stop.put(None)
        self._thread.join(self._times.life)

    def tick(self) -> None:
        """Renew the lease if it is due. A failure is logged, and the next tick tries again."""
        if not self._times.due(self._clock.monotonic()):
            return
        try:
            self._write()
        except HeadraceError as error:
            _log.warning("the lease of attempt %s could not be renewed: %s", self._attempt, error)

    def alive(self) -> bool:
        """Whether the holder may still trust the lease."""
        return self._times.alive(self._clock.monotonic())

    def require_alive(self) -> None:
        """Raise `TransientError` if the lease has expired."""
        if not self.alive():
            raise lost(self._attempt)

    def release(self) -> None:
        """Stop renewing and delete the lease. In a forked child nothing happens: the lease belongs to the parent."""
        if os.getpid() != self._pid:
            return
        self._stop.put(None)
        self._thread.join(self._times.life)
        try:
            self._store.delete_many([self._key])
        except HeadraceError as error:
            _log.warning("the lease of attempt %s could not be deleted and will run out: %s", self._attempt, error)

    def _write(self) -> None:
        started = self._clock.monotonic()
        until = self._clock.time() + self._times.life
        document = Lease(
            version=Lease.newest if any(base.run for base in self._bases) else VERSION,
            attempt=self._attempt,
            run=self._run,
            timeline=self._timeline,
            step=self._step,
            bases=self._bases,
            until=until,
            life=self._times.life,
            process=this_process(),
        )
        self._store.put(self._key, encode(document))
        self._times.renewed(started)


def _renew_until_stopped(keeper_of: weakref.ref[LeaseKeeper], stop: SimpleQueue[None]) -> None:
    """Renew the lease while the keeper is referenced. The thread holds only a weak reference to it."""
    while (keeper := keeper_of()) is not None:
        pause = keeper._times.wait(keeper._clock.monotonic())
        del keeper
        with contextlib.suppress(Empty):
            stop.get(timeout=pause)
            return
        if (keeper := keeper_of()) is not None:
            keeper.tick()


def lost(attempt: str) -> TransientError:
    """The error of an attempt that could not keep its lease."""
    return TransientError(
        f"attempt {attempt} could not renew its lease in time and stopped before its decision", hint="save again"
    )
