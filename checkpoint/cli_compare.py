"""`headrace ckpt diff`: what differs between two steps, and how the modules of a run changed over several steps.

Invariant: the command runs without torch. It reads only chunks that differ, and writes nothing but leases.
Failure behaviour: exit code 2 for a missing step, 4 for a damaged chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.checkpoint.compare.diff import StepDiff, TensorChange, TensorForm, diff
from headrace.dataio.core.cli import LISTED, byte_progress, one_line
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import counted, format_bytes
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

if TYPE_CHECKING:
    Actions = argparse._SubParsersAction[argparse.ArgumentParser]

MOST_STEPS = 100
"""The maximum number of steps of one series."""


def add(actions: Actions, common: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the sub-commands. `common` adds the arguments that all of them have."""
    parser = actions.add_parser("diff", help="compare two steps, or several steps of a run")
    common(parser)
    parser.add_argument(
        "between",
        nargs="*",
        metavar="A [URL] B",
        help="two steps, as RUN@STEP, RUN@latest or RUN@tag:NAME; with a URL before the second, B is in that repository",
    )
    parser.add_argument("--steps", metavar="N,N,…", help="with --run: compare each of these steps with the next one")
    parser.add_argument(
        "--include", action="append", metavar="PATTERN", help="only tensors that match, such as model/*"
    )
    parser.add_argument("-o", "--output", metavar="PAGE.html", help="write a page with a heat map of all modules")


def _diff(store: Store, options: argparse.Namespace) -> int:
    with (
        contextlib.ExitStack() as stack,
        byte_progress("comparing", _describe, quiet=options.json) as show,
    ):
        found = [
            diff(
                store,
                a,
                b,
                other=other,
                include=_included(options.include),
                progress=None if show is None else partial(_show, show, f"{a} → {b}"),
            )
            for a, b, other in _pairs(options, stack)
        ]
    if options.output:
        from headrace.checkpoint.compare.page import page

        Path(options.output).write_text(page(store.location.url, found), encoding="utf-8")
    if options.json:
        documents = [_as_json(each) for each in found]
        print(json.dumps(documents if options.steps else documents[0], indent=1))
    else:
        for each in found:
            for line in lines(each):
                print(one_line(line))
        if options.output:
            print(f"page: {options.output}")
    return 0


@dataclass(frozen=True, slots=True)
class _Compared:
    steps: str
    bytes: int
    bytes_total: int


def _show(show: Callable[[_Compared], None], steps: str, done: int, total: int) -> None:
    show(_Compared(steps, done, total))


def _describe(done: _Compared) -> str:
    return done.steps


def _pairs(options: argparse.Namespace, stack: contextlib.ExitStack) -> Iterator[tuple[str, str, Store | None]]:
    between: list[str] = options.between
    if options.steps:
        if between or not options.run:
            raise UsageError("--steps needs --run, and no other steps", hint="for example --run exp42 --steps 100,200")
        steps = [f"{options.run}@{step}" for step in options.steps.split(",")]
        if not 2 <= len(steps) <= MOST_STEPS:
            raise UsageError(f"--steps names {counted(len(steps), 'step')}", hint=f"give 2 to {MOST_STEPS} steps")
        yield from ((a, b, None) for a, b in itertools.pairwise(steps))
    elif len(between) == 3:
        yield between[0], between[2], stack.enter_context(open_store(between[1]))
    elif len(between) == 2:
        yield between[0], between[1], None
    else:
        raise UsageError(
            "diff needs two steps",
            hint="for example `headrace ckpt diff URL exp42@100 exp42@200`, or --run exp42 --steps 100,200,300",
        )


def _included(patterns: Sequence[str] | None) -> Callable[[str], bool] | None:
    if not patterns:
        return None
    return lambda name: any(fnmatch.fnmatchcase(name, each) or name.startswith(f"{each}/") for each in patterns)


def _as_json(found: StepDiff) -> dict[str, object]:
    fields = asdict(found)
    fields["equal_names"] = sorted(set(found.equal_names))
    fields["changed"] = [_finite(asdict(each) | {"relative": each.relative}) for each in found.changed]
    return fields | {"is_equal": found.is_equal}


def _finite(row: dict[str, object]) -> dict[str, object]:
    """The row with None in place of numbers that JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def lines(found: StepDiff) -> list[str]:
    """Describe the differences in lines of text. A line may contain any character of a tensor's name."""
    head = f"{found.a} → {found.b}: "
    if found.is_equal:
        return [f"{head}equal, {counted(found.equal, 'tensor')} ({format_bytes(found.equal_bytes)})"]
    text = [
        f"{head}{counted(len(found.changed), 'tensor')} changed, {found.equal} equal ({format_bytes(found.equal_bytes)}), "
        f"{len(found.added)} added, {len(found.removed)} removed, {len(found.reshaped)} of another shape or type; "
        f"{counted(found.values.total, 'other value')} changed; {format_bytes(found.bytes_compared)} of "
        f"{format_bytes(found.bytes_total)} compared"
    ]
    text += _shortened([_changed(each) for each in sorted(found.changed, key=_size, reverse=True)], "changed tensors")
    text += _shortened([f"  + {_name(each)}  {each.dtype_b} {list(each.shape_b)}" for each in found.added], "added")
    text += _shortened([f"  - {_name(each)}  {each.dtype_a} {list(each.shape_a)}" for each in found.removed], "removed")
    text += _shortened(
        [
            f"  ≠ {_name(each)}  {each.dtype_a} {list(each.shape_a)} → {each.dtype_b} {list(each.shape_b)}"
            for each in found.reshaped
        ],
        "of another shape or type",
    )
    values = [
        f"  {each.path}{f' (rank {each.rank})' if each.rank else ''}: {_value(each.a)} → {_value(each.b)}"
        for each in found.values.listed
    ]
    return text + _shortened(values, "values", found.values.total)


def _shortened(rows: list[str], what: str, total: int | None = None) -> list[str]:
    hidden = (len(rows) if total is None else total) - min(len(rows), LISTED)
    return rows[:LISTED] + ([f"  and {hidden} more {what} (--json lists them)"] if hidden else [])


def _size(change: TensorChange) -> float:
    return change.norm_diff if change.relative is None else change.relative


def _changed(change: TensorChange) -> str:
    relative = "" if change.relative is None else f"  relative {change.relative:.3g}"
    share = change.changed / max(change.elements, 1)
    bad = f"  {change.nonfinite} not finite" if change.nonfinite else ""
    return (
        f"  {_name(change)}  {change.dtype} {list(change.shape)}{relative}  |a| {change.norm_a:.4g}  "
        f"|b| {change.norm_b:.4g}  |b-a| {change.norm_diff:.4g}  max {change.largest:.3g}  {share:.1%} changed{bad}"
    )


def _name(of: TensorChange | TensorForm) -> str:
    return of.name if of.rank < 0 else f"{of.name} (rank {of.rank})"


def _value(text: str | None) -> str:
    return "absent" if text is None else text


COMMANDS: dict[str, Callable[[Store, argparse.Namespace], int]] = {"diff": _diff}
