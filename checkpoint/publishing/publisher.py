"""Publishes a committed step as the next version of a name.

Purpose: `publish` reads the selected tensors of a step, compares them with those of the version before, and writes the
table of their blocks, the update, and last the record, which makes the version visible.

Invariants:

- A record names a committed step. A tag keeps the step from the time before the record is written. A lease keeps it until
  after that.
- The update leads from the version before to this one, block by block. An old block that does not have its digest is not
  used.
- Memory: two pieces of a tensor of each version and a few blocks. If `Held` keeps the weights, also those of the newest
  version. A step in staging memory is not read back.

Failure behaviour: `ConflictError` if another process published the next version first, or if the name belongs to
another run. A publisher that dies leaves the version before. A version before that cannot be read makes a version without an
update. A publication that fails leaves no tag and no update, unless it is unknown whether its record was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, this_process
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.comparison import Comparison, Held, compare, discard_update
from headrace.checkpoint.publishing.early import EarlyComparison, compare_early
from headrace.checkpoint.publishing.records import Published, Stored, WithdrawnError
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, in_staging, published_tensors
from headrace.checkpoint.publishing.staged import StagedMemoryError, StagedStep
from headrace.checkpoint.publishing.weights import store_weights
from headrace.checkpoint.repository import tag_records, tags
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.saving.arena import Staging
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, NotFoundError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)

_after_tag = declare("publish.tagged", "a tag keeps the step, and nothing else was written")
_after_update = declare("publish.update", "the table and the update are stored, and no record names them")
_after_record = declare("publish.record", "the version is published, and old versions are not deleted yet")


def publish(
    store: Store,
    name: str,
    run: str,
    base: Base,
    choice: Choice,
    *,
    held: Held | None = None,
    staging: Staging | None = None,
    early: EarlyComparison | None = None,
    move: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Published:
    """Publish a committed step as the next version of `name`.

    Args:
        store: the repository.
        name: letters, digits, dots, dashes and underscores, at most 80.
        run: the run of the step.
        base: the step.
        choice: the tensors, and the dtype in which they are published.
        held: keeps the weights in memory until the next call, which then need not read them again.
        staging: the staging memory of the run's saves on rank 0. If it still holds the step, the step is not read back.
        early: the result of `begin` for this step. It is used if the version before is still the same.
        move: publish also if the version before is of another run.
        clock: the time of the record.

    Returns:
        The record of the version.

    Raises:
        ConflictError: another process published the next version first, or the name belongs to another run.
        NotFoundError: the step does not exist.
        UsageError: no tensor is selected, or the name is invalid.
    """
    held = held or Held(0)
    with ExitStack() as stack, ExitStack() as undo:
        if early is not None:
            undo.callback(early.discard, store)
        before, number = _newest(store, name)
        if before is not None and before.run != run and not move:
            raise ConflictError(
                f"{name} is published from run {before.run}, not from {run}",
                hint="give move=True to publish another run",
            )
        records.key_of(name, number)
        tag = records.tag_of(name, number, names.new_id(clock))
        with _tag_removed_after_an_error(store, tag):
            tags.tag(store, tag, run, base, clock=clock)
            _after_tag()
            step = stack.enter_context(chunk_reader.LeasedStep(store, run, base, clock))
            prefix, tensors = published_tensors(SavedStep(store, step, 0), choice)
            if early is not None and early.is_of(before, prefix, tensors, step):
                comparison, update = early.comparison, early.update
            else:
                undo.close()
                comparison, update = _compared(store, name, step, tensors, before, held, staging, clock)
                undo.callback(discard_update, store, name, update)
            weights = store_weights(store, name, comparison.weights(), clock)
            _after_update()
            record = Published(
                name=name,
                number=number,
                run=run,
                timeline=base.timeline,
                step=base.step,
                attempt=base.attempt,
                tag=tag,
                include=choice.include,
                exclude=choice.exclude,
                prefix=prefix,
                dtype=choice.dtype,
                bytes=comparison.nbytes,
                weights=weights,
                update=update,
                parent=before.number if before and update else 0,
                parent_weights=before.weights.digest if before and update else "",
                created=clock.time(),
                process=this_process(),
            )
        undo.pop_all()  # an error of the next call may leave a record, which needs the tag and the update
        written = records.write(store, record)
    if written:
        _after_record()
        held.keep(record)
        if _delete_old(store, record) < number + records.KEPT_VERSIONS:
            return record  # otherwise the record of this number had been deleted, and no subscriber reads this one
    else:
        _delete_tag(store, tag)
        discard_update(store, name, update)
    raise ConflictError(
        f"another process published version {number} of {name} first", hint="publish again for the next version"
    )


def _newest(store: Store, name: str) -> tuple[Published | None, int]:
    """The newest version, and the number of the next one. A damaged record does not stop the next version."""
    try:
        before, number = records.find_numbered(store, name)
        return before, number + 1  # also after a withdrawal
    except CorruptionError as error:
        number = records.newest_number(store, name) or 0
        _log.warning("the newest version of %s cannot be read, so the next version has no update: %s", name, error)
        return None, number + 1


@contextmanager
def _tag_removed_after_an_error(store: Store, tag: str) -> Iterator[None]:
    """Delete the tag if the block raises. Otherwise a program whose publications all fail would keep all its steps."""
    try:
        yield
    except Exception:
        _delete_tag(store, tag)
        raise


def _delete_tag(store: Store, tag: str) -> None:
    """Delete a tag, which no other process moves. If that fails, the next publisher deletes it."""
    with suppress(HeadraceError):
        store.delete_many([tag_records.key_of(tag)])


def begin(
    store: Store, name: str, choice: Choice, attempt: str, staging: Staging, held: Held, clock: Clock = SYSTEM_CLOCK
) -> EarlyComparison | None:
    """Compare a save that is still being written with the newest version, for a later `publish` of its step.

    Returns None if the weights are not all in staging memory. `publish` then compares the step.
    """
    return compare_early(store, name, choice, attempt, staging, _newest(store, name)[0], held, clock)


def _compared(
    store: Store,
    name: str,
    step: Step,
    tensors: list[PublishedTensor],
    before: Published | None,
    held: Held,
    staging: Staging | None,
    clock: Clock,
) -> tuple[Comparison, Stored | None]:
    """Compare with the version before, and store the update. Weights that are in staging memory are not read back."""
    copy = staging.copy_of(step.base.attempt) if staging is not None else None
    if staging is not None and copy is not None:
        staged = StagedStep(staging, copy)
        comparison, update = compare(store, name, in_staging(tensors, staged), before, held, clock)
        try:
            staged.require_same(step.manifests[0])
            return comparison, update
        except StagedMemoryError as error:
            _log.error("step %s is read back to publish it: %s", step.base.step, error)
            discard_update(store, name, update)
    return compare(store, name, tensors, before, held, clock)


def _needed(record: Published) -> set[str]:
    """The tag of a version, and the keys of its objects."""
    return {record.tag} | {record.key_of(one) for one in (record.weights, record.update) if one is not None}


def _kept(store: Store, newest: Published, numbers: Iterable[int], most: int) -> set[str]:
    """The tags and objects of the newest `most` versions. A version before a withdrawal needs none."""
    kept = _needed(newest)
    for number in sorted(numbers, reverse=True):
        if number > newest.number - most:
            try:
                kept |= _needed(records.read_record(store, newest.name, number))
            except WithdrawnError:
                break
            except (NotFoundError, CorruptionError):
                continue
    return kept


def _delete_old(store: Store, newest: Published) -> int:
    """Delete what old versions need no more. Return the number of the newest version in the store.

    A failure is logged: the next publisher tries again.
    Orphans are older than the record of `newest` by `ORPHAN_SECONDS`, by the store's clock. So they do not belong to a
    publisher that may still win: it began after that record.
    """
    try:
        numbered, others = records.listed(store, newest.name)
        keys = [info.key for number, info in numbered.items() if number <= newest.number - records.KEPT_VERSIONS]
        if newest.number not in numbered:
            return max(numbered, default=0)
        orphaned = numbered[newest.number].modified - records.ORPHAN_SECONDS
        old = [info.key for info in others if info.modified < orphaned]
        kept = _kept(store, newest, numbered, records.KEPT_VERSIONS if old else 2)
        keys += [key for key in old if key not in kept]
        for tag in tag_records.listed(store):
            of_tag = records.number_of_tag(newest.name, tag)
            if of_tag is not None and (of_tag < newest.number - 1 or (of_tag <= newest.number and tag not in kept)):
                keys.append(tag_records.key_of(tag))  # no other process moves this tag
        store.delete_many(keys)
        return max(numbered)
    except HeadraceError as error:
        _log.warning("old versions of %s could not be deleted: %s", newest.name, error)
        return newest.number
