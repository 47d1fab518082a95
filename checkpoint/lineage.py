"""Chooses the timeline that a trainer saves in, and the steps that its saves reference.

A trainer that starts has no timeline. Its first save opens a timeline, or joins that of another writer in the process.
So does the first save after a restore that begins a branch. `headrace.checkpoint.repository.writers` has the rules. A
restore alone changes nothing.

The first save references the step before it, or a step of another run that the trainer started from. Later saves
reference the trainer's own last step.
Invariant: a lease protects the restored step, and the step at which a timeline begins, until this trainer has committed
a step of its own. A timeline is opened only while that lease is alive, and after the lease was written and the step was
found. So no collection removes the step at which it begins.
Failure behaviour: `ConflictError` if another trainer took over the run or if the parent step was removed.
`ConflictError` also if a step was restored as the latest while the store was unreachable, and is not the latest. A
removed step of another run is not referenced, which costs only space. A process without write access takes no lease.
The lease of a process that dies expires.
"""

from __future__ import annotations

import threading
import weakref

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import writers
from headrace.checkpoint.repository.lease import DEFAULT_LIFE, LeaseKeeper
from headrace.checkpoint.repository.writers import WriterState
from headrace.checkpoint.tier.restoring import Found, NodeTier, outdated
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import AccessDeniedError, NotFoundError, TransientError
from headrace.dataio.store.base import Store

Origin = str | tuple[str, int] | None
"""Another run, or a step of one."""
_ERROR_BYTES = 400
"""The maximum length of the error text in rank 0's message, in bytes."""
_LOOKS = 5
"""The maximum number of searches for the latest step while retention removes each step that is found."""


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """Rank 0's answer for one save: the attempt, its timeline and the bases to reference.

    `local`: all ranks only keep the step in the tiers of their nodes.
    """

    attempt: str
    timeline: int
    bases: tuple[Base, ...]
    store_error: str = ""
    """The error text if the store was unreachable. There is no timeline then, and nothing is saved."""
    local: bool = False


