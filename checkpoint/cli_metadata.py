"""`headrace ckpt log`, `tree`, `table` and `artifacts`, and the metadata that `ls` and `show` print.

Invariant: these commands run without torch, and change nothing but the files that `-o` names. Texts of metadata are
printed on one line, without terminal escapes.
Failure behaviour: as `headrace.checkpoint.cli`. `table` without pyarrow raises one line that names the extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.checkpoint import run_tree, where
from headrace.checkpoint.format.metadata import Value, printable
from headrace.checkpoint.repository import check, survey
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.survey import Report, StepLine
from headrace.dataio.core.cli import one_line
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.imports import naming_extras
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_HELP = {
    "log": "list the steps of a run, newest first, with their metadata",
    "tree": "show the runs, their timelines and where these fork",
    "table": "write all steps and their metadata into a Parquet file",
    "artifacts": "list the files that were stored with a step, or fetch one",
}
NEED_RUN = {"log", "artifacts"}
_VALUE_CHARACTERS = 60
_SHOWN = 8
"""The number of entries of metadata that a line of `log` shows, unless `--metadata` names them."""


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    parsers = {name: actions.add_parser(name, help=text) for name, text in _HELP.items()}
    for parser in parsers.values():
        common(parser)
    add_columns(parsers["log"])
    parsers["log"].add_argument("-n", "--limit", type=int, metavar="N", help="only the newest N of these steps")
    parsers["table"].add_argument("-o", "--output", required=True, metavar="FILE", help="the Parquet file to write")
    listing = parsers["artifacts"]
    _accept_any_order(listing)
    listing.add_argument("name", nargs="?", metavar="NAME", help="fetch this artifact; without NAME, list them")
    listing.add_argument("--step", default="latest", help="a number, latest (default), or tag:NAME")
    listing.add_argument("--rank", type=int, metavar="R", help="of this rank; default: the lowest that has NAME")
    listing.add_argument("-o", "--output", metavar="FILE", help="write it into FILE; default: standard output")


def _accept_any_order(parser: argparse.ArgumentParser) -> None:
    """Let an optional positional argument follow options, as in `URL --run exp42 NAME`. argparse alone refuses that."""
    parse = parser.parse_known_args

    def reordered(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        if "--" in (args or ()):
            return parse(args, namespace)
        words, options, positionals = iter(args or ()), list[str](), list[str]()
        for word in words:
            if not word.startswith("-") or word == "-":
                positionals.append(word)
                continue
            options.append(word)
            known = parser._option_string_actions
            matching = [known[word]] if word in known else [known[name] for name in known if name.startswith(word)]
            if matching and matching[0].nargs is None:  # it takes the next word
                options += [value for value in [next(words, None)] if value is not None]
        return parse([*positionals, *options], namespace)

    setattr(parser, "parse_known_args", reordered)  # noqa: B010


def add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that list steps: `--metadata` and `--where`."""
    parser.add_argument("--metadata", metavar="NAMES", help="show these entries of the metadata, such as loss,tokens")
    parser.add_argument(
        "--where", metavar="EXPRESSION", help="only steps for which it holds, such as 'loss < 2 and tokens > 1e9'"
    )


# what a list of steps shows


def values_of(line: StepLine) -> Mapping[str, Value]:
    """The names that `--where` knows for this step. The fields of the step come before its metadata."""
    fields: dict[str, Value] = {
        "run": line.run,
        "timeline": line.timeline,
        "step": line.step,
        "time": line.committed,
        "bytes": line.bytes_state,
        "ranks": line.world_size,
        "seconds": line.seconds,
    }
    return line.metadata | fields


def _test(options: argparse.Namespace) -> Callable[[StepLine], bool]:
    """Whether `--where` holds for a step."""
    if not options.where:
        return lambda line: True
    test = where.parse(options.where)
    return lambda line: test(values_of(line))


def listed(store: Store, options: argparse.Namespace) -> Report:
    """The report of `ls`. With `--where`, it has only the steps that are selected."""
    test = _test(options)
    report = survey.survey(store, options.run)
    if options.where:
        report.steps, report.unfinished = list(filter(test, report.steps)), []
    return report


def report_as_json(report: Report) -> dict[str, Any]:
    """A report for `--json`."""
    return asdict(report) | {"steps": [step_as_json(line) for line in report.steps], "clean": report.clean}


def step_as_json(line: StepLine) -> dict[str, Any]:
    """One step for `--json`."""
    return asdict(line) | {"metadata": {name: printable(value) for name, value in line.metadata.items()}}


