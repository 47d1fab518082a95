"""One look at the whole repository: attempts with their fates, COMMITs, leases, records of collectors, packs.

Order of looking: tombstones first, then attempts and their fates, then packs. A step becomes a tombstone only when nobody can
come to lean on it any more, so whoever does is seen when attempts are listed *after* tombstones were read; and a pack whose
attempt has no fate here is left alone.
Invariant: documents that never change (fates, manifests' pack names) are read once for each `Reader`.
Failure behaviour: errors of the store, and `CorruptionError` for a document that cannot be read: nothing is collected then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from checkpoint.format import manifest as manifests
from checkpoint.format import names, ulid
from checkpoint.format.documents import Commit, Condemned, Fate, Lease, StepOfRun, read
from checkpoint.format.names import StepKey
from dataio.core.errors import NotFoundError
from dataio.store.contract import ObjectInfo, Store

_THREADS, _FEW = 8, 8
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Held:
    """A lease, and when the store says that it was written last."""

    lease: Lease
    modified: float

    @property
    def reads_only(self) -> bool:
        """Whether it is a reader's: it leans on the very step it names, which no saver does."""
        at = (self.lease.timeline, self.lease.step)
        return any((base.timeline, base.step) == at for base in self.lease.bases)


@dataclass(slots=True)
class Seen:
    """One attempt: its step, the ranks whose manifest is there, its fate if it has one."""

    step: StepOfRun
    attempt: str
    ranks: set[int] = field(default_factory=set)
    fate: Fate | None = None

    def manifest_keys(self) -> list[str]:
        """Of a committed attempt all that its fate names, else those that were listed."""
        s, known = self.step, len(self.fate.manifests) if self.fate else 0
        return [
            names.manifest(s.run, s.timeline, s.step, self.attempt, r) for r in sorted({*self.ranks, *range(known)})
        ]

    def listed_keys(self) -> list[str]:
        """The manifests that are there."""
        s = self.step
        return [names.manifest(s.run, s.timeline, s.step, self.attempt, rank) for rank in sorted(self.ranks)]

    @property
    def fate_key(self) -> str:
        return names.fate(self.step.run, self.step.timeline, self.step.step, self.attempt)


@dataclass(slots=True)
class Inventory:
    """What was seen. `packs`: by attempt, every pack's object; `records`: collectors' records by key."""

    attempts: dict[str, Seen] = field(default_factory=dict)
    commits: dict[StepOfRun, Commit] = field(default_factory=dict)
    leases: dict[str, Held] = field(default_factory=dict)
    records: dict[str, tuple[StepOfRun, ...]] = field(default_factory=dict)
    packs: dict[str, list[ObjectInfo]] = field(default_factory=lambda: defaultdict(list))

    def condemned(self) -> set[StepOfRun]:
        """Steps that unfinished collections name."""
        return {step for steps in self.records.values() for step in steps}


class Reader:
    """Reads inventories of one repository, and remembers what cannot change."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fates: dict[str, Fate] = {}
        self._packs: dict[str, frozenset[str]] = {}

    def look(self) -> Inventory:
        """Everything, in the order that the module's text gives."""
        seen = Inventory()
        committed = [key for key in self._step_keys() if key.kind == "commit"]
        for step, commit in self._many(self._commit, committed):
            seen.commits[step] = commit
        fated = self._list_attempts(seen)
        for key, held in self._many(self._lease, list(self._store.list(names.LEASES))):
            seen.leases[key] = held
        for attempt, fate in self._many(self._fate, fated):
            seen.attempts[attempt].fate = fate
        for record, steps in self._many(self._record, [info.key for info in self._store.list(names.GC)]):
            seen.records[record] = steps
        for info in self._store.list(names.PACKS):
            seen.packs[info.key.split("/")[1]].append(info)
        return seen

    def packs_of(self, attempts: Iterable[Seen]) -> set[str] | None:
        """Keys of all packs that the manifests of these attempts name; None when one of them is not there (any more)."""
        keys = [key for attempt in attempts for key in attempt.manifest_keys()]
        fresh = [key for key in keys if key not in self._packs]
        self._packs |= dict(self._many(self._packs_in, fresh))
        if any(key not in self._packs for key in keys):
            return None
        return {pack for key in keys for pack in self._packs[key]}

    def _step_keys(self) -> Iterator[StepKey]:
        parsed = (names.parse_step_key(info.key) for info in self._store.list(names.RUNS))
        return (key for key in parsed if key is not None)

    def _list_attempts(self, seen: Inventory) -> list[Seen]:
        fated = []
        for key in self._step_keys():
            if key.kind == "commit":
                continue
            step = StepOfRun(key.run, key.timeline, key.step)
            attempt = seen.attempts.setdefault(key.attempt, Seen(step, key.attempt))
            if key.kind == "fate":
                fated.append(attempt)
            else:
                attempt.ranks.add(key.rank)
        return fated

    def _many(self, work: Callable[[T], R | None], items: list[T]) -> Iterator[R]:
        """`work` on every item by a few threads; what has vanished meanwhile (None) is left out."""
        if len(items) <= _FEW:
            yield from (found for found in map(work, items) if found is not None)
            return
        with ThreadPoolExecutor(min(_THREADS, len(items)), thread_name_prefix="millrace-look") as pool:
            yield from (found for found in pool.map(work, items) if found is not None)

    def _lease(self, info: ObjectInfo) -> tuple[str, Held] | None:
        try:
            lease = read(self._store, info.key, Lease)
        except NotFoundError:
            return None
        return lease.attempt, Held(lease, info.modified)

    def _commit(self, key: StepKey) -> tuple[StepOfRun, Commit] | None:
        return StepOfRun(key.run, key.timeline, key.step), read(
            self._store, names.commit(key.run, key.timeline, key.step), Commit
        )

    def _fate(self, seen: Seen) -> tuple[str, Fate] | None:
        key = seen.fate_key
        if key not in self._fates:
            self._fates[key] = read(self._store, key, Fate)
        return seen.attempt, self._fates[key]

    def _record(self, key: str) -> tuple[str, tuple[StepOfRun, ...]] | None:
        try:
            return key, read(self._store, key, Condemned).steps
        except NotFoundError:  # that collector is done
            return None

    def _packs_in(self, key: str) -> tuple[str, frozenset[str]] | None:
        try:
            data = self._store.get(key, max_bytes=manifests.MAX_BYTES)
        except NotFoundError:  # another collector removes that attempt
            return None
        return key, frozenset(pack.key for pack in manifests.decode(data, key).packs)


def born(attempt: str) -> float:
    """When the attempt was drawn, in seconds since the epoch by the clock of whoever drew it; 0 for what is no attempt."""
    return int.from_bytes(ulid.to_bytes(attempt)[:6], "big") / 1000 if ulid.is_ulid(attempt) else 0.0
