"""No figure without a command: where a page, a docstring or a comment tells a speed, a time or a ratio, it names its maker.

What counts as a figure: a number with a unit of speed or of fine time (MB/s, samples/s, ms, µs, CPU s, seconds with
decimals), "2.4 times as fast", or a table whose heads or rows are such units. What counts as its maker: a kept command or
test, or a file under `bench/results`; each must exist. On a page it stands in the same section (under the same heading), in
code in the same docstring or run of comments. What was set and not measured (a limit, a server held at 40 MB/s) is told apart
by `<!-- set, not measured -->` in the same paragraph or table.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    + [path for folder in ("docs", "deploy", "bench/results") for path in ROOT.glob(f"{folder}/**/*.md")]
)
CODE = sorted(path for room in ("dataio", "loaders", "checkpoint", "bench") for path in ROOT.glob(f"{room}/**/*.py"))
SET = "<!-- set, not measured -->"
_UNITS = r"(?:CPU s|[kKMGT]i?B/s|(?:samples|clips|frames|files|batches|keys|requests|tokens)/s|[mµn]s)"
_FIGURE = re.compile(
    rf"\d\s{_UNITS}\b|\d\.\d+ s(?:econds)?\b|\d times (?:as|longer|faster|slower|less|more)\b|\d ×(?! ?\d)"
)
_HEAD = re.compile(rf"(?:^|[\s(,]){_UNITS}(?:$|[\s),])|(?:^|[\s,])s$|÷|\bseconds$")
_NUMBER = re.compile(r"\W*\d[\d.,]*")
_SOURCE = re.compile(
    r"\bheadrace (?P<bench>bench [a-z-]+|order\b)"
    r"|\bpython -m (?:headrace\.)?(?P<module>bench(?:\.\w+)+)"
    r"|(?<![\w/])(?P<path>bench/\w+\.py|tests/[\w/]+(?:\.py)?)"
    r"|\bmake (?P<target>bench|demo|soak)\b"
    r"|(?P<results>bench/results/[\w./*-]*\w)"
)


def sections(page: str) -> Iterator[tuple[str, str]]:
    """(heading, text below it up to the next heading); blocks of code belong to it, but their `#` are no headings."""
    heading, lines, fenced = "", list[str](), False
    for line in page.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if re.match(r"#+ ", line) and not fenced:
            yield heading, "\n".join(lines)
            heading, lines = line, []
        lines.append(line)
    yield heading, "\n".join(lines)


def prose(path: Path) -> Iterator[tuple[str, str]]:
    """(where, text) of a module's docstrings and runs of comments."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield f"line {node.lineno}", node.value.value
    if not re.search(r"#.*\d", text):  # no comment has a number, so it tells no figure
        return
    last, run = -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > last + 1 and run:
                yield f"line {last}", " ".join(run)
                run = []
            run.append(token.string.lstrip("# "))
            last = token.start[0]
    yield f"line {last}", " ".join(run)


def figures(text: str) -> list[str]:
    """The measured figures of a section, each with what stands around it; a table by its head."""
    found = list[str]()
    for block in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        if SET in block:
            continue
        rows = [line for line in block.splitlines() if line.startswith("|")]
        words = re.sub(r"`[^`]*`", "", " ".join(line for line in block.splitlines() if line not in rows))
        found += [words[max(0, match.start() - 40) : match.end() + 20] for match in _FIGURE.finditer(words)]
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        heads = [*(cells[0] if cells else ()), *(row[0] for row in cells)]
        numbers = any(_NUMBER.match(cell) for row in cells[1:] for cell in row[1:])
        if numbers and any(_HEAD.search(re.sub(r"`[^`]*`", "", head)) for head in heads):
            found.append(f"table {rows[0]}")
        found += [row for row in rows if _FIGURE.search(re.sub(r"`[^`]*`", "", row))]
    return found


