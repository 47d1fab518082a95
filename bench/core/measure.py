"""Side-by-side measurement: candidates take turns, each in its own process, and every sample is kept.

Every candidate runs once per round. Each round begins with another candidate (A B C, then B C A, …), so drift of the
machine and the order affect all candidates equally. A candidate is a function: `python -m headrace.bench.core.measure
MODULE:FUNCTION ARGUMENTS` calls it and prints its result as JSON.

`Latencies` is a histogram of bounded size with logarithmic ranges, each divided into 64 equal buckets (as in
HdrHistogram). Its percentiles are at most 1.6 % too high and never too low, between a microsecond and an hour.

Failure behaviour: a candidate that fails is reported with the end of its standard error, and has no figures. The others
continue. An interrupt ends the measurement. All earlier samples are in `samples`.
"""

from __future__ import annotations

import compileall
import contextlib
import importlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.core.results import Samples

CANDIDATE_SECONDS = 300.0
Progress = Callable[[str, float], None]
"""A callback that gets the name of the running candidate and the completed share of the work, 0.0 to 1.0."""


@dataclass(frozen=True)
class Candidate:
    """One of the implementations that are compared.

    Args:
        name: Its name in tables.
        function: `module:function`. It returns a dict of metric → number. The dict may also have `histograms`, name →
            pairs of (upper edge in seconds, count), which are added up over all rounds. It may have `errors`, a list
            of texts.
        arguments: The arguments of the function, as values that JSON can represent.
        python: The Python interpreter. Default: this one.
        environ: Environment variables, added to those of this process.
    """

    name: str
    function: str
    arguments: tuple[Any, ...]
    python: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


def command_of(function: str, *arguments: Any, python: str = "") -> list[str]:
    """Return the command that calls `module:function` in a new process and prints the result as JSON."""
    return [python or sys.executable, "-m", "headrace.bench.core.measure", function, json.dumps(arguments)]


def alternate(
    candidates: Sequence[Candidate],
    rounds: int,
    progress: Progress,
    samples: dict[str, Samples] | None = None,
    *,
    seconds: float = CANDIDATE_SECONDS,
) -> dict[str, Samples]:
    """Run every candidate once per round. Each round begins with another candidate.

    Args:
        candidates: The candidates, in the order of the first round.
        rounds: The number of rounds.
        progress: Called before each run.
        samples: Results are added to this dict as they arrive, so an interrupt loses none.
        seconds: The time limit of one process.

    Returns:
        The samples of each candidate, by name.
    """
    samples = {} if samples is None else samples
    samples |= {candidate.name: Samples() for candidate in candidates}
    for number in range(rounds):
        first = number % max(1, len(candidates))
        for position, candidate in enumerate((*candidates[first:], *candidates[:first])):
            progress(candidate.name, (number * len(candidates) + position) / (rounds * len(candidates)))
            _run(candidate, samples[candidate.name], seconds)
    return samples


def compile_packages() -> None:
    """Compile Headrace's packages to bytecode, as an installation does.

    Measured processes do not write bytecode. Without this, they would compile the modules of a checkout each time, but
    not the installed modules of the peers.
    """
    here = Path(__file__).parents[2]
    for package in ("dataio", "loaders", "checkpoint", "bench"):
        compileall.compile_dir(here / package, quiet=2)


