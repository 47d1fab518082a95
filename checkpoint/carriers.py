"""Who carries a staged save: the node's sidecar where one answers and may, else this process.

Invariant: whatever becomes of the carrier, a save is reported as failed only after the repository itself was asked; and an
arena that a lost carrier may still be reading is not handed out again. Two carriers of one save do no harm: their packs
have names of their own, and the first manifest stands.
Failure behaviour: a sidecar that is absent or refuses means in-process, said once; errors of the save itself go on up.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpoint import commit
from checkpoint import plan as plans
from checkpoint.carry import carry, result_of
from checkpoint.commit import Attempt
from checkpoint.events import Event, Released
from checkpoint.plan import PutPlan
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.errors import DeadlineError, MillraceError, TransientError
from dataio.core.log import get_logger, warn_once
from dataio.sidecar.client import SaveMeter, Sidecar, Staged
from dataio.store.contract import Store

CARRY_SECONDS = 6 * 3600.0
"""The most that a daemon may take for one save before its client gives up waiting."""
GRACE_SECONDS = 10.0
"""How long the repository is watched for the commit of a save whose carrier was lost."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Cargo:
    """A staged save. `give_back` and `abandon` are the arena's; `handed_over` is told "sidecar" or "process"."""

    plan: PutPlan
    arena_fd: int
    view: Callable[[], memoryview]
    give_back: Callable[[], None]
    abandon: Callable[[], None]
    handed_over: Callable[[str], None]


class Carriers:
    """Chooses the carrier for every save of one `Checkpointer`."""

    def __init__(
        self, store: Store, sidecar: str | os.PathLike[str] | None, meter: SaveMeter, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store, self._wanted, self._meter, self._clock = store, sidecar, meter, clock
        self._sidecar: Sidecar | None = None
        self._lock = threading.Lock()

    def carry(self, cargo: Cargo) -> dict[str, object]:
        """Carry the save to its commit and return what happened; the arena is given back as soon as possible."""
        sidecar, staged = self._hand_over(cargo)
        cargo.handed_over("process" if staged is None else "sidecar")
        try:
            if staged is None:
                return self._here(cargo, shared=sidecar is not None)
            return self._there(cargo, staged)
        except TransientError as error:
            lost = sidecar is not None and sidecar.broken
            return self._look_again(cargo.plan, error, GRACE_SECONDS if lost else 0.0)

    def close(self) -> None:
        """End the connection to the sidecar; what it carries goes on."""
        with self._lock:
            if self._sidecar is not None:
                self._sidecar.close()
            self._sidecar = None

    def _hand_over(self, cargo: Cargo) -> tuple[Sidecar | None, Staged | None]:
        """(sidecar, its job); without a job this process carries, and with a sidecar then the sidecar perhaps too."""
        if self._wanted is None:
            return None, None
        if not self._store.location.shareable:
            warn_once(
                _log, "the store's options hold secrets, which the sidecar does not get: saving inside this process"
            )
            return None, None
        sidecar = self._find()
        if sidecar is None:
            warn_once(_log, "no sidecar answers: saving inside this process")
            return None, None
        try:
            plan, about = plans.encode(cargo.plan), _about(cargo.plan)
            return sidecar, sidecar.stage(kind="checkpoint", arena_fd=cargo.arena_fd, plan=plan, about=about)
        except MillraceError as error:
            warn_once(_log, f"the sidecar did not take the save over, saving inside this process: {error}")
            unsure = sidecar.broken or isinstance(error, DeadlineError)
            self.close()
            return (sidecar if unsure else None), None

    def _find(self) -> Sidecar | None:
        with self._lock:
            if self._sidecar is None or self._sidecar.broken:
                self._sidecar = Sidecar.find(self._wanted)
                if self._sidecar is not None:
                    self._sidecar.reporting = self._meter.report
            return self._sidecar

    def _here(self, cargo: Cargo, *, shared: bool) -> dict[str, object]:
        """In this process; `shared`: a sidecar may be reading the arena as well, and may carry the same attempt."""
        let_go, done = (cargo.abandon if shared else cargo.give_back), False

        def emit(event: Event) -> None:
            nonlocal done
            if isinstance(event, Released):
                done = True
                let_go()

        try:
            return carry(cargo.view(), plans.encode(cargo.plan), emit, store=self._store, clock=self._clock)
        finally:
            if not done:
                let_go()

    def _there(self, cargo: Cargo, staged: Staged) -> dict[str, object]:
        try:
            staged.wait_released(CARRY_SECONDS)
        except BaseException:
            cargo.abandon()
            raise
        cargo.give_back()
        return staged.result(CARRY_SECONDS)

    def _look_again(self, plan: PutPlan, error: TransientError, grace: float) -> dict[str, object]:
        """The save's result if it was committed after all, else its error."""
        attempt = Attempt(plan.run, plan.timeline, plan.step, plan.attempt, plan.world_size)
        deadline = self._clock.monotonic() + grace
        while True:
            try:
                found = commit.recognise(self._store, attempt)
            except MillraceError as second:
                _log.warning("whether step %d was committed cannot be seen either: %s", plan.step, second)
                raise error from second
            if found is not None and found.attempt == plan.attempt:
                return result_of(self._store, attempt, plan.rank, found)
            if found is not None or self._clock.monotonic() >= deadline:
                raise error
            self._clock.sleep(0.2)


def _about(plan: PutPlan) -> str:
    """The save, for people."""
    rank = f", rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""
    return f"{plan.run}, step {plan.step}{rank}"