def columns(line: StepLine, options: argparse.Namespace, *, show_all: bool = False) -> str:
    """The step's metadata as text: the entries that `--metadata` names, or the first few if `show_all`."""
    if options.metadata:
        chosen = [name.strip() for name in options.metadata.split(",")]
        return "".join(f"  {name} {_text(line.metadata[name]) if name in line.metadata else '-'}" for name in chosen)
    if not show_all:
        return ""
    shown = "".join(f"  {name} {_text(value)}" for name, value in islice(line.metadata.items(), _SHOWN))
    return shown + ("  ..." if len(line.metadata) > _SHOWN else "")


def _text(value: Value) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool | None) else f"{value:.8g}"
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
    return one_line(text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}...")


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


# the commands


def _log(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("log needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit {options.limit}: give a whole number from 1")
    steps = islice(filter(_test(options), survey.newest_first(store, options.run)), options.limit)
    if options.json:
        print(json.dumps([step_as_json(line) for line in steps], indent=1))
        return 0
    is_empty = True
    for line in steps:
        is_empty = False
        took = f"{line.seconds:8.1f} s" if line.seconds else " " * 10
        text = f"step {line.step:>8}  {_time(line.committed)}  {took}  timeline {line.timeline}"
        print(one_line(text + columns(line, options, show_all=True)))
    if is_empty:
        if not options.where:
            raise repository.missing(store, options.run)
        print("no step that --where selects")
    return 0


def _tree(store: Store, options: argparse.Namespace) -> int:
    report = survey.survey(store, options.run)
    trees = [run_tree.build(store, run, report.steps) for run in run_tree.runs_of(store, options.run)]
    if options.json:
        print(json.dumps([asdict(tree) for tree in trees], indent=1))
    else:
        for tree in trees:
            for text in run_tree.lines(tree):
                print(one_line(text))
        if not trees:
            print("no runs")
    return 0 if report.clean else CorruptionError.exit_code


def _table(store: Store, options: argparse.Namespace) -> int:
    with naming_extras():
        from headrace.checkpoint import step_table
    report = survey.survey(store, options.run)
    if not report.clean:
        raise CorruptionError(
            f"{counted(len(report.problems), 'step')} cannot be read", hint="`headrace ckpt check` names them"
        )
    written = step_table.write(report.steps, Path(options.output))
    if options.json:
        print(json.dumps({"file": options.output, "rows": written.rows, "columns": written.columns}, indent=1))
    else:
        print(f"{options.output}: {counted(written.rows, 'step')}, {counted(len(written.columns), 'column')}")
    return 0


def _artifacts(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint import artifacts

    if not options.run:
        raise UsageError("artifacts needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    with artifacts.open_leased(store, options.run, check.step_of(options.step)) as step:
        if options.name is None:
            _print_artifacts(artifacts.artifacts_of(step), as_json=options.json)
        elif options.output is None:
            sys.stdout.buffer.write(artifacts.read_bytes(store, step, options.name, options.rank))
            sys.stdout.buffer.flush()
        else:
            size = artifacts.save_as(store, step, options.name, Path(options.output), options.rank)
            written = {"file": options.output, "bytes": size}
            print(json.dumps(written) if options.json else f"{options.output}: {format_bytes(size)}")
    return 0


def _print_artifacts(found: list[Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(artifact) for artifact in found], indent=1))
        return
    for artifact in found:
        print(one_line(f"{artifact.name}  rank {artifact.rank}  {format_bytes(artifact.bytes)}"))
    if not found:
        print("no artifacts")


def lines_of_shown(shown: check.Shown) -> list[str]:
    """The metadata, the artifacts, the loaders and the description of a step, as lines of text."""
    text = [f"metadata: {name} = {_text(value)}" for name, value in shown.metadata.items()]
    text += [f"artifact: {name}  rank {rank}  {format_bytes(size)}" for name, rank, size in shown.artifacts]
    text += [f"loader {path}: {json.dumps(position, default=str)}" for path, position in shown.loaders.items()]
    for name, section in (shown.description or {}).items():
        text += [f"{name}.{path} = {value}" for path, value in _flat(section, "")] or [
            f"{name} = {json.dumps(section)}"
        ]
    return text


def _flat(section: object, path: str) -> Iterator[tuple[str, str]]:
    """(path, value) of each entry of a section that is a nested dict."""
    if not isinstance(section, dict):
        return
    for name, value in section.items():
        inner = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from _flat(value, inner)
        else:
            yield inner, json.dumps(value, ensure_ascii=False)


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "log": _log,
    "tree": _tree,
    "table": _table,
    "artifacts": _artifacts,
}
