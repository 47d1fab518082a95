"""Timelines: numbered sequences of steps. Each begins at a step of an older timeline, its parent, or has no parent.

A save opens a timeline when a trainer starts on the run, and when the trainer begins a branch.

Invariants:

* A new timeline has a higher number than all others, and one writer opens it (`put_if_absent`).
* A timeline stops the writers of older ones at once. It hides steps of older timelines only after one of its own steps
  was decided, because a late write may open a timeline after its writer gave up.
* Readers follow the newest timeline that has a decided step. The latest step is the newest committed step of that
  timeline. If there is none, it is the newest committed step of the parent, up to the step where the child branched
  off, and so on.
* A parent is always older than its child.
* Numbers have no gaps and documents are never removed. So if a timeline has objects but no document, the document was
  lost.

Failure behaviour: `ConflictError` if other processes open all timelines that this one tries to open. `CorruptionError`
for a parent that is not older, and if the newest timeline's document is lost. Readers do not fall back to an older
timeline in that case.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Newest, StepName, Timeline, encode, read, this_process
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import (
    CapacityError,
    ConflictError,
    CorruptionError,
    HeadraceError,
    NotFoundError,
    UnsupportedError,
)
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_TRIES = 100

_opened = declare("ckpt.timeline-opened", "an empty timeline: the latest step is that of its parent")


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a branch that is in one timeline: its steps up to `upto`, or all of them."""

    timeline: int
    upto: int | None


def numbers(store: Store, run: str) -> list[int]:
    """Numbers of the run's timelines, oldest first."""
    parsed = (names.parse_timeline_key(info.key) for info in store.list(names.timelines(run)))
    return sorted(number for name_and_number in parsed if name_and_number for number in name_and_number[1:])


def read_timeline(store: Store, run: str, number: int) -> Timeline:
    """Read the timeline's document and check its parent."""
    key = names.timeline(run, number)
    try:
        document = read(store, key, Timeline)
    except NotFoundError:
        raise CorruptionError(f"{key} is missing, and timelines are never removed") from None
    if document.parent is not None and not 0 <= document.parent.timeline < number:
        raise CorruptionError(f"{key} names timeline {document.parent.timeline} as its parent, which is not older")
    return document


def lost(store: Store, run: str) -> list[int]:
    """Numbers of timelines that have objects, but no document."""
    listed = numbers(store, run)
    missing = set(range(1, max(listed, default=0) + 2)) - set(listed)
    return sorted(number for number in missing if _is_lost(store, run, number))


def _newest_number(store: Store, run: str) -> int:
    """The newest timeline's number; 0 if there is none. Raises `CorruptionError` if its document is lost."""
    newest = max(numbers(store, run), default=0)
    if _is_lost(store, run, newest + 1):
        raise CorruptionError(
            f"{names.timeline(run, newest + 1)} is missing, but the timeline has steps: the latest step of run {run} is unknown",
            hint="restore the object from a backup or an earlier version in the store; tagged steps can still be restored by tag",
        )
    return newest


def _is_lost(store: Store, run: str, number: int) -> bool:
    """Whether a timeline that was not listed has objects but no document.

    A timeline that was opened after the listing has its document. Folders are not enough: a store may list one whose
    objects were deleted.
    """
    has_objects = next(iter(store.list(names.timeline_steps(run, number))), None) is not None
    return has_objects and not store.exists(names.timeline(run, number))


def take(
    store: Store, run: str, number: int, parent: StepName | None, writer: str = "", clock: Clock = SYSTEM_CLOCK
) -> bool:
    """Open this timeline; False if another writer has opened it."""
    document = Timeline(
        run=run, timeline=number, parent=parent, created=clock.time(), process=this_process(), writer=writer
    )
    if not store.put_if_absent(names.timeline(run, number), encode(document)):
        return False
    _opened()
    return True


def open_timeline(store: Store, run: str, parent: StepName | None, clock: Clock = SYSTEM_CLOCK) -> int:
    """Open a timeline with the next free number, and return the number."""
    for _ in range(_TRIES):
        number = _newest_number(store, run) + 1
        if take(store, run, number, parent, clock=clock):
            return number
    raise ConflictError(
        f"run {run}: no new timeline in {_TRIES} tries",
        hint="other trainers keep starting on this run; give each its own run name",
    )


def newest_after(store: Store, run: str, number: int) -> Timeline | None:
    """The newest timeline, if it is newer than `number`; else None."""
    newest = max(numbers(store, run), default=0)
    return read_timeline(store, run, newest) if newest > number else None


def newest(store: Store, run: str) -> Timeline | None:
    """The newest timeline; None if the run has none."""
    number = _newest_number(store, run)
    return read_timeline(store, run, number) if number else None


