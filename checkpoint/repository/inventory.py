"""Reads the repository for a collection: steps with their attempts and decisions, leases, and records of collectors.

A call of `Reader.look` reads the repository. It is called a look below.
Order: tombstones first, then attempts and decisions, then packs (`pack_users`). A step becomes a tombstone only when no
process can start to reference it. So a look sees every attempt that references the step if it lists attempts *after*
the tombstone was written. A tombstone is therefore new at the first look that sees it, unless the caller wrote the
tombstone before that look. The objects of a step with a new tombstone stay until the next look.
A listing is not a snapshot. It may miss a change that happens during the listing, but not an older one. A listing of
tmpfs may miss a file that is being replaced. So if a listing lacks a lease of the look before, the lease is read by its
key.
Cost: a `Reader` lists the folders of all steps. It reads a step's objects again only while the step is not settled. A
settled step has a COMMIT or a tombstone, and no attempt that may still change. A later attempt of a settled step can
never become the step, so the objects that it references need not be kept. A new `Reader` finds the objects of such an
attempt.
Invariant: every look reads all attempts of the steps that are not settled.
Failure behaviour: errors of the store are raised. An unreadable document raises `CorruptionError`. The collection then
removes nothing.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit, Decision, Lease, PendingDelete, StepOfRun, read
from headrace.checkpoint.format.metadata import numbers, to_json
from headrace.checkpoint.repository import commit as commits
from headrace.checkpoint.repository import timeline
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import ObjectInfo, Store

THREADS, _FEW = 16, 8
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SeenLease:
    """A lease, its key, and the store's time of its last write."""

    key: str
    lease: Lease
    modified: float

    @property
    def reads_only(self) -> bool:
        """Whether the lease is a reader's.

        A reader's lease references the step that it names; a saver's never does.
        """
        lease = self.lease
        at = StepOfRun(lease.run, lease.timeline, lease.step)
        return any(base.of(lease.run) == at for base in lease.bases)


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """A collector's record, and the store's time of its write."""

    pending_deletes: PendingDelete
    modified: float


@dataclass(slots=True)
class SeenAttempt:
    """One attempt: its step, the ranks and groups whose objects were listed, and its decision if it has one.

    `documents`: number of groups (if `grouped`) or of manifests that the decision names. To save memory, `decision` lacks
    their digests, and its metadata has only numbers.
    """

    step: StepOfRun
    attempt: str
    ranks: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    decision: Decision | None = None
    documents: int = 0
    grouped: bool = False

    def set_decision(self, decision: Decision) -> None:
        """Set `decision`, `documents` and `grouped`."""
        self.grouped = bool(decision.groups)
        self.documents = len(decision.groups) or len(decision.manifests)
        values = {sys.intern(name): value for name, value in numbers(decision.values()).items()}
        self.decision = msgspec.structs.replace(
            decision, manifests=(), groups=(), metadata=to_json(values), description=""
        )

    def keys_naming_packs(self) -> list[str]:
        """Keys of the objects that name the attempt's packs.

        These are the groups that the decision names. If it names no groups, these are the manifests that the decision
        names and the manifests that were listed.
        """
        if self.grouped:
            return [self._group_key(index) for index in range(self.documents)]
        return [self._manifest_key(rank) for rank in sorted({*self.ranks, *range(self.documents)})]

    def listed_keys(self) -> list[str]:
        """Keys of the manifests and groups that were listed."""
        manifests_listed = [self._manifest_key(rank) for rank in sorted(self.ranks)]
        return manifests_listed + [self._group_key(index) for index in sorted(self.groups)]

    def _manifest_key(self, rank: int) -> str:
        return names.manifest(self.step.run, self.step.timeline, self.step.step, self.attempt, rank)

    def _group_key(self, index: int) -> str:
        return names.group(self.step.run, self.step.timeline, self.step.step, self.attempt, index)

    @property
    def decision_key(self) -> str:
        return names.decision(self.step.run, self.step.timeline, self.step.step, self.attempt)


