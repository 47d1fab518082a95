"""Who carries a staged save: the node's sidecar where one answers and may, else this process.

Invariant: whatever becomes of the carrier, a save is reported as failed only after the repository itself was asked; and an
arena that a lost carrier may still be reading is not handed out again.
Failure behaviour: a sidecar that is absent or refuses means in-process, said once; errors of the save itself go on up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpoint import commit
from checkpoint import manifest as manifests
from checkpoint import plan as plans
from checkpoint.carry import carry
from checkpoint.commit import Attempt
from checkpoint.documents import Commit
from checkpoint.events import Event, Released
from checkpoint.plan import PutPlan
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.errors import MillraceError, TransientError
from dataio.core.log import get_logger, warn_once
from dataio.sidecar.client import Sidecar, Staged
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

    def __init__(self, store: Store, sidecar: str | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._wanted, self._clock = store, sidecar, clock
        self._sidecar: Sidecar | None = None
        self._lock = threading.Lock()

    def carry(self, cargo: Cargo) -> dict[str, object]:
        """Carry the save to its commit and return what happened; the arena is given back as soon as possible."""
        staged = self._hand_over(cargo)
        cargo.handed_over("process" if staged is None else "sidecar")
        try:
            return self._here(cargo) if staged is None else self._there(cargo, staged)
        except TransientError as error:
            return self._look_again(cargo.plan, error, GRACE_SECONDS if staged is not None else 0.0)

    def close(self) -> None:
        """End the connection to the sidecar; what it carries goes on."""
        with self._lock:
            if self._sidecar is not None:
                self._sidecar.close()
            self._sidecar = None

    def _hand_over(self, cargo: Cargo) -> Staged | None:
        if self._wanted is None:
            return None
        if not self._store.location.shareable:
            warn_once(
                _log, "the store's options hold secrets, which the sidecar does not get: saving inside this process"
            )
            return None
        try:
            sidecar = self._find()
            if sidecar is None:
                warn_once(_log, "no sidecar answers: saving inside this process")
                return None
            return sidecar.stage(kind="checkpoint", arena_fd=cargo.arena_fd, plan=plans.encode(cargo.plan))
        except MillraceError as error:
            warn_once(_log, f"the sidecar did not take the save over, saving inside this process: {error}")
            self.close()
            return None

    def _find(self) -> Sidecar | None:
        with self._lock:
            if self._sidecar is None:
                self._sidecar = Sidecar.find(self._wanted)
            return self._sidecar

    def _here(self, cargo: Cargo) -> dict[str, object]:
        released = False

        def emit(event: Event) -> None:
            nonlocal released
            if isinstance(event, Released):
                released = True
                cargo.give_back()

        try:
            return carry(cargo.view(), plans.encode(cargo.plan), emit, store=self._store, clock=self._clock)
        finally:
            if not released:
                cargo.give_back()

    def _there(self, cargo: Cargo, staged: Staged) -> dict[str, object]:
        try:
            staged.wait_released(CARRY_SECONDS)
        except TransientError:
            cargo.abandon()
            self.close()
            raise
        except BaseException:
            cargo.give_back()
            raise
        cargo.give_back()
        try:
            return staged.result(CARRY_SECONDS)
        except TransientError:
            self.close()
            raise

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
                return self._result_from_store(attempt, plan.rank, found)
            if found is not None or self._clock.monotonic() >= deadline:
                raise error
            self._clock.sleep(0.2)

    def _result_from_store(self, attempt: Attempt, rank: int, found: Commit) -> dict[str, object]:
        key = attempt.manifest_key(rank)
        manifest = manifests.decode(self._store.get(key, max_bytes=manifests.MAX_BYTES), key)
        return {
            "run": attempt.run,
            "timeline": attempt.timeline,
            "step": attempt.step,
            "attempt": attempt.id,
            "rank": rank,
            "bytes_state": manifest.bytes_state,
            "bytes_written": manifest.bytes_written,
            "bytes_deduplicated": manifest.bytes_deduplicated,
            "committed": found.committed,
            "seconds": max(found.committed - manifest.created, 0.0),
        }
