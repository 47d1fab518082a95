"""`headrace ckpt copy` and `headrace ckpt rm`: copy steps to another repository, and remove one step.

Invariant: the commands run without torch. `rm` prints a plan and changes nothing without `--apply`. `copy` never changes
the source, except that it writes leases there, and the missing COMMIT of a complete attempt.
Failure behaviour: exit code 4 for a damaged chunk, 5 for a conflict, 6 for a full destination. A copy that stops can be
started again with the same arguments and continues.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.checkpoint.copies.copy import (
    COPIED,
    PRESENT,
    REMOVED_HERE,
    REMOVED_THERE,
    CopyProgress,
    CopyReport,
    Progress,
    RunCopier,
    Selection,
    StepCopy,
    run_copiers,
)
from headrace.checkpoint.repository import check, removal
from headrace.checkpoint.repository.removal import Removal
from headrace.dataio.core.cli import apply_option, byte_progress, byte_rate, positive_int, print_json_line
from headrace.dataio.core.errors import TransientError, UsageError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_log = get_logger(__name__)
STATES = (COPIED, PRESENT, REMOVED_HERE, REMOVED_THERE)
_MOST_SECONDS = 24 * 3600


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    copying = actions.add_parser("copy", help="copy steps to another repository, or mirror a run as it grows")
    common(copying)
    copying.add_argument("destination", metavar="DST", help="the repository to copy to; it is created if it is missing")
    copying.add_argument("--steps", default="all", metavar="N,N,…", help="steps to copy (default: all)")
    copying.add_argument("--last", type=positive_int, metavar="N", help="copy only the newest N steps")
    copying.add_argument("--as", dest="as_run", metavar="RUN", help="the name of the run at the destination")
    copying.add_argument("--tags", action="store_true", help="also copy steps that have a tag, and the tags")
    copying.add_argument(
        "--follow", nargs="?", const="60s", metavar="60s", help="copy new steps until interrupted, at this interval"
    )
    copying.add_argument("--workers", type=positive_int, default=2, metavar="N", help="packs at a time (default: 2)")
    removing = actions.add_parser("rm", help="remove one step: prints a plan; --apply executes it")
    common(removing)
    removing.add_argument("--step", help="a number, latest, or tag:NAME")
    removing.add_argument("--with-tags", action="store_true", help="remove a step that has tags, and the tags")
    apply_option("remove it")(removing)


def _copy(store: Store, options: argparse.Namespace) -> int:
    selection = _selection(options)
    report = CopyReport()
    with open_store(options.destination) as destination:
        began, interval = time.monotonic(), _seconds(options.follow) if options.follow else None
        with byte_progress("copying", _describe, quiet=options.json) as progress:
            copiers: dict[str, RunCopier] = {}
            while True:
                try:
                    _round(store, destination, options, copiers, selection, report, progress)
                except TransientError as error:
                    if interval is None:
                        raise
                    _log.warning("steps could not be copied now, and are copied at the next round: %s", error)
                if interval is None:
                    break
                report = CopyReport()
                time.sleep(interval)
    if options.json:
        fields: dict[str, object] = msgspec.to_builtins(report)
        print(json.dumps(fields | {"bytes_sent": report.bytes_sent}, indent=1))
    else:
        states = {state: sum(each.state == state for each in report.steps) for state in STATES}
        counts = ", ".join(f"{count} {state}" for state, count in states.items() if count or state == COPIED)
        print(f"{counts}; {byte_rate(report.bytes_sent, time.monotonic() - began)} sent")
    return 0


def _round(
    store: Store,
    destination: Store,
    options: argparse.Namespace,
    copiers: dict[str, RunCopier],
    selection: Selection,
    report: CopyReport,
    progress: Progress | None,
) -> None:
    """Copy what is new. Runs that were copied before keep their copiers, which know what the destination has."""
    for copier in run_copiers(
        store, destination, options.run, options.as_run, workers=options.workers, progress=progress
    ):
        copier = copiers.setdefault(copier.route.run, copier)
        for outcome in copier.copy(selection):
            report.steps.append(outcome)
            if options.follow and options.json:
                print_json_line(msgspec.to_builtins(outcome))
            elif not options.json and outcome.state != PRESENT:
                print(_line(outcome), flush=True)
        report.tags += copier.tags_set
        for name in copier.tags_set if not options.json else ():
            print(f"{copier.route.run}  tag {name}: set")


def _selection(options: argparse.Namespace) -> Selection:
    if options.as_run and not options.run:
        raise UsageError("--as needs --run", hint="for example --run exp42 --as exp42-copy")
    if options.steps == "all":
        return Selection(None, options.last, options.tags)
    numbers = options.steps.split(",")
    if not options.run or options.last or not all(each.isascii() and each.isdecimal() for each in numbers):
        raise UsageError(
            "--steps takes numbers, needs --run, and goes without --last",
            hint="for example --run exp42 --steps 100,200",
        )
    return Selection(tuple(map(int, numbers)), None, options.tags)


def _seconds(text: str) -> float:
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    number = text[:-1] if factor else text
    if not number.isascii() or not number.isdecimal() or not 0 < int(number) * (factor or 1) <= _MOST_SECONDS:
        raise UsageError(f"--follow {text!r:.40}: not a time", hint="give for example 30s, 5m or 1h, at most a day")
    return float(int(number) * (factor or 1))


def _describe(done: CopyProgress) -> str:
    return f"{done.run} step {done.step}"


def _line(done: StepCopy) -> str:
    rate = f"  {byte_rate(done.bytes_sent, done.seconds)} sent, {format_bytes(done.bytes_found)} found there"
    return f"{done.run}  timeline {done.timeline}  step {done.step}: {done.state}{rate if done.state == COPIED else ''}"


def _rm(store: Store, options: argparse.Namespace) -> int:
    if not options.run or not options.step:
        raise UsageError("rm needs --run and --step", hint="for example --run exp42 --step 1200")
    done = removal.remove_step(
        store, options.run, check.step_of(options.step), with_tags=options.with_tags, apply=options.apply
    )
    if options.json:
        fields: dict[str, object] = msgspec.to_builtins(done)
        print(json.dumps(fields | {"bytes_freed": done.plan.bytes_freed, "applied": options.apply}, indent=1))
    else:
        _print_removal(done, applied=options.apply)
    return 0


def _print_removal(done: Removal, *, applied: bool) -> None:
    step, plan = done.step, done.plan
    would_be = "" if applied else "would be "
    label = f"{step.run}  timeline {step.timeline}  step {step.step}"
    if step in plan.spared:
        print(f"{label}: stays, because a live process or a tag needs it")
    elif step in plan.tombstones:
        latest = ", the latest step of the run" if done.was_latest else ""
        print(f"{label}{latest}: {would_be}removed")
    for name in done.tags:
        print(f"tag {name}: {would_be}removed")
    others = len(plan.tombstones) - (step in plan.tombstones)
    if others:
        print(f"{others} steps of an earlier collection that stopped: {would_be}removed")
    print(f"{format_bytes(plan.bytes_freed)} {would_be}freed in {len(plan.objects)} objects")
    if not applied:
        print("nothing was changed; --apply executes the plan")


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {"copy": _copy, "rm": _rm}
