"""What a process remembers of the runs that it saves to through DCP, where every step may have a writer of its own.

Invariant: all writers of DCP in a process are one writer of `headrace.checkpoint.repository.writers`, also those that
an asynchronous save
sends to a process of its own: `handed_on` is sent with them. A load decides nothing; a load with `resume=True` lets the next save
begin a branch, if the saved step is not newer than the run's newest one.
Failure behaviour: errors of the store, and as of `writers`.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository import timeline, writers
from headrace.checkpoint.repository.writers import WriterState
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

_log = get_logger(__name__)
_lock = threading.Lock()
_writer, _handed_on = "", False
_timelines: dict[tuple[str, str], int] = {}
"""The timeline that this process saved in last."""
_resumed: dict[tuple[str, str], tuple[Base, int]] = {}
"""The step that the process goes on from, and the run's newest timeline when it was loaded."""


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator decides for one save."""

    attempt: str
    timeline: int
    base: Base | None


def draw(store: Store, run: str, step: int, again: bool = False) -> Ticket:
    """On the coordinator, once for each save. `again`: a step that this job has saved is saved once more, in a branch."""
    at = (store.location.url, run)
    with _lock:
        repository.ensure_repo(store)
        restored, since = _resumed.get(at, (None, 0))
        standing = WriterState(_own(), _timelines.get(at, 0), restored, since, handed_on=_handed_on, again=again)
        place = writers.place(store, run, step, standing)
        _timelines[at] = place.timeline
        _resumed.pop(at, None)
    if place.newer is not None:
        _log.warning(
            "run %s: step %d is saved before step %d, which stays the latest; to go on from an earlier step, load that with"
            " RepositoryReader(..., resume=True)",
            *(run, step, place.newer.step),
        )
    return Ticket(names.new_id(), place.timeline, place.base)


def resume(store: Store, run: str, base: Base) -> None:
    """What the process saves from now on may go on from this step, which it has loaded."""
    since = max(timeline.numbers(store, run), default=0)
    with _lock:
        _resumed[store.location.url, run] = base, since


def handed_on() -> Any:
    """What a process that saves for this one must know: the argument of `take_over` there."""
    global _handed_on
    with _lock:
        _handed_on = True
        return _own(), writers.of_this_job(), dict(_timelines), dict(_resumed)


def take_over(handed: Any) -> None:
    """Save for the process that handed this on, as if it saved itself."""
    global _writer
    with _lock:
        _writer, known, timelines, resumed = handed
        writers.join(known)
        _resumed.update(resumed)
        for at, number in timelines.items():
            _timelines[at] = max(_timelines.get(at, 0), number)


def is_new_process() -> None:
    """Forget everything: what was saved and resumed was another process's."""
    global _writer, _handed_on, _lock
    _writer, _handed_on, _lock = "", False, threading.Lock()
    _timelines.clear()
    _resumed.clear()


def _own() -> str:
    global _writer
    if not _writer:
        _writer = writers.enter()
    return _writer


os.register_at_fork(after_in_child=is_new_process)
