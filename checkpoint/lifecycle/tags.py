"""Tags: names that people give to steps, such as `best` or `release-1`.

Invariant: a tag names one committed attempt; the protocol never depends on one. A policy keeps the steps that tags name: a step
whose tag was given is not removed by one that was at work meanwhile. Whoever gives a tag holds a lease on the step, looks
whether it is condemned, and writes the tag while the lease lives; a collection reads leases, then tags.
Failure behaviour: `ConflictError` for a name that is taken, unless it is to be moved; `NotFoundError` for a step or a tag that is
not there, or a step that is being removed; `TransientError` when the lease ran out on the way.
"""

from __future__ import annotations

from checkpoint.format import ulid
from checkpoint.format.documents import Base, encode, me, read
from checkpoint.repository import steps as repository
from checkpoint.repository.lease import LeaseKeeper
from checkpoint.repository.tagged import Tag, all_tags, find, key_of
from dataio.core.clock import SYSTEM_CLOCK, Clock
from dataio.core.errors import ConflictError, NotFoundError
from dataio.store.contract import Store

__all__ = ["Tag", "all_tags", "find", "tag", "untag"]


def tag(
    store: Store, name: str, run: str, step: int | str = "latest", *, move: bool = False, clock: Clock = SYSTEM_CLOCK
) -> Tag:
    """Give the step a name; with `move` also when another step has it."""
    key = key_of(name)
    found = repository.find(store, run, step)
    if found is None:
        raise NotFoundError(f"run {run} has no step {step} to tag", hint="`millrace ckpt ls` lists the steps")
    with LeaseKeeper(store, ulid.new(clock), run, found.timeline, found.step, [found], clock=clock) as lease:
        try:
            repository.require_there(store, run, found)
            made = _write(store, key, _tag(name, run, found, clock), move=move)
            lease.require_alive()
        finally:
            lease.release()
    return made


def _tag(name: str, run: str, base: Base, clock: Clock) -> Tag:
    return Tag(
        name=name,
        run=run,
        timeline=base.timeline,
        step=base.step,
        attempt=base.attempt,
        created=clock.time(),
        who=me(),
    )


def _write(store: Store, key: str, made: Tag, *, move: bool) -> Tag:
    if move:
        store.put(key, encode(made))
    elif not store.put_if_absent(key, encode(made)):
        other = read(store, key, Tag)
        raise ConflictError(
            f"tag {made.name} is step {other.step} of run {other.run} already",
            hint="move it (--move, or move=True), or untag it",
        )
    return made


def untag(store: Store, name: str) -> None:
    """Forget the name; the step stays, until a policy lets it go."""
    find(store, name)
    store.delete_many([key_of(name)])
