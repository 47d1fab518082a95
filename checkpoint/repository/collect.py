"""Garbage collection: removes steps that the policy lets go and leftovers of dead attempts, while savers and readers run.

Order (`docs/design/0012-retention.md`; the tests stop it at every store operation):

0. Write COMMIT for every complete attempt that has none.
1. Write `gc/<id>` with the steps to delete. From then on no process references, reads or tags them. A record that
   another collection deletes too early is written once more.
2. Read leases. Abort every attempt without a decision whose lease is over. Spare the steps that a live lease
   references. Then apply the policy again, and spare what it keeps now: a tag or a timeline may have been added
   meanwhile.
3. Replace the COMMITs of the remaining steps by tombstones, which is final.
4. Look at the repository again, and delete what no live attempt needs.
5. Delete `gc/<id>`, and records of dead collectors whose steps are all tombstones or that are a day old.

`Retention` runs this in a thread of the trainer after each commit. Its errors are logged; the steps stay until the
next commit.
Invariant: a pack that a committed step needs is never missing, wherever a process stops or sleeps. A step that the
policy keeps at the time of the tombstone does not become one.
Failure behaviour: an error or a crash leaves a record in `gc/`; the next collection finishes its steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit, Decision, PendingDelete, Policy, StepName, StepOfRun, encode
from headrace.checkpoint.repository import commit, tag_records
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.inventory import Inventory, Reader
from headrace.checkpoint.repository.retention import Keep, Plan, steps_to_delete
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_recorded = declare("gc.recorded", "the record of the steps to delete is written; nothing is removed")
_fenced = declare("gc.fenced", "dead attempts are fenced; nothing is removed")
_one_tombstone = declare("gc.one-tombstone", "one step is a tombstone, its objects are still stored")
_tombstones = declare("gc.tombstones", "the steps to delete are tombstones, their objects are still stored")
_deleting = declare("gc.deleting", "some objects of removed steps are deleted")
_deleted = declare("gc.deleted", "only the record is left")
_TRIES = 10
"""How often a record is written that others settle at once."""
_BATCH = 256
_BURIAL_SECONDS = plans.RECORD_SECONDS / 24
"""From its record on a collector takes at most this long until its last tombstone."""


def to_delete(store: Store, run: str, keep: Keep, removed: Iterable[StepOfRun] = ()) -> set[StepOfRun]:
    """The steps of the run that the policy removes. `removed`: those that are known to be tombstones.

    All steps are listed before the branch is looked at: one that is committed meanwhile then is in the branch at most, where
    it is the newest. The other way round it would look abandoned, and be removed.
    """
    known = {StepName(step.timeline, step.step) for step in removed if step.run == run}
    everything = _committed(store, run) - known
    branch = [StepName(base.timeline, base.step) for base in repository.visible(store, run, known)]
    others = everything - set(branch)
    named: dict[StepName, set[str]] = {}
    # last, after leases when a collection applies the policy again: see `lifecycle.tags`
    for tag in (tag for records in tag_records.standing(store).values() for tag in records):
        if tag.run == run:
            named.setdefault(StepName(tag.timeline, tag.step), set()).add(tag.name)
    return {StepOfRun(run, name.timeline, name.step) for name in steps_to_delete(keep, branch, others, named)}


def _committed(store: Store, run: str) -> set[StepName]:
    """All steps with a COMMIT, of every timeline."""
    found: set[StepName] = set()
    for info in store.list(f"{names.RUNS}{run}/"):
        key = names.parse_step_key(info.key)
        if key is not None and key.kind == "commit":
            found.add(StepName(key.timeline, key.step))
    return found


def preview(store: Store, pending_deletes: Iterable[StepOfRun], clock: Clock = SYSTEM_CLOCK) -> Plan:
    """What `collect` would do; nothing is changed."""
    _require_repo(store)
    reader = Reader(store)
    return plans.foresee(reader.look(), pending_deletes, reader.packs_of, clock.time())


def retain(
    store: Store, run: str, keep: Keep, clock: Clock = SYSTEM_CLOCK, reader: Reader | None = None
) -> Plan | None:
    """Remove the steps that the policy does not keep. Returns what was done, None when there is nothing to remove."""
    _require_repo(store)
    reader = reader or Reader(store)
    gone = to_delete(store, run, keep, reader.removed)
    return collect(store, gone, clock, reader, keep) if gone else None


def collect(
    store: Store,
    pending_deletes: Iterable[StepOfRun],
    clock: Clock = SYSTEM_CLOCK,
    reader: Reader | None = None,
    keep: Keep | None = None,
) -> Plan:
    """Remove the given steps and leftovers of dead attempts; return what was done.

    `keep`: the policy that selected them; a step that it keeps at the time of the removal stays. None: all are removed.
    """
    _require_repo(store)
    reader = reader or Reader(store)
    first = reader.look()
    _finish_complete(store, first, clock)
    mine = _records(first, set(pending_deletes), keep, clock)
    wanted = {step for record in mine.values() for step in record.steps}
    until = clock.monotonic() + _BURIAL_SECONDS
    now = _write(store, mine)
    aborted, safe = _fence(store, reader.look(), wanted, now)
    safe |= wanted - _still_pending(store, mine.values(), reader.removed)
    gone = tuple(_bury(store, wanted - safe, clock, until))
    _tombstones()
    last = reader.look()
    objects, kept = plans.garbage(last, reader.packs_of, now)
    _delete(store, [name for name, _ in objects])
    _deleted()
    store.delete_many([*mine, *_settled_records(last, gone, now), *_outdated_tags(store, now)])
    return Plan(gone, tuple(sorted(safe, key=plans.order)), aborted, tuple(objects), kept)


def _records(seen: Inventory, own: set[StepOfRun], keep: Keep | None, clock: Clock) -> dict[str, PendingDelete]:
    """What this collection records, by key: its own steps, and what earlier ones left, each under the policy that selected
    it."""
    by_policy: dict[Policy | None, set[StepOfRun]] = {keep.policy if keep is not None else None: own}
    for record in seen.records.values():
        by_policy.setdefault(record.pending_deletes.policy, set()).update(record.pending_deletes.steps)
    wanted = plans.to_remove(seen, own)
    made: dict[str, PendingDelete] = {}
    for policy, steps in by_policy.items():
        there = tuple(sorted(steps & wanted, key=plans.order))
        if there or not made:  # one at least: it says what time the store has
            made[f"{names.GC}{names.new_id(clock)}.json"] = PendingDelete(steps=there, policy=policy)
    return made


def _write(store: Store, records: dict[str, PendingDelete]) -> float:
    """The time when the records were there, by the store's clock, which also dates the leases."""
    for _ in range(_TRIES):
        for key, record in records.items():
            store.put_if_absent(key, encode(record))
        _recorded()
        with contextlib.suppress(NotFoundError):  # another collection has settled it already: once more, for the time
            return max(store.stat(key).modified for key in records)
    raise TransientError("other collections keep settling the records of this one", hint="collect again later")


