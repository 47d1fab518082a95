"""The progress and the outcome of every staged checkpoint. Sans-I/O.

Purpose: the list of saves on the status page, and the counts of ended saves for the metrics.
Invariants: at most `KEPT` ended saves are remembered. A save in flight is remembered until it ends.
Failure behaviour: if the result of a save names no run or no step, the save counts, but no step is recorded as
committed.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.dataio.sidecar import protocol as m

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


class SaveStats:
    """The staged checkpoints. Calls `committed(run, step, when)` for every step that a job has committed."""

    def __init__(self, committed: Callable[[str, int, float], None], clock: Callable[[], float] = time.time) -> None:
        self._committed, self._clock = committed, clock
        self._saves: OrderedDict[str, _Save] = OrderedDict()
        self.outcomes = {"committed": 0, "failed": 0}
        self.room: Callable[[], Mapping[str, float]] = dict
        """Returns the counts of the job service (`JobService.room`)."""

    def listener(
        self,
        token: str,
        about: str,
        phase: Callable[[], str] = lambda: "running",
        trouble: Callable[[], str] = lambda: "",
    ) -> Callable[[m.JobEvent], None]:
        """Add a save; returns the listener for its events.

        `phase` returns its job's state. `trouble` returns why the job is retried, or an empty string.
        """
        name = "".join(c for c in about if c.isprintable())
        self._saves[token] = save = _Save(name, self._clock(), phase=phase, trouble=trouble)
        return lambda event: self._on_event(save, event)

    def listed(self) -> list[dict[str, object]]:
        """The saves in flight, then those that ended; both newest first, at most `LISTED`."""
        for token in [token for token, save in self._saves.items() if save.ended is None and save.phase() == "gone"]:
            del self._saves[token]
        order = sorted(self._saves.values(), key=lambda save: (save.ended is not None, -save.accepted))
        return [self._describe(save) for save in order[:LISTED]]

    def _on_event(self, save: _Save, event: m.JobEvent) -> None:
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
                self._report_commit(result)

    def _end(self, save: _Save, outcome: str) -> None:
        save.ended = self._clock()
        self.outcomes[outcome] += 1
        ended_tokens = [token for token, other in self._saves.items() if other.ended is not None]
        for token in ended_tokens[:-KEPT]:
            del self._saves[token]

    def _report_commit(self, result: str) -> None:
        fields = json.loads(result)
        run, step, when = fields.get("run"), fields.get("step"), fields.get("committed")
        valid = isinstance(run, str) and isinstance(step, int) and isinstance(when, int | float)
        if valid and step >= 0 and math.isfinite(when):
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
