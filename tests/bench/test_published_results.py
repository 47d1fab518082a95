"""Published results: they can be read, name no folder of a machine, and hold the figures that two tables show.

The tables are the README's and the summary of docs/benchmarks.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.core.report import markdown
from headrace.bench.core.results import Run, read, shown

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "bench" / "results"
FILES = sorted(KEPT.glob("*/*.json"))
MOST_BYTES = 400_000
ALL_BYTES = 3_000_000


def runs() -> list[Run]:
    return [read(path) for path in FILES]


def test_they_are_small_and_can_be_reported() -> None:
    assert FILES
    assert [path.name for path in FILES if path.stat().st_size > MOST_BYTES] == []
    assert sum(path.stat().st_size for path in FILES) < ALL_BYTES
    text = markdown(runs())
    assert all(part.title.split(":")[0] in text for run in runs() for part in run.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_each_says_how_and_where_it_was_measured(path: Path) -> None:
    run = read(path)
    assert {"cpu", "cpus", "kernel", "memory_gib", "load_before"} <= set(run.environment) or "gpu" in run.environment
    assert path.parent.name[:10] <= run.started[:10], "it lies in the folder of another day"
    assert not re.search(r'"/[a-z]+/|/tmp/|/home/|/root/', path.read_text()), "it names a folder of a machine"
    assert all(part.candidates or part.status != "done" for part in run.parts)


def test_folders_of_this_machine_do_not_get_into_a_command() -> None:
    given = [
        "bench",
        "store",
        "/mnt/nfs/x",
        "-o",
        "/tmp/a.json",
        "--peer-python",
        "energon=/opt/e/bin/python",
        "s3://b/p",
    ]
    assert shown(given) == ["bench", "store", "…/x", "-o", "…/a.json", "--peer-python", "energon=…/python", "s3://b/p"]
    assert shown(["--directory=/scratch/me", "--where", "a=b/c"]) == ["--directory=…/me", "--where", "a=b/c"]


TABLES = {"README.md": "## Measured\n", "docs/benchmarks.md": "## Summary\n"}
"""The pages whose tables are checked → the headings above these tables."""


def rows(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """(what, benchmark, figures) of the page's table of what was measured."""
    table = (ROOT / page).read_text().partition(TABLES[page])[2].partition("\n## ")[0]
    benchmark = ""
    for line in table.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or cells[0] in ("", "---"):
            continue
        if command := re.search(r"`headrace bench ([a-z-]+)", cells[3]):
            benchmark = command[1]
        figures = re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)", " ".join(cells[1:3]))
        yield cells[0], benchmark, [figure.replace(",", "") for figure in figures]


@pytest.mark.parametrize("page", TABLES)
def test_the_figures_of_a_table_are_in_the_files_or_named_with_command_and_date(page: str) -> None:
    values: dict[str, set[float]] = {}
    for run in runs():
        for part in run.parts:
            for found in part.candidates.values():
                values.setdefault(part.name, set()).update(
                    value for one in found.metrics.values() for value in middles(one)
                )
    elsewhere = (KEPT / "README.md").read_text().partition("## Figures that no file holds")[2]
    checked = list(rows(page))
    assert len(checked) > 5, "the table was not found"
    for what, benchmark, figures in checked:
        assert figures, what
        missing = [figure for figure in figures if not any(shows(figure, value) for value in values.get(benchmark, ()))]
        listed = re.search(rf"\| {re.escape(what)} \| `headrace bench {benchmark}[^|]*\| \d{{4}}-\d\d-\d\d", elsewhere)
        assert not missing or listed, f"{what}: {', '.join(missing)} in no file of bench/results, and not in its README"


def middles(samples: list[float]) -> Iterator[float]:
    """What a table shows of samples: the median, and each of them."""
    yield from samples
    ordered = sorted(samples)
    if ordered:
        yield (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def shows(figure: str, value: float) -> bool:
    """Whether the text is the value, rounded as the text is."""
    digits = len(figure.partition(".")[2])
    return math.isfinite(value) and abs(value - float(figure)) <= 0.501 * 10**-digits


def test_a_figure_is_recognised_by_the_digits_it_has() -> None:
    assert shows("0.03", 0.0331)
    assert shows("39.2", 39.24)
    assert shows("974", 973.6)
    assert not shows("39.2", 39.3)
