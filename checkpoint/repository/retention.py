"""Retention policy and collection plan: pure functions that choose the steps to keep and the objects to remove.

Invariant, policy: the newest step of the branch and every step with a matching tag stay. Steps with a higher number than
the newest one stay, too, in the branch and in abandoned ones, until the branch has reached their numbers. So a trainer
that started by mistake, or went back to a low number, deletes nothing that it has not repeated.
Invariant, plan: an attempt is dead only if its decision is "abort" or if its step has another outcome. That is, COMMIT
is a tombstone that is not new (`inventory`), or names another complete attempt. All objects of an attempt without a
decision are kept. Every pack that a manifest of a live attempt names is kept, too. Packs without lease, manifest and
decision are deleted when they are a week old. The decision of a removed step is deleted with the last of its attempt's
packs. Its tombstone is deleted when it is a week old.
Failure behaviour: `UsageError` for an impossible policy; nothing else fails.
"""

from __future__ import annotations

import fnmatch
import heapq
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Best, Commit, Decision, Policy, StepName, StepOfRun
from headrace.checkpoint.format.metadata import Value, number_of
from headrace.checkpoint.repository.inventory import Inventory, SeenAttempt, SeenLease
from headrace.checkpoint.repository.pack_users import PackUsers
from headrace.checkpoint.repository.tag_records import OF_PUBLISHED
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.store.base import ObjectInfo

MOST_BEST = 1000
"""The maximum number of steps that one rule of `Keep.best` keeps."""
_RULE_HINT = f'give (name, count, "min" or "max"), such as ("loss", 3, "min"); the count is from 1 to {MOST_BEST}'


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps of a run to keep. A step stays if any rule matches.

    The newest step always stays. After a trainer went back, steps with higher numbers than the newest one stay until it
    has reached their numbers.

    Args:
        last (int | None): Keep the newest `last` steps, those of the newest timeline first. With `last` and `every`
            None and no `best` (default), all steps stay.
        every (int | None): Keep steps whose number is a multiple of `every`. Default: None.
        tags (tuple[str, ...]): Keep steps that have a tag matching one of these patterns, for example
            `("release-*",)`. Default: `("*",)`, any tag.
        best (tuple[str, int, str] | tuple[tuple[str, int, str], ...]): Keep the steps with the best values of their
            metadata: `("loss", 3, "min")` keeps the 3 steps with the lowest `loss`, and "max" the highest. Steps
            without a number of this name, or with NaN, do not count. Of equal values, the newer step counts first. It
            may be a tuple of such rules. Default: none.

    Raises:
        UsageError: `last` or `every` is not a whole number from 1, `tags` is not a tuple, or a rule of `best` is
            invalid.

    Example:
        >>> Keep(last=3, every=1000).policy.last
        3
    """

    last: int | None = None
    every: int | None = None
    tags: tuple[str, ...] = ("*",)
    best: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"Keep({name}={value!r}): give a whole number from 1")
        if not isinstance(self.tags, tuple):  # a str would be read as many patterns of one character
            raise UsageError(f"Keep(tags={self.tags!r}): give a tuple of patterns")
        object.__setattr__(self, "best", _rules(self.best))

    @property
    def selects(self) -> bool:
        """Whether the policy removes any step at all."""
        return self.last is not None or self.every is not None or bool(self.best)

    @property
    def policy(self) -> Policy:
        """The policy as a collector's record stores it."""
        return Policy(self.last, self.every, self.tags, tuple(Best(*rule) for rule in self.best))

    @classmethod
    def of(cls, policy: Policy) -> Keep:
        """The inverse of `policy`."""
        return cls(policy.last, policy.every, policy.tags, tuple((x.name, x.count, x.order) for x in policy.best))


def _rules(best: object) -> tuple[tuple[str, int, str], ...]:
    """The rules of `Keep.best` as a tuple of rules."""
    if not isinstance(best, tuple | list):
        raise UsageError(f"Keep(best={best!r:.200}): it is not a rule", hint=_RULE_HINT)
    rules = (best,) if best and isinstance(best[0], str) else tuple(best)
    return tuple(_rule(each) for each in rules)


