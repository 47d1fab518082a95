"""The result of a part of the drill: one part of a results document, as plain data.

Invariants: the fields are those of `headrace.bench.core.results.Part`. This module does not import it, so that a part
can report a failure before any package is installed. If `path` is set, every figure is written to the file at once. The
file's status is "interrupted" until `finish`, so a part that hangs or dies keeps its figures.

Failure behaviour: none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar


@dataclass
class PartResult:
    """Figures by candidate and metric, with the samples of every repetition."""

    path: ClassVar[Path | None] = None
    name: str
    title: str
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    against: str = ""
    status: str = "interrupted"
    why: str = ""
    seconds: float = 0.0

    def metric(self, name: str, title: str, unit: str, better: str = "lower", **more: Any) -> None:
        """Declare a metric; `more` as in `Metric`: goal, limit, limit_why."""
        self.metrics[name] = {"title": title, "unit": unit, "better": better, **more}

    def add(self, candidate: str, metric: str, *values: float) -> None:
        """Add samples of a metric."""
        if metric not in self.metrics:
            raise KeyError(f"{metric} was not declared")
        samples = self.candidates.setdefault(candidate, {"metrics": {}, "errors": []})
        samples["metrics"].setdefault(metric, []).extend(float(value) for value in values)
        self._write()

    def fail(self, candidate: str, why: str) -> None:
        """Add an error of one candidate. The others continue."""
        self.candidates.setdefault(candidate, {"metrics": {}, "errors": []})["errors"].append(why[:500])
        self._write()

    def finish(self) -> None:
        """Mark the part as done: each figure was measured, or there is an error that explains why it is absent."""
        self.status = "done"
        self._write()

    def _write(self) -> None:
        if self.path is not None:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.data(), indent=1))
            partial.replace(self.path)

    def data(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return asdict(self)


def rates(action: Callable[[], float], seconds: float, least: int = 3) -> list[float]:
    """Repeat `action` for `seconds`, at least `least` times, and return the rate of each run.

    `action` returns the amount of work that it did. A first run does not count.
    """
    action()
    measured = list[float]()
    until = time.perf_counter() + seconds
    while len(measured) < least or time.perf_counter() < until:
        began = time.perf_counter()
        amount = action()
        measured.append(amount / (time.perf_counter() - began))
    return measured


def timed(action: Callable[[], object], repeat: int = 5, sync: Callable[[], object] = lambda: None) -> list[float]:
    """Return the seconds of each of `repeat` runs, after one that does not count. `sync` waits for background work."""
    action()
    sync()
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        sync()
        seconds.append(time.perf_counter() - began)
    return seconds