def run_process(command: list[str], environ: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run the process of a candidate to its end. Raises `subprocess.TimeoutExpired` after `seconds`."""
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environ)


def _run(candidate: Candidate, samples: Samples, seconds: float) -> None:
    command = command_of(candidate.function, *candidate.arguments, python=candidate.python)
    try:
        completed = run_process(command, {**os.environ, **candidate.environ}, seconds)
    except subprocess.TimeoutExpired:
        samples.errors.append(f"took longer than {seconds:g} s")
        return
    if completed.returncode != 0:
        samples.errors.append(
            " / ".join(completed.stderr.strip().splitlines()[-3:]) or f"exit status {completed.returncode}"
        )
        return
    try:
        printed = json.loads(completed.stdout.strip().splitlines()[-1])
        histograms = {name: dict(pairs) for name, pairs in printed.pop("histograms", {}).items()}
        errors = [str(message) for message in printed.pop("errors", [])]
        figures = {name: float(value) for name, value in printed.items()}
    except (ValueError, IndexError, AttributeError, TypeError):
        samples.errors.append(f"printed {completed.stdout[-200:]!r} instead of figures")
        return
    samples.errors += errors
    for name, counts in histograms.items():
        earlier_counts = dict(samples.histograms.get(name, ()))
        samples.histograms[name] = sorted(
            (edge, counts.get(edge, 0) + earlier_counts.get(edge, 0)) for edge in counts | earlier_counts
        )
    for metric, value in figures.items():
        samples.metrics.setdefault(metric, []).append(value)


# --- CPU and memory


class Meter:
    """Measures the process that creates it: wall time, CPU time with its ended children, and peak memory."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()

    def read(self) -> dict[str, float]:
        """Return `wall_s` and `cpu_s` since the meter was created, and `peak_mib`.

        `peak_mib` is the peak of the process plus that of its largest ended child.
        """
        peak = sum(resource.getrusage(scope).ru_maxrss for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return {
            "wall_s": time.perf_counter() - self._wall,
            "cpu_s": cpu_seconds() - self._cpu,
            "peak_mib": peak / 1024,
        }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its ended children."""
    uses = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def children_cpu_seconds() -> float:
    """Return the CPU seconds of the child processes that are running. Processes that have ended are not counted."""
    ticks = 0
    for pid in children():
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_kib(name: str, pid: int | str = "self", file: str = "status") -> int:
    """Return a value of /proc/PID/status (or of another such file) in KiB, or 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def children(pid: int | str = "self") -> list[str]:
    """Return the ids of the child processes of `pid`."""
    pids = list[str]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids += task.read_text().split()
        except OSError:
            continue
    return pids


class TreeMemory:
    """Peak memory of this process and its descendants: the sum of their PSS, sampled four times a second."""

    def __init__(self) -> None:
        self._peak = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """Stop sampling, and return the peak in MiB."""
        self._stopped.set()
        self._thread.join()
        return self._peak / 1024

    def _sample(self) -> None:
        while True:
            stopped = self._stopped.wait(0.25)
            tree = _descendants(str(os.getpid()))
            self._peak = max(self._peak, sum(memory_kib("Pss", pid, "smaps_rollup") for pid in tree))
            if stopped:
                return


def _descendants(pid: str) -> list[str]:
    return [pid, *(descendant for child in children(pid) for descendant in _descendants(child))]


# --- latencies


_STEPS = 64
_UNIT = 1e-6
_OCTAVES = 32


def edge(seconds: float) -> float:
    """Return the upper edge, in seconds, of the bucket of a latency."""
    ticks = min(max(seconds / _UNIT, 1.0), 2.0**_OCTAVES)
    octave = int(ticks).bit_length() - 1
    width = 2.0**octave / _STEPS
    bucket = int((ticks - 2.0**octave) / width)
    return float((2.0**octave + (bucket + 1) * width) * _UNIT)


class Latencies:
    """A histogram of latencies. Not thread-safe: use one in each thread, and merge them afterwards."""

    def __init__(self) -> None:
        self.counts: dict[float, int] = {}

    def add(self, seconds: float) -> None:
        """Count one latency."""
        at = edge(seconds)
        self.counts[at] = self.counts.get(at, 0) + 1

    def merge(self, others: Iterable[Latencies]) -> Latencies:
        """Add the counts of all `others` to this one, and return it."""
        for other in others:
            for at, count in other.counts.items():
                self.counts[at] = self.counts.get(at, 0) + count
        return self

    @property
    def total(self) -> int:
        """The number of counted latencies."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """Return the seconds that a `share` (0 to 1) of all latencies did not exceed; 0 if there are none."""
        needed, so_far = share * self.total, 0
        for at, count in sorted(self.counts.items()):
            so_far += count
            if so_far >= needed:
                return at
        return 0.0

    def pairs(self) -> list[tuple[float, int]]:
        """Return (upper edge in seconds, count) of each bucket, for the results document."""
        return sorted(self.counts.items())


def main(function: str, arguments: str) -> None:
    """Call `module:function` with a JSON list of arguments, and print the result as JSON."""
    module, _, name = function.partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))


if __name__ == "__main__":
    main(*sys.argv[1:])
