"""Runs a staged save: in the node's sidecar if one answers and accepts it, otherwise in this process.

With `through_tier`, this process saves if the node has a local tier (`headrace.checkpoint.saving.tier_saves`).
Invariant: after a transient error the executor first asks the repository whether the step was committed. An arena
that a lost worker may still be reading is not reused. Two workers of one save do no harm: their packs have different
names, and the first manifest counts.
Failure behaviour: if no sidecar answers, or if it refuses the save, this process saves and logs the reason once. Errors
of the save are raised.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.saving import plan as plans
from headrace.checkpoint.saving.commit_worker import commit_staged, result_of
from headrace.checkpoint.saving.plan import Event, OwnManifest, PutPlan, Released
from headrace.checkpoint.saving.progress import ProgressFile
from headrace.checkpoint.saving.staged_save import ArenaOwner, StagedSave
from headrace.checkpoint.saving.tier_saves import TierSaves, without_abort
from headrace.checkpoint.tier.restoring import node_tier
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import (
    DeadlineError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UsageError,
)
from headrace.dataio.core.limits import MIB
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.sidecar.client import SaveMeter, Sidecar, StagedJob
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.tier import LocalTier

QUEUE_SECONDS = 600.0
"""Seconds that a save waits in the daemon's queue before this process commits it."""
COMMIT_SECONDS = 6 * 3600.0
"""Seconds that the client waits for the daemon to finish one save."""
RETURN_SECONDS = 20.0
"""Seconds that the client waits for a lost daemon to return before it saves in this process."""
GRACE_SECONDS = 10.0
"""Seconds that the client waits for the commit of a save if the connection broke after the arena was released."""
ROUNDS = 5
"""The maximum number of times that one save is followed at a daemon, restarts included."""
_KEPT_MANIFEST_BYTES = 8 * MIB
"""The next save uses a manifest of up to this size from memory. It reads a larger manifest from the store."""
_POLL = 0.2
_WATCH_SECONDS = 5.0
_plan_built = declare("trainer.plan-built", "the arena is full, the plan is built, the sidecar has neither")
_log = get_logger(__name__)


