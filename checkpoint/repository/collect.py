"""Garbage collection: removes steps that the policy does not keep, and leftovers of dead attempts.

Savers and readers may run at the same time.
Order (`docs/design/0012-retention.md`; the tests stop the collection at every store operation):

0. Write COMMIT for every attempt that is complete but has none.
1. Write `gc/<id>` with the steps to delete. From then on, no process begins to reference, read or tag them. If another
   collection deletes the record too early, this one writes it again.
2. Read the leases. Abort every attempt that has no decision and whose lease has expired. Spare the steps that a live
   lease references. Then apply the policy again, because a tag or a timeline may have been added in the meantime. Spare
   the steps that the policy now keeps.
3. Replace the COMMITs of the remaining steps by tombstones. This is final.
4. Read the repository again, and delete the objects that no live attempt needs.
5. Delete `gc/<id>`. Delete records of dead collectors if all their steps are tombstones, or if they are a day old.

`Retention` runs this in a thread of the trainer after each commit. It logs errors; the steps stay until the next
commit.
Invariant: a pack that a committed step needs is never missing, even if a process stops or sleeps at any point. A step
that the policy keeps at the time of the tombstone does not become one.
Failure behaviour: an error or a crash leaves a record in `gc/`. The next collection finishes its steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import (
    Commit,
    Decision,
    PendingDelete,
    Policy,
    StepName,
    StepOfRun,
    encode,
)
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.repository import commit, tag_records, timeline
from headrace.checkpoint.repository import retention as plans
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.inventory import THREADS, Inventory, Reader, many
from headrace.checkpoint.repository.pack_users import PackUsers
from headrace.checkpoint.repository.retention import Keep, Plan, steps_to_delete
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import NotFoundError, TransientError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_recorded = declare("gc.recorded", "the record of the steps to delete is written; nothing is removed")
_fenced = declare("gc.fenced", "dead attempts are aborted; nothing is removed")
_one_tombstone = declare("gc.one-tombstone", "one step is a tombstone, its objects are still stored")
_tombstones = declare("gc.tombstones", "the steps to delete are tombstones, their objects are still stored")
_deleting = declare("gc.deleting", "some objects of removed steps are deleted")
_deleted = declare("gc.deleted", "only the record is left")
_TRIES = 10
"""The maximum number of times that a record is written while other collections delete it."""
_BATCH = 1000
AT_ONCE = 28
"""The maximum number of live attempts whose own packs a collection after a commit lists."""
Spare = Callable[[set[StepOfRun]], set[StepOfRun]]
"""Returns those of the given steps that must stay."""
_TOMBSTONE_WINDOW = plans.RECORD_SECONDS / 24
"""The maximum time in seconds from a collector's record to its last tombstone."""


class Collector:
    """The state that a process keeps between collections of one repository, so that it reads only changed objects.

    Args:
        store: The repository.
        at_once: See `PackUsers`. Default: None, no limit.
    """

    def __init__(self, store: Store, at_once: int | None = None) -> None:
        self.reader = Reader(store)
        self.users = PackUsers(store, at_once)


def to_delete(
    store: Store, run: str, keep: Keep, inventory: Inventory | None = None, reader: Reader | None = None
) -> set[StepOfRun]:
    """Steps of the run that the policy does not keep.

    With the `reader` of the inventory, the newest `THREADS` steps that the policy counts, and the steps that count as
    best, are read again, because another collection may have removed them. So at least the newest step exists, and a
    removed step does not take the place of a best one.

    The `inventory` lists all steps before this function reads the branch. A step that is committed in between is
    then seen only in the branch, as its newest step. In the opposite order, the function would treat that step as
    abandoned and remove it.
    """
    inventory = inventory or Reader(store).look()
    branch = list(_branch(store, run, inventory))
    values = _metadata(run, branch, inventory) if keep.best else {}
    confirmed: set[StepName] = set()
    while reader is not None:
        counted = {*branch[: min(keep.last or 1, THREADS)], *plans.best_steps(keep, branch, values)} - confirmed
        gone = reader.confirm(inventory, [StepOfRun(run, name.timeline, name.step) for name in sorted(counted)])
        if not gone:
            break
        confirmed |= {name for name in counted if StepOfRun(run, name.timeline, name.step) not in gone}
        branch = [name for name in branch if StepOfRun(run, name.timeline, name.step) not in gone]
    committed = {
        StepName(at.timeline, at.step)
        for at, found in inventory.commits.items()
        if at.run == run and not found.tombstone
    }
    others = committed - set(branch)
    named: dict[StepName, set[str]] = {}
    # read tags last; a collection that applies the policy again has read the leases before (see `repository.tags`)
    for tag in (tag for records in tag_records.current_records(store).values() for tag in records):
        if tag.run == run:
            named.setdefault(StepName(tag.timeline, tag.step), set()).add(tag.name)
    selected = steps_to_delete(keep, branch, others, named, values)
    return {StepOfRun(run, name.timeline, name.step) for name in selected}


