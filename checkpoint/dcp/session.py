"""What a process remembers of the runs that it saves to through DCP, where every step may have a writer of its own.

Invariant: a process opens one timeline for each run, at its first save; a save that is still on its way is thus not fenced
off by the next one's writer. The timeline's parent is the step that the process loaded, else the newest step before the
one that is saved.
Failure behaviour: errors of the store.
"""

from __future__ import annotations

import threading

import msgspec

from checkpoint.format import ulid
from checkpoint.format.documents import Base, StepName
from checkpoint.repository import steps as repository
from checkpoint.repository import timeline
from dataio.store.contract import Store

_lock = threading.Lock()
_timelines: dict[tuple[str, str], int] = {}
_loaded: dict[tuple[str, str], StepName] = {}


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """What the coordinator decides for one save."""

    attempt: str
    timeline: int
    base: Base | None


def draw(store: Store, run: str, step: int) -> Ticket:
    """On the coordinator, once for each save."""
    place = (store.location.url, run)
    with _lock:
        repository.ensure_repo(store)
        base = next((b for b in repository.visible(store, run) if b.step < step), None)
        if place not in _timelines:
            parent = _loaded.get(place) or (StepName(base.timeline, base.step) if base else None)
            _timelines[place] = timeline.open_timeline(store, run, parent)
        return Ticket(ulid.new(), _timelines[place], base)


def loaded(store: Store, run: str, base: Base) -> None:
    """The process has loaded this step: what it saves from now on descends from it."""
    place = (store.location.url, run)
    with _lock:
        _loaded[place] = StepName(base.timeline, base.step)
        _timelines.pop(place, None)