def _rule(rule: object) -> tuple[str, int, str]:
    match rule:
        case (str(name), int(count), "min" | "max" as order) if name and not isinstance(count, bool):
            if 1 <= count <= MOST_BEST:
                return name, count, order
    raise UsageError(f"Keep(best={rule!r:.200}): it is not a rule", hint=_RULE_HINT)


_NO_METADATA: Mapping[StepName, Mapping[str, Value]] = MappingProxyType({})


def best_steps(
    keep: Keep, branch: Sequence[StepName], metadata: Mapping[StepName, Mapping[str, Value]] = _NO_METADATA
) -> set[StepName]:
    """The steps that a rule of `keep.best` keeps. `branch`: newest first. `metadata`: the steps' values."""
    kept: set[StepName] = set()
    for name, count, order in keep.best:
        values = ((number_of(metadata.get(step, {}), name), step) for step in branch)
        numbers = [(-value if order == "max" else value, step) for value, step in values if value is not None]
        kept |= {step for _, step in heapq.nsmallest(count, numbers, key=operator.itemgetter(0))}  # it is stable
    return kept


def steps_to_delete(
    keep: Keep,
    branch: Sequence[StepName],
    others: Iterable[StepName],
    tagged: Mapping[StepName, Iterable[str]],
    metadata: Mapping[StepName, Mapping[str, Value]] = _NO_METADATA,
) -> set[StepName]:
    """The steps to remove.

    `branch`: the steps that readers see, newest first; `others`: steps of abandoned timelines. `metadata`: that of the
    steps of the branch.
    """
    if not keep.selects:
        return set()
    newest = set(branch[: keep.last or 1])
    reached = {name for name in (*branch, *others) if branch and name.step <= branch[0].step}
    multiples = {name for name in branch if keep.every and name.step % keep.every == 0}
    patterns = (*keep.tags, OF_PUBLISHED)
    named = {name for name, tags in tagged.items() if any(fnmatch.fnmatchcase(t, p) for t in tags for p in patterns)}
    return reached - newest - multiples - named - best_steps(keep, branch, metadata)


ORPHAN_SECONDS = 7 * 24 * 3600.0
"""The age in seconds at which a pack without lease, manifest and decision is deleted."""
MOST_STEPS = 10_000
"""The maximum number of steps that one collection removes. The next collection removes the others."""
TOMBSTONE_SECONDS = 7 * 24 * 3600.0
"""How long a tombstone stays, in seconds.

Without the tombstone, a saver that is paused between decision and COMMIT could make a removed step visible again.
"""
RECORD_SECONDS = 24 * 3600.0
"""The collector of an older record has stopped: every collector stops after a small part of this time."""
SLACK_SECONDS = 5.0
"""Added to a lease's lifetime before it counts as expired, because stores date objects to the second."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a collection removes.

    `tombstones`: removed steps. `spared`: selected steps that a live lease references or that the policy keeps now.
    `aborted`: attempts that are aborted. `objects`: (key, bytes) of deleted objects; the size is given for packs only.
    `kept_bytes`: bytes of the listed packs that stay.
    """

    tombstones: tuple[StepOfRun, ...] = ()
    spared: tuple[StepOfRun, ...] = ()
    aborted: tuple[str, ...] = ()
    objects: tuple[tuple[str, int], ...] = ()
    kept_bytes: int = 0

    @property
    def bytes_freed(self) -> int:
        return sum(size for _, size in self.objects)

    @property
    def empty(self) -> bool:
        """Whether the plan changes nothing."""
        return not (self.tombstones or self.aborted or self.objects)


def is_over(lease: SeenLease, now: float) -> bool:
    """Whether the lease has expired. Its last write and `now` are both times of the store's clock."""
    return now - lease.modified > lease.lease.life + SLACK_SECONDS