def _still_pending(store: Store, records: Iterable[PendingDelete], removed: Iterable[StepOfRun]) -> set[StepOfRun]:
    """Steps that are removed unconditionally, and those that the policy still selects."""
    found: set[StepOfRun] = set()
    for record in records:
        steps = set(record.steps)
        if record.policy is None:
            found |= steps
            continue
        for run in {step.run for step in steps}:
            found |= steps & to_delete(store, run, Keep.of(record.policy), removed)
    return found


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
        document = Decision(attempt=attempt.attempt, outcome="abort", reason=reason)
        if store.put_if_absent(attempt.decision_key, encode(document)):
            aborted.append(attempt.attempt)
    _fenced()
    return tuple(sorted(aborted)), safe


def _bury(store: Store, steps: set[StepOfRun], clock: Clock, until: float) -> Iterator[StepOfRun]:
    for step in sorted(steps, key=plans.order):
        if clock.monotonic() > until:
            raise TransientError("the collection took too long and stopped", hint="the next one goes on")
        key = names.commit(step.run, step.timeline, step.step)
        found = commit.find_commit(store, key)
        if found is not None and not found.tombstone:
            tombstone = Commit(step=step.step, attempt=found.attempt, tombstone=True, committed=clock.time())
            store.put(key, encode(tombstone))
            _one_tombstone()
            yield step


def _delete(store: Store, keys: list[str]) -> None:
    for i in range(0, len(keys), _BATCH):
        store.delete_many(keys[i : i + _BATCH])
        _deleting()


def _settled_records(seen: Inventory, gone: tuple[StepOfRun, ...], now: float) -> list[str]:
    """Records that are no longer needed: of collectors whose steps are all removed, and of dead collectors. A step that a
    dead collector selected and this one spared is an ordinary step again."""
    buried = {*seen.tombstones, *gone}
    return [
        key
        for key, record in seen.records.items()
        if set(record.pending_deletes.steps) <= buried or now - record.modified > plans.RECORD_SECONDS
    ]


def _outdated_tags(store: Store, now: float) -> list[str]:
    """Records of tags that nothing depends on: all collectors at work by now have seen those that replaced them, and no request
    for an older one is late by more than a tombstone is kept."""
    return tag_records.outdated(store, now - plans.RECORD_SECONDS, now - plans.TOMBSTONE_SECONDS)


def _require_repo(store: Store) -> None:
    if repository.read_repo(store) is None:
        raise NotFoundError(f"no checkpoint repository at {store.location.url}", hint="check the URL")


_log = get_logger(__name__)


class Retention:
    """Applies `keep` to `run` whenever `committed` is called."""

    def __init__(self, store: Store, run: str, keep: Keep) -> None:
        self._store, self._run, self._keep = store, run, keep
        self._reader = Reader(store)
        self._lock = threading.Lock()
        self._again = False
        self._thread: threading.Thread | None = None

    def committed(self) -> None:
        """A step was committed: remove others, in a thread."""
        with self._lock:
            self._again = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="headrace-retention")
                try:
                    thread.start()
                except RuntimeError as error:  # no room for a thread, or the program ends
                    _log.warning("old steps of run %s could not be removed now: %s", self._run, error)
                else:
                    self._thread = thread

    def wait(self, timeout: float) -> None:
        """Until nothing is being removed, at most `timeout` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            self._once()

    def _once(self) -> None:
        try:
            done = retain(self._store, self._run, self._keep, reader=self._reader)
            if done is not None:
                steps = ", ".join(str(step.step) for step in done.tombstones)
                _log.info("removed steps %s, %s", steps or "none", format_bytes(done.bytes_freed))
        except Exception as error:
            _log.warning("old steps of run %s could not be removed now: %s", self._run, error)
