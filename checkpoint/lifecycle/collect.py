"""The collection: removes condemned steps and what dead attempts left, beside savers, readers and other collectors.

Order (`docs/design/0012-retention.md`; the tests take it apart at every store operation):

0. COMMIT of every attempt that is complete and has none;
1. `gc/<id>` with the condemned steps, so that a saver that comes now does not lean on them;
2. leases are read: first every attempt without a fate whose lease is over is fenced with the fate "abort"; steps that a live
   lease leans on are spared;
3. the COMMITs of the condemned become tombstones, which nobody can undo;
4. the repository is looked at again, and what no live attempt needs is deleted;
5. `gc/<id>` is deleted, and records of dead collectors whose steps are all tombstones by now.

Invariant: at no point is a pack missing that a committed step needs, whoever dies or sleeps wherever.
Failure behaviour: an error or a crash leaves a record in `gc/`; its steps are finished by the next collection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from checkpoint.format import names, ulid
from checkpoint.format.documents import Commit, Condemned, Fate, StepName, StepOfRun, encode
from checkpoint.lifecycle import plan as plans
from checkpoint.lifecycle import tags
from checkpoint.lifecycle.inventory import Inventory, Reader
from checkpoint.lifecycle.keep import Keep, doomed
from checkpoint.lifecycle.plan import Plan
from checkpoint.repository import commit
from checkpoint.repository import steps as repository
from checkpoint.repository.commit import Attempt
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.crashpoints import declare
from dataio.core.errors import NotFoundError
from dataio.store.contract import Store

_recorded = declare("gc.recorded", "the record of the condemned is there; nothing is removed")
_fenced = declare("gc.fenced", "dead attempts are fenced; nothing is removed")
_one_tombstone = declare("gc.one-tombstone", "one condemned step is a tombstone, its objects are there")
_tombstones = declare("gc.tombstones", "the condemned steps are tombstones, their objects are there")
_deleting = declare("gc.deleting", "some objects of removed steps are deleted")
_deleted = declare("gc.deleted", "only the record is left")
_BATCH = 256


def condemn(store: Store, run: str, keep: Keep) -> set[StepOfRun]:
    """The steps of the run that the policy lets go.

    All steps are listed before the branch is looked at: one that is committed meanwhile then is in the branch at most, where
    it is the newest. The other way round it would look abandoned, and be removed.
    """
    everything = _committed(store, run)
    branch = [StepName(base.timeline, base.step) for base in repository.visible(store, run)]
    others = everything - set(branch)
    named: dict[StepName, set[str]] = {}
    for tag in tags.all_tags(store):
        if tag.run == run:
            named.setdefault(StepName(tag.timeline, tag.step), set()).add(tag.name)
    return {StepOfRun(run, name.timeline, name.step) for name in doomed(keep, branch, others, named)}


def _committed(store: Store, run: str) -> set[StepName]:
    """All steps with a COMMIT, of every timeline."""
    found: set[StepName] = set()
    for info in store.list(f"{names.RUNS}{run}/"):
        key = names.parse_step_key(info.key)
        if key is not None and key.kind == "commit":
            found.add(StepName(key.timeline, key.step))
    return found


def preview(store: Store, condemned: Iterable[StepOfRun], clock: Clock = SYSTEM_CLOCK) -> Plan:
    """What `collect` would do; nothing is changed."""
    _require_repo(store)
    reader = Reader(store)
    return plans.foresee(reader.look(), condemned, reader.packs_of, clock.time())


def collect(
    store: Store, condemned: Iterable[StepOfRun], clock: Clock = SYSTEM_CLOCK, reader: Reader | None = None
) -> Plan:
    """Remove the condemned steps and what dead attempts left; return what was done."""
    _require_repo(store)
    reader = reader or Reader(store)
    first = reader.look()
    _finish_complete(store, first, clock)
    wanted = plans.to_remove(first, condemned)
    key = f"{names.GC}{ulid.new(clock)}.json"
    store.put_if_absent(key, encode(Condemned(steps=tuple(wanted))))
    _recorded()
    now = store.stat(key).modified  # the store's clock, which also dates the leases
    aborted, safe = _fence(store, reader.look(), wanted, now)
    gone = tuple(_bury(store, wanted - safe, clock))
    _tombstones()
    last = reader.look()
    objects, kept = plans.garbage(last, reader.packs_of, now)
    _delete(store, [name for name, _ in objects])
    _deleted()
    store.delete_many([key, *_settled_records(last, gone)])
    return Plan(gone, tuple(sorted(safe, key=plans.order)), aborted, tuple(objects), kept)


def _finish_complete(store: Store, seen: Inventory, clock: Clock) -> None:
    for found in plans.unfinished(seen):
        at = found.step
        commit.write_commit(store, Attempt(at.run, at.timeline, at.step, found.attempt, 0), clock)


def _fence(store: Store, seen: Inventory, wanted: set[StepOfRun], now: float) -> tuple[tuple[str, ...], set[StepOfRun]]:
    """Fence what is dead *before* anything is spared or not: see the note for what goes wrong otherwise."""
    safe = plans.spared(seen, wanted, now)
    aborted = []
    for attempt in plans.to_fence(seen, now):
        reason = "its lease was over when a collector came"
        document = Fate(attempt=attempt.attempt, fate="abort", reason=reason)
        if store.put_if_absent(attempt.fate_key, encode(document)):
            aborted.append(attempt.attempt)
    _fenced()
    return tuple(sorted(aborted)), safe


def _bury(store: Store, steps: set[StepOfRun], clock: Clock) -> Iterator[StepOfRun]:
    for step in sorted(steps, key=plans.order):
        key = names.commit(step.run, step.timeline, step.step)
        found = commit.find_commit(store, key)
        if found is not None and not found.tombstone:
            store.put(key, encode(Commit(step=step.step, tombstone=True, committed=clock.time())))
            _one_tombstone()
            yield step


def _delete(store: Store, keys: list[str]) -> None:
    for i in range(0, len(keys), _BATCH):
        store.delete_many(keys[i : i + _BATCH])
        _deleting()


def _settled_records(seen: Inventory, gone: tuple[StepOfRun, ...]) -> list[str]:
    """Records of other collectors whose steps are all removed: nobody needs the warning, and nothing they do matters."""
    buried = {step for step, found in seen.commits.items() if found.tombstone} | set(gone)
    return [key for key, steps in seen.records.items() if set(steps) <= buried]


def _require_repo(store: Store) -> None:
    if repository.read_repo(store) is None:
        raise NotFoundError(f"no checkpoint repository at {store.location.url}", hint="check the URL")
