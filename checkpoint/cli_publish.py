"""`headrace ckpt publish`, `published` and `unpublish`: publish the weights of a step, list the names, withdraw a name.

`unpublish` prints a plan and changes nothing without `--apply`.
Failure behaviour: the exit code is that of the error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from headrace.dataio.core.cli import apply_option
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.checkpoint.publishing.records import Published

    Actions = argparse._SubParsersAction[argparse.ArgumentParser]


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    listing = actions.add_parser("published", help="list the published names and their versions")
    publishing = actions.add_parser("publish", help="publish the weights of a step as the next version of a name")
    withdrawing = actions.add_parser("unpublish", help="withdraw a name: prints a plan; --apply executes it")
    for parser in (listing, publishing, withdrawing):
        common(parser)
    withdrawing.add_argument("name", metavar="NAME", help="a published name; `headrace ckpt published URL` lists them")
    apply_option("withdraw it")(withdrawing)
    publishing.add_argument("name", metavar="NAME", help="letters, digits, '.', '-' and '_'")
    publishing.add_argument("--step", default="latest", help="a number, latest (default), or tag:NAME")
    publishing.add_argument(
        "--include", action="append", metavar="PATTERN", help="paths of the tensors (default: model/*)"
    )
    publishing.add_argument("--exclude", action="append", metavar="PATTERN", help="paths of tensors to leave out")
    publishing.add_argument("--dtype", help="convert floating-point tensors, for example to bfloat16")
    publishing.add_argument("--move", action="store_true", help="publish also if the name belongs to another run")


def _publish(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.publishing.publisher import publish
    from headrace.checkpoint.publishing.source import check_choice
    from headrace.checkpoint.repository import check, steps

    if not options.run:
        raise UsageError("publish needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    base = steps.find(store, options.run, check.step_of(options.step))
    if base is None:
        raise steps.missing(store, options.run)
    choice = check_choice(options.include or "model/*", options.exclude or (), options.dtype)
    record = publish(store, options.name, options.run, base, choice, move=options.move)
    print(json.dumps(msgspec.to_builtins(record), indent=1) if options.json else _line(record))
    return 0


def _published(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.publishing import records

    listed, code = list[records.Published](), 0
    for name in records.published_names(store):
        try:
            record = records.find(store, name)
        except CorruptionError as error:  # the other names are listed
            print(f"{name}: {error}", file=sys.stderr)
            code = error.exit_code
        else:
            listed += [record] if record is not None and options.run in (None, record.run) else []
    if options.json:
        print(json.dumps([msgspec.to_builtins(record) for record in listed], indent=1))
        return code
    for record in listed:
        print(_line(record))
    if not listed and not code:
        print("nothing is published")
    return code


def _line(record: Published) -> str:
    when = datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%d %H:%M:%S")
    update = f"update of {format_bytes(record.update.size)}" if record.update else "no update"
    return (
        f"{record.name}  version {record.number}  {when}Z  run {record.run}  step {record.step}  "
        f"{format_bytes(record.bytes)} of weights, {update}"
    )


def _unpublish(store: Store, options: argparse.Namespace) -> int:
    from headrace.checkpoint.publishing import withdrawal

    done = (withdrawal.withdraw if options.apply else withdrawal.plan)(store, options.name)
    if options.json:
        fields = {"name": done.name, "number": done.number, "version": done.version, "tags": done.tags}
        sizes = {"objects": len(done.objects), "bytes": done.bytes, "applied": options.apply}
        print(json.dumps(msgspec.to_builtins(fields | sizes), indent=1))
        return 0
    if done.version is not None:
        print(_line(done.version))
    verb = "deleted" if options.apply else "to delete"
    print(f"{verb}: {len(done.objects)} objects with {format_bytes(done.bytes)}, {len(done.tags)} tags of steps")
    if not options.apply:
        print("nothing was changed; --apply executes the plan")
    return 0


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "publish": _publish,
    "published": _published,
    "unpublish": _unpublish,
}
