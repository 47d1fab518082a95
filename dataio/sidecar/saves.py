"""The staged checkpoints as people see them: what is on its way, how far, how fast; and what was committed last.

Purpose: turns the events of the daemon's jobs into lines for the status page.
Invariant: at most `KEPT` ended saves are remembered; a save in flight is remembered until it ends.
Failure behaviour: a result that names no run or step is a save without a committed step.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.dataio.sidecar import messages as m

KEPT = 16
LISTED = 32


@dataclass(slots=True)
class _Save:
    about: str
    accepted: float
    done: int = 0
    total: int = 0
    released: bool = False
    ended: float | None = None
    error: str | None = None
    phase: Callable[[], str] = lambda: "running"
    trouble: Callable[[], str] = lambda: ""


class Saves:
    """`committed(run, step, when)` hears of every step that a job says it committed."""

    def __init__(self, committed: Callable[[str, int, float], None], clock: Callable[[], float] = time.time) -> None:
        self._committed, self._clock = committed, clock
        self._saves: OrderedDict[str, _Save] = OrderedDict()
        self.outcomes = {"committed": 0, "failed": 0}
        self.room: Callable[[], Mapping[str, float]] = dict
        """How much room for arenas there is, and who waits for it."""

    def listener(
        self,
        token: str,
        about: str,
        phase: Callable[[], str] = lambda: "running",
        trouble: Callable[[], str] = lambda: "",
    ) -> Callable[[m.JobEvent], None]:
        """A new save; what is returned wants its events. `phase` says whether it waits, as its job's state, and `trouble` why it
        is tried again."""
        name = "".join(c for c in about if c.isprintable())
        self._saves[token] = save = _Save(name, self._clock(), phase=phase, trouble=trouble)
        return lambda event: self._heard(save, event)

    def listed(self) -> list[dict[str, object]]:
        """In flight first, then the latest that ended, newest first."""
        for token in [token for token, save in self._saves.items() if save.ended is None and save.phase() == "gone"]:
            del self._saves[token]
        order = sorted(self._saves.values(), key=lambda save: (save.ended is not None, -save.accepted))
        return [self._describe(save) for save in order[:LISTED]]

    def _heard(self, save: _Save, event: m.JobEvent) -> None:
        match event:
            case m.Progress(_, done, total):
                save.done, save.total = done, total
            case m.Released():
                save.released = True
            case m.JobFailed(_, _, message):
                save.error = message[:300]
                self._end(save, "failed")
            case m.Done(_, result):
                self._end(save, "committed")
                self._tell(result)

    def _end(self, save: _Save, outcome: str) -> None:
        save.ended = self._clock()
        self.outcomes[outcome] += 1
        over = [token for token, other in self._saves.items() if other.ended is not None]
        for token in over[:-KEPT]:
            del self._saves[token]

    def _tell(self, result: str) -> None:
        said = json.loads(result)
        run, step, when = said.get("run"), said.get("step"), said.get("committed")
        good = isinstance(run, str) and isinstance(step, int) and isinstance(when, int | float)
        if good and step >= 0 and math.isfinite(when):
            self._committed(run, step, when)

    def _describe(self, save: _Save) -> dict[str, object]:
        until = save.ended if save.ended is not None else self._clock()
        return {
            "about": save.about or "a checkpoint",
            "state": _state(save),
            "done": save.done,
            "total": save.total,
            "seconds": round(until - save.accepted, 1),
            "age_seconds": round(self._clock() - until, 1),
            "error": save.error or (save.trouble()[:300] if save.ended is None else "") or None,
        }


def _state(save: _Save) -> str:
    if save.ended is not None:
        return "failed" if save.error else "committed"
    if (phase := save.phase()) in ("waiting", "lost", "retrying"):
        return phase
    if phase in ("taken", "queued"):
        return "queued"
    return "committing" if save.released else "sending"