@dataclass(slots=True)
class SeenStep:
    """One step: its attempts, and its COMMIT or tombstone with the store's time of its last write."""

    step: StepOfRun
    attempts: list[SeenAttempt]
    commit: Commit | None = None
    modified: float = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether the step has an outcome, and no attempt that may still change (see the module's docstring)."""
        if self.commit is None:
            return False
        if self.commit.tombstone:
            return all(each.decision and not each.ranks and not each.groups for each in self.attempts)
        if len(self.attempts) != 1:
            return False
        (attempt,) = self.attempts
        is_complete = attempt.decision is not None and attempt.decision.outcome == "commit"
        return is_complete and attempt.attempt == self.commit.attempt

    def forget_objects(self) -> SeenStep:
        """This step without the ranks and groups of its attempts."""
        return SeenStep(self.step, [_without_objects(each) for each in self.attempts], self.commit, self.modified)


def _without_objects(attempt: SeenAttempt) -> SeenAttempt:
    return SeenAttempt(
        attempt.step, attempt.attempt, decision=attempt.decision, documents=attempt.documents, grouped=attempt.grouped
    )


@dataclass(slots=True)
class Inventory:
    """The contents of a repository.

    `leases`: by attempt, because several processes may hold a lease on one attempt. `records`: collectors' records, by
    key. `tombstones`: steps whose tombstone is not new, and the time when it was written. `new_tombstones`: steps whose
    tombstone may have been written after some attempts were listed.
    """

    attempts: dict[str, SeenAttempt] = field(default_factory=dict)
    commits: dict[StepOfRun, Commit] = field(default_factory=dict)
    leases: dict[str, list[SeenLease]] = field(default_factory=lambda: defaultdict(list))
    tombstones: dict[StepOfRun, float] = field(default_factory=dict)
    new_tombstones: set[StepOfRun] = field(default_factory=set)
    records: dict[str, SeenRecord] = field(default_factory=dict)

    def pending_deletes(self) -> set[StepOfRun]:
        """Steps that unfinished collections name."""
        return {step for record in self.records.values() for step in record.pending_deletes.steps}

    def add(self, step: SeenStep, *, is_new: bool) -> None:
        """Add a step. `is_new`: whether its tombstone, if it has one, is new."""
        for attempt in step.attempts:
            self.attempts[attempt.attempt] = attempt
        if step.commit is not None:
            self.commits[step.step] = step.commit
        if step.commit is not None and step.commit.tombstone:
            if is_new:
                self.new_tombstones.add(step.step)
            else:
                self.tombstones[step.step] = step.modified


class Reader:
    """Reads inventories of one repository. It reads settled steps once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._settled: dict[StepOfRun, SeenStep] = {}
        self._tombstones: set[StepOfRun] = set()
        self._leases: set[str] = set()

    def look(self, oldest_tombstone: float = 0.0) -> Inventory:
        """Read everything but the packs, in the order that the module's docstring gives.

        It also reads settled steps again whose tombstone was written before `oldest_tombstone`, in seconds since the
        epoch.
        """
        inventory, known_tombstones = Inventory(), frozenset(self._tombstones)
        steps = list(self._listed_steps())
        settled = {step: self._settled[step] for step in steps if step in self._settled}
        self._settled = {
            step: seen
            for step, seen in settled.items()
            if seen.commit is None or not seen.commit.tombstone or seen.modified >= oldest_tombstone
        }
        for seen in self._settled.values():
            inventory.add(seen, is_new=False)
        for seen in many(self._read_step, [step for step in steps if step not in self._settled]):
            self._remember(seen, known_tombstones)
            inventory.add(seen, is_new=seen.step not in known_tombstones)
        self._tombstones &= set(steps)
        for lease in many(self._lease, self._listed_leases()):
            inventory.leases[lease.lease.attempt].append(lease)
        for key, record in many(self._record, list(self._store.list(names.GC))):
            inventory.records[key] = record
        return inventory

    def changed(self, steps: Iterable[StepOfRun]) -> None:
        """Report that objects of these steps were changed or deleted. The next look reads the steps again."""
        for step in steps:
            self._settled.pop(step, None)

    def confirm(self, inventory: Inventory, steps: Iterable[StepOfRun]) -> set[StepOfRun]:
        """Read the COMMITs of settled steps again; return the steps that are removed.

        Another collection may have removed them. In `inventory`, their tombstones are new.
        """
        gone = set(many(self._removed_or_none, [step for step in steps if step in self._settled]))
        for step in gone:
            inventory.commits[step] = Commit(step=step.step, tombstone=True)
        inventory.new_tombstones |= gone
        self.changed(gone)
        return gone

    def removed(self, steps: Iterable[StepOfRun]) -> None:
        """Report that the caller has written the tombstones of these steps. They are not new at the next look."""
        self._tombstones.update(steps)

    def _remember(self, step: SeenStep, known_tombstones: frozenset[StepOfRun]) -> None:
        is_tombstone = step.commit is not None and step.commit.tombstone
        if is_tombstone:
            self._tombstones.add(step.step)
        if step.is_settled and (not is_tombstone or step.step in known_tombstones):
            self._settled[step.step] = step.forget_objects()

    def _listed_steps(self) -> Iterator[StepOfRun]:
        for run in self._store.list_folders(names.RUNS):
            if not names.is_run(run):
                continue
            for folder in self._store.list_folders(names.run(run)):
                number = names.timeline_of_folder(folder)
                if number is not None:
                    yield from (StepOfRun(run, number, at) for at in timeline.steps(self._store, run, number))

    def _read_step(self, step: StepOfRun) -> SeenStep | None:
        attempts: dict[str, SeenAttempt] = {}
        decided, committed = list[str](), None
        for info in self._store.list(names.step(step.run, step.timeline, step.step)):
            key = names.parse_step_key(info.key)
            if key is None:
                continue
            if key.kind == "commit":
                committed = info
                continue
            attempt = attempts.setdefault(key.attempt, SeenAttempt(step, key.attempt))
            if key.kind == "fate":
                decided.append(key.attempt)
            else:
                (attempt.groups if key.kind == "group" else attempt.ranks).add(key.rank)
        commit = commits.find_commit(self._store, committed.key) if committed is not None else None
        for attempt_id in decided:
            decision = commits.find_decision(self._store, attempts[attempt_id].decision_key)
            if decision is None:  # another collector removed the attempt after the listing
                del attempts[attempt_id]
            else:
                attempts[attempt_id].set_decision(decision)
        # if a tombstone replaced the COMMIT after the listing, the tombstone's own time counts
        modified = max(committed.modified, commit.committed) if committed is not None and commit is not None else 0.0
        return SeenStep(step, list(attempts.values()), commit, modified)

    def _removed_or_none(self, step: StepOfRun) -> StepOfRun | None:
        current = commits.find_commit(self._store, names.commit(step.run, step.timeline, step.step))
        return step if current is None or current.tombstone else None

    def _listed_leases(self) -> list[ObjectInfo]:
        listed = list(self._store.list(names.LEASES))
        lost = self._leases - {info.key for info in listed}
        listed += many(self._stat_or_none, sorted(lost))
        self._leases = {info.key for info in listed}
        return listed

    def _stat_or_none(self, key: str) -> ObjectInfo | None:
        try:
            return self._store.stat(key)
        except NotFoundError:
            return None

    def _lease(self, info: ObjectInfo) -> SeenLease | None:
        try:
            return SeenLease(info.key, read(self._store, info.key, Lease), info.modified)
        except NotFoundError:
            return None

    def _record(self, info: ObjectInfo) -> tuple[str, SeenRecord] | None:
        try:
            return info.key, SeenRecord(read(self._store, info.key, PendingDelete), info.modified)
        except NotFoundError:  # the collector that wrote it has finished and deleted it
            return None


def many(work: Callable[[T], R | None], items: list[T]) -> Iterator[R]:
    """Call `work` on every item, with a few threads if there are many items.

    Results that are None are dropped: their objects were deleted.
    """
    if len(items) <= _FEW:
        yield from (found for found in map(work, items) if found is not None)
        return
    with ThreadPoolExecutor(min(THREADS, len(items)), thread_name_prefix="headrace-look") as pool:
        yield from (found for found in pool.map(work, items) if found is not None)
