"""One HTML page that shows how the modules of a run changed over a series of steps, as a heat map.

Purpose: users see at a glance which layers still move, which are frozen, and where a run went wrong. Rows are modules by
path, columns are pairs of steps, and the colour is the relative change: the norm of the difference divided by the norm
before. The page is one file. It has no scripts and needs no network.
Invariants:

* A module's change covers all its tensors that were read. Its tensors are those with the same path but for the last part.
* At most `MOST_ROWS` rows: if a run has more modules, their paths are shortened until they fit.
* All text from checkpoints is escaped. The page is readable from a width of 400 pixels, in light and dark mode.

Failure behaviour: none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from headrace.checkpoint.compare.diff import StepDiff, TensorChange, TensorForm
from headrace.checkpoint.pages.document import document, style_of
from headrace.dataio.core.limits import counted, format_bytes

MOST_ROWS = 400
MOST_LISTED = 40
_LEAST, _MOST = -6.0, 0.0
"""The colour covers relative changes from 10 ** _LEAST to 10 ** _MOST."""
_MIDDLE, _STRONG = 0.62, 0.82
"""Levels from which on the text has another colour: in dark mode, and in both modes."""


@dataclass(slots=True)
class _Cell:
    """The change of one module between two steps. `equal`, `changed`, `other`: numbers of its tensors."""

    square_before: float = 0.0
    square_diff: float = 0.0
    largest: float = 0.0
    equal: int = 0
    changed: int = 0
    other: int = 0
    nonfinite: int = 0

    def add(self, change: TensorChange) -> None:
        self.square_before += change.norm_a**2
        self.square_diff += change.norm_diff**2
        self.largest = max(self.largest, change.largest)
        self.nonfinite += change.nonfinite
        self.changed += 1

    @property
    def relative(self) -> float | None:
        if self.square_before > 0:
            return math.sqrt(self.square_diff / self.square_before)
        return 0.0 if self.square_diff == 0 else None


def page(where: str, diffs: Sequence[StepDiff]) -> str:
    """The page of a series of comparisons. `where` is the repository's URL."""
    pairs = "".join(_pair(each) for each in diffs)
    return document(
        f"{diffs[0].a} → {diffs[-1].b}",
        where,
        f"<h2>Relative change of each module</h2>\n{_KEY}{_heat(diffs)}<h2>Comparisons</h2>\n{pairs}",
        style_of("headrace.checkpoint.compare", "page.css"),
        "headrace ckpt diff",
    )


_KEY = (
    '<p class="key"><span>10<sup>−6</sup></span><span class="bar" role="img" aria-label="from pale to strong"></span>'
    '<span>1 and more</span><span class="same">= equal</span><span class="odd">≠ added, removed or reshaped</span></p>\n'
)


def _heat(diffs: Sequence[StepDiff]) -> str:
    columns = _columns(diffs)
    rows = sorted({module for column in columns for module in column}, key=_order)
    head = "".join(f"<th>{escape(_step(each.a))} → {escape(_step(each.b))}</th>" for each in diffs)
    body, group = "", None
    for module in rows:
        top = module.partition("/")[0]
        if top != group and module != top:
            body += f'<tr class="group"><th colspan="{len(diffs) + 1}">{escape(top)}</th></tr>\n'
        group = top
        cells = "".join(_td(column.get(module)) for column in columns)
        body += f"<tr><th>{escape(module.removeprefix(f'{top}/') or module)}</th>{cells}</tr>\n"
    return (
        f'<div class="scroll"><table class="heat"><thead><tr><th>module</th>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>\n"
    )


def _step(name: str) -> str:
    return name.rpartition("@")[2]


def _order(module: str) -> list[tuple[int, int, str]]:
    """Sort key of paths, in which numbers sort by value."""
    parts = module.replace("/", ".").split(".")
    return [(0, int(part), "") if part.isascii() and part.isdecimal() else (1, 0, part) for part in parts]


def _columns(diffs: Sequence[StepDiff]) -> list[dict[str, _Cell]]:
    depth = 64
    while True:
        columns = [_cells(each, depth) for each in diffs]
        modules = {module for column in columns for module in column}
        if len(modules) <= MOST_ROWS or depth == 1:
            return columns
        depth = min(depth, max(len(_parts(module)) for module in modules)) - 1


def _parts(name: str) -> list[str]:
    """The parts of a path, each with the separator before it."""
    parts, at = list[str](), 0
    for i, character in enumerate(name):
        if character in "/." and i:
            parts.append(name[at:i])
            at = i
    return [*parts, name[at:]]


