"""`headrace ckpt report`: one page about a repository.

Invariant: the command runs without torch. It reads at most `--steps` steps, and writes nothing but the page, and what
`survey` writes.
Failure behaviour: exit code 2 for a missing repository or run, 4 if a step is damaged. The page is written in that case
too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.checkpoint.format.metadata import printable
from headrace.dataio.core.cli import one_line
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import counted
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.checkpoint.report.reading import RepositoryReport, RunReport

    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_PAGE = "report.html"


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    parser = actions.add_parser("report", help="write a page: runs, forks, sizes, failures, published names, metadata")
    common(parser)
    parser.add_argument(
        "-o", "--output", metavar="PAGE.html", help=f"the page to write (default: {_PAGE}, and none with --json)"
    )
    parser.add_argument(
        "--steps", type=int, default=500, metavar="N", help="read at most N steps, newest first (default: %(default)s)"
    )


def _report(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.pages.document import write
    from headrace.checkpoint.report.page import page
    from headrace.checkpoint.report.reading import read_report

    report = read_report(store, options.run, steps=options.steps)
    target = options.output or ("" if options.json else _PAGE)
    if target:
        try:
            write(Path(target), page(report))
        except OSError as error:
            raise UsageError(
                f"{target} cannot be written: {error.strerror or error}", hint="check the folder"
            ) from None
    if options.json:
        print(json.dumps(_as_json(report), indent=1))
    else:
        for run in report.runs:
            print(one_line(_line(run)))
        print(f"page: {target}")
    return CorruptionError.exit_code if report.problems else 0


def _line(run: RunReport) -> str:
    hidden = f", {run.hidden_steps} not read" if run.hidden_steps else ""
    failed = f"  {counted(len(run.failures), 'failed attempt')}" if run.failures else ""
    return f"{run.run}  {counted(len(run.timelines), 'timeline')}  {counted(len(run.steps), 'step')}{hidden}{failed}"


def _as_json(report: RepositoryReport) -> dict[str, Any]:
    fields = asdict(report)
    for run, row in zip(report.runs, fields["runs"], strict=True):
        row["sizes"] = [
            {"timeline": at[0], "step": at[1], "unique": size.unique, "shared": size.shared}
            for at, size in run.sizes.items()
        ]
        for line in row["steps"]:
            line["metadata"] = {name: printable(value) for name, value in line["metadata"].items()}
    fields["tags"] = msgspec.to_builtins(report.tags)
    fields["published"] = [
        {"name": each.name, "kept": each.kept, "newest": msgspec.to_builtins(each.newest)} for each in report.published
    ]
    return fields


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {"report": _report}
