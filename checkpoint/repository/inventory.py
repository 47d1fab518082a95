"""Reads the whole repository for a collection: attempts and decisions, COMMITs, leases, records of collectors, packs.

Order: tombstones first, then attempts and decisions, then packs. A step becomes a tombstone only when no process can
start to reference it. So attempts that reference the step are seen if attempts are listed *after* tombstones. A listing
is not a snapshot. It may miss a change that happens during the listing, but not an older one. A listing of tmpfs may
miss a file that is being replaced. A lease that was seen before and is not listed is therefore looked up by name.
Invariant: a `Reader` reads each document that never changes only once. It drops the document when the object is
deleted.
Failure behaviour: errors of the store are raised; an unreadable document raises `CorruptionError`. The collection then
removes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.checkpoint.format import group, names, own_digest
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.documents import Commit, Decision, Lease, PendingDelete, StepOfRun, read
from headrace.checkpoint.format.names import StepKey
from headrace.checkpoint.repository import commit as commits
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import ObjectInfo, Store

_THREADS, _FEW = 8, 8
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
    """One attempt: its step, the ranks and groups whose objects were listed, and its decision if it has one."""

    step: StepOfRun
    attempt: str
    ranks: set[int] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    decision: Decision | None = None

    def keys_naming_packs(self) -> list[str]:
        """Keys of the objects that name the attempt's packs.

        They are the groups that the decision names. If it names none, they are the manifests that it names or that were
        listed.
        """
        named = self.decision or Decision(attempt=self.attempt, outcome="")
        if named.groups:
            return [self._group_key(index) for index in range(len(named.groups))]
        return [self._manifest_key(rank) for rank in sorted({*self.ranks, *range(len(named.manifests))})]

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
class Inventory:
    """The contents of a repository.

    `packs`: the listed packs, by attempt. `leases`: by attempt, because several processes may hold a lease on one
    attempt. `records`: collectors' records, by key. `tombstones`: the time when each was written.
    """

    attempts: dict[str, SeenAttempt] = field(default_factory=dict)
    commits: dict[StepOfRun, Commit] = field(default_factory=dict)
    leases: dict[str, list[SeenLease]] = field(default_factory=lambda: defaultdict(list))
    tombstones: dict[StepOfRun, float] = field(default_factory=dict)
    records: dict[str, SeenRecord] = field(default_factory=dict)
    packs: dict[str, list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))

    def pending_deletes(self) -> set[StepOfRun]:
        """Steps that unfinished collections name."""
        return {step for record in self.records.values() for step in record.pending_deletes.steps}


class Reader:
    """Reads inventories of one repository, and caches the documents that cannot change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decisions: dict[str, Decision] = {}
        self._tombstones: dict[str, Commit] = {}
        self._packs: dict[str, frozenset[str]] = {}
        self._leases: set[str] = set()

    def look(self) -> Inventory:
        """Read the whole repository, in the order that the module's docstring gives."""
        seen = Inventory()
        self._read_commits(seen)
        decided = self._list_attempts(seen)
        for held in self._many(self._lease, self._listed_leases()):
            seen.leases[held.lease.attempt].append(held)
        self._read_decisions(seen, decided)
        for key, record in self._many(self._record, list(self._store.list(names.GC))):
            seen.records[key] = record
        for info in self._store.list(names.PACKS):
            seen.packs[info.key.split("/")[1]].append(info)
        return seen

    @property
    def removed(self) -> list[StepOfRun]:
        """Steps that were tombstones at this reader's last `look`."""
        keys = map(names.parse_step_key, self._tombstones)
        return [StepOfRun(key.run, key.timeline, key.step) for key in keys if key is not None]

    def packs_of(self, attempts: Iterable[SeenAttempt]) -> set[str] | None:
        """Keys of all packs that these attempts name; None if one of their manifests or groups is missing."""
        keys = {key for attempt in attempts for key in attempt.keys_naming_packs()}
        unread = [key for key in keys if key not in self._packs]
        self._packs |= dict(self._many(self._packs_in, unread))
        self._packs = {key: packs for key, packs in self._packs.items() if key in keys}
        if len(self._packs) < len(keys):
            return None
        return {pack for packs in self._packs.values() for pack in packs}

    def _step_keys(self) -> Iterator[tuple[StepKey, ObjectInfo]]:
        for info in self._store.list(names.RUNS):
            key = names.parse_step_key(info.key)
            if key is not None:
                yield key, info

    def _read_commits(self, seen: Inventory) -> None:
        listed = [info for key, info in self._step_keys() if key.kind == "commit"]
        kept = {}
        for step, info, commit in self._many(self._commit, listed):
            seen.commits[step] = commit
            if commit.tombstone:  # it may have replaced the COMMIT after the listing: its own time counts then
                seen.tombstones[step] = max(info.modified, commit.committed)
                kept[info.key] = commit
        self._tombstones = kept

    def _list_attempts(self, seen: Inventory) -> list[SeenAttempt]:
        decided = []
        for key, _ in self._step_keys():
            if key.kind == "commit":
                continue
            step = StepOfRun(key.run, key.timeline, key.step)
            attempt = seen.attempts.setdefault(key.attempt, SeenAttempt(step, key.attempt))
            if key.kind == "fate":
                decided.append(attempt)
            else:
                (attempt.groups if key.kind == "group" else attempt.ranks).add(key.rank)
        return decided

    def _read_decisions(self, seen: Inventory, decided: list[SeenAttempt]) -> None:
        for attempt in decided:  # if the decision was deleted since, another collector has removed the attempt
            del seen.attempts[attempt.attempt]
        kept = {}
        for attempt, decision in self._many(self._decision, decided):
            attempt.decision = decision
            seen.attempts[attempt.attempt] = attempt
            kept[attempt.decision_key] = decision
        self._decisions = kept

    def _listed_leases(self) -> list[ObjectInfo]:
        listed = list(self._store.list(names.LEASES))
        lost = self._leases - {info.key for info in listed}
        listed += self._many(self._stat_or_none, sorted(lost))
        self._leases = {info.key for info in listed}
        return listed

    def _stat_or_none(self, key: str) -> ObjectInfo | None:
        try:
            return self._store.stat(key)
        except NotFoundError:
            return None

    def _many(self, work: Callable[[T], R | None], items: list[T]) -> Iterator[R]:
        """Call `work` on every item, with a few threads if there are many items.

        Results that are None are dropped: their objects were deleted.
        """
        if len(items) <= _FEW:
            yield from (found for found in map(work, items) if found is not None)
            return
        with ThreadPoolExecutor(min(_THREADS, len(items)), thread_name_prefix="headrace-look") as pool:
            yield from (found for found in pool.map(work, items) if found is not None)

    def _lease(self, info: ObjectInfo) -> SeenLease | None:
        try:
            return SeenLease(info.key, read(self._store, info.key, Lease), info.modified)
        except NotFoundError:
            return None

    def _commit(self, info: ObjectInfo) -> tuple[StepOfRun, ObjectInfo, Commit] | None:
        key = names.parse_step_key(info.key)
        assert key is not None
        commit = self._tombstones.get(info.key) or commits.find_commit(self._store, info.key)
        if commit is None:  # another collector deleted this old tombstone
            return None
        return StepOfRun(key.run, key.timeline, key.step), info, commit

    def _decision(self, seen: SeenAttempt) -> tuple[SeenAttempt, Decision] | None:
        key = seen.decision_key
        try:
            return seen, self._decisions.get(key) or read(self._store, key, Decision)
        except NotFoundError:
            return None

    def _record(self, info: ObjectInfo) -> tuple[str, SeenRecord] | None:
        try:
            return info.key, SeenRecord(read(self._store, info.key, PendingDelete), info.modified)
        except NotFoundError:  # its collector has finished and deleted it
            return None

    def _packs_in(self, key: str) -> tuple[str, frozenset[str]] | None:
        at = names.parse_step_key(key)
        try:
            data = own_digest.fetch(self._store, key, max_bytes=manifests.MAX_BYTES)
        except NotFoundError:  # another collector is removing the attempt
            return None
        is_group = at is not None and at.kind == "group"
        packs = group.decode(data, key).packs if is_group else manifests.decode(data, key).packs
        return key, frozenset(pack.key for pack in packs)


def born(attempt: str) -> float:
    """The time in the attempt's id: seconds since the epoch, by the clock of its process. 0 for an invalid id."""
    return int.from_bytes(names.id_to_bytes(attempt)[:6], "big") / 1000 if names.is_id(attempt) else 0.0
