"""`headrace bench simulate --control-plane`: what a large job spends on plans, commits and restores.

Most figures come from the real code of all ranks in virtual time (`plan`, `commit`, `restore`). CPU and memory of a
restore come from the real code of one rank of a job of that size (`one_rank`). `steps` measures a repository of many
steps.
A job that is too large for one process is extrapolated: three smaller jobs are measured, and a line is fitted to them.
Each job runs in a process of its own, so that its peak memory is known.

Invariant: an extrapolated figure is named in the results, with its law and the sizes to which it was fitted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.bench.core.measure import Progress
from headrace.bench.core.results import Metric

METRICS = {
    "plan_cpu_s": Metric("first plan, CPU of the slowest rank", "s", "lower"),
    "plan_peak_mib": Metric("first plan, memory of a rank", "MiB", "lower"),
    "commit_s": Metric("from the last manifest to COMMIT", "s", "lower"),
    "save_requests": Metric("requests of a first save", "", "lower"),
    "later_save_requests": Metric("requests of a later save", "", "lower"),
    "restore_requests": Metric("requests of a restore, same layout", "", "lower"),
    "reshard_requests": Metric("requests of a restore onto three quarters of the ranks", "", "lower"),
    "restore_cpu_s": Metric("restore, CPU of a rank", "s", "lower"),
    "restore_peak_mib": Metric("restore, memory of a rank", "MiB", "lower"),
    "latest_s": Metric("search for the latest of 10,000 steps", "s", "lower"),
    "latest_requests": Metric("requests of that search", "", "lower"),
    "retention_s": Metric("retention after a commit, with 10,000 steps", "s", "lower"),
    "retention_requests": Metric("requests of that retention", "", "lower"),
}
STEPS = 10_000
"""Number of steps of the repository in which the latest step is searched, and from which retention removes one."""
LARGEST = {"plan": 1024, "commit": 1024, "restore": 128}
"""The largest jobs whose ranks are all run in one process."""


@dataclass
class Figures:
    """The figures of a job, by name, and the law of each one that is extrapolated."""

    values: dict[str, float] = field(default_factory=dict)
    laws: dict[str, dict[str, object]] = field(default_factory=dict)


def figures(ranks: int, latency: float, progress: Progress, largest: Mapping[str, int] = LARGEST) -> Figures:
    """Measure a job of `ranks` ranks, whose store answers after `latency` seconds."""
    collected = Figures()
    measured: tuple[tuple[str, Callable[[int], dict[str, float]]], ...] = (
        ("plan", _plan),
        ("commit", lambda size: _commit(size, latency)),
        ("restore", lambda size: _restore(size, latency)),
    )
    for number, (name, measure) in enumerate(measured):
        sizes = [ranks] if ranks <= largest[name] else [largest[name] // 4, largest[name] // 2, largest[name]]
        results = []
        for size in sizes:
            progress(f"{name}, {size} ranks", number / 5)
            results.append(measure(size))
        for quantity in results[0]:
            _add(collected, quantity, ranks, sizes, [each[quantity] for each in results])
    progress(f"{STEPS:,} steps", 3 / 5)
    collected.values |= {name: value for name, value in _run("steps", STEPS, ranks, latency).items() if name in METRICS}
    progress(f"restore, one of {ranks} ranks", 4 / 5)
    of_one_rank = _run("one_rank", ranks)
    collected.values |= {"restore_cpu_s": of_one_rank["cpu_seconds"], "restore_peak_mib": of_one_rank["mib"]}
    return collected


def _add(collected: Figures, quantity: str, ranks: int, sizes: Sequence[int], values: Sequence[float]) -> None:
    if sizes == [ranks]:
        collected.values[quantity] = values[0]
        return
    slope, constant = np.polyfit(sizes, values, 1)
    collected.values[quantity] = round(float(constant + slope * ranks), 3)
    law = f"{constant:.4g} + {slope:.4g} * ranks"
    collected.laws[quantity] = {"extrapolated": True, "law": law, "sizes": list(sizes), "measured": list(values)}


def _run(module: str, *arguments: float) -> dict[str, float]:
    """Run a module of this package as a program, and return what it prints."""
    command = [sys.executable, "-m", f"headrace.bench.control_plane.{module}", *map(str, arguments)]
    completed = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    printed: dict[str, float] = json.loads(completed.stdout)
    return printed


def _plan(ranks: int) -> dict[str, float]:
    measured = _run("plan", ranks)
    return {"plan_cpu_s": measured["most_cpu_seconds"], "plan_peak_mib": measured["mib"]}


def _commit(ranks: int, latency: float) -> dict[str, float]:
    measured = _run("commit", ranks, latency)
    return {
        "commit_s": measured["commit_seconds"],
        "save_requests": measured["requests"],
        "later_save_requests": measured["later_requests"],
    }


def _restore(ranks: int, latency: float) -> dict[str, float]:
    same, fewer = _run("restore", ranks, ranks, latency), _run("restore", ranks, max(1, 3 * ranks // 4), latency)
    return {"restore_requests": same["requests"], "reshard_requests": fewer["requests"]}