def _branch(store: Store, run: str, inventory: Inventory) -> Iterator[StepName]:
    """Steps of the run's newest branch, newest first: those that were seen, and newer ones."""
    listed: dict[int, set[int]] = defaultdict(set)
    for step in (*inventory.commits, *(attempt.step for attempt in inventory.attempts.values())):
        if step.run == run:
            listed[step.timeline].add(step.step)
    yielded: set[int] = set()
    for segment in timeline.branch(store, run):
        numbers = listed[segment.timeline]
        numbers |= set(timeline.steps(store, run, segment.timeline, max(numbers, default=-1) + 1))
        for at in sorted(numbers - yielded, reverse=True):
            is_in_segment = segment.upto is None or at <= segment.upto
            if is_in_segment and _exists(store, StepOfRun(run, segment.timeline, at), inventory):
                yielded.add(at)
                yield StepName(segment.timeline, at)


def _metadata(run: str, branch: Iterable[StepName], inventory: Inventory) -> dict[StepName, Metadata]:
    """The numbers in the metadata of these steps, as far as they were seen.

    A step that was committed after the look has none. No record names such a step, so it is not removed.
    """
    values: dict[StepName, Metadata] = {}
    complete = {attempt.step: attempt for attempt in plans.unfinished(inventory)}
    for name in branch:
        at = StepOfRun(run, name.timeline, name.step)
        seen_commit = inventory.commits.get(at)
        attempt = inventory.attempts.get(seen_commit.attempt) if seen_commit is not None else complete.get(at)
        if attempt is not None and attempt.decision is not None:
            values[name] = attempt.decision.values()
    return values


def _exists(store: Store, at: StepOfRun, inventory: Inventory) -> bool:
    """Whether the step is committed. A step that the inventory lacks is read from the store."""
    seen_commit = inventory.commits.get(at)
    if seen_commit is not None:
        return not seen_commit.tombstone
    return repository.recognise(store, at.run, at.timeline, at.step) is not None


def preview(store: Store, pending_deletes: Collection[StepOfRun], clock: Clock = SYSTEM_CLOCK) -> Plan:
    """Return the plan of `collect` without changing anything."""
    _require_repo(store)
    collector, now = Collector(store), clock.time()
    first = collector.reader.look()  # no tombstone that this look sees is new at the next one
    collector.reader.changed(plans.existing_steps(first, pending_deletes))  # their objects are part of the plan
    inventory = collector.reader.look(now - plans.TOMBSTONE_SECONDS)
    return plans.preview(inventory, pending_deletes, collector.users, now)


def retain(
    store: Store,
    run: str,
    keep: Keep,
    clock: Clock = SYSTEM_CLOCK,
    collector: Collector | None = None,
    spare: Spare = lambda _: set(),
) -> Plan | None:
    """Remove the steps that the policy does not keep. Returns the executed plan; None if there is nothing to remove.

    `spare` returns those of the selected steps that stay all the same. It is called before the record, and as in
    `collect`.
    """
    if collector is None:
        _require_repo(store)
        collector = Collector(store)
    inventory = collector.reader.look()
    removed = to_delete(store, run, keep, inventory)
    removed -= spare(removed)
    return _collect(store, inventory, removed, keep, clock, collector, spare) if removed else None


def collect(
    store: Store,
    pending_deletes: Iterable[StepOfRun],
    clock: Clock = SYSTEM_CLOCK,
    collector: Collector | None = None,
    keep: Keep | None = None,
    spare: Spare = lambda _: set(),
) -> Plan:
    """Remove the given steps and the leftovers of dead attempts; return the executed plan.

    `keep` is the policy that selected the steps. A step that the policy keeps at the time of the removal stays. With
    None the collection removes all given steps that no live lease references. `spare` is called after the leases were
    read, and returns steps that stay as well. If the `collector` has collected before, the collection does not examine
    leftovers that the `collector` has examined.
    """
    _require_repo(store)
    collector = collector or Collector(store)
    return _collect(store, collector.reader.look(), pending_deletes, keep, clock, collector, spare)


