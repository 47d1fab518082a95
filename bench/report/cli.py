"""`headrace bench report` and `headrace bench compare`.

Invariant: the commands measure nothing. They show what results files contain.
Failure behaviour: a file without results is a `UsageError` that names it. `compare` returns exit code 1 when a metric
got worse beyond noise, so that scripts can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.bench.core.results import Run, read
from headrace.bench.core.table import markdown
from headrace.bench.report.compare import as_text, compare
from headrace.bench.report.page import page
from headrace.dataio.core.cli import Parser
from headrace.dataio.core.errors import translate_os_errors
from headrace.dataio.core.files import write_output


def report(argv: Sequence[str]) -> int:
    """Write the page, or print Markdown, of results files; `headrace bench report`."""
    parser = Parser(
        prog="headrace bench report",
        description="Make one self-contained page (or Markdown tables) of what `headrace bench … -o FILE` wrote.",
        epilog="exit codes: 0 written; 2 a file holds no results; others as in headrace --help",
    )
    parser.add_argument("results", nargs="+", type=Path, help="results files")
    parser.add_argument("-o", "--output", type=Path, help="HTML file to write")
    parser.add_argument("--title", default="Headrace benchmarks")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--part", action="append", default=[], help="only this part, for --markdown; may be repeated")
    args = parser.parse_args(argv)
    runs: list[tuple[str, Run]] = [(path.name, read(path)) for path in args.results]
    if args.output:
        with translate_os_errors(f"writing {args.output}"), write_output(args.output) as file:
            file.write(page(runs, args.title).encode())
        print(f"wrote {args.output}")
    if args.markdown or not args.output:
        print(markdown(runs, args.part), end="")
    return 0


def compare_(argv: Sequence[str]) -> int:
    """Print the changes between two results files; `headrace bench compare`."""
    parser = Parser(
        prog="headrace bench compare",
        description="Say what changed from A to B beyond noise: exact Mann–Whitney test with a false discovery rate of 5 %,\n"
        "changes of medians from 2 % on.",
        epilog="exit codes: 0 nothing got worse; 1 something did; 2 not comparable; others as in headrace --help",
    )
    parser.add_argument("a", type=Path, help="results before")
    parser.add_argument("b", type=Path, help="results after")
    parser.add_argument(
        "--different-machines", action="store_true", help="compare although the machines differ, and say so"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)
    found = compare(read(args.a), read(args.b), any_machine=args.different_machines)
    print(msgspec.json.encode(found).decode() if args.json else as_text(found))
    return 1 if any(change.verdict == "worse" for change in found.changes) else 0
