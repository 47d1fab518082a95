"""Sets, moves and removes tags: names for steps, such as `best` or `release-1`.

Invariant: a tag names one committed attempt. A policy keeps tagged steps, including a step that is tagged during a
collection. The process that sets a tag first takes a lease on the step. It then checks that no collector is about to
remove the step, and writes the record while the lease is alive. A collection reads leases first, then tags. The process
deletes older records last, so the previous step is kept until the move is confirmed.
Failure behaviour: `ConflictError` for a name that is taken (unless `move`). `NotFoundError` for a missing step or tag,
or for a step that is being removed. `TransientError` when the lease ran out.
"""

from __future__ import annotations

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import VERSION, Base, encode, this_process
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import tag_records
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.repository.tag_records import Tag, all_tags, find, key_of
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import ConflictError, NotFoundError, TransientError
from headrace.dataio.store.base import Store

__all__ = ["Tag", "all_tags", "find", "tag", "untag"]
_TRIES = 10
"""How many times a record is written, each time with the next free number."""


def tag(
    store: Store,
    name: str,
    run: str,
    step: int | str | Base = "latest",
    *,
    move: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Tag:
    """Give the step a name. With `move`, a name that another step has is moved to this step.

    `step` is a number, "latest", "tag:NAME", or one attempt in any timeline.
    """
    key_of(name)
    base = repository.find(store, run, step)
    if base is None:
        raise NotFoundError(f"run {run} has no step {step} to tag", hint="`headrace ckpt ls` lists the steps")
    with LeaseKeeper(
        store, names.new_id(clock), run=run, timeline=base.timeline, step=base.step, bases=[base], clock=clock
    ) as lease:
        try:
            repository.require_exists(store, run, base)
            record = _tag(name, run, base, clock)
            number = _write(store, record, move=move)
            lease.require_alive()
            _delete_before(store, name, number)
        finally:
            lease.release()
    return record


def _tag(name: str, run: str, base: Base, clock: Clock) -> Tag:
    return Tag(
        name=name,
        run=run,
        timeline=base.timeline,
        step=base.step,
        attempt=base.attempt,
        created=clock.time(),
        process=this_process(),
    )


def _write(store: Store, record: Tag, *, move: bool) -> int:
    """Write the record as the newest of its name, and return its number."""
    for _ in range(_TRIES):
        records = tag_records.listed(store, record.name).get(record.name, [])
        current = tag_records.current_records(store, record.name).get(record.name)
        if record.removed and current is None:
            raise NotFoundError(f"no tag {record.name}", hint="`headrace ckpt tags` lists them")
        if current is not None and not move:
            raise ConflictError(
                f"tag {record.name} is step {current[0].step} of run {current[0].run} already",
                hint="move it (--move, or move=True), or untag it",
            )
        number = records[0][0] + 1 if records else 0
        version = Tag.newest if number else VERSION
        if store.put_if_absent(key_of(record.name, number), encode(msgspec.structs.replace(record, version=version))):
            return number
    raise TransientError(f"other processes keep moving tag {record.name}", hint="try again")


def _delete_before(store: Store, name: str, number: int) -> None:
    """Delete the records that record `number` has replaced."""
    records = tag_records.listed(store, name).get(name, [])
    store.delete_many([info.key for other, info in records if other < number])


def untag(store: Store, name: str, clock: Clock = SYSTEM_CLOCK) -> None:
    """Remove the tag. The step stays until a policy removes it."""
    old = find(store, name)
    removal = msgspec.structs.replace(_tag(name, old.run, old.base, clock), removed=True)
    _delete_before(store, name, _write(store, removal, move=True))