def _collect(
    store: Store,
    first: Inventory,
    pending_deletes: Iterable[StepOfRun],
    keep: Keep | None,
    clock: Clock,
    collector: Collector,
    spare: Spare = lambda _: set(),
) -> Plan:
    reader, users = collector.reader, collector.users
    _finish_complete(store, first, clock)
    records = _records(first, set(pending_deletes), keep, clock)
    to_remove = {step for record in records.values() for step in record.steps}
    until = clock.monotonic() + _TOMBSTONE_WINDOW
    now = _write(store, records)
    second = reader.look()
    reader.changed(each.step for each in plans.to_fence(second, now))
    aborted, spared = _fence(store, second, to_remove, now)
    spared |= to_remove - _still_pending(store, records.values(), second, reader)
    spared |= spare(to_remove - spared) & to_remove
    reader.changed(to_remove)
    removed = tuple(_write_tombstones(store, to_remove - spared, clock, until))
    reader.removed(removed)
    _tombstones()
    last = reader.look(now - plans.TOMBSTONE_SECONDS)
    objects, bytes_kept = plans.garbage(last, users, now)
    _delete(store, [name for name, _ in objects])
    _deleted()
    users.done()
    reader.changed(users.doubtful)
    reader.changed(_steps_of(name for name, _ in objects))
    store.delete_many([*records, *_outdated_records(last, removed, now), *_outdated_tags(store, now)])
    return Plan(removed, tuple(sorted(spared, key=plans.order)), aborted, tuple(objects), bytes_kept)


def _steps_of(keys: Iterable[str]) -> set[StepOfRun]:
    """The steps that these objects belong to."""
    parsed = map(names.parse_step_key, keys)
    return {StepOfRun(key.run, key.timeline, key.step) for key in parsed if key is not None}


def _records(
    inventory: Inventory, steps_of_caller: set[StepOfRun], keep: Keep | None, clock: Clock
) -> dict[str, PendingDelete]:
    """The records of this collection, by key, one for each policy.

    They hold this collection's own steps and the steps that earlier collections left, under the policy that selected
    them.
    """
    by_policy: dict[Policy | None, set[StepOfRun]] = {keep.policy if keep is not None else None: steps_of_caller}
    for record in inventory.records.values():
        by_policy.setdefault(record.pending_deletes.policy, set()).update(record.pending_deletes.steps)
    to_remove = plans.existing_steps(inventory, steps_of_caller)
    records: dict[str, PendingDelete] = {}
    for policy, steps in by_policy.items():
        selected = tuple(sorted(steps & to_remove, key=plans.order))
        if selected or not records:  # at least one record is written, because it shows the store's time
            records[f"{names.GC}{names.new_id(clock)}.json"] = PendingDelete(steps=selected, policy=policy)
    return records


def _write(store: Store, records: dict[str, PendingDelete]) -> float:
    """Write the records and return when the last was written, by the store's clock, which also dates the leases."""
    for _ in range(_TRIES):
        for key, record in records.items():
            store.put_if_absent(key, encode(record))
        _recorded()
        with contextlib.suppress(NotFoundError):  # another collection deleted it: write it again for the time
            return max(store.stat(key).modified for key in records)
    raise TransientError("other collections keep deleting the records of this one", hint="collect again later")


def _still_pending(
    store: Store, records: Iterable[PendingDelete], inventory: Inventory, reader: Reader
) -> set[StepOfRun]:
    """The recorded steps that a policy still selects, and the steps that were recorded without a policy."""
    pending: set[StepOfRun] = set()
    for record in records:
        steps = set(record.steps)
        if record.policy is None:
            pending |= steps
            continue
        for run in {step.run for step in steps}:
            pending |= steps & to_delete(store, run, Keep.of(record.policy), inventory, reader)
    return pending


def _finish_complete(store: Store, inventory: Inventory, clock: Clock) -> None:
    """Write the missing COMMITs of complete attempts."""
    for complete in plans.unfinished(inventory):
        at = complete.step
        commit.write_commit(store, Attempt(at.run, at.timeline, at.step, complete.attempt, 0), clock)


def _fence(
    store: Store, inventory: Inventory, to_remove: set[StepOfRun], now: float
) -> tuple[tuple[str, ...], set[StepOfRun]]:
    """Abort every attempt whose lease has expired; return those attempts and the spared steps.

    All aborts are written before any step is removed. `docs/design/0012-retention.md` gives the reason.
    """
    spared = plans.spared(inventory, to_remove, now)
    aborted = []
    for attempt in plans.to_fence(inventory, now):
        reason = "its lease had expired when a collection ran"
        document = Decision(attempt=attempt.attempt, outcome="abort", reason=reason)
        if store.put_if_absent(attempt.decision_key, encode(document)):
            aborted.append(attempt.attempt)
    _fenced()
    return tuple(sorted(aborted)), spared