class Lineage:
    """The timeline and the referenced steps of one trainer.

    `timeline` is 0 until the trainer has saved. `again`: the timeline may already have the step of the next save. Not
    thread-safe, except `prepare` and `release`.
    """

    def __init__(self, store: Store, run: str, origin: Origin = None) -> None:
        if origin is not None:
            names.check_run(origin if isinstance(origin, str) else origin[0])
        self._store, self._run = store, run
        self._origin = (origin, "latest") if isinstance(origin, str) else origin
        self.timeline = 0
        self._writer = writers.enter()
        self._leave = weakref.finalize(self, writers.leave, self._writer)
        self._preparing, self._prepared = threading.Lock(), False
        self._restored: Base | None = None
        self._was_latest = False
        self.again = False
        self._parent_lease, self._fork_lease = ParentLease(store), ParentLease(store)
        self._base: Base | None = None
        self._fork: Base | None = None
        self._offline_latest: Base | None = None

    def prepare(self) -> None:
        """Connect to the store and create the repository if needed. Otherwise the first `new_ticket` does it."""
        with self._preparing:
            if not self._prepared:
                repository.ensure_repo(self._store)
                self._prepared = True

    def new_ticket(self, step: int, local: bool = False) -> Ticket:
        """The ticket of the next save. Only rank 0 calls it. `local`: see `Ticket`.

        The store is read only for the first save, for the first after a restore, and if `again` is set. If the store is
        unreachable, no error is raised in the training loop. The ticket holds the reason, and the next save tries
        again.
        """
        try:
            self._require_timeline(step)
        except TransientError as error:
            return Ticket("", 0, (), str(error).encode()[:_ERROR_BYTES].decode(errors="ignore"))
        bases = tuple(base for base in (self._base, self._fork) if base is not None)
        return Ticket(names.new_id(), self.timeline, bases, local=local)

    def _require_timeline(self, step: int) -> None:
        """Open or join a timeline before the first save, after a restore, and for a step that the timeline has."""
        if not self.timeline or self._restored is not None or self.again:
            self.prepare()
            self._check_offline_restore()
            if not self.timeline:
                # before a timeline is opened, so that a wrong origin does not stop another trainer of the run
                self._fork = self._fork or self._find_origin()
            state = WriterState(
                self._writer,
                self.timeline,
                self._restored,
                was_latest=self._was_latest,
                may_start_fresh=True,
                again=self.again,
            )
            position = writers.place(
                self._store, self._run, step, state, lambda base: self._parent_lease.hold(self._run, base)
            )
            self._base = position.base or self._base
            self.set_timeline(position.timeline)

    def set_timeline(self, number: int) -> None:
        """Set the timeline that the trainer saves in until it restores another step. All ranks call it."""
        self.timeline, self._restored, self.again = number, None, False

    def find(self, run: str, step: int | str | Base, tier: NodeTier) -> Found | None:
        """Find the step and hold a lease on it until this trainer has committed a step. Only rank 0 calls it.

        If the latest step is being removed, a newer one is looked up.
        """
        for tries_left in reversed(range(_LOOKS)):
            found = tier.find(self._store, run, step)
            if found is None or found.offline:
                break
            try:
                (self._parent_lease if run == self._run else self._fork_lease).hold(run, found.base)
                break
            except NotFoundError:
                if step != "latest" or not tries_left:
                    raise
        return found

    def restored(self, run: str, found: Found, latest: bool) -> None:
        """Record a restore.

        The next save may continue from this step. If the step belongs to another run, the next save references it.
        """
        base = found.base
        if run == self._run:
            self._restored, self._was_latest = base, latest
            self._offline_latest = base if found.offline and latest else None
        elif not found.offline:
            self._fork = msgspec.structs.replace(base, run=run)

    def committed(self, step: int, attempt: str) -> None:
        """Record a commit of this trainer.

        The calls may come in any order. The next save references the newest step.
        """
        if self._base is None or (self._base.timeline, self._base.step) < (self.timeline, step):
            self._base = Base(self.timeline, step, attempt)
        self._fork = None

    def release(self) -> None:
        """Release all leases."""
        self._parent_lease.release()
        self._fork_lease.release()

    def close(self) -> None:
        """Release all leases and unregister this trainer's writer."""
        self.release()
        self._leave()

    def _find_origin(self) -> Base | None:
        """The step of another run that this run starts from; None if this run has a step or there is no origin."""
        if self._origin is None or self._restored is not None:
            return None
        if repository.find(self._store, self._run, "latest") is not None:
            return None
        run, step = self._origin
        base = repository.find(self._store, run, step)
        return None if base is None else msgspec.structs.replace(base, run=run)

    def _check_offline_restore(self) -> None:
        """Raise if a step that was restored as the latest while the store was unreachable is not the latest."""
        if self._offline_latest is not None:
            latest = repository.find(self._store, self._run, "latest")
            if latest != self._offline_latest:
                raise outdated(self._run, self._offline_latest, latest)
            self._offline_latest = None


class ParentLease:
    """Holds a lease on at most one step at a time. `release` may be called from any thread."""

    def __init__(self, store: Store, life: float = DEFAULT_LIFE, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._life, self._clock = store, life, clock
        self._lock = threading.Lock()
        self._lease: tuple[LeaseKeeper, str, Base] | None = None

    def hold(self, run: str, base: Base) -> None:
        """Release the held step and lease this one; `NotFoundError` if it is removed.

        A step that is held already is only checked.
        """
        with self._lock:
            current = self._lease
        if current is not None and current[1:] == (run, base) and current[0].alive():
            repository.require_exists(self._store, run, base)
            return
        self.release()
        lease = LeaseKeeper(
            self._store,
            names.new_id(self._clock),
            run=run,
            timeline=base.timeline,
            step=base.step,
            bases=[base],
            life=self._life,
            clock=self._clock,
        )
        try:
            lease.__enter__()
        except AccessDeniedError:  # a process without write access cannot save either
            return
        try:
            repository.require_exists(self._store, run, base)
        except BaseException:
            lease.release()
            raise
        with self._lock:
            self._lease = lease, run, base

    def release(self) -> None:
        """Release the lease."""
        with self._lock:
            current, self._lease = self._lease, None
        if current is not None:
            current[0].release()
