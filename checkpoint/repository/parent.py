"""The step that a trainer goes on from, held from its restore until the trainer has a step of its own.

Why: until its first commit a new timeline has no past but its parent. Were the parent removed meanwhile, by a policy that another
trainer of the run still applies, the next start would find an empty branch.
Invariant: while a lease lives and the step was seen to be there after the lease was written, no collection removes it; a timeline
is opened only then.
Failure behaviour: `hold` raises `NotFoundError` for a step that is being removed. Where nothing may be written, nothing is
held. A process that dies leaves a lease, which runs out.
"""

from __future__ import annotations

import threading

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.lease import DEFAULT_LIFE, LeaseKeeper
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import AccessDeniedError
from headrace.dataio.store.base import Store


class Parent:
    """Holds one step at a time, or none. `let_go` may come from any thread."""

    def __init__(self, store: Store, life: float = DEFAULT_LIFE, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._life, self._clock = store, life, clock
        self._lock = threading.Lock()
        self._held: tuple[LeaseKeeper, str, Base] | None = None

    def hold(self, run: str, base: Base) -> None:
        """Let go of what was held, and hold this step. One that is held already must still be there."""
        with self._lock:
            held = self._held
        if held is not None and held[1:] == (run, base) and held[0].alive():
            repository.require_there(self._store, run, base)
            return
        self.let_go()
        lease = LeaseKeeper(
            self._store, names.new_id(self._clock), run, base.timeline, base.step, [base], self._life, self._clock
        )
        try:
            lease.__enter__()
        except AccessDeniedError:  # a reader that may not write can save nothing either
            return
        try:
            repository.require_there(self._store, run, base)
        except BaseException:
            lease.release()
            raise
        with self._lock:
            self._held = lease, run, base

    def let_go(self) -> None:
        """Hold nothing."""
        with self._lock:
            held, self._held = self._held, None
        if held is not None:
            held[0].release()
