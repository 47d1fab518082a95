"""Which steps of a run a policy keeps.

Invariant: the newest step of the branch is always kept, and so is every step that a tag of the policy's patterns names. Steps
that the branch left behind are seen by no reader, so they go unless a tag names them, but not before the branch has come as
far: a trainer that started anew by mistake, or died before its first save, takes nothing with it.
Failure behaviour: `UsageError` for a policy that makes no sense.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.checkpoint.format.documents import Policy, StepName
from headrace.dataio.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest `last` steps, every step whose number is a multiple of `every`, and those with a tag.

    `last` None keeps all of the branch. `tags`: patterns such as `release-*`; a step with a matching tag stays.
    """

    last: int | None = None
    every: int | None = None
    tags: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"Keep({name}={value!r}): give a whole number from 1")
        if not isinstance(self.tags, tuple):  # a single pattern would be taken for many of one letter
            raise UsageError(f"Keep(tags={self.tags!r}): give a tuple of patterns")

    @property
    def policy(self) -> Policy:
        """As it is recorded."""
        return Policy(self.last, self.every, self.tags)

    @classmethod
    def of(cls, policy: Policy) -> Keep:
        """As it was recorded."""
        return cls(policy.last, policy.every, policy.tags)


def doomed(
    keep: Keep, branch: Sequence[StepName], others: Iterable[StepName], tagged: Mapping[StepName, Iterable[str]]
) -> set[StepName]:
    """The steps to let go. `branch`: what readers see, newest first; `others`: steps of abandoned timelines."""
    if keep.last is None and keep.every is None:
        return set()
    newest = set(branch[: keep.last or 1])
    behind = {name for name in others if branch and name.step <= branch[0].step}
    round_steps = {name for name in branch if keep.every and name.step % keep.every == 0}
    named = {name for name, tags in tagged.items() if any(fnmatch.fnmatchcase(t, p) for t in tags for p in keep.tags)}
    return {*branch, *behind} - newest - round_steps - named
