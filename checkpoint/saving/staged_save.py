"""A save whose state is staged, with the functions that release its memory.

Invariant: the memory is released once, by `give_back` or by `abandon`.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.checkpoint.repository import commit
from headrace.checkpoint.saving.plan import PutPlan
from headrace.checkpoint.saving.upload import ArenaBytes
from headrace.dataio.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedSave:
    """A staged save.

    - `arena_fd`: -1 for a state in slices or with large artifacts, which only this process can save.
    - `give_back`, `abandon`: release the arena for the next save, or drop it because a worker may still read it.
    - `handed_over`: called with "sidecar" or "process".
    - `through`: wraps the store when this process saves; None to use it as it is.
    - `failed_ranks`: reports ranks that have ended. It is used only without a daemon, because a daemon stores the parts
      of ended ranks.
    - `silent_ranks`: reports ranks on a lost node; None if that cannot be observed.
    - `local`: only keep the step in the node's tier.
    - `kept`: called when the tier has all of the rank's part.
    """

    plan: PutPlan
    arena_fd: int
    view: Callable[[], ArenaBytes]
    give_back: Callable[[], None]
    abandon: Callable[[], None]
    handed_over: Callable[[str], None]
    urgent: bool = False
    through: Callable[[Store], Store] | None = None
    failed_ranks: commit.FailedRanks = commit.no_failed_ranks
    silent_ranks: commit.FailedRanks | None = None
    local: bool = False
    kept: Callable[[], None] = lambda: None


class ArenaOwner:
    """Gives the arena of a save back, or abandons it, once."""

    def __init__(self, save: StagedSave) -> None:
        self._staged_save, self.released = save, False

    def give_back(self) -> None:
        if not self.released:
            self.released = True
            self._staged_save.give_back()

    def abandon(self) -> None:
        if not self.released:
            self.released = True
            self._staged_save.abandon()
