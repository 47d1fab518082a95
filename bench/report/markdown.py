"""The tables of a report as Markdown, for a README: each under its title, with the command that makes it and the machine.

Invariant: the same medians and spreads as the page; whatever could end a cell is replaced. Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.bench.core.results import Part, Run
from headrace.bench.core.table import part_table


def markdown(runs: Sequence[tuple[str, Run]], only: Iterable[str] = ()) -> str:
    """The parts of `runs`, or those named in `only`, as Markdown."""
    wanted = set(only)
    chosen = [(run, part) for _, run in runs for part in run.parts if not wanted or part.name in wanted]
    return "\n\n".join(_part(run, part) for run, part in chosen) + "\n"


def _part(run: Run, part: Part) -> str:
    facts = run.environment
    machine = (
        f"{facts.get('cpus')} cores of {facts.get('cpu')}, {facts.get('file_system')}, load {facts.get('load_before')}"
    )
    rounds = max((len(values) for s in part.candidates.values() for values in s.metrics.values()), default=0)
    head = f"### {part.title or part.name}\n\n`{_command(run)}`, {rounds} rounds, {machine}, {run.started[:10]}."
    notes = "".join(f"\n\n{note}" for note in part.notes)
    return f"{head}\n\n{_tables(part)}{notes}"


def _command(run: Run) -> str:
    """The command line without where it wrote its results, which says nothing to others."""
    shown, words = list[str](), iter(run.command)
    for word in words:
        if word in ("-o", "--output"):
            next(words, None)
        else:
            shown.append(word)
    return " ".join(shown)


def _tables(part: Part) -> str:
    """One table; for a sweep one of throughput for each operation, and one of what is left."""
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
    rest = [name for name, metric in part.metrics.items() if not metric.axes]
    return "\n\n".join([*tables, *([part_table(part, rest)] if rest else [])])
