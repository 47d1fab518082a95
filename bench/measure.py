"""Side-by-side measurement: candidates in turn, each in a process of its own, medians and spread, raw samples kept.

Invariant: every figure of a report comes from one run on one machine in which the candidates alternated (A B C A B C …), so
that drift of the machine hits all alike; a candidate's process measures itself and prints one JSON object.
Failure behaviour: a candidate that fails is reported with its last words and has no figures; the others go on.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

_CANDIDATE_SECONDS = 300
_PACKAGES = ("torch", "nvidia-dali-cuda130", "av", "webdataset", "s3fs", "numpy", "pyarrow")


@dataclass(frozen=True)
class Candidate:
    """One way of doing the job: `python -m <module> <arguments…>` prints a JSON object of metric → number."""

    name: str
    module: str
    arguments: tuple[str, ...]


@dataclass
class Samples:
    """All raw samples of one candidate, metric by metric, and the errors of the rounds that failed."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def alternate(candidates: Sequence[Candidate], rounds: int, tell: Callable[[str, float], None]) -> dict[str, Samples]:
    """Run every candidate once a round; `tell` hears its name and the share of the work done."""
    samples = {candidate.name: Samples() for candidate in candidates}
    for number in range(rounds):
        for place, candidate in enumerate(candidates):
            tell(candidate.name, (number * len(candidates) + place) / (rounds * len(candidates)))
            _once(candidate, samples[candidate.name])
    return samples


def _once(candidate: Candidate, samples: Samples) -> None:
    command = [sys.executable, "-m", candidate.module, *candidate.arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CANDIDATE_SECONDS)
    except subprocess.TimeoutExpired:
        samples.errors.append(f"took longer than {_CANDIDATE_SECONDS} s")
        return
    if done.returncode != 0:
        samples.errors.append(" / ".join(done.stderr.strip().splitlines()[-3:]))
        return
    try:
        figures = {name: float(value) for name, value in json.loads(done.stdout.strip().splitlines()[-1]).items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        samples.errors.append(f"printed no figures but {done.stdout[-200:]!r}")
        return
    for metric, value in figures.items():
        samples.metrics.setdefault(metric, []).append(value)


class Meter:
    """Measures the process it lives in: wall seconds, CPU seconds of it and its ended children, peak resident memory."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
        peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": _cpu_seconds() - self._cpu,
            "peak_mib": peak / 1024,
        }


def _cpu_seconds() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def environment() -> dict[str, object]:
    """What a reader must know about the machine to judge the figures."""
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def table(samples: Mapping[str, Samples], metrics: Mapping[str, str], against: str) -> str:
    """A Markdown table of medians with (min–max), and each metric's ratio of the first candidate to `against`."""
    names = list(samples)
    lines = ["| | " + " | ".join(metrics.values()) + " |", "|---|" + "---|" * len(metrics)]
    for name in names:
        cells = [_cell(samples[name].metrics.get(metric)) for metric in metrics]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    ratios = [_ratio(samples[names[0]].metrics.get(m), samples[against].metrics.get(m)) for m in metrics]
    lines.append(f"| {names[0]} ÷ {against} | " + " | ".join(ratios) + " |")
    lines += [f"\n{name} failed: {samples[name].errors[0]}" for name in names if samples[name].errors]
    return "\n".join(lines)


def _cell(values: list[float] | None) -> str:
    if not values:
        return "–"
    return f"{_short(statistics.median(values))} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(ours: list[float] | None, theirs: list[float] | None) -> str:
    if not ours or not theirs or not statistics.median(theirs):
        return "–"
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"