def followed(store: Store, run: str) -> int:
    """The number of the timeline that readers follow: the newest one in which a step was decided; 0 if there is none.

    If no timeline has such a step, it is the newest timeline.
    """
    number = _newest_number(store, run)
    return next((each for each in range(number, 0, -1) if _has_step(store, run, each)), number)


def _has_step(store: Store, run: str, number: int) -> bool:
    if newest_step(store, run, number) is not None:
        return True
    return any(is_decided(store, run, number, at) for at in steps(store, run, number))


def steps(store: Store, run: str, number: int, since: int = 0) -> Iterator[int]:
    """Numbers of the timeline's steps that have objects, from `since` on, in ascending order.

    Not all of them are committed. Only folders are listed, so the cost does not depend on the number of ranks.
    """
    after = names.step_folder(since - 1) if since else ""
    for folder in store.list_folders(names.timeline_steps(run, number), after=after):
        at = names.step_of_folder(folder)
        if at is not None:
            yield at


def steps_newest_first(store: Store, run: str, number: int, upto: int | None = None) -> Iterator[int]:
    """Numbers of the timeline's steps that have objects, at most `upto`, in descending order.

    The first listing begins at the step that `newest.json` names, so it is short.
    """
    since = newest_step(store, run, number)
    if since is None or (upto is not None and since > upto):
        since = names.STEP_LIMIT
    else:
        yield from (at for at in reversed(list(steps(store, run, number, since))) if upto is None or at <= upto)
    older = (at for at in steps(store, run, number) if at < since and (upto is None or at <= upto))
    yield from reversed(list(older))


def attempts(store: Store, run: str, number: int, at: int) -> list[str]:
    """The ids of all attempts to save this step that have objects, oldest first."""
    return [name for name in store.list_folders(names.step(run, number, at)) if names.is_id(name)]


def is_decided(store: Store, run: str, number: int, at: int) -> bool:
    """Whether the step has a COMMIT, a tombstone, or an attempt with a decision."""
    if store.exists(names.commit(run, number, at)):
        return True
    return any(store.exists(names.decision(run, number, at, each)) for each in attempts(store, run, number, at))


def newest_step(store: Store, run: str, number: int) -> int | None:
    """The step that `newest.json` names; None if the object is missing or damaged.

    The writers of COMMITs record their steps there. It need not be the newest step, and it may have been removed. So
    callers only begin their search at this step.
    """
    try:
        at = read(store, names.newest(run, number), Newest).step
    except (NotFoundError, CorruptionError, UnsupportedError, CapacityError):
        return None
    return at if 0 <= at < names.STEP_LIMIT else None


def record_newest(store: Store, run: str, number: int, at: int) -> None:
    """Write `newest.json` after the COMMIT of step `at`. An error is only logged: no reader depends on the object."""
    try:
        store.put(names.newest(run, number), encode(Newest(step=at)))
    except HeadraceError as error:
        _log.debug("step %d of run %s is committed, but newest.json was not written: %s", at, run, error)


def history(store: Store, run: str) -> list[Timeline]:
    """The timeline that readers follow and its ancestors, newest first."""
    number = followed(store, run)
    if not number:
        return []
    documents = [read_timeline(store, run, number)]
    while (parent := documents[-1].parent) is not None:
        documents.append(read_timeline(store, run, parent.timeline))
    return documents


def segments(timelines: Sequence[Timeline]) -> list[Segment]:
    """The segments of a branch, from its timelines as `history` returns them."""
    branch, upto = list[Segment](), None
    for document in timelines:
        branch.append(Segment(document.timeline, upto))
        upto = document.parent.step if document.parent is not None else None
    return branch


def branch(store: Store, run: str) -> list[Segment]:
    """The segments of the run's newest branch, newest first."""
    return segments(history(store, run))


def is_of_same_process(store: Store, run: str, number: int, newer: Timeline) -> bool:
    """Whether the process that opened timeline `number` also opened the newer one."""
    try:
        writer = read_timeline(store, run, number).writer
    except CorruptionError:  # the document was lost, so its writer is unknown
        return False
    return bool(writer) and writer.partition("-")[0] == newer.writer.partition("-")[0]


def superseded(run: str, number: int, newer: Timeline, same_process: bool = False) -> ConflictError:
    """The error of a writer whose timeline a newer one has replaced."""
    if same_process:
        return ConflictError(
            f"run {run}: timeline {number} was taken over by timeline {newer.timeline}, which this process"
            f" opened ({newer.process}): another Checkpointer or DCP writer of the run restored an earlier step",
            hint="save a run through one of them at a time, and wait for its commits before you restore",
        )
    return ConflictError(
        f"run {run}: timeline {number} was taken over by timeline {newer.timeline}, opened by {newer.process}",
        hint="another trainer started on this run; stop this one, or give it its own run name",
    )
