"""Charts as inline SVG: curves, and bars with their spread. No script, no font, no file from elsewhere.

Invariant: pure; the same data give the same text; everything that comes from a results file is escaped. Colours are
classes (`c0` … `c7`) that the page's style gives a light and a dark value; curves also differ by their markers, so colour
alone tells nothing. Failure behaviour: no data, no chart: an empty string.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from headrace.bench.core.table import short

COLOURS = 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 250, 56, 14, 34, 40
_BAR, _GAP, _NAME = 22, 8, 160


@dataclass(frozen=True)
class Point:
    """One place of a curve: all samples there."""

    x: float
    values: Sequence[float]


def curves(
    title: str,
    series: Mapping[str, Sequence[Point]],
    *,
    x_title: str,
    unit: str,
    colours: Mapping[str, int],
    log_y: bool = False,
    labels: Mapping[float, str] | None = None,
    limit: float | None = None,
) -> str:
    """Medians by x, evenly spaced, with whiskers from the smallest to the largest sample."""
    places = sorted({point.x for points in series.values() for point in points})
    values = [
        value for points in series.values() for point in points for value in point.values if value > 0 or not log_y
    ]
    if not places or not values:
        return ""
    scale = _Scale(places, [*values, *([limit] if limit else [])], log_y=log_y)
    parts = [scale.axes(x_title, labels or {x: short(x) for x in places})]
    for name, points in series.items():
        parts.append(_curve(name, sorted(points, key=lambda point: point.x), scale, colours[name], unit))
    if limit:
        y = scale.y(limit)
        parts.append(f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _svg(_WIDTH, _HEIGHT, f"{title}, {unit}", "".join(parts))


def _curve(name: str, points: Sequence[Point], scale: _Scale, colour: int, unit: str) -> str:
    out, line = [], []
    for point in points:
        low, middle, high = min(point.values), statistics.median(point.values), max(point.values)
        x = scale.x(point.x)
        line.append(f"{x:.1f},{scale.y(middle):.1f}")
        out.append(
            f'<line class="whisker c{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{scale.y(low):.1f}" y2="{scale.y(high):.1f}"/>'
        )
        about = f"{escape(name)}: {short(middle)} {escape(unit)} ({short(low)}–{short(high)})"
        out.append(f'<g class="c{colour}">{_marker(colour, x, scale.y(middle))}<title>{about}</title></g>')
    return f'<polyline class="curve c{colour}" points="{" ".join(line)}"/>' + "".join(out)


def _marker(colour: int, x: float, y: float) -> str:
    """A shape of its own for each of the first four colours; later ones repeat them, hollow."""
    hollow = ' class="hollow"' if colour >= 4 else ""
    shapes = (
        f'<circle{hollow} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect{hollow} x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>',
        f'<path{hollow} d="M{x:.1f} {y - 5:.1f} l5 8.5 h-10 z"/>',
        f'<path{hollow} d="M{x:.1f} {y - 5:.1f} l5 5 l-5 5 l-5 -5 z"/>',
    )
    return shapes[colour % 4]


class _Scale:
    """Maps places and values to the drawing."""

    def __init__(self, places: Sequence[float], values: Sequence[float], *, log_y: bool) -> None:
        self._places, self._log = list(places), log_y
        if log_y:
            self.low, self.high = 10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values)))
            self.high = self.high if self.high > self.low else self.low * 10
        else:
            self.low, self.high = 0.0, _round_up(max(values))

    def x(self, place: float) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (self._places.index(place) + 0.5) / len(self._places)

    def y(self, value: float) -> float:
        if self._log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _ticks(self) -> list[float]:
        if self._log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            step = max(1, (last - first + 4) // 5)
            return [10.0**power for power in range(first, last + 1, step)]
        return [self.high * share / 4 for share in range(5)]

    def axes(self, x_title: str, labels: Mapping[float, str]) -> str:
        out = []
        for tick in self._ticks():
            y = self.y(tick)
            out.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            out.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_tick(tick)}</text>')
        every = max(1, math.ceil(len(self._places) / 8))
        for place in self._places[::every]:
            out.append(
                f'<text x="{self.x(place):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{escape(labels[place])}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        out.append(f'<text class="quiet" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>')
        return "".join(out)


def _tick(value: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    return f"{value:g}"


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.999)


def bars(
    title: str,
    rows: Mapping[str, Sequence[float]],
    *,
    unit: str,
    colours: Mapping[str, int],
    limit: float | None = None,
    goal: float | None = None,
) -> str:
    """One bar a candidate: its median, a whisker from smallest to largest, and every sample as a dot."""
    known = {name: values for name, values in rows.items() if values}
    if not known:
        return ""
    most = _round_up(max([max(values) for values in known.values()] + [bound for bound in (limit, goal) if bound]))
    height = _TOP + len(rows) * (_BAR + _GAP) + 8

    def x(value: float) -> float:
        return _NAME + max(0.0, value) / most * (_WIDTH - _NAME - 60)

    out = []
    for place, (name, values) in enumerate(rows.items()):
        y = _TOP + place * (_BAR + _GAP)
        shown = name if len(name) <= 22 else f"{name[:10].rstrip()}…{name[-8:].lstrip()}"  # names differ at their ends
        out.append(
            f'<text x="{_NAME - 8}" y="{y + 15}" text-anchor="end">{escape(shown)}<title>{escape(name)}</title></text>'
        )
        out.append(_bar(values, y, x, colours[name]) if values else f'<text x="{_NAME}" y="{y + 15}">–</text>')
    for bound, kind in ((limit, "limit"), (goal, "goal")):
        if bound is not None:
            out.append(
                f'<line class="{kind}" x1="{x(bound):.1f}" x2="{x(bound):.1f}" y1="{_TOP - 6}" y2="{height - 8}"/>'
            )
    return _svg(_WIDTH, height, f"{title}, {unit}" if unit else title, "".join(out))


def _bar(values: Sequence[float], y: float, x: Callable[[float], float], colour: int) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    centre = y + _BAR / 2
    out = [
        f'<rect class="bar c{colour}" x="{_NAME}" y="{y}" width="{x(middle) - _NAME:.1f}" height="{_BAR}"/>',
        f'<line class="spread" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{centre}" y2="{centre}"/>',
    ]
    out += [f'<circle class="sample" cx="{x(value):.1f}" cy="{centre}" r="2.5"/>' for value in values[:64]]
    out.append(f'<text x="{x(max(middle, high)) + 6:.1f}" y="{y + 15}">{short(middle)}</text>')
    return "".join(out)


def _svg(width: float, height: float, title: str, inner: str) -> str:
    head = f'<text class="title" x="4" y="16">{escape(title)}</text>'
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{head}{inner}</svg>'
