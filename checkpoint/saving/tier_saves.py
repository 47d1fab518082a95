"""Saves through the node's local tier, in this process: the tier has each step before the store.

The arena is free as soon as the tier has the step. A `local` save ends there (`keep`), and `commit_kept` may upload it
later. `upload` keeps and commits the step.
Invariant: a step that the tier has is never aborted for a rank that ended, so a restore can still commit it. A step
whose upload failed counts as kept.
Failure behaviour: `LocalOnlyError` if the tier has the step and the store does not. `NotFoundError` if the node has no
tier. Errors of the save are raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.commit import FinalError
from headrace.checkpoint.saving.commit_worker import commit_kept, keep_staged
from headrace.checkpoint.saving.plan import PutPlan
from headrace.checkpoint.saving.staged_save import StagedSave
from headrace.checkpoint.tier.restoring import NodeTier
from headrace.checkpoint.tier.saving import KeptSteps, local_only_error
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CapacityError, NotFoundError, TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.tier import LocalTier

_WITHOUT_BASES = 15
"""The number of uploads without bases that follow an upload for which the bases had no chunk."""
_log = get_logger(__name__)
_Result = dict[str, object]


class TierSaves:
    """The saves of one `Checkpointer` through the tier.

    - `find_sidecar`: the node's sidecar, or None.
    - `commit`: commits a save in this process, with the tier before the store.
    - `result_or_raise`: returns the result of a save that was committed despite the error, or raises the error.
    - `is_there`: whether the tier was there at the last save.
    """

    def __init__(
        self,
        store: Store,
        *,
        find_sidecar: Callable[[], Sidecar | None],
        commit: Callable[[StagedSave, LocalTier], _Result],
        result_or_raise: Callable[[PutPlan, TransientError], _Result],
        clock: Clock,
    ) -> None:
        self._store, self._find_sidecar, self._commit, self._clock = store, find_sidecar, commit, clock
        self._result_or_raise = result_or_raise
        self.is_there, self.kept_steps, self._without_bases = False, KeptSteps(), 0

    def keep(self, save: StagedSave) -> None:
        """Keep the step in the node's tier only. The arena is released as soon as the tier has it."""
        save.handed_over("process")
        try:
            local_tier = self.find()
            if local_tier is None:
                raise NotFoundError(
                    f"step {save.plan.step} is not saved: the node's sidecar reports no local tier",
                    hint="see `headrace sidecar status`; the next save is uploaded",
                )
            store = self._store if save.through is None else save.through(self._store)
            try:
                record = keep_staged(
                    save.view(), save.plan, lambda _: None, store=store, local_tier=local_tier, clock=self._clock
                )
            except CapacityError:
                self.is_there = False  # the next save asks again
                raise
        finally:
            save.give_back()
        save.kept()
        self.kept_steps.add(local_tier, record)

    def commit_kept(self, plan: PutPlan, failed_ranks: commit.FailedRanks = commit.no_failed_ranks) -> _Result:
        """Upload and commit a step that `keep` has kept. `failed_ranks`: see `StagedSave`."""
        local_tier = self.find()
        if local_tier is None:
            raise NotFoundError(f"step {plan.step} is not uploaded: the node's sidecar reports no local tier")
        return self._upload_kept(plan, local_tier, failed_ranks)

    def _upload_kept(self, plan: PutPlan, local_tier: LocalTier, failed_ranks: commit.FailedRanks) -> _Result:
        try:
            return commit_kept(
                plan,
                store=self._store,
                local_tier=local_tier,
                failed_ranks=without_abort(failed_ranks, plan),
                clock=self._clock,
            )
        except FinalError:
            raise
        except TransientError as error:
            raise local_only_error(error, plan.step) from error

    def find(self) -> LocalTier | None:
        """The node's tier. It is looked up for each save, because the sidecar may start or stop."""
        local_tier = NodeTier(self._find_sidecar()).local_tier
        self.is_there = local_tier is not None
        if local_tier is None:
            warn_once(_log, 'uploads="newest" needs a sidecar with a local tier: every step is uploaded', "node")
        return local_tier

    def upload(self, save: StagedSave, local_tier: LocalTier) -> _Result:
        """Commit in this process, with the tier before the store. A step whose upload failed counts as kept."""
        try:
            return self._upload_through(save, local_tier)
        except BaseException:
            self.kept_steps.add_failed(local_tier, self._store.location.url, save.plan)
            raise

    def _upload_through(self, save: StagedSave, local_tier: LocalTier) -> _Result:
        """Commit in this process, with the tier before the store.

        If the bases had no chunk of an earlier step, the next ones are kept without bases and uploaded from the tier.
        Then the trainer's next save does not wait until the store has answered about the bases.
        """
        save.handed_over("process")
        plan = save.plan
        try:
            if self._without_bases and save.arena_fd >= 0 and not plan.description_data:
                self._without_bases -= 1
                return self._keep_and_commit(save, local_tier)
            result = self._commit(save, local_tier)
        except TransientError as error:
            return self._result_or_raise(plan, error)
        if plan.bases and plan.compression != "delta" and not result["bytes_deduplicated"]:
            self._without_bases = _WITHOUT_BASES
        return result

    def _keep_and_commit(self, save: StagedSave, local_tier: LocalTier) -> _Result:
        """Keep the step, release the arena, and upload the step from the tier. If the tier is full, as without this."""
        began, release = self._clock.monotonic(), save.give_back
        try:
            keep_staged(
                save.view(), save.plan, lambda _: None, store=self._store, local_tier=local_tier, clock=self._clock
            )
        except CapacityError:
            release = _nothing
            return self._commit(save, local_tier)
        finally:
            release()
        kept = self._clock.monotonic() - began
        save.kept()
        result = self._upload_kept(save.plan, local_tier, save.failed_ranks)
        return result | {"kept": kept, "seconds": self._clock.monotonic() - began}


def without_abort(failed_ranks: commit.FailedRanks, plan: PutPlan) -> commit.FailedRanks:
    """As `failed_ranks`, but raise for a rank that is missing a second time. Its part may be in a tier.

    The attempt is then not aborted, and a restore can still commit the step.
    """
    before = ""

    def failed(ranks: Sequence[int]) -> str:
        nonlocal before
        lost = failed_ranks(ranks)
        if len(ranks) < plan.world_size:  # otherwise it is no question about missing ranks
            if lost and lost == before:
                raise TransientError(f"step {plan.step} is not committed: {lost}", hint="start the ranks again")
            before = lost
        return lost

    return failed


def _nothing() -> None:
    pass
