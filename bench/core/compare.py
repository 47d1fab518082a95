"""`headrace bench compare`: finds significant changes between two runs.

The test is the exact Mann–Whitney U test (H. B. Mann and D. R. Whitney, "On a test of whether one of two random
variables is stochastically larger than the other", 1947). The procedure of Benjamini and Hochberg (1995) judges the p
values of all metrics together, which bounds the false discovery rate. The size of a change is the ratio of medians,
with a seeded percentile-bootstrap interval (Efron, 1979).

Invariants:

- The comparison is deterministic, and depends only on the two documents.
- Only samples of the same benchmark, settings, candidate and metric are compared.
- Both runs come from one machine, unless the caller allows two. The result then says so.
- With too few samples to reach the level, the verdict is "too few samples", not "no change".

Failure behaviour: runs from two machines raise a `MismatchError` that names the differences. Empty samples raise a
`ValueError`. The command's exit code is 1 if a metric became significantly worse, so that scripts can use it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bench.core.results import Metric, Part, Run, differences, read
from headrace.dataio.core.cli import argument, command
from headrace.dataio.core.errors import MismatchError

LEAST_CHANGE = 0.02
"""Changes of medians below two per cent are not reported, even if they are significant."""

Verdict = Literal["better", "worse", "changed little", "no change seen", "too few samples"]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one candidate: B compared with A. `ratio` is B's median over A's, with its 95 % interval."""

    part: str
    candidate: str
    metric: str
    title: str
    unit: str
    verdict: Verdict
    p: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    samples: tuple[int, int] = (0, 0)


class Comparison(msgspec.Struct, frozen=True):
    """All changes, and warnings about differences between the runs."""

    changes: list[Change]
    warnings: list[str]


@command(
    "bench compare",
    "List the significant changes from A to B: exact Mann–Whitney test with a false discovery rate of 5 %,\n"
    "changes of medians from 2 % on.",
    argument("a", type=Path, help="results before"),
    argument("b", type=Path, help="results after"),
    argument(
        "--different-machines", action="store_true", help="compare even if the machines differ, and print a warning"
    ),
    argument("--json", action="store_true", help="print everything as JSON"),
    epilog="exit codes: 0 no metric is worse; 1 a metric is worse; 2 not comparable; others as in headrace --help",
)
def compare_files(args: argparse.Namespace) -> int:
    """Print the changes between two results files; `headrace bench compare`."""
    comparison = compare(read(args.a), read(args.b), any_machine=args.different_machines)
    print(msgspec.json.encode(comparison).decode() if args.json else as_text(comparison))
    return 1 if any(change.verdict == "worse" for change in comparison.changes) else 0


def compare(a: Run, b: Run, *, any_machine: bool = False) -> Comparison:
    """Compare `b` with `a`. Runs from two machines are refused unless `any_machine` is true."""
    machines = differences(a.environment, b.environment)
    if machines and not any_machine:
        hint = "run both on one machine, or say --different-machines"
        raise MismatchError(f"the runs come from different machines ({'; '.join(machines)})", hint=hint)
    warnings = [f"DIFFERENT MACHINES: {text}" for text in machines]
    warnings += [f"{name}: {a.environment.get(name)} / {b.environment.get(name)}" for name in _minor_differences(a, b)]
    pairs = list(_pairs(a, b, warnings))
    return Comparison(_judge(pairs), warnings)


def _minor_differences(a: Run, b: Run) -> list[str]:
    names = ("kernel", "python", "file_system", "commit", "packages")
    return [name for name in names if a.environment.get(name) != b.environment.get(name)]


def _pairs(a: Run, b: Run, warnings: list[str]) -> Iterator[tuple[Part, str, str, Metric, list[float], list[float]]]:
    parts_of_a = {part.name: part for part in a.parts}
    for name in sorted(parts_of_a.keys() ^ {part.name for part in b.parts}):
        warnings.append(f"{name}: only in {'A' if name in parts_of_a else 'B'}")
    for part in b.parts:
        before = parts_of_a.get(part.name)
        if before is None:
            continue
        if before.settings != part.settings:
            changed = sorted(
                k for k in before.settings | part.settings if before.settings.get(k) != part.settings.get(k)
            )
            warnings.append(f"{part.name}: not compared, as its settings differ ({', '.join(changed)})")
            continue
        for which, side in (("A", before), ("B", part)):
            if side.failed:
                errors = [error for found in side.candidates.values() for error in found.errors]
                warnings.append(f"{side.name}: {side.status} in {which}, {side.why or '; '.join(errors)[:200]}")
        for candidate in sorted(before.candidates.keys() ^ part.candidates.keys()):
            warnings.append(f"{part.name}: {candidate} is only in {'A' if candidate in before.candidates else 'B'}")
        for candidate in part.candidates.keys() & before.candidates.keys():
            old, new = before.candidates[candidate].metrics, part.candidates[candidate].metrics
            for metric, about in part.metrics.items():
                if old.get(metric) and new.get(metric):
                    yield part, candidate, metric, about, old[metric], new[metric]