def _write_tombstones(store: Store, steps: set[StepOfRun], clock: Clock, until: float) -> Iterator[StepOfRun]:
    """Replace the COMMITs of the steps by tombstones before the time `until`. Yields each step after its tombstone."""
    for step in sorted(steps, key=plans.order):
        if clock.monotonic() > until:
            raise TransientError("the collection took too long and stopped", hint="run it again for the other steps")
        key = names.commit(step.run, step.timeline, step.step)
        current = commit.find_commit(store, key)
        if current is not None and not current.tombstone:
            tombstone = Commit(step=step.step, attempt=current.attempt, tombstone=True, committed=clock.time())
            store.put(key, encode(tombstone))
            _one_tombstone()
            yield step


def _delete(store: Store, keys: list[str]) -> None:
    """Delete these objects, several requests at the same time. Decisions and tombstones are deleted after the others."""

    def delete_batch(batch: list[str]) -> None:
        store.delete_many(batch)
        _deleting()

    outcomes = [key for key in keys if (at := names.parse_step_key(key)) is not None and at.kind in ("fate", "commit")]
    late = set(outcomes)
    for phase in ([key for key in keys if key not in late], outcomes):
        list(many(delete_batch, [phase[i : i + _BATCH] for i in range(0, len(phase), _BATCH)]))


def _outdated_records(inventory: Inventory, removed: tuple[StepOfRun, ...], now: float) -> list[str]:
    """Records that are no longer needed: those whose steps are all removed, and those of dead collectors.

    If a dead collector selected a step and this collection spared it, no record names the step any more.
    """
    are_removed = {*inventory.tombstones, *removed}
    return [
        key
        for key, record in inventory.records.items()
        if set(record.pending_deletes.steps) <= are_removed or now - record.modified > plans.RECORD_SECONDS
    ]


def _outdated_tags(store: Store, now: float) -> list[str]:
    """Tag records that are no longer needed.

    Every running collector has read the records that replaced them. A store applies a late request for an older record
    within `TOMBSTONE_SECONDS`.
    """
    return tag_records.outdated(store, now - plans.RECORD_SECONDS, now - plans.TOMBSTONE_SECONDS)


def _require_repo(store: Store) -> None:
    if repository.read_repo(store) is None:
        raise NotFoundError(f"no checkpoint repository at {store.location.url}", hint="check the URL")


_log = get_logger(__name__)


class Retention:
    """Applies the policy `keep` to `run` after each call of `committed`."""

    def __init__(self, store: Store, run: str, keep: Keep) -> None:
        self._store, self._run, self._keep = store, run, keep
        self._collector = Collector(store, AT_ONCE)
        self._lock = threading.Lock()
        self._pending = False
        self._thread: threading.Thread | None = None
        self._protected = Counter[int]()

    def protect(self, step: int) -> Callable[[], None]:
        """Keep the steps with this number, until the returned function is called. Other processes may remove them."""
        with self._lock:
            self._protected[step] += 1
        return lambda: self._release(step)

    def committed(self) -> None:
        """Report a commit: a thread then removes the steps that the policy does not keep."""
        with self._lock:
            self._pending = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="headrace-retention")
                try:
                    thread.start()
                except RuntimeError as error:  # the process can start no thread, or it is shutting down
                    _log.warning("old steps of run %s could not be removed now: %s", self._run, error)
                else:
                    self._thread = thread

    def wait(self, timeout: float) -> None:
        """Wait until the thread has ended, at most `timeout` seconds."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._thread = None
                    return
                self._pending = False
            self._apply()

    def _apply(self) -> None:
        try:
            plan = retain(self._store, self._run, self._keep, collector=self._collector, spare=self._spare)
            if plan is not None:
                steps = ", ".join(str(step.step) for step in plan.tombstones)
                _log.info("removed steps %s, %s", steps or "none", format_bytes(plan.bytes_freed))
        except Exception as error:
            _log.warning("old steps of run %s could not be removed now: %s", self._run, error)

    def _spare(self, steps: set[StepOfRun]) -> set[StepOfRun]:
        with self._lock:
            return {step for step in steps if step.run == self._run and step.step in self._protected}

    def _release(self, step: int) -> None:
        with self._lock:
            self._protected[step] -= 1
            if not self._protected[step]:
                del self._protected[step]