def _module(name: str, depth: int) -> str:
    parts = _parts(name)
    return "".join((parts[:-1] or parts)[:depth])


def _cells(found: StepDiff, depth: int) -> dict[str, _Cell]:
    cells: dict[str, _Cell] = defaultdict(_Cell)
    for change in found.changed:
        cells[_module(change.name, depth)].add(change)
    for name in found.equal_names:
        cells[_module(name, depth)].equal += 1
    for form in (*found.added, *found.removed, *found.reshaped):
        cells[_module(form.name, depth)].other += 1
    return cells


def _td(cell: _Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    title = f"{counted(cell.changed, 'tensor')} changed, {cell.equal} equal, {cell.other} added, removed or reshaped"
    if cell.changed:
        title += f"; norm of the difference {math.sqrt(cell.square_diff):.4g}, largest {cell.largest:.4g}"
    mark = ' <span class="odd">≠</span>' if cell.other else ""
    if cell.nonfinite:
        title += f"; {cell.nonfinite} elements are not finite"
        mark += ' <span class="odd">NaN</span>'
    if not cell.changed:
        return f'<td class="same" title="{escape(title)}">{"=" if cell.equal else ""}{mark}</td>'
    relative = cell.relative
    level = 1.0 if relative is None else _level(relative)
    strong = " strong" if level > _STRONG else " middle" if level > _MIDDLE else ""
    text = "from 0" if relative is None else f"{relative:.2g}"
    return f'<td class="cell{strong}" style="--t:{level:.2f}" title="{escape(title)}">{text}{mark}</td>'


def _level(relative: float) -> float:
    """The strength of the colour, from 0 to 1."""
    if relative <= 0:
        return 0.0
    return min(max((math.log10(relative) - _LEAST) / (_MOST - _LEAST), 0.0), 1.0)


def _pair(found: StepDiff) -> str:
    summary = (
        f"{escape(found.a)} → {escape(found.b)}: {counted(len(found.changed), 'tensor')} changed, {found.equal} equal "
        f"({format_bytes(found.equal_bytes)}), {found.values.total} other values changed; "
        f"{format_bytes(found.bytes_compared)} of {format_bytes(found.bytes_total)} compared"
    )
    tables = _changed(found.changed)
    tables += (
        _forms("added", found.added)
        + _forms("removed", found.removed)
        + _forms("of another shape or type", found.reshaped)
    )
    values = [
        f"<li>{escape(each.path)}: <code>{escape(str(each.a))}</code> → <code>{escape(str(each.b))}</code></li>"
        for each in found.values.listed[:MOST_LISTED]
    ]
    if values:
        tables += f"<p>other values</p><ul>{''.join(values)}{_more(found.values.total)}</ul>"
    return f"<details><summary>{summary}</summary>\n{tables}</details>\n"


def _changed(changes: Sequence[TensorChange]) -> str:
    if not changes:
        return ""
    largest = sorted(changes, key=lambda each: math.inf if each.relative is None else each.relative, reverse=True)
    rows = "".join(
        f"<tr><td>{escape(each.name)}</td><td>{_number(each.relative)}</td><td>{each.norm_a:.4g}</td>"
        f"<td>{each.norm_b:.4g}</td><td>{each.norm_diff:.4g}</td><td>{each.largest:.3g}</td>"
        f"<td>{each.changed / max(each.elements, 1):.1%}</td><td>{escape(each.dtype)}</td></tr>\n"
        for each in largest[:MOST_LISTED]
    )
    titles = ("tensor", "relative", "|a|", "|b|", "|b−a|", "max", "changed", "type")
    head = f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"
    return (
        f'<div class="scroll"><table class="names"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
        f"<ul>{_more(len(changes))}</ul>"
    )


def _forms(what: str, forms: Iterable[TensorForm]) -> str:
    listed = list(forms)
    if not listed:
        return ""
    rows = "".join(
        f"<li>{escape(each.name)} {escape(each.dtype_a or each.dtype_b)} {list(each.shape_a or each.shape_b)}</li>"
        for each in listed[:MOST_LISTED]
    )
    return f"<p>{what}</p><ul>{rows}{_more(len(listed))}</ul>"


def _more(total: int) -> str:
    return f"<li>and {total - MOST_LISTED} more (--json lists them)</li>" if total > MOST_LISTED else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
