"""Removes one step, through the collection that policies use: record, leases, tombstone, objects (`collect`).

Invariant: a step that a live lease references stays. A step that has a tag stays, unless the caller removes its tags as
well. A tag that is set during the removal keeps the step: the process that sets it holds a lease while it looks for
collectors' records, and this process reads leases, then tags, after its record is written.
Failure behaviour: `NotFoundError` for a missing step. `ConflictError` for a step that has tags. A removal that stops
leaves a record in `gc/`; the next collection finishes it. Tags are removed first, so no tag names a removed step.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.checkpoint.format.documents import Base, StepOfRun
from headrace.checkpoint.repository import collect, tag_records, tags
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.retention import Plan
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.store.base import Store


@dataclass(frozen=True, slots=True)
class Removal:
    """The plan of a removal: the step, its tags, and what the collection removes.

    `was_latest`: whether it is the latest step of its run.
    """

    step: StepOfRun
    tags: tuple[str, ...]
    was_latest: bool
    plan: Plan


def remove_step(
    store: Store,
    run: str,
    step: int | str,
    *,
    with_tags: bool = False,
    apply: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Removal:
    """Remove one step, or return the plan.

    Args:
        store (Store): The repository.
        run (str): The run's name.
        step (int | str): A number, "latest", or "tag:NAME".
        with_tags (bool): Remove the step's tags, too. Default: False, a step that has tags is refused.
        apply (bool): Execute the plan. Default: False, nothing is changed.
        clock (Clock): The clock. Default: the system's.

    Raises:
        NotFoundError: The run, the step or the tag does not exist.
        ConflictError: The step has tags, and `with_tags` is False.
    """
    base = repository.find(store, run, step)
    if base is None:
        raise repository.missing(store, run)
    latest = repository.find(store, run, "latest")
    at = base.of(run)
    named = tags_of(store, {at}, base)
    if named and not with_tags:
        raise ConflictError(
            f"step {base.step} of run {run} has the tag {', '.join(named)}",
            hint="`headrace ckpt untag` removes a tag; --with-tags removes the step with its tags",
        )
    if not apply:
        return Removal(at, named, base == latest, collect.preview(store, [at], clock))
    for name in named:
        tags.untag(store, name, clock)
    plan = collect.collect(store, [at], clock, spare=lambda steps: _tagged(store, steps & {at}))
    return Removal(at, named, base == latest, plan)


def tags_of(store: Store, steps: set[StepOfRun], base: Base | None = None) -> tuple[str, ...]:
    """Names of the tags that name any of these steps. With `base`, only those of this attempt."""
    return tuple(
        name
        for name, records in tag_records.current_records(store).items()
        if any(
            StepOfRun(tag.run, tag.timeline, tag.step) in steps and (base is None or tag.attempt == base.attempt)
            for tag in records
        )
    )


def _tagged(store: Store, steps: set[StepOfRun]) -> set[StepOfRun]:
    return {step for step in steps if tags_of(store, {step})}
