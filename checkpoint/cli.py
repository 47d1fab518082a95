"""`headrace ckpt`: list, check, show, tag and remove the steps of a checkpoint repository, and add up their sizes.

The modules `cli_*` add the other commands.

Invariant: the command runs without torch. `ls`, `du`, `check`, `show` and `state` change nothing, except that they write the
missing COMMIT of a complete attempt, as every reader does. `ls`, `du` and `check` may also write a lease and delete it
(`survey`). `retain` and `gc` print a plan and change nothing without `--apply`.
Failure behaviour: exit code 4 when `check` finds damage, otherwise that of the error. The next collection finishes one
that stopped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from headrace.checkpoint import (
    cli_compare,
    cli_copy,
    cli_exchange,
    cli_metadata,
    cli_publish,
    cli_report,
    object_states,
    positions,
)
from headrace.checkpoint.format.metadata import printable
from headrace.checkpoint.repository import check, collect, survey, tags, usage
from headrace.checkpoint.repository.retention import Keep, Plan
from headrace.checkpoint.repository.step_usage import GroupUsage, StepUsage, step_usage
from headrace.dataio.core.cli import apply_option, byte_progress, command, json_option, one_line
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_MAX_HITS = 5


_HELP = {
    "du": "add up the stored bytes of each run; --steps: of each step; --by group: of each group of tensors",
    "show": "describe one step: its ranks, bytes and codecs; --tensors lists its tensors",
    "state": "print the state of an object in a step as JSON, such as the position of a loader",
    "retain": "remove old steps: prints a plan; --apply executes it",
    "gc": "delete objects that no step needs: prints a plan; --apply executes it",
    "tag": "set a tag; retention keeps tagged steps",
    "untag": "remove a tag",
    "tags": "list the tags and their steps",
}


_NEED_RUN = {"show", "state", "retain", "tag", "publish", *cli_metadata.NEED_RUN, "export", "import"}


def _add_common(action: argparse.ArgumentParser) -> None:
    action.add_argument("url", metavar="URL", help="the repository: a path, file:///path or s3://bucket/prefix")
    needs_run = action.prog.rpartition(" ")[2] in _NEED_RUN
    action.add_argument("--run", help="the run; `headrace ckpt ls URL` lists them" if needs_run else "only this run")
    json_option()(action)
    action.epilog = "exit codes: 0 clean · 2 usage error or not found · 3 transient error · 4 damage · 5 conflict"


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    parsers = {name: actions.add_parser(name, help=text) for name, text in _HELP.items()}
    for parser in parsers.values():
        common(parser)
    parsers["retain"].add_argument("--last", type=int, metavar="N", help="keep the newest N steps")
    parsers["retain"].add_argument("--every", type=int, metavar="N", help="keep steps whose number is a multiple of N")
    parsers["retain"].add_argument(
        "--keep-tags", action="append", metavar="PATTERN", help="keep steps with a tag that matches (default: any tag)"
    )
    parsers["retain"].add_argument(
        "--best",
        action="append",
        metavar="NAME:N:ORDER",
        help="keep the N steps with the best value of their metadata, such as loss:3:min (or max); may be repeated",
    )
    for name in ("retain", "gc"):
        apply_option("remove them")(parsers[name])
    parsers["du"].add_argument(
        "--steps", action="store_true", help="bytes of each step, shared with other steps and unique to it"
    )
    parsers["du"].add_argument(
        "--by", choices=("group",), help="of each step, bytes by the first part of tensors' names"
    )
    parsers["show"].add_argument("--tensors", action="store_true", help="list every tensor by its path in the state")
    for name in ("tag", "untag"):
        parsers[name].add_argument("name", metavar="NAME", help="letters, digits, '.', '-' and '_'")
    parsers["state"].add_argument(
        "--name", metavar="NAME", help="the object's path in the state, such as loader (default: the only one)"
    )
    parsers["state"].add_argument(
        "--rank", type=int, default=0, metavar="N", help="the rank that saved it (default: 0)"
    )
    for name in ("tag", "show", "state"):
        parsers[name].add_argument("--step", default="latest", help="a number, latest (default), or tag:NAME")
    parsers["tag"].add_argument("--move", action="store_true", help="move the tag if another step has it")


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("ls", help="list the steps")
    checking = actions.add_parser("check", help="read every step, and report whether it can be restored bit for bit")
    checking.add_argument(
        "--quick", action="store_true", help="read documents, manifests and pack tables only, not the data"
    )
    for action in (listing, checking):
        _add_common(action)
    cli_metadata.add_columns(listing)
    add(actions, _add_common)
    cli_publish.add(actions, _add_common)
    cli_metadata.add(actions, _add_common)
    cli_compare.add(actions, _add_common)
    cli_copy.add(actions, _add_common)
    cli_exchange.add(actions, _add_common)
    cli_report.add(actions, _add_common)


@command("ckpt", "List, check, name and remove the steps of a checkpoint repository.", _add_actions)
def ckpt(options: argparse.Namespace) -> int:
    """`headrace ckpt ACTION URL`"""
    with open_store(options.url) as store:
        if options.action in COMMANDS:
            return run(store, options)
        if options.action == "ls":
            report = cli_metadata.listed(store, options)
        else:
            with byte_progress("checking", _steps_text, quiet=options.json) as progress:
                report = check.check(store, options.run, data=not options.quick, progress=progress)
    if options.json:
        print(json.dumps(cli_metadata.report_as_json(report), indent=1))
    elif options.action == "ls":
        _print_steps(report, options)
    else:
        _print_check(report, quick=options.quick)
    return 0 if report.clean else CorruptionError.exit_code


def _steps_text(done: check.CheckProgress) -> str:
    return counted(done.steps, "step")


def _print_steps(report: survey.Report, options: argparse.Namespace) -> None:
    if not report.steps:
        print("no committed steps")
    latest = [] if options.where else _latest_below_others(report.steps)
    for line in report.steps:
        when = datetime.fromtimestamp(line.committed, UTC).strftime("%Y-%m-%d %H:%M:%S")
        sizes = f"{format_bytes(line.bytes_state):>10} of state {format_bytes(line.bytes_written):>10} written"
        note = "" if line.current else "  (abandoned branch)"
        note = "  (latest)" if line in latest else note
        text = f"{line.run}  timeline {line.timeline}  step {line.step:>8}  {when}Z  {sizes}  ranks {line.world_size}{note}"
        print(one_line(text + cli_metadata.columns(line, options)))
    for attempt in report.unfinished:
        print(
            f"{attempt.run}  timeline {attempt.timeline}  step {attempt.step:>8}  attempt {attempt.attempt} {attempt.state}"
        )
    _print_problems(report)


def _latest_below_others(steps: Sequence[survey.StepLine]) -> list[survey.StepLine]:
    """The latest step of each run in which readers also see a step with a higher number. `steps`: all steps."""
    latest, highest = dict[str, survey.StepLine](), dict[str, int]()
    for line in (each for each in steps if each.current):
        highest[line.run] = max(line.step, highest.get(line.run, 0))
        if line.run not in latest or (line.timeline, line.step) > (latest[line.run].timeline, latest[line.run].step):
            latest[line.run] = line
    return [line for run, line in latest.items() if line.step < highest[run]]


def _print_check(report: survey.Report, *, quick: bool) -> None:
    _print_problems(report)
    read = "data not read" if quick else f"{report.chunks} chunks, {format_bytes(report.bytes_read)} read"
    print(f"{len(report.steps)} steps, {report.packs} packs, {read}")
    if report.unfinished or report.unreferenced:
        print(f"{len(report.unfinished)} attempts without a step, {len(report.unreferenced)} packs that no step needs")
    print("clean" if report.clean else f"{len(report.problems)} problems")


def _print_problems(report: survey.Report) -> None:
    for problem in report.problems:
        print(one_line(f"damaged: {problem.object}: {problem.what}"))
        for hit in problem.hits[:_MAX_HITS]:
            print(one_line(f"  needed by {hit}"))
        if len(problem.hits) > _MAX_HITS:
            print(f"  and {len(problem.hits) - _MAX_HITS} more")


_MAX_LINES = 50


def run(store: Store, options: argparse.Namespace) -> int:
    """Run the sub-command that `options.action` names."""
    return COMMANDS[options.action](store, options)


def _show(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("show needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    shown = check.describe(
        store, options.run, options.step, tensors=options.tensors, positions=positions.loader_positions
    )
    if options.json:
        shown.metadata = {name: printable(value) for name, value in shown.metadata.items()}
        print(json.dumps(msgspec.to_builtins(shown), indent=1))
        return 0
    for line in (*check.lines(shown), *cli_metadata.lines_of_shown(shown)):
        print(one_line(line))
    return 0


def _state(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("state needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    states = object_states.object_states(store, options.run, options.step, options.rank)
    print(json.dumps(object_states.object_state(states, options.name)))
    return 0


def _retain(store: Store, options: argparse.Namespace) -> int:
    if not options.run or (options.last is None and options.every is None and not options.best):
        raise UsageError("retain needs --run and a policy", hint="for example --run exp42 --last 3 --every 1000")
    keep = Keep(options.last, options.every, tuple(options.keep_tags or ("*",)), _best(options.best or ()))
    selected = collect.to_delete(store, options.run, keep)
    plan = collect.collect(store, selected, keep=keep) if options.apply else collect.preview(store, selected)
    return _print_result(options, plan)


def _best(texts: Sequence[str]) -> tuple[tuple[str, int, str], ...]:
    """The rules of `--best`. The name may contain colons."""
    rules = []
    for text in texts:
        name, _, rest = text.rpartition(":")
        name, _, count = name.rpartition(":")
        if not name or not count.isdecimal():
            raise UsageError(f"--best {text!r:.200} is not a rule", hint="give NAME:N:min or NAME:N:max, as loss:3:min")
        rules.append((name, int(count), rest))
    return tuple(rules)


def _gc(store: Store, options: argparse.Namespace) -> int:
    return _print_result(options, collect.collect(store, ()) if options.apply else collect.preview(store, ()))


def _print_result(options: argparse.Namespace, plan: Plan) -> int:
    if options.json:
        print(json.dumps(_as_json(plan, applied=options.apply), indent=1))
    else:
        _print_plan(plan, applied=options.apply)
    return 0


def _as_json(plan: Plan, *, applied: bool) -> dict[str, object]:
    fields: dict[str, object] = msgspec.to_builtins(plan)
    return fields | {"bytes_freed": plan.bytes_freed, "applied": applied}


def _print_plan(plan: Plan, *, applied: bool) -> None:
    would_be = "" if applied else "would be "
    for step in plan.tombstones:
        print(f"{step.run}  timeline {step.timeline}  step {step.step}: {would_be}removed")
    for step in plan.spared:
        print(f"{step.run}  timeline {step.timeline}  step {step.step}: stays (a live process or the policy needs it)")
    for attempt in plan.aborted:
        print(f"attempt {attempt}: {would_be}aborted, because its lease has expired")
    for key, size in plan.objects[:_MAX_LINES]:
        print(f"{key}: {would_be}deleted" + (f", {format_bytes(size)}" if size else ""))
    if len(plan.objects) > _MAX_LINES:
        print(f"and {len(plan.objects) - _MAX_LINES} more objects")
    print(f"{format_bytes(plan.bytes_freed)} {would_be}freed, {format_bytes(plan.kept_bytes)} of packs stay")
    if not applied and not plan.empty:
        print("nothing was changed; --apply executes the plan")


def _du_steps(store: Store, options: argparse.Namespace) -> int:
    steps = step_usage(store, options.run, by_group=options.by == "group")
    if options.json:
        print(json.dumps([asdict(each) for each in steps], indent=1))
        return 0
    for step in steps:
        note = "" if step.current else "  (abandoned branch)"
        print(f"{step.run}  timeline {step.timeline}  step {step.step:>8}  {_bytes(step)}{note}")
        for group in step.groups:
            print(one_line(f"  {group.group:<24.100}  {_bytes(group)}"))
    print(f"{counted(len(steps), 'step')}, {format_bytes(sum(each.unique for each in steps))} unique to one of them")
    return 0


def _bytes(usage: StepUsage | GroupUsage) -> str:
    sizes = (usage.state, usage.stored, usage.unique, usage.shared)
    state, stored, unique, shared = (f"{format_bytes(size):>10}" for size in sizes)
    return f"{state} of state  {stored} stored  {unique} unique  {shared} shared"


def _du(store: Store, options: argparse.Namespace) -> int:
    if options.steps or options.by:
        return _du_steps(store, options)
    total = usage.usage(store, options.run)
    if options.json:
        print(json.dumps(asdict(total), indent=1))
        return 0
    for run in total.runs:
        steps, state, stored = counted(run.steps, "step"), format_bytes(run.state), format_bytes(run.stored)
        others = f"  {format_bytes(run.other_stored)} of attempts that are no step" if run.other_packs else ""
        print(f"{run.run}  {steps}  {state} of state  {stored} stored in {counted(run.packs, 'pack')}{others}")
    if total.unknown_packs:
        print(f"{format_bytes(total.unknown_stored)} in {counted(total.unknown_packs, 'pack')} of no run")
    print(f"{format_bytes(total.stored)} in {counted(total.packs, 'pack')}")
    return 0


def _tag(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("tag needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    return _print_tag(
        options, tags.tag(store, options.name, options.run, check.step_of(options.step), move=options.move)
    )


def _untag(store: Store, options: argparse.Namespace) -> int:
    tags.untag(store, options.name)
    if options.json:
        print(json.dumps({"untagged": options.name}))
    return 0


def _tags(store: Store, options: argparse.Namespace) -> int:
    listed = [tag for tag in tags.all_tags(store) if options.run in (None, tag.run)]
    if options.json:
        print(json.dumps([msgspec.to_builtins(tag) for tag in listed], indent=1))
        return 0
    for tag in listed:
        print(_line(tag))
    if not listed:
        print("no tags")
    return 0


def _print_tag(options: argparse.Namespace, tag: tags.Tag) -> int:
    print(json.dumps(msgspec.to_builtins(tag), indent=1) if options.json else _line(tag))
    return 0


def _line(tag: tags.Tag) -> str:
    return f"{tag.name}  {tag.run}  timeline {tag.timeline}  step {tag.step}"


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "du": _du,
    "show": _show,
    "state": _state,
    "retain": _retain,
    "gc": _gc,
    "tag": _tag,
    "untag": _untag,
    "tags": _tags,
    **cli_publish.COMMANDS,
    **cli_metadata.COMMANDS,
    **cli_compare.COMMANDS,
    **cli_copy.COMMANDS,
    **cli_exchange.COMMANDS,
    **cli_report.COMMANDS,
}