def to_fence(inventory: Inventory, now: float) -> list[SeenAttempt]:
    """Attempts without a decision whose lease has expired or is missing."""
    named = dict(inventory.attempts)
    for attempt, (seen_lease, *_) in inventory.leases.items():
        if attempt not in named and not seen_lease.reads_only:
            lease = seen_lease.lease
            named[attempt] = SeenAttempt(StepOfRun(lease.run, lease.timeline, lease.step), attempt)
    return [
        each
        for each in named.values()
        if each.decision is None and not _is_alive(inventory.leases.get(each.attempt, ()), now)
    ]


def _is_alive(leases: Iterable[SeenLease], now: float) -> bool:
    """Whether one of the attempt's leases has not expired."""
    return any(not is_over(held, now) for held in leases)


def spared(inventory: Inventory, pending_deletes: Iterable[StepOfRun], now: float) -> set[StepOfRun]:
    """Steps to delete that a live attempt or reader references.

    An attempt is alive while one of its leases has not expired. A live attempt is not aborted. All steps that any of
    its leases names are spared, because the holder of an expired lease may still renew it.
    """
    alive = [held for leases in inventory.leases.values() if _is_alive(leases, now) for held in leases]
    return set(pending_deletes) & {base.of(held.lease.run) for held in alive for base in held.lease.bases}


def unfinished(inventory: Inventory) -> list[SeenAttempt]:
    """Attempts whose decision is "commit" and whose step has no COMMIT yet."""
    return [
        a
        for a in inventory.attempts.values()
        if a.decision and a.decision.outcome == "commit" and a.step not in inventory.commits
    ]


def is_dead(inventory: Inventory, attempt: SeenAttempt) -> bool:
    """Whether the attempt is dead (see the module's docstring). Live attempts may still need some of its packs."""
    if attempt.decision is None:
        return False
    commit = inventory.commits.get(attempt.step)
    if attempt.decision.outcome != "commit" or commit is None:
        return attempt.decision.outcome != "commit"
    if commit.tombstone:
        return attempt.step not in inventory.new_tombstones
    return _lost(inventory, attempt, commit)


def _lost(inventory: Inventory, attempt: SeenAttempt, commit: Commit) -> bool:
    """Whether COMMIT names another attempt of the step, and that attempt exists and is complete."""
    winner = inventory.attempts.get(commit.attempt)
    if winner is None or winner is attempt or winner.step != attempt.step:
        return False
    return winner.decision is not None and winner.decision.outcome == "commit"


def garbage(inventory: Inventory, users: PackUsers, now: float) -> tuple[list[tuple[str, int]], int]:
    """Return (key, bytes) of every object to delete, and the bytes of the listed packs that stay.

    It examines only the packs that `users` lists.
    """
    live = [attempt for attempt in inventory.attempts.values() if not is_dead(inventory, attempt)]
    deleted_keys: list[tuple[str, int]] = []
    bytes_kept, emptied = 0, set[str]()
    for attempt, packs in users.look(inventory, live):
        keys = {pack.key for pack in packs}
        needed = keys if _are_all_needed(inventory, attempt, packs) else users.needed(attempt, keys)
        stay = 0
        for pack in packs:
            if pack.key not in needed and _is_deletable(inventory, attempt, pack, now):
                deleted_keys.append((pack.key, pack.size))
            else:
                stay += 1
                bytes_kept += pack.size
        if not stay:
            emptied.add(attempt)
    for dead in inventory.attempts.values():
        if is_dead(inventory, dead):
            deleted_keys += [(key, 0) for key in dead.listed_keys()]
    return deleted_keys + _documents(inventory, emptied, now), bytes_kept


def _are_all_needed(inventory: Inventory, attempt: str, packs: Sequence[ObjectInfo]) -> bool:
    """Whether all listed packs of the attempt are needed, as far as their number shows.

    They are if the attempt is live and has no more packs than its decision counts.
    """
    seen_attempt = inventory.attempts.get(attempt)
    if not packs or seen_attempt is None or seen_attempt.decision is None or is_dead(inventory, seen_attempt):
        return not packs
    return seen_attempt.decision.totals is not None and len(packs) <= seen_attempt.decision.totals.packs


