"""What a part is shown as: curves for what was swept, bars for what was measured side by side, a table for everything.

Invariant: pure; every metric with samples is in the table, whatever is drawn. Failure behaviour: a part without samples
has no charts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from headrace.bench.core.latency import Latencies
from headrace.bench.core.results import Metric, Part, Samples
from headrace.bench.core.table import short
from headrace.bench.report.charts import COLOURS, Point, bars, curves
from headrace.dataio.core.limits import format_bytes

X_AXES = ("concurrency", "gpus", "ranks", "interval")
"""Axes that become the x axis of a curve; the first that a metric has."""
_PERCENTILES = {0.5: "50 %", 0.9: "90 %", 0.99: "99 %", 0.999: "99.9 %", 0.9999: "99.99 %"}
_PERCENTILE_QUANTITIES = ("latency p50", "latency p99", "latency p999")
"""They have charts of their own, by percentile."""
_LOG = ("gpus", "interval")


def colours_of(part: Part) -> dict[str, int]:
    """A colour for each candidate, the same in all charts of the part."""
    return {name: place % COLOURS for place, name in enumerate(part.candidates)}


def charts(part: Part) -> list[tuple[str, list[str]]]:
    """(heading, charts) of a part: one heading for each operation, then what was measured side by side."""
    found: dict[str, list[str]] = {}
    for heading, chart in (*_swept(part), *_latencies(part), *(("Side by side", chart) for chart in _beside(part))):
        if chart:
            found.setdefault(heading or "All settings", []).append(chart)
    return list(found.items())


def _axis(metric: Metric) -> str:
    return next((name for name in X_AXES if name in metric.axes), "")


def _swept(part: Part) -> Iterator[tuple[str, str]]:
    """(operation, chart): one chart for each quantity and each setting of the axes that are not x."""
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
    """(operation, chart): percentiles of latency at the highest concurrency, for each operation and size."""
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
    """Bars for what was not swept."""
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
    """(candidate, metric, median, share of the physical limit, how the limit was found) of all that have one."""
    return [
        (name, full_title(metric), f"{short(middle)} {metric.unit}", _share(metric, middle), metric.limit_why)
        for key, metric in part.metrics.items()
        if metric.limit
        for name, samples in part.candidates.items()
        if (middle := _median(samples, key)) is not None
    ]


def full_title(metric: Metric) -> str:
    """The title of a metric that stands alone."""
    before = [f"{metric.group}:"] if metric.group else []
    before += [str(metric.axes["operation"])] if "operation" in metric.axes else []
    return " ".join([*before, metric.title.strip()])


def says_unit(metric: Metric) -> bool:
    """Whether the title has the unit in it."""
    words = metric.title.replace(",", " ").split()
    return metric.unit in words or (metric.unit == "1/s" and any(word.endswith("/s") for word in words))


def in_words(value: object, name: str = "") -> str:
    """A setting for people: lists by commas, yes and no, bytes in their units."""
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