def sources(text: str) -> Iterator[tuple[str, bool]]:
    """What the text names as makers of figures, and whether each is there."""
    for match in _SOURCE.finditer(text.replace("\n", " ")):
        known = match.groupdict()
        if bench := known["bench"]:
            there = bench == "order" or bench.removeprefix("bench ") in COMMANDS
        elif module := known["module"]:
            where = ROOT / module.replace(".", "/")
            there = where.with_suffix(".py").exists() or where.is_dir()
        elif results := known["results"]:
            there = any(ROOT.glob(results))
        else:
            there = known["target"] is not None or (ROOT / known["path"]).exists()
        yield match[0], there


def orphans(text: str) -> list[str]:
    """Figures of a section that names no source."""
    found = figures(text) if re.search(r"\d", text) else []
    return [] if found and any(there for _, there in sources(text)) else found


HOW = "name the command that makes it (headrace bench …, a test, a file of bench/results), or say it in words"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_figure_of_a_page_stands_in_a_section_that_says_what_makes_it(page: Path) -> None:
    found = {heading: told for heading, text in sections(page.read_text()) if (told := orphans(text))}
    assert found == {}, f"{HOW}; where it was set and not measured: {SET}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_whatever_is_named_as_the_maker_of_figures_is_there(page: Path) -> None:
    missing = [name for name, there in sources(page.read_text()) if not there]
    assert not missing


@pytest.mark.slow
def test_docstrings_and_comments_tell_no_figure_that_nothing_makes() -> None:
    found = {f"{path.relative_to(ROOT)} {where}": orphans(text) for path in CODE for where, text in prose(path)}
    assert {where: told for where, told in found.items() if told} == {}, HOW


@pytest.mark.parametrize(
    "told",
    [
        "An `open` takes 38 µs instead of 42.",
        "It copies 5.3 GB/s rather than 11.4.",
        "Taking it over took 0.5 s.",
        "It takes 3 times as long.",
        "It takes 0.57 CPU s a GiB.",
        "| from | restore s |\n|---|---|\n| tier | 1.23 (1.06–1.51) |",
        "| goal | median |\n|---|---|\n| first batch, < 40 ms | 12.4 |",
        "| | CPU s per 1,000 |\n|---|---|\n| exact | 24.4 |",
    ],
)
def test_a_planted_figure_is_found_and_a_command_a_file_or_a_test_beside_it_is_enough(told: str) -> None:
    assert orphans(f"## Speed\n\n{told}\n")
    for source in ("`headrace bench raw`", "`pytest tests/bench/test_raw.py`", "in `bench/results/2026-11-22-2cores`"):
        assert not orphans(f"## Speed\n\n{source} says:\n\n{told}\n")
    assert not orphans(f"## Speed\n\n{told} {SET}\n")
    assert orphans(f"## Speed\n\n{SET}\n\n{told}\n"), "the mark counts for its own paragraph alone"
    assert orphans(f"## Speed\n\n`headrace bench nothing` says:\n\n{told}\n"), "no such command"
    assert orphans(f"## Speed\n\n`pytest tests/bench/test_nothing.py` says:\n\n{told}\n"), "no such test"


def test_limits_and_settings_are_no_figures() -> None:
    told = "Tried again after 30 s, at most 64 KiB, 24 of them.\n\n| setting | default |\n|---|---|\n| `retry_seconds` | `3600` |"
    assert not figures(told)
    assert not figures("```console\nheadrace bench store --seconds 0.3   # 0.3 s each\n```")


def test_sections_end_at_headings_and_not_at_comments_in_blocks_of_code() -> None:
    page = "# A\n\n```sh\n# no heading\n```\n\nIt took 3 ms.\n\n## B\n\n`headrace bench raw`\n"
    assert [heading for heading, text in sections(page) if orphans(text)] == ["# A"]


def test_figures_in_docstrings_and_comments_are_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""It takes 3 ms."""\n\nx = 1  # a copy of\n# 4 MiB: 0.3 ms\n\ny = "7 ms"\n')
    assert [where for where, text in prose(path) if orphans(text)] == ["line 1", "line 4"]
