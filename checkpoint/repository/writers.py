"""Chooses the timeline of a save, and the step at which a new timeline branches off.

A job may have several writers of one run: Checkpointers, DCP's writers, the process of an asynchronous DCP save. Each
timeline names the writer that opened it, and the writers of one job save in each other's timelines. A writer continues
in the timeline of its last save while that is the newest, even if the writer that opened it was closed. A restore alone
changes nothing.

1. A step that is newer than the run's newest step continues from that step, whichever step was restored before. So no
   step is hidden.
2. A step that is not newer begins a branch, if the writer restored a step since its last save or is new to the run. The
   branch begins at the newest step before the saved one. It begins at the restored step if that is the saved step or
   newer, or lies in an abandoned timeline. A Checkpointer that has restored nothing begins without a parent step.
3. Any other save goes into the job's own timeline. A step that this timeline already has is refused. Under frameworks
   that overwrite their files, such a step begins a branch at the newest step before it.

Invariant: only a save opens a timeline. It is the first save of a writer that is new to the run, or a save that begins
a branch. If two writers of a job save at the same time, one opens the timeline and the other finds it.

Failure behaviour: `ConflictError` if another job has taken the timeline over, or if the job's timeline already has the
step. `ConflictError` also if retention keeps removing the step to begin at. `CorruptionError` as in `timeline`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base, StepName
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline
from headrace.dataio.core.errors import ConflictError, NotFoundError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)

_TRIES = 20
"""The maximum number of tries to place a save while other writers open timelines or retention removes its parent."""
_of_this_job: set[str] = set()
_process, _numbers = names.new_id(), itertools.count(1)


@dataclass(frozen=True, slots=True)
class WriterState:
    """A writer's state before a save.

    - `timeline`: the timeline of its last save; 0 for none.
    - `restored`: the step that it has restored since then.
    - `since`: the timeline that was the newest at that restore; 0 if that does not matter.
    - `may_start_fresh`: whether it may begin a timeline without a parent step.
    - `handed_on`: whether other processes save for this one, so that the job's last timeline is looked up.
    - `again`: whether it may save a step that its timeline already has.
    - `was_latest`: whether `restored` was the run's latest step when it was restored.
    """

    writer: str
    timeline: int = 0
    restored: Base | None = None
    since: int = 0
    may_start_fresh: bool = False
    handed_on: bool = False
    again: bool = False
    was_latest: bool = False


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """The place of a save.

    `base`: the step to deduplicate against; None for the first save. `newer`: a step of the same timeline that stays
    the latest.
    """

    timeline: int
    base: Base | None
    newer: Base | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """`timeline` is 0 if a new one is needed. The new one has the number `following` and branches off `parent`."""

    timeline: int
    following: int
    parent: Base | None
    base: Base | None
    newer: Base | None = None


def enter() -> str:
    """Register a new writer of this process and return its name."""
    writer = f"{_process}-{next(_numbers)}"
    _of_this_job.add(writer)
    return writer


def leave(writer: str) -> None:
    """Remove the writer. A later writer of this process no longer shares its timelines."""
    _of_this_job.discard(writer)


def of_this_job() -> frozenset[str]:
    """Names of all writers of this job that this process knows, its own included. They share their timelines."""
    return frozenset(_of_this_job)


def join(writers: Iterable[str]) -> None:
    """Add the writers of the process that started this one, and for which this one saves."""
    _of_this_job.update(writers)


def is_new_process() -> None:
    """Forget all writers and take a new process name. Runs in every forked child."""
    global _process
    _process = names.new_id()
    _of_this_job.clear()


os.register_at_fork(after_in_child=is_new_process)


def place(
    store: Store, run: str, step: int, state: WriterState, lease_parent: Callable[[Base], object] = lambda _: None
) -> SaveTarget:
    """Return the timeline to save `step` in, and open it if needed.

    Before a timeline is opened, `lease_parent` is called with its parent step. It raises `NotFoundError` if that step
    is being removed.
    """
    removed: NotFoundError | None = None
    for _ in range(_TRIES):
        choice = _choose_timeline(store, run, step, state)
        if choice.timeline:
            return SaveTarget(choice.timeline, choice.base, choice.newer)
        if choice.parent is not None:
            try:
                lease_parent(choice.parent)
            except NotFoundError as error:
                removed = error
                continue
        parent = None if choice.parent is None else StepName(choice.parent.timeline, choice.parent.step)
        if timeline.take(store, run, choice.following, parent, state.writer):
            if parent is None and choice.base is not None:
                _log.warning(
                    "run %s starts anew at step %d: its steps up to %d are hidden, and retention may remove them."
                    " To continue them, call restore before the first save; for an unrelated run, give another name",
                    run,
                    step,
                    choice.base.step,
                )
            return SaveTarget(choice.following, choice.base)
    if removed is not None:
        raise ConflictError(
            f"run {run}: step {step} cannot be saved, because retention removed its parent step: {removed.message}",
            hint="restore the latest step, or start the trainer again",
        ) from removed
    raise ConflictError(
        f"run {run}: no new timeline in {_TRIES} tries",
        hint="other trainers keep starting on this run; give each its own run name",
    )


def _choose_timeline(store: Store, run: str, step: int, state: WriterState) -> _Choice:
    head = timeline.newest(store, run)
    if head is None:
        return _Choice(0, 1, None, None)
    # the opener may be closed; a writer that has saved in the timeline continues there until a newer one is opened
    is_own = head.timeline == state.timeline or head.writer == state.writer or head.writer in _of_this_job
    if not is_own and (last := state.timeline or (_last_of_this_job(store, run) if state.handed_on else 0)):
        raise timeline.superseded(run, last, head, timeline.is_of_same_process(store, run, last, head))
    restored = state.restored
    if is_own and state.since and head.timeline > state.since:
        restored = None  # another writer of the job has begun the branch already
    branch = timeline.branch(store, run)
    steps = repository.visible(store, run, branch=branch)
    latest = next(steps, None)
    following = head.timeline + 1
    if latest is None:
        return _Choice(head.timeline if is_own and restored is None else 0, following, restored, restored)
    if not is_own and state.was_latest and restored is not None and not _is_in(branch, restored):
        return _Choice(0, following, restored, restored)  # another trainer has gone back before this step
    if step > latest.step:
        return _Choice(head.timeline if is_own else 0, following, latest, latest)
    if is_own and restored is None:
        if not timeline.is_decided(store, run, head.timeline, step):
            return _Choice(head.timeline, following, None, latest, latest)
        if not state.again:
            raise _saved(run, head.timeline, step)
    elif restored is None and state.may_start_fresh:
        return _Choice(0, following, None, latest)
    if restored is not None and (restored.step >= step or not _is_in(branch, restored)):
        return _Choice(0, following, restored, restored)
    before = next((base for base in itertools.chain((latest,), steps) if base.step < step), restored)
    return _Choice(0, following, before, before or latest)


def _last_of_this_job(store: Store, run: str) -> int:
    documents = (timeline.read_timeline(store, run, number) for number in reversed(timeline.numbers(store, run)))
    return next((document.timeline for document in documents if document.writer in _of_this_job), 0)


def _saved(run: str, number: int, step: int) -> ConflictError:
    return ConflictError(
        f"step {step} of run {run} is already saved in timeline {number}, which this process saves in",
        hint="save each step once; to go back to an earlier step, restore it first (`resume=True` of RepositoryReader)",
    )


def _is_in(branch: Iterable[timeline.Segment], base: Base) -> bool:
    return any(
        segment.timeline == base.timeline and (segment.upto is None or base.step <= segment.upto) for segment in branch
    )
