"""`headrace ckpt show | retain | gc | tag | untag | tags`: one step, and what becomes of old ones.

Invariant: `retain` and `gc` print what they would do and change nothing unless `--apply` is given.
Failure behaviour: the error's exit code; a collection that dies is finished by the next one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.checkpoint.lifecycle import collect, tags
from headrace.checkpoint.lifecycle.keep import Keep
from headrace.checkpoint.lifecycle.plan import Plan
from headrace.checkpoint.repository import show
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

_MOST_LINES = 50
_HELP = {
    "show": "one step: its ranks, tensors and bytes, and how they are encoded",
    "retain": "let old steps go: prints a plan, and carries it out with --apply",
    "gc": "delete what no step needs: prints a plan, and carries it out with --apply",
    "tag": "give a step a name, which also keeps it",
    "untag": "forget a name",
    "tags": "list names and their steps",
}


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands; `common` adds the arguments that all have."""
    made = {name: actions.add_parser(name, help=text) for name, text in _HELP.items()}
    for parser in made.values():
        common(parser)
    made["retain"].add_argument("--last", type=int, metavar="N", help="keep the newest N steps")
    made["retain"].add_argument("--every", type=int, metavar="N", help="keep steps whose number is a multiple of N")
    made["retain"].add_argument(
        "--keep-tags", action="append", metavar="PATTERN", help="keep steps with such a tag (default: any tag)"
    )
    for name in ("retain", "gc"):
        made[name].add_argument("--apply", action="store_true", help="do it")
    made["show"].add_argument("--tensors", action="store_true", help="every tensor as well")
    for name in ("tag", "untag"):
        made[name].add_argument("name", metavar="NAME", help="letters, digits, '.', '-' and '_'")
    for name in ("tag", "show"):
        made[name].add_argument("--step", default="latest", help="a number, latest (default), or tag:NAME")
    made["tag"].add_argument("--move", action="store_true", help="also when another step has the name")


def run(store: Store, options: argparse.Namespace) -> int:
    """Carry out one of them."""
    return COMMANDS[options.action](store, options)


def _show(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("show needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    found = show.look(store, options.run, options.step, tensors=options.tensors)
    print(json.dumps(msgspec.to_builtins(found), indent=1) if options.json else show.text(found))
    return 0


def _retain(store: Store, options: argparse.Namespace) -> int:
    if not options.run or (options.last is None and options.every is None):
        raise UsageError("retain needs --run and a policy", hint="for example --run exp42 --last 3 --every 1000")
    keep = Keep(options.last, options.every, tuple(options.keep_tags or ("*",)))
    gone = collect.condemn(store, options.run, keep)
    done = collect.collect(store, gone, keep=keep) if options.apply else collect.preview(store, gone)
    return _tell(options, done)


def _gc(store: Store, options: argparse.Namespace) -> int:
    return _tell(options, collect.collect(store, ()) if options.apply else collect.preview(store, ()))


def _tell(options: argparse.Namespace, done: Plan) -> int:
    if options.json:
        print(json.dumps(_as_json(done, applied=options.apply), indent=1))
    else:
        _print_plan(done, applied=options.apply)
    return 0


def _as_json(plan: Plan, *, applied: bool) -> dict[str, object]:
    found: dict[str, object] = msgspec.to_builtins(plan)
    return found | {"bytes_freed": plan.bytes_freed, "applied": applied}


def _print_plan(plan: Plan, *, applied: bool) -> None:
    done = "" if applied else "would be "
    for step in plan.tombstones:
        print(f"{step.run}  timeline {step.timeline}  step {step.step}: {done}removed")
    for step in plan.spared:
        print(
            f"{step.run}  timeline {step.timeline}  step {step.step}: stays, somebody leans on it or the policy keeps it by now"
        )
    for attempt in plan.aborted:
        print(f"attempt {attempt}: {done}aborted, its lease is over")
    for key, size in plan.objects[:_MOST_LINES]:
        print(f"{key}: {done}deleted" + (f", {format_bytes(size)}" if size else ""))
    if len(plan.objects) > _MOST_LINES:
        print(f"and {len(plan.objects) - _MOST_LINES} objects more")
    print(f"{format_bytes(plan.bytes_freed)} {done}freed, {format_bytes(plan.kept_bytes)} of packs stay")
    if not applied and not plan.empty:
        print("nothing was changed; --apply does it")


def _tag(store: Store, options: argparse.Namespace) -> int:
    if not options.run:
        raise UsageError("tag needs --run", hint="for example --run exp42; `headrace ckpt ls URL` lists the runs")
    return _say(options, tags.tag(store, options.name, options.run, show.step_of(options.step), move=options.move))


def _untag(store: Store, options: argparse.Namespace) -> int:
    tags.untag(store, options.name)
    if options.json:
        print(json.dumps({"untagged": options.name}))
    return 0


def _tags(store: Store, options: argparse.Namespace) -> int:
    found = [tag for tag in tags.all_tags(store) if options.run in (None, tag.run)]
    if options.json:
        print(json.dumps([msgspec.to_builtins(tag) for tag in found], indent=1))
        return 0
    for tag in found:
        print(_line(tag))
    if not found:
        print("no tags")
    return 0


def _say(options: argparse.Namespace, tag: tags.Tag) -> int:
    print(json.dumps(msgspec.to_builtins(tag), indent=1) if options.json else _line(tag))
    return 0


def _line(tag: tags.Tag) -> str:
    return f"{tag.name}  {tag.run}  timeline {tag.timeline}  step {tag.step}"


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {
    "show": _show,
    "retain": _retain,
    "gc": _gc,
    "tag": _tag,
    "untag": _untag,
    "tags": _tags,
}
