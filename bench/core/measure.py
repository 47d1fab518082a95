"""Side-by-side measurement: candidates take turns, each in its own process, and all samples are kept.

Every candidate runs once a round, and every round begins with another candidate (A B C, then B C A, …), so drift of the
machine and the order itself affect all alike. A candidate's process measures itself and prints one JSON object.
`Latencies` is a histogram of bounded size with logarithmic ranges, each divided into 64 equal buckets (as in HdrHistogram).
A percentile of it is at most 1.6 % too high and never too low, between a microsecond and an hour.
Failure behaviour: a candidate that fails is reported with the end of its standard error and has no figures; the others go
on. An interrupt ends the measurement; what was measured until then is in `samples`.
"""

from __future__ import annotations

import compileall
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.core.results import Samples

CANDIDATE_SECONDS = 300.0
Tell = Callable[[str, float], None]
"""Called with the name of the candidate that runs and the share of the work that is done."""


@dataclass(frozen=True)
class Candidate:
    """One way to do the work: `python -m <module> <arguments…>` prints a JSON object of metric → number as its last line.

    `python` is another interpreter than this one. The object may have a key `histograms`: name → pairs of (upper edge in
    seconds, how many); those of all rounds are added up.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    python: str = ""


def alternate(
    candidates: Sequence[Candidate],
    rounds: int,
    tell: Tell,
    samples: dict[str, Samples] | None = None,
    *,
    seconds: float = CANDIDATE_SECONDS,
) -> dict[str, Samples]:
    """Run every candidate once a round, each round beginning with another one; a process gets at most `seconds`.

    Samples are added to `samples` as they arrive, so an interrupt loses none.
    """
    samples = {} if samples is None else samples
    samples |= {candidate.name: Samples() for candidate in candidates}
    for number in range(rounds):
        first = number % max(1, len(candidates))
        for place, candidate in enumerate((*candidates[first:], *candidates[:first])):
            tell(candidate.name, (number * len(candidates) + place) / (rounds * len(candidates)))
            _once(candidate, samples[candidate.name], seconds)
    return samples


def compiled() -> None:
    """Compile our packages, as an installation does. A measured process may not write bytecode; it would compile the modules
    of a checkout each time, but not those of its peers."""
    here = Path(__file__).parents[2]
    for package in ("dataio", "loaders", "checkpoint", "bench"):
        compileall.compile_dir(here / package, quiet=2)


def _once(candidate: Candidate, samples: Samples, seconds: float) -> None:
    command = [candidate.python or sys.executable, "-m", candidate.module, *candidate.arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        samples.errors.append(f"took longer than {seconds:g} s")
        return
    if done.returncode != 0:
        samples.errors.append(" / ".join(done.stderr.strip().splitlines()[-3:]) or f"exit status {done.returncode}")
        return
    try:
        printed = json.loads(done.stdout.strip().splitlines()[-1])
        histograms = {name: dict(pairs) for name, pairs in printed.pop("histograms", {}).items()}
        errors = [str(message) for message in printed.pop("errors", [])]
        figures = {name: float(value) for name, value in printed.items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        samples.errors.append(f"printed no figures but {done.stdout[-200:]!r}")
        return
    samples.errors += errors
    for name, counts in histograms.items():
        known = dict(samples.histograms.get(name, ()))
        samples.histograms[name] = sorted((edge, counts.get(edge, 0) + known.get(edge, 0)) for edge in counts | known)
    for metric, value in figures.items():
        samples.metrics.setdefault(metric, []).append(value)


class Meter:
    """Measures the process it lives in: wall seconds, CPU seconds of it and its ended children, peak resident memory."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def read(self) -> dict[str, float]:
        """`wall_s` and `cpu_s` since the meter was made, `peak_mib` of the process and of its largest ended child."""
        peak = sum(resource.getrusage(scope).ru_maxrss for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": cpu_seconds() - self._cpu,
            "peak_mib": peak / 1024,
        }


def cpu_seconds() -> float:
    """CPU seconds of this process and its ended children."""
    uses = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


_STEPS = 64
_UNIT = 1e-6
_OCTAVES = 32


def edge(seconds: float) -> float:
    """The upper edge, in seconds, of the bucket of a latency."""
    ticks = min(max(seconds / _UNIT, 1.0), 2.0**_OCTAVES)
    octave = int(ticks).bit_length() - 1
    width = 2.0**octave / _STEPS
    bucket = int((ticks - 2.0**octave) / width)
    return float((2.0**octave + (bucket + 1) * width) * _UNIT)


class Latencies:
    """Counts by bucket. Not locked: one a thread, added up afterwards."""

    def __init__(self, counts: Mapping[float, int] | None = None) -> None:
        self.counts = dict(counts or {})

    def add(self, seconds: float) -> None:
        """Count one latency."""
        at = edge(seconds)
        self.counts[at] = self.counts.get(at, 0) + 1

    def merge(self, others: Iterable[Latencies]) -> Latencies:
        """This one with all of `others` added."""
        for other in others:
            for at, count in other.counts.items():
                self.counts[at] = self.counts.get(at, 0) + count
        return self

    @property
    def total(self) -> int:
        """How many latencies were counted."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """Seconds that a `share` (0 to 1) of all latencies did not exceed; 0 when there are none."""
        wanted, seen = share * self.total, 0
        for at, count in sorted(self.counts.items()):
            seen += count
            if seen >= wanted:
                return at
        return 0.0

    def mean(self) -> float:
        """Mean of the buckets' edges in seconds; 0 when there are none."""
        return sum(at * count for at, count in self.counts.items()) / self.total if self.counts else 0.0

    def pairs(self) -> list[tuple[float, int]]:
        """(upper edge in seconds, how many), for the results document."""
        return sorted(self.counts.items())
