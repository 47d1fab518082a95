"""Charts of a part as inline SVG: curves for sweeps, bars for comparisons of candidates. They load no script, font or
file.

Invariant: the functions are pure: the same data give the same text. All text from a results file is escaped. Colours
are classes (`c0` … `c7`) that have a light and a dark value in the page's style. Curves also differ by their markers.
The page's table has every metric with samples, whether or not it is drawn.
Failure behaviour: without samples a chart is an empty string.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from headrace.bench.core.measure import Latencies
from headrace.bench.core.results import Metric, Part, Samples
from headrace.bench.core.table import short
from headrace.dataio.core.limits import format_bytes

COLOURS = 8
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 420, 250, 56, 14, 34, 40
_BAR, _GAP, _NAME = 22, 8, 160


@dataclass(frozen=True)
class Point:
    """One x value of a curve, with all its samples."""

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
    """Draw medians by x, evenly spaced, with whiskers from the smallest to the largest sample."""
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
    """Draw a marker. Each of the first four colours has its own shape; the other four repeat these shapes, hollow."""
    hollow = ' class="hollow"' if colour >= 4 else ""
    shapes = (
        f'<circle{hollow} cx="{x:.1f}" cy="{y:.1f}" r="4"/>',
        f'<rect{hollow} x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>',
        f'<path{hollow} d="M{x:.1f} {y - 5:.1f} l5 8.5 h-10 z"/>',
        f'<path{hollow} d="M{x:.1f} {y - 5:.1f} l5 5 l-5 5 l-5 -5 z"/>',
    )
    return shapes[colour % 4]


class _Scale:
    """Maps x values and samples to coordinates in the drawing."""

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
    """Draw a bar for each candidate: its median, a whisker from smallest to largest, and up to 64 samples as dots."""
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
        shown = name if len(name) <= 22 else f"{name[:10].rstrip()}…{name[-8:].lstrip()}"  # the ends of names differ
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


X_AXES = ("concurrency", "gpus", "ranks", "interval")
"""Axes that can be the x axis of a curve. The first one that a metric has is used."""
_PERCENTILES = {0.5: "50 %", 0.9: "90 %", 0.99: "99 %", 0.999: "99.9 %", 0.9999: "99.99 %"}
_PERCENTILE_QUANTITIES = ("latency p50", "latency p99", "latency p999")
"""Quantities that have their own charts, by percentile."""
_LOG = ("gpus", "interval")


def colours_of(part: Part) -> dict[str, int]:
    """Return a colour for each candidate. It is the same in all charts of the part."""
    return {name: place % COLOURS for place, name in enumerate(part.candidates)}


def charts_of(part: Part) -> list[tuple[str, list[str]]]:
    """Return the (heading, charts) of a part: one heading for each operation, then the bars of metrics without a
    sweep."""
    found: dict[str, list[str]] = {}
    for heading, chart in (*_swept(part), *_latencies(part), *(("Side by side", chart) for chart in _beside(part))):
        if chart:
            found.setdefault(heading or "All settings", []).append(chart)
    return list(found.items())


def _axis(metric: Metric) -> str:
    return next((name for name in X_AXES if name in metric.axes), "")


def _swept(part: Part) -> Iterator[tuple[str, str]]:
    """Yield (operation, chart): one chart for each quantity and each setting of the axes other than x."""
    lines: dict[tuple[str, str, tuple[tuple[str, str | float], ...]], list[tuple[str, Metric]]] = {}
    for name, metric in part.metrics.items():
        if not metric.quantity or not _axis(metric) or metric.quantity in _PERCENTILE_QUANTITIES:
            continue
        others = tuple((axis, at) for axis, at in metric.axes.items() if axis not in (_axis(metric), "operation"))
        lines.setdefault((str(metric.axes.get("operation", "")), metric.quantity, others), []).append((name, metric))
    for (operation, quantity, others), members in lines.items():
        yield operation, _curve_chart(part, quantity, others, members)


def _curve_chart(
    part: Part, quantity: str, others: tuple[tuple[str, str | float], ...], members: list[tuple[str, Metric]]
) -> str:
    axis, metric = _axis(members[0][1]), members[0][1]
    series = {
        name: [Point(float(m.axes[axis]), samples.metrics[key]) for key, m in members if samples.metrics.get(key)]
        for name, samples in part.candidates.items()
    }
    title = ", ".join([*(_place(name, at) for name, at in others), quantity])
    return curves(
        title,
        {name: points for name, points in series.items() if points},
        x_title=_AXIS_TITLES.get(axis, axis),
        unit=metric.unit,
        colours=colours_of(part),
        log_y=_spans_decades(series) and axis not in _LOG,
        limit=metric.limit,
    )


_AXIS_TITLES = {"concurrency": "requests at once", "gpus": "GPUs", "interval": "seconds between checkpoints"}


def _place(axis: str, at: str | float) -> str:
    if axis == "size" and isinstance(at, (int, float)):
        return format_bytes(at) if at else "all"
    return at if isinstance(at, str) else f"{axis} {short(at)}"


def _spans_decades(series: Mapping[str, list[Point]]) -> bool:
    middles = [statistics.median(point.values) for points in series.values() for point in points]
    positive = [value for value in middles if value > 0]
    return bool(positive) and max(positive) > 50 * min(positive)


def _latencies(part: Part) -> Iterator[tuple[str, str]]:
    """Yield (operation, chart): latency percentiles at the highest concurrency, for each operation and size."""
    widest: dict[tuple[str, str | float], tuple[str, Metric]] = {}
    for name, metric in part.metrics.items():
        if any(name in samples.histograms for samples in part.candidates.values()):
            widest[str(metric.axes.get("operation", "")), metric.axes.get("size", 0)] = (name, metric)
    for (operation, _), (name, metric) in widest.items():
        yield operation, _percentiles(part, name, metric)


def _percentiles(part: Part, name: str, metric: Metric) -> str:
    series = {}
    for candidate, samples in part.candidates.items():
        found = Latencies(dict(samples.histograms.get(name, ())))
        known = [share for share in _PERCENTILES if found.total * (1 - share) >= 1 or share == 0.5]
        if found.total:
            series[candidate] = [Point(share, [1e3 * found.percentile(share)]) for share in known]
    return curves(
        f"{metric.title}, latency",
        series,
        x_title="of the requests took at most",
        unit="ms",
        colours=colours_of(part),
        log_y=True,
        labels=_PERCENTILES,
    )


def _beside(part: Part) -> Iterator[str]:
    """Yield bars for the metrics that were not swept."""
    for name, metric in part.metrics.items():
        if metric.quantity:
            continue
        rows = {candidate: samples.metrics.get(name, []) for candidate, samples in part.candidates.items()}
        if len(rows) > 1 and any(rows.values()):
            yield bars(
                full_title(metric),
                rows,
                unit=_unit(metric),
                colours=colours_of(part),
                limit=metric.limit,
                goal=metric.goal,
            )


def _unit(metric: Metric) -> str:
    arrow = "more is better" if metric.better == "higher" else "less is better"
    return f"{metric.unit} ({arrow})" if metric.unit and not says_unit(metric) else arrow


def limits(part: Part) -> list[tuple[str, str, str, float, str]]:
    """Describe all metrics that have a physical limit.

    Each row is (candidate, metric, median, share of the limit, how the limit was found).
    """
    return [
        (name, full_title(metric), f"{short(middle)} {metric.unit}", _share(metric, middle), metric.limit_why)
        for key, metric in part.metrics.items()
        if metric.limit
        for name, samples in part.candidates.items()
        if (middle := _median(samples, key)) is not None
    ]


def full_title(metric: Metric) -> str:
    """Return the title of a metric with its group and operation, for use outside a table."""
    before = [f"{metric.group}:"] if metric.group else []
    before += [str(metric.axes["operation"])] if "operation" in metric.axes else []
    return " ".join([*before, metric.title.strip()])


def says_unit(metric: Metric) -> bool:
    """Return whether the title contains the unit."""
    words = metric.title.replace(",", " ").split()
    return metric.unit in words or (metric.unit == "1/s" and any(word.endswith("/s") for word in words))


def in_words(value: object, name: str = "") -> str:
    """Format a setting: lists with commas, booleans as yes and no, bytes with their units."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key} ({in_words(one)})" for key, one in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(in_words(one, name) for one in value) or "none"
    if isinstance(value, int) and ("bytes" in name or name == "sizes"):
        return format_bytes(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _share(metric: Metric, value: float) -> float:
    assert metric.limit is not None
    return value / metric.limit if metric.better == "higher" else metric.limit / value if value else 1.0


def _median(samples: Samples, key: str) -> float | None:
    values = samples.metrics.get(key)
    return statistics.median(values) if values else None
