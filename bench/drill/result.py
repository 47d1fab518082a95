"""What a part leaves: one part of a results document, as plain data.

Invariant: the same fields as `bench.core.results.Part`, made without importing it, so that a part can fail before anything is
installed. Failure behaviour: none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class PartResult:
    """Figures by candidate and metric, with the samples of every repetition."""

    name: str
    title: str
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    candidates: dict[str, dict[str, Any]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    against: str = ""
    status: str = "done"
    why: str = ""
    seconds: float = 0.0

    def metric(self, name: str, title: str, unit: str, better: str = "lower", **more: Any) -> None:
        """Say what `name` is; `more` as in `Metric`: goal, limit, limit_why."""
        self.metrics[name] = {"title": title, "unit": unit, "better": better, **more}

    def add(self, candidate: str, metric: str, *values: float) -> None:
        """Keep samples."""
        if metric not in self.metrics:
            raise KeyError(f"{metric} was not declared")
        samples = self.candidates.setdefault(candidate, {"metrics": {}, "errors": []})
        samples["metrics"].setdefault(metric, []).extend(float(value) for value in values)

    def fail(self, candidate: str, why: str) -> None:
        """Keep an error of one candidate; the others go on."""
        self.candidates.setdefault(candidate, {"metrics": {}, "errors": []})["errors"].append(why[:500])

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def timed(action: Callable[[], object], repeat: int = 5, sync: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of each of `repeat` runs, after one that does not count; `sync` ends what runs behind the program's back."""
    action()
    sync()
    found = []
    for _ in range(repeat):
        began = time.perf_counter()
        action()
        sync()
        found.append(time.perf_counter() - began)
    return found
