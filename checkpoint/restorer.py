"""One restore by the ranks of a job: which step, opened on each rank, put into the state.

Invariant: all ranks restore the same step, or all raise: every rank takes part in every exchange, also one that has failed. There
are five when only tensors are filled in place: that all may begin; which step; that it is open and fits everywhere; who needs
what; that all is done.
Failure behaviour: as in `headrace.checkpoint.restoring`, and errors of the store on any rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.gds.file import Direct
from headrace.checkpoint.gds.restoring import GdsStore
from headrace.checkpoint.lineage import Lineage
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.restoring import restore
from headrace.checkpoint.restoring.apply import Fitted, apply, fitted, require_one_content
from headrace.checkpoint.state.selection import Selection
from headrace.checkpoint.tier import restoring
from headrace.checkpoint.tier.restoring import Found, NodeTier, node_tier
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.connection import SidecarName
from headrace.dataio.store.base import Store

_log = get_logger(__name__)


class Restorer:
    """Restores for one checkpointer, from its store or the node's tier of it."""

    def __init__(
        self, store: Store, ranks: Ranks, lineage: Lineage, sidecar: SidecarName, direct: Direct | None
    ) -> None:
        self._store, self._ranks, self._lineage = store, ranks, lineage
        self._sidecar, self._direct = sidecar, direct

    def restore(
        self,
        state: dict[str, Any],
        run: str,
        step: int | str | Base,
        begin: Callable[[], object],
        select: Callable[[], Selection],
        required: bool = False,
    ) -> Found | None:
        """The step that was restored, None where the run has none and none is `required`; called by all ranks.

        `begin` and `select` are called first, and what they raise on one rank fails all.
        """
        asked = step.step if isinstance(step, Base) else step
        number = asked if isinstance(asked, int) and 0 <= asked < names.STEP_LIMIT else 0
        with contextlib.ExitStack() as stack:
            with self._ranks.agreed(number):
                begin()
                selection = select()
                tier = stack.enter_context(node_tier(self._sidecar))
                tier.send(self._store, names.check_run(run))
            # now all that only the nodes' tiers had is in the store
            found = self._find(run, step, number, tier, required)
            if found is None:
                return None
            with self._ranks.agreed(), gc_paused():
                near = self._near(tier)
                work = self._open(stack, state, run, found, near, selection)
                self._require_matches(selection)
                require_one_content(work, near)
            apply(work, self._ranks, near)
            restoring.told(near, found.base.step)
        if work.todo.skipped:
            _log.warning("step %d: left as they are: %s", found.base.step, ", ".join(work.todo.skipped[:8]))
        return found

    def _find(self, run: str, step: int | str | Base, number: int, tier: NodeTier, required: bool) -> Found | None:
        found, error = None, None
        try:
            if self._ranks.rank == 0:
                found = self._lineage.find(run, step, tier)
                if found is None and required:
                    raise repository.missing(self._store, run)
                if found is None:
                    repository.warn_of_mistakes(self._store, run)
        except Exception as caught:  # the other ranks must learn of it, whatever it is
            error = caught
        message = self._ranks.agree(number, msgspec.msgpack.encode(found), error)
        return msgspec.msgpack.decode(message, type=Found | None)

    def _near(self, tier: NodeTier) -> Store:
        near = tier.near(self._store)
        return GdsStore(near, self._direct) if self._direct is not None and near is self._store else near

    def _require_matches(self, selection: Selection) -> None:
        """A pattern that takes nothing is a mistake; with several ranks it may be meant for another's entries."""
        if not selection.unmatched or not selection.strict:
            return
        said = f"include has patterns that nothing matches: {', '.join(map(repr, selection.unmatched[:8]))}"
        if self._ranks.world_size == 1:
            raise UsageError(
                said, hint="`headrace ckpt show` lists the entries of a step; strict=False goes on without"
            )
        _log.warning("%s on this rank", said)

    def _open(
        self,
        stack: contextlib.ExitStack,
        state: dict[str, Any],
        run: str,
        found: Found,
        near: Store,
        selection: Selection,
    ) -> Fitted:
        """The step as this rank sees it, compared with the state."""
        opening = restoring.away(near, run, found.base) if found.away else restore.reading(near, run, found.base)
        return fitted(state, stack.enter_context(opening), self._ranks.rank, selection)
