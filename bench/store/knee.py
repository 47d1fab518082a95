"""Where more requests at once stop paying.

The knee is where Kleinrock's power, throughput divided by response time, is largest (L. Kleinrock, "Power and
deterministic rules of thumb for probabilistic problems in computer communications", ICC 1979): below it throughput is
given away, above it requests mostly wait.
Invariant: pure. Failure behaviour: no points, no knee.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.bench.core.results import Samples
from headrace.bench.core.table import short
from headrace.bench.store.cells import Cell
from headrace.dataio.core.limits import format_bytes

_ENOUGH = 0.9


@dataclass(frozen=True)
class Point:
    """One concurrency: requests at once, throughput in any unit, median latency in ms."""

    width: int
    throughput: float
    latency: float


@dataclass(frozen=True)
class Knee:
    """`best`: the point of the greatest power; `enough`: the smallest concurrency with nine tenths of the greatest throughput."""

    best: Point
    enough: Point


def find(points: Iterable[Point]) -> Knee | None:
    """The knee of one curve."""
    known = sorted((point for point in points if point.latency > 0), key=lambda point: point.width)
    if not known:
        return None
    most = max(point.throughput for point in known)
    best = max(known, key=lambda point: point.throughput / point.latency)
    return Knee(best, next(point for point in known if point.throughput >= _ENOUGH * most))


def sentences(cells: Iterable[Cell], candidates: Mapping[str, Samples]) -> list[str]:
    """One sentence for each operation and size of the first candidate."""
    if not candidates:
        return []
    name, samples = next(iter(candidates.items()))
    curves: dict[tuple[str, int], list[Point]] = {}
    for cell in cells:
        rates, latencies = samples.metrics.get(cell.name), samples.metrics.get(f"{cell.name}_p50")
        if rates and latencies:
            point = Point(cell.width, statistics.median(rates), statistics.median(latencies))
            curves.setdefault((cell.operation, cell.size), []).append(point)
    return [line for (operation, size), points in curves.items() if (line := _sentence(name, operation, size, points))]


def _sentence(name: str, operation: str, size: int, points: list[Point]) -> str:
    knee = find(points)
    if knee is None or len(points) < 2:
        return ""
    what = f"{operation} {format_bytes(size)}" if size else operation
    unit = "MB/s" if size else "keys/s"
    best = f"{short(knee.best.throughput)} {unit}, p50 {short(knee.best.latency)} ms"
    return (
        f"{name}, {what}: knee at {knee.best.width} at once ({best}); "
        f"{knee.enough.width} at once give nine tenths of the most"
    )
