"""Small charts in SVG: curves of values over steps, and the timelines of a run over time.

The drawings stretch to the width of the page. Strokes keep their width, and dots are strokes of length zero, so both
stay round. Text is HTML around the drawing, so it stays readable on narrow screens.
Invariant: all text is escaped. Coordinates are finite. A chart has at most `MOST_POINTS` points.
Failure behaviour: none. Values that are not finite leave a gap in a curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeVar

from headrace.checkpoint.report.reading import RunReport, TimelineRow

MOST_POINTS = 2000
_WIDTH, _HEIGHT, _EDGE = 1000.0, 100.0, 6.0
ROW = 46
"""The height of a timeline's row in pixels."""
_LINE = 34
"""Where the line is in a row, from its top."""
Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """Values: (step, value), in ascending order. `current`: whether they are those of the newest branch."""

    points: Sequence[Point]
    current: bool


def curve(title: str, series: Sequence[Series], text: Callable[[float], str]) -> str:
    """A chart of values over steps, with its range and its newest value.

    Args:
        title (str): The name of the values, as text.
        series (Sequence[Series]): The newest branch, and other timelines.
        text (Callable[[float], str]): Formats a value.

    Returns:
        str: HTML; "" if no value is finite.
    """
    thinned = [Series(_thinned(each.points), each.current) for each in series]
    finite = [point for each in thinned for point in each.points if math.isfinite(point[1])]
    if not finite:
        return ""
    x = _scale((step for step, _ in finite), _WIDTH)
    y = _scale((value for _, value in finite), _HEIGHT)
    paths = "".join(
        _path(
            [(x(step), _HEIGHT - y(value)) if math.isfinite(value) else None for step, value in each.points],
            "now" if each.current else "old",
        )
        for each in sorted(thinned, key=lambda each: each.current)  # the newest branch is drawn last
    )
    low, high = min(value for _, value in finite), max(value for _, value in finite)
    newest = max((point for each in thinned if each.current for point in each.points), default=finite[-1])
    range_ = f"{text(low)} to {text(high)}" if low != high else text(low)
    label = f"{title}: {range_}, newest {text(newest[1])}"
    return (
        f"<figure><figcaption><b>{escape(title)}</b><span>{escape(text(newest[1]))}</span></figcaption>"
        f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{paths}</svg><p class="quiet">{escape(range_)}</p></figure>\n'
    )


def _path(points: Sequence[Point | None], kind: str) -> str:
    """A line through the points, with gaps where they are None, and a dot at each point that stands alone."""
    drawn, dots, previous = "", "", None
    for i, point in enumerate(points):
        if point is not None:
            drawn += f"{'M' if previous is None else 'L'}{point[0]:.1f} {point[1]:.1f}"
            following = points[i + 1] if i + 1 < len(points) else None
            if previous is None and following is None:
                dots += f"M{point[0]:.1f} {point[1]:.1f}h0"
        previous = point
    return f'<path class="{kind}" d="{drawn}"/>' + (f'<path class="{kind} dot" d="{dots}"/>' if dots else "")


def lanes(run: RunReport, label: Callable[[TimelineRow], str]) -> str:
    """The timelines of a run, one row each: a dot for each step and each failure, at its time, and lines to the parents.

    Args:
        run (RunReport): The run.
        label (Callable[[TimelineRow], str]): HTML above a timeline's line.

    Returns:
        str: HTML.
    """
    rows = {row.number: i for i, row in enumerate(run.timelines)}
    times = {(line.timeline, line.step): line.committed for line in run.steps if line.committed}
    failed = [(each.timeline, each.began) for each in run.failures]
    x = _scale([*times.values(), *(row.created for row in run.timelines), *(at for _, at in failed)], _WIDTH)
    drawing = ""
    for i, row in enumerate(run.timelines):
        own = [line for line in run.steps if line.timeline == row.number and line.committed]
        current = [x(line.committed) for line in own if line.current]
        other = [x(line.committed) for line in own if not line.current]
        y, begin = i * ROW + _LINE, x(row.created)
        kind = "now" if current or row.followed else "old"
        if row.parent in rows:
            begin = x(times.get((row.parent, row.fork or 0), row.created))
            drawing += f'<path class="{kind}" d="M{begin:.1f} {rows[row.parent] * ROW + _LINE}V{y}"/>'
        drawing += f'<path class="old" d="M{begin:.1f} {y}H{max([begin, *current, *other]):.1f}"/>'
        drawing += f'<path class="{kind}" d="M{begin:.1f} {y}H{max([begin, *current]):.1f}"/>'
        drawing += _dots(other, y, "old") + _dots(current, y, "now")
        drawing += _dots((x(at) for number, at in failed if number == row.number), y, "bad")
    height = ROW * len(run.timelines)
    labels = "".join(f'<div class="lane"><span>{label(row)}</span></div>' for row in run.timelines)
    return (
        f'<div class="lanes"><svg viewBox="0 0 {_WIDTH:.0f} {height}" height="{height}" preserveAspectRatio="none" '
        f'aria-hidden="true">{drawing}</svg>{labels}</div>\n'
    )


def _dots(xs: Iterable[float], y: float, kind: str) -> str:
    found = "".join(f"M{x:.1f} {y}h0" for x in _thinned(sorted(xs)))
    return f'<path class="{kind} dot" d="{found}"/>' if found else ""


def _scale(values: Iterable[float], size: float) -> Callable[[float], float]:
    """Maps the range of the values to the drawing, with a margin."""
    listed = list(values)
    low, high = min(listed), max(listed)
    # halves, because the difference of two large floats may be infinite
    span = high / 2 - low / 2
    room = size - 2 * _EDGE

    def at(value: float) -> float:
        return _EDGE + (room * ((value / 2 - low / 2) / span) if span > 0 else room / 2)

    return at


def _thinned(items: Sequence[T]) -> Sequence[T]:
    """At most `MOST_POINTS` items, evenly spaced, with the last one."""
    if len(items) <= MOST_POINTS:
        return items
    every = -(-len(items) // MOST_POINTS)
    return [*items[:-1:every][: MOST_POINTS - 1], items[-1]]