def _judge(pairs: list[tuple[Part, str, str, Metric, list[float], list[float]]]) -> list[Change]:
    p_values = {
        str(place): mann_whitney(new, old)
        for place, (*_, old, new) in enumerate(pairs)
        if smallest_p(len(old), len(new)) <= LEVEL
    }
    significant = benjamini_hochberg(p_values)
    changes = []
    for place, (part, candidate, metric, about, old, new) in enumerate(pairs):
        p = p_values.get(str(place))
        interval = ratio_of_medians(new, old)
        verdict = _verdict(about, interval, enough=p is not None, certain=str(place) in significant)
        change = Change(
            part=part.name,
            candidate=candidate,
            metric=metric,
            title=about.title or metric,
            unit=about.unit,
            verdict=verdict,
            p=p if p is not None else 1.0,
            ratio=interval.ratio if interval else None,
            low=interval.low if interval else None,
            high=interval.high if interval else None,
            samples=(len(old), len(new)),
        )
        changes.append(change)
    return changes


def _verdict(metric: Metric, interval: Interval | None, *, enough: bool, certain: bool) -> Verdict:
    if not enough:
        return "too few samples"
    if not certain or interval is None:
        return "no change seen"
    if abs(interval.ratio - 1) < LEAST_CHANGE:
        return "changed little"
    return "better" if (interval.ratio > 1) == (metric.better == "higher") else "worse"


def as_text(comparison: Comparison) -> str:
    """Return Markdown: the warnings, a table of the changes, and counts of the metrics that did not change."""
    lines = [f"- {warning}" for warning in comparison.warnings]
    changed = [change for change in comparison.changes if change.verdict in ("better", "worse")]
    if changed:
        lines += ["", "| | | B ÷ A (95 %) | p | |", "|---|---|---|---|---|"]
        lines += [
            f"| {c.part} | {c.candidate}: {c.metric} | {c.ratio:.3g} ({c.low:.3g}–{c.high:.3g}) | {c.p:.2g} | {c.verdict} |"
            for c in sorted(changed, key=lambda c: (c.verdict, c.part, c.candidate, c.metric))
        ]
    counts = {
        name: sum(c.verdict == name for c in comparison.changes)
        for name in ("no change seen", "changed little", "too few samples")
    }
    lines += ["", f"{len(changed)} changed; " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)]
    if counts["too few samples"]:
        lines.append("With 4 rounds or more on both sides, every metric can be judged.")
    return "\n".join(lines).strip()


LEVEL = 0.05
_EXACT = 50_000
_RESAMPLES = 2000


def mann_whitney(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided p value.

    It is exact for up to 50,000 splits of the samples into two groups. Otherwise 50,000 splits are sampled with a fixed
    seed.
    """
    if not ours or not theirs:
        raise ValueError("no samples")
    ranks = _ranks([*ours, *theirs])
    n, middle = len(ours), len(ours) * (len(ranks) + 1) / 2
    distance = abs(sum(ranks[:n]) - middle) - 1e-9
    deals = math.comb(len(ranks), n)
    if deals <= _EXACT:
        hits = sum(abs(sum(chosen) - middle) >= distance for chosen in itertools.combinations(ranks, n))
        return hits / deals
    rng = random.Random(0)
    hits = sum(abs(sum(rng.sample(ranks, n)) - middle) >= distance for _ in range(_EXACT))
    return (hits + 1) / (_EXACT + 1)


def smallest_p(ours: int, theirs: int) -> float:
    """Return the smallest p value for `ours` and `theirs` samples (counts) that are all different."""
    return 2 / math.comb(ours + theirs, ours)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks, from 1. Equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for _, group in itertools.groupby(enumerate(order), key=lambda pair: values[pair[1]]):
        members = list(group)
        shared = statistics.fmean(place + 1 for place, _ in members)
        for _, index in members:
            ranks[index] = shared
    return ranks


def benjamini_hochberg(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """Return the names of the significant p values at the false discovery rate `level`."""
    order = sorted(p_values, key=p_values.__getitem__)
    cut = max((place for place, name in enumerate(order, 1) if p_values[name] <= level * place / len(order)), default=0)
    return set(order[:cut])


@dataclass(frozen=True)
class Interval:
    """A ratio of medians with its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Return the median of `ours` divided by that of `theirs`, or None if the median of `theirs` is zero."""
    if not statistics.median(theirs):
        return None
    rng = random.Random(0)
    drawn = sorted(
        statistics.median(rng.choices(ours, k=len(ours))) / below
        for _ in range(_RESAMPLES)
        if (below := statistics.median(rng.choices(theirs, k=len(theirs))))
    )
    low, high = drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))]
    return Interval(statistics.median(ours) / statistics.median(theirs), low, high)
