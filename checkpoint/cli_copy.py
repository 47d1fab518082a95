"""`headrace ckpt copy` and `headrace ckpt rm`: copy steps to another repository, and remove one step.

Invariant: the commands run without torch. `rm` prints a plan and changes nothing without `--apply`. `copy` never changes
the source, except that it writes leases there, and the missing COMMIT of a complete attempt.
Failure behaviour: exit code 4 for a damaged chunk, 5 for a conflict, 6 for a full destination. A copy that stops can be
started again with the same arguments and continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.checkpoint.repository import check, removal
from headrace.checkpoint.repository.removal import Removal
from headrace.dataio.core.cli import apply_option
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    removing = actions.add_parser("rm", help="remove one step: prints a plan; --apply executes it")
    common(removing)
    removing.add_argument("--step", help="a number, latest, or tag:NAME")
    removing.add_argument("--with-tags", action="store_true", help="remove a step that has tags, and the tags")
    apply_option("remove it")(removing)


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


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {"rm": _rm}
