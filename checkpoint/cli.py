"""`headrace ckpt`: list, check, name and remove the steps of a checkpoint repository.

Invariant: runs without torch. Listing and checking change nothing, but that complete attempts are finished, as by any reader.
Failure behaviour: exit code 4 when `check` finds damage, otherwise that of the error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from headrace.checkpoint import cli_lifecycle
from headrace.checkpoint.repository import check
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.options import Parser
from headrace.dataio.store.open import open_store

_MOST_HITS = 5


def ckpt(argv: Sequence[str]) -> int:
    """Run `headrace ckpt ARGV` and return its exit code."""
    options = _parser().parse_args(argv)
    with open_store(options.url) as store:
        if options.action in cli_lifecycle.COMMANDS:
            return cli_lifecycle.run(store, options)
        if options.action == "ls":
            report, _ = check.survey(store, options.run)
        else:
            report = check.check(store, options.run, data=not options.quick)
    if options.json:
        print(json.dumps(asdict(report) | {"clean": report.clean}, indent=1))
    elif options.action == "ls":
        _print_steps(report)
    else:
        _print_check(report, quick=options.quick)
    return 0 if report.clean else CorruptionError.exit_code


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="headrace ckpt", description="List, check, name and remove the steps of a checkpoint repository."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the steps")
    checking = actions.add_parser("check", help="read every step and say whether it can be restored bit for bit")
    checking.add_argument(
        "--quick", action="store_true", help="only documents, manifests and pack tables, not the data"
    )
    for action in (listing, checking):
        _add_common(action)
    cli_lifecycle.add(actions, _add_common)
    return parser


def _add_common(action: argparse.ArgumentParser) -> None:
    action.add_argument("url", metavar="URL", help="the repository: a path, file:///path or s3://bucket/prefix")
    action.add_argument("--run", help="only this run")
    action.add_argument("--json", action="store_true", help="one JSON object instead of text")
    action.epilog = "exit codes: 0 clean · 2 wrong use or not there · 3 try again · 4 damage was found · 5 taken"


def _print_steps(report: check.Report) -> None:
    if not report.steps:
        print("no committed steps")
    for line in report.steps:
        when = datetime.fromtimestamp(line.committed, UTC).strftime("%Y-%m-%d %H:%M:%S")
        sizes = f"{format_bytes(line.bytes_state):>10} of state {format_bytes(line.bytes_written):>10} written"
        note = "" if line.current else "  (abandoned branch)"
        print(
            f"{line.run}  timeline {line.timeline}  step {line.step:>8}  {when}Z  {sizes}  ranks {line.world_size}{note}"
        )
    for attempt in report.unfinished:
        print(
            f"{attempt.run}  timeline {attempt.timeline}  step {attempt.step:>8}  attempt {attempt.attempt} {attempt.state}"
        )
    _print_problems(report)


def _print_check(report: check.Report, *, quick: bool) -> None:
    _print_problems(report)
    read = "data not read" if quick else f"{report.chunks} chunks, {format_bytes(report.bytes_read)} read"
    print(f"{len(report.steps)} steps, {report.packs} packs, {read}")
    if report.unfinished or report.unreferenced:
        print(f"{len(report.unfinished)} attempts without a step, {len(report.unreferenced)} packs that no step needs")
    print("clean" if report.clean else f"{len(report.problems)} problems")


def _print_problems(report: check.Report) -> None:
    for problem in report.problems:
        print(f"damaged: {problem.object}: {problem.what}")
        for hit in problem.hits[:_MOST_HITS]:
            print(f"  needed by {hit}")
        if len(problem.hits) > _MOST_HITS:
            print(f"  and {len(problem.hits) - _MOST_HITS} more")