def _is_deletable(inventory: Inventory, attempt: str, pack: ObjectInfo, now: float) -> bool:
    """Whether a pack that no live manifest names may be deleted."""
    seen_attempt = inventory.attempts.get(attempt)
    if seen_attempt is not None:
        return seen_attempt.decision is not None
    return attempt not in inventory.leases and now - pack.modified > ORPHAN_SECONDS


def _documents(inventory: Inventory, emptied: set[str], now: float) -> list[tuple[str, int]]:
    """Leases, decisions and tombstones that are no longer needed. `emptied`: attempts of which no pack stays."""
    return [
        (key, 0) for key in (*_leases(inventory, now), *_decisions(inventory, emptied), *_tombstones(inventory, now))
    ]


def _leases(inventory: Inventory, now: float) -> list[str]:
    """Expired leases of decided attempts and of readers."""
    expired = [(a, held) for a, leases in inventory.leases.items() for held in leases if is_over(held, now)]
    return sorted(
        held.key
        for a, held in expired
        if held.reads_only or (a in inventory.attempts and inventory.attempts[a].decision)
    )


def _decisions(inventory: Inventory, emptied: set[str]) -> list[str]:
    """Decisions of removed steps.

    A decision stays while other steps need a pack of its attempt. Later collections then know that the attempt has
    ended.
    """
    return [
        a.decision_key
        for a in inventory.attempts.values()
        if a.decision is not None and a.step in inventory.tombstones and a.attempt in emptied
    ]


def _tombstones(inventory: Inventory, now: float) -> list[str]:
    """Old tombstones of steps without other objects. No saver can still write the COMMIT of such a step."""
    busy = {a.step for a in inventory.attempts.values()}
    old = (
        step for step, written in inventory.tombstones.items() if now - written > TOMBSTONE_SECONDS and step not in busy
    )
    return [names.commit(step.run, step.timeline, step.step) for step in sorted(old, key=order)]


def preview(
    inventory: Inventory,
    pending_deletes: Iterable[StepOfRun],
    users: PackUsers,
    now: float,
) -> Plan:
    """The plan of a collection that starts now, if no other process changes the repository."""
    to_remove = existing_steps(inventory, pending_deletes)
    safe = spared(inventory, to_remove, now)
    fenced = to_fence(inventory, now)
    after = replace(
        inventory,
        attempts=dict(inventory.attempts),
        commits=dict(inventory.commits),
        tombstones=dict(inventory.tombstones),
    )
    for attempt in fenced:
        after.attempts[attempt.attempt] = replace(attempt, decision=Decision(attempt=attempt.attempt, outcome="abort"))
    for step in to_remove - safe:
        after.commits[step] = Commit(step=step.step, tombstone=True)
        after.tombstones[step] = now
    objects, bytes_kept = garbage(after, users, now)
    return Plan(
        tuple(sorted(to_remove - safe, key=order)),
        tuple(sorted(safe, key=order)),
        tuple(sorted(attempt.attempt for attempt in fenced)),
        tuple(sorted(objects)),
        bytes_kept,
    )


def existing_steps(inventory: Inventory, pending_deletes: Iterable[StepOfRun]) -> set[StepOfRun]:
    """The steps to delete that exist, including those of unfinished collections; at most `MOST_STEPS`."""
    existing = [step for step in {*pending_deletes, *inventory.pending_deletes()} if _is_step(inventory, step)]
    return set(sorted(existing, key=order)[:MOST_STEPS])


def _is_step(inventory: Inventory, step: StepOfRun) -> bool:
    """Whether the step exists: committed, or complete."""
    commit = inventory.commits.get(step)
    if commit is not None:
        return not commit.tombstone
    return any(attempt.step == step for attempt in unfinished(inventory))


def order(step: StepOfRun) -> tuple[str, int, int]:
    """Sort key of steps."""
    return step.run, step.timeline, step.step
