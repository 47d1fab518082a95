"""Markdown tables of results: for `headrace bench report`, and for the output of every benchmark.

Invariants: a cell shows the median and, in brackets, the smallest and largest sample. A metric without samples is a
dash. Every error is listed below its table.

Failure behaviour: a file without results is a `UsageError` that names the file.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headrace.bench.core.results import Metric, Part, Run, Samples, read
from headrace.dataio.core.cli import argument, command


def part_table(part: Part, metrics: Iterable[str] | None = None) -> str:
    """Return a table of `part`, with all metrics or the given ones.

    The rows are candidates, or metrics if there is only one candidate.
    """
    names = [name for name in (metrics or part.metrics) if name in part.metrics]
    shown = {name: part.metrics[name] for name in names}
    if len(part.candidates) == 1:
        (samples,) = part.candidates.values()
        lines = _metric_rows(shown, samples)
    else:
        lines = _candidate_rows(shown, part.candidates, part.against)
    lines += [f"\n{name} failed: {found.errors[0]}" for name, found in part.candidates.items() if found.errors]
    if part.status != "done":
        lines.append(f"\n**{part.status}**: {part.why}")
    return "\n".join(lines)


def _candidate_rows(metrics: Mapping[str, Metric], samples: Mapping[str, Samples], against: str) -> list[str]:
    titles = [f"{metric.title}" for metric in metrics.values()]
    lines = ["| | " + " | ".join(titles) + " |", "|---|" + "---|" * len(metrics)]
    for name, candidate in samples.items():
        lines.append(f"| {name} | " + " | ".join(cell(candidate.metrics.get(metric)) for metric in metrics) + " |")
    if against in samples and len(samples) > 1:
        first = next(iter(samples))
        ratios = [ratio(samples[first].metrics.get(m), samples[against].metrics.get(m)) for m in metrics]
        lines.append(f"| {first} ÷ {against} | " + " | ".join(ratios) + " |")
    return lines


def _metric_rows(metrics: Mapping[str, Metric], samples: Samples) -> list[str]:
    """Return a table with metrics as rows. Goal and limit have a column only if a metric has one."""
    columns = [
        name for name in ("goal", "limit") if any(getattr(metric, name) is not None for metric in metrics.values())
    ]
    lines = ["| | " + " | ".join((*columns, "median (min–max)")) + " |", "|---|" + "---|" * (len(columns) + 1)]
    for name, metric in metrics.items():
        values = samples.metrics.get(name)
        bounds = [_bound(metric, getattr(metric, which)) for which in columns]
        lines.append("| " + " | ".join((metric.title, *bounds, cell(values) + _met(metric, values))) + " |")
    return lines


def _bound(metric: Metric, value: float | None) -> str:
    return "" if value is None else f"{'≥' if metric.better == 'higher' else '≤'} {value:g}"


def _met(metric: Metric, values: Sequence[float] | None) -> str:
    if metric.goal is None or not values:
        return ""
    middle = statistics.median(values)
    return " ✓" if (middle >= metric.goal if metric.better == "higher" else middle <= metric.goal) else " ✗"


def cell(values: Sequence[float] | None) -> str:
    """Format samples as median (smallest–largest), or a dash."""
    if not values:
        return "–"
    if len(values) == 1:
        return short(values[0])
    return f"{short(statistics.median(values))} ({short(min(values))}–{short(max(values))})"


def short(value: float) -> str:
    """Format a number with three digits, or as a whole number from a hundred on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratio(ours: Sequence[float] | None, theirs: Sequence[float] | None) -> str:
    """Format the ratio of the medians, or a dash."""
    if not ours or not theirs or not statistics.median(theirs):
        return "–"
    return f"{statistics.median(ours) / statistics.median(theirs):.2f}"


@command(
    "bench report",
    "Print Markdown tables of files that `headrace bench … -o FILE` wrote.",
    argument("results", nargs="+", type=Path, help="results files"),
    argument("--part", action="append", default=[], help="only this part; may be repeated"),
    epilog="exit codes: 0 printed; 2 a file holds no results; others as in headrace --help",
)
def report(args: argparse.Namespace) -> int:
    """Print the tables of results files; `headrace bench report`."""
    print(markdown([read(path) for path in args.results], args.part), end="")
    return 0


def markdown(runs: Sequence[Run], only: Iterable[str] = ()) -> str:
    """Return the parts of `runs`, or those in `only`, as Markdown. Incomplete parts come first, with reasons."""
    names = set(only)
    chosen = [(run, part) for run in runs for part in run.parts if not names or part.name in names]
    incomplete = [f"- **{part.name}** {why}" for _, part in chosen if (why := incompleteness(part))]
    head = "\n".join(incomplete) + "\n\n" if incomplete else ""
    return head + "\n\n".join(_part_tables(run, part) for run, part in chosen) + "\n"


def incompleteness(part: Part) -> str:
    """Describe the missing results of a part and the reason; "" if the part is complete."""
    if part.status != "done":
        return f"{part.status}: {part.why}"
    failed = [f"{name}: {found.errors[0]}" for name, found in part.candidates.items() if found.errors]
    return f"in part: {'; '.join(failed)}" if failed else ""


def _part_tables(run: Run, part: Part) -> str:
    facts = run.environment
    machine = (
        f"{facts.get('cpus')} cores of {facts.get('cpu')}, {facts.get('file_system')}, load {facts.get('load_before')}"
    )
    rounds = max((len(values) for s in part.candidates.values() for values in s.metrics.values()), default=0)
    head = f"### {part.title or part.name}\n\n`{_command(run)}`, {rounds} rounds, {machine}, {run.started[:10]}."
    notes = "".join(f"\n\n{note}" for note in part.notes)
    return f"{head}\n\n{_tables(part)}{notes}"


def _command(run: Run) -> str:
    """Return the command line without the path of its results, which other readers do not need."""
    shown, words = list[str](), iter(run.command)
    for word in words:
        if word in ("-o", "--output"):
            next(words, None)
        else:
            shown.append(word)
    return " ".join(shown)


def _tables(part: Part) -> str:
    """Return one table, or, for a sweep, a table of throughput for each operation and a table of the other metrics."""
    operations = dict.fromkeys(
        str(metric.axes["operation"]) for metric in part.metrics.values() if "operation" in metric.axes
    )
    if not operations:
        return part_table(part)
    tables = []
    for operation in operations:
        names = [
            name
            for name, metric in part.metrics.items()
            if metric.quantity == "throughput" and metric.axes.get("operation") == operation
        ]
        if names:
            tables.append(f"**{operation}, {part.metrics[names[0]].unit}**\n\n{part_table(part, names)}")
    others = [name for name, metric in part.metrics.items() if not metric.axes]
    return "\n\n".join([*tables, *([part_table(part, others)] if others else [])])