class SaveExecutor:
    """Runs every save of one `Checkpointer`, in the sidecar or in this process."""

    def __init__(
        self,
        store: Store,
        sidecar: str | os.PathLike[str] | None,
        *,
        meter: SaveMeter,
        through_tier: bool = False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._store, self._sidecar_name, self._meter, self._clock = store, sidecar, meter, clock
        self._through_tier = through_tier
        self.tier = TierSaves(
            store,
            find_sidecar=self._find,
            commit=lambda save, local_tier: self._commit_in_process(save, shared=False, local_tier=local_tier),
            result_or_raise=self._result_or_raise,
            clock=clock,
        )
        self._sidecar: Sidecar | None = None
        self.own_manifest: OwnManifest | None = None
        """This rank's manifest of the step that the last save committed. None before the first save and after a failed one."""
        self._lock = threading.Lock()

    def commit_staged(self, save: StagedSave) -> dict[str, object]:
        """Commit the save and return its report. The arena is released as soon as possible."""
        try:
            local_tier = self.tier.find() if self._through_tier else None
            result = self._commit_anywhere(save) if local_tier is None else self.tier.upload(save, local_tier)
        except BaseException:
            self.own_manifest = None
            raise
        self.own_manifest = own_manifest_of(result, result.pop("encoded", None))
        return result

    def _commit_anywhere(self, save: StagedSave) -> dict[str, object]:
        sidecar, staged = self._hand_over(save)
        save.handed_over("process" if staged is None else "sidecar")
        try:
            if sidecar is None or staged is None:
                return self._commit_in_process(save, shared=sidecar is not None)
            return self._commit_in_sidecar(save, sidecar, staged)
        except TransientError as error:
            return self._result_or_raise(save.plan, error)

    def close(self) -> None:
        """Close the connection to the sidecar; its jobs continue."""
        with self._lock:
            if self._sidecar is not None:
                self._sidecar.close()
            self._sidecar = None

    def _hand_over(self, save: StagedSave) -> tuple[Sidecar | None, StagedJob | None]:
        """Returns (sidecar, its job).

        If the job is None, this process saves. If a sidecar is returned without a job, it may be saving as well.
        """
        if self._sidecar_name is None:
            return None, None
        if save.arena_fd < 0:
            sliced = "the sidecar takes no state in slices and no large artifacts: saving inside this process"
            warn_once(_log, sliced, "job")
            return None, None
        if not self._store.location.shareable:
            secret = "the store's options hold secrets, which the sidecar does not get: saving inside this process"
            warn_once(_log, secret, "job")
            return None, None
        sidecar = self._find()
        if sidecar is None:
            warn_once(_log, "no sidecar answers: saving inside this process", "node")
            return None, None
        try:
            return sidecar, _stage(sidecar, save)
        except HeadraceError as error:
            warn_once(_log, f"the sidecar did not take the save over, saving inside this process: {error}", "node")
            may_have_started = sidecar.broken or isinstance(error, DeadlineError)
            self.close()
            return (sidecar if may_have_started else None), None

    def _find(self) -> Sidecar | None:
        if self._sidecar_name is None:
            return None
        with self._lock:
            if self._sidecar is None or self._sidecar.broken:
                self._sidecar = Sidecar.find(self._sidecar_name)
                if self._sidecar is not None:
                    self._sidecar.reporting = self._meter.report
            return self._sidecar

    def _commit_in_process(
        self, save: StagedSave, *, shared: bool, local_tier: LocalTier | None = None
    ) -> dict[str, object]:
        """Commit in this process.

        `shared`: a sidecar may also be reading the arena and may commit the same attempt. `local_tier`: the node's tier,
        if the caller has found it already.
        """
        release, is_released = (save.abandon if shared else save.give_back), False
        through_tier = local_tier is not None
        progress = ProgressFile(None)

        def emit(event: Event) -> None:
            nonlocal is_released
            if isinstance(event, Released):
                is_released = True
                release()

        try:
            with contextlib.ExitStack() as stack:
                if local_tier is None and self._sidecar_name is not None:
                    local_tier = stack.enter_context(node_tier(self._sidecar_name)).local_tier
                store = self._store if save.through is None else save.through(self._store)
                failed_ranks = commit.no_failed_ranks if shared else save.failed_ranks
                if through_tier:
                    failed_ranks = without_abort(failed_ranks, save.plan)
                result = commit_staged(
                    save.view(),
                    save.plan,
                    emit,
                    store=store,
                    local_tier=local_tier,
                    progress=progress,
                    failed_ranks=failed_ranks,
                    on_kept=save.kept,
                    clock=self._clock,
                )
                return result | {"encoded": progress.manifest}
        finally:
            if not is_released:
                release()

    def _commit_in_sidecar(self, save: StagedSave, sidecar: Sidecar, staged: StagedJob) -> dict[str, object]:
        """Wait for the daemon's job, across restarts of the daemon.

        If the daemon does not return, save in this process.
        """
        with self._watching_ranks(save):
            return self._follow(save, sidecar, staged)

    def _follow(self, save: StagedSave, sidecar: Sidecar, staged: StagedJob) -> dict[str, object]:
        owner = ArenaOwner(save)
        for _ in range(ROUNDS):
            try:
                staged.wait_released(COMMIT_SECONDS)
                if staged.released:
                    owner.give_back()
                result = staged.result(COMMIT_SECONDS)
                owner.give_back()
                return result
            except BaseException as error:
                if isinstance(error, UsageError) and not owner.released:  # it may only concern the daemon's environment
                    warn_once(_log, f"the sidecar cannot save, saving inside this process: {error}", "node")
                    save.handed_over("process")
                    return self._commit_in_process(save, shared=False)
                if not isinstance(error, TransientError) or not sidecar.broken:
                    owner.abandon()
                    raise
                reconnected = self._reconnect(save, staged.token, error, owner.released)
            if isinstance(reconnected, dict):
                owner.abandon()
                return reconnected
            if reconnected is None:
                break
            sidecar, staged = reconnected
        if owner.released:
            raise _without_daemon(save.plan)
        return self._commit_in_process(save, shared=True)

    @contextlib.contextmanager
    def _watching_ranks(self, save: StagedSave) -> Iterator[None]:
        """Abort the attempt when the node of a missing rank is lost. No daemon reports that."""
        if save.silent_ranks is None:
            yield
            return
        stopped, arguments = threading.Event(), (self._store, attempt_of(save.plan), save.silent_ranks)
        watcher = threading.Thread(target=_watch, args=(stopped, *arguments), name=f"headrace-nodes-{save.plan.step}")
        watcher.start()
        try:
            yield
        finally:
            stopped.set()
            watcher.join()

    def _reconnect(
        self, save: StagedSave, token: str, error: TransientError, released: bool
    ) -> tuple[Sidecar, StagedJob] | dict[str, object] | None:
        """Find the job again after the connection broke.

        Returns the sidecar with the job, which is followed or staged again. If the step was committed in the meantime,
        returns the result. If neither is possible, returns None. Raises `error` if the arena was already released and
        no commit appears in time.
        """
        until = self._clock.monotonic() + (GRACE_SECONDS if released else RETURN_SECONDS)
        while True:
            if (result := self._try_find_result(save.plan)) is not None:
                return result
            if (back := self._find_job(save, token, released)) is not None:
                return back
            if self._clock.monotonic() >= until:
                if released:
                    raise error
                return None
            self._clock.sleep(_POLL)

    def _find_job(self, save: StagedSave, token: str, released: bool) -> tuple[Sidecar, StagedJob] | None:
        """The job at a daemon that has returned.

        It is staged again if the daemon does not know it and the arena is not released.
        """
        sidecar = self._find()
        if sidecar is None:
            return None
        try:
            return sidecar, sidecar.follow(token)
        except NotFoundError:
            if released:
                return None
        except HeadraceError:
            return None
        try:
            return sidecar, _stage(sidecar, save)
        except HeadraceError as error:
            _log.warning("step %d could not be staged again: %s", save.plan.step, error)
            return None

    def _result_or_raise(self, plan: PutPlan, error: TransientError) -> dict[str, object]:
        """Return the save's result if it was committed despite the error; else raise the error."""
        try:
            result = self._find_result(plan)
        except HeadraceError as second:
            _log.warning("whether step %d was committed cannot be seen either: %s", plan.step, second)
            raise error from second
        if result is None:
            raise error
        return result

    def _try_find_result(self, plan: PutPlan) -> dict[str, object] | None:
        """As `_find_result`, but None if the store is unreachable."""
        with contextlib.suppress(TransientError):
            return self._find_result(plan)
        return None

    def _find_result(self, plan: PutPlan) -> dict[str, object] | None:
        attempt = attempt_of(plan)
        committed = commit.recognise(self._store, attempt)
        if committed is None or not committed.commits(plan.attempt):
            return None
        return result_of(self._store, attempt, plan.rank, committed)


def attempt_of(plan: PutPlan) -> Attempt:
    """The attempt that the plan belongs to."""
    return Attempt(plan.run, plan.timeline, plan.step, plan.attempt, plan.world_size)


def own_manifest_of(result: Mapping[str, object], encoded: object = None) -> OwnManifest | None:
    """This rank's manifest of a committed step, from the save's report.

    Args:
        result: The report. If an older daemon made it, it lacks the manifest's digest.
        encoded: The encoded manifest, if this process built it. Default: None.

    Returns:
        The manifest's digest, with the encoded manifest if it has this digest and is small enough. None if the report
        has no digest.
    """
    attempt, name = result.get("attempt"), result.get("manifest")
    if not isinstance(attempt, str) or not isinstance(name, str):
        return None
    data = encoded if isinstance(encoded, bytes) and len(encoded) <= _KEPT_MANIFEST_BYTES else b""
    try:
        expected = bytes.fromhex(name)
    except ValueError:
        return None
    return OwnManifest(attempt, expected, data if digest(data) == expected else b"")


def _watch(stopped: threading.Event, store: Store, attempt: Attempt, silent_ranks: commit.FailedRanks) -> None:
    while not stopped.wait(_WATCH_SECONDS):
        if silent_ranks(range(attempt.world_size)):
            with contextlib.suppress(HeadraceError):  # the store is unreachable: the next round tries again
                commit.abort_without(store, attempt, silent_ranks)


def _stage(sidecar: Sidecar, save: StagedSave) -> StagedJob:
    plan = plans.encode(save.plan)
    _plan_built()
    return sidecar.stage(
        kind="checkpoint",
        arena_fd=save.arena_fd,
        plan=plan,
        about=_label(save.plan),
        urgent=save.urgent,
        wait=QUEUE_SECONDS,
    )


def _without_daemon(plan: PutPlan) -> TransientError:
    return TransientError(
        f"step {plan.step}: the connection to the sidecar was lost {ROUNDS} times",
        hint="see the sidecar's log; save again",
    )


def _label(plan: PutPlan) -> str:
    """A description of the save, for status displays."""
    rank = f", rank {plan.rank} of {plan.world_size}" if plan.world_size > 1 else ""
    return f"{plan.run}, step {plan.step}{rank}"
