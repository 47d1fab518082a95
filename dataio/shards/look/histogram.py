"""Histograms: chooses the bins, and draws them.

Invariants: every value falls into exactly one of at most `MOST_BINS` bins. The edges are round numbers. They are steps
of 1, 2 or 5, or 1, 2, 5, 10, … if the values span more than two orders of magnitude. The drawing is SVG, and its text
is text.
Failure behaviour: without values, there are no bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_BINS = 24
_WIDTH, _HEIGHT, _BASE, _TOP = 480, 150, 124, 20
_TICK = 96
_ONE_POINT = 1e-9
"""If all values lie closer together than this share of their size, they count as one.

Floats could not distinguish the edges between them.
"""


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins: `edges` has one more number than `counts`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def bins(values: npt.ArrayLike) -> Bins:
    """Sort the values into bins with round edges. Values that are negative or not finite are ignored."""
    found = np.asarray(values, np.float64)
    found = found[np.isfinite(found) & (found >= 0)]
    if not len(found):
        return Bins((), ())
    low, high = float(found.min()), float(found.max())
    edges = _powers(low, high) if low > 0 and high / low > 100 else _steps(low, high)
    counts, _ = np.histogram(found, edges)
    return Bins(tuple(edges), tuple(int(n) for n in counts))


def _steps(low: float, high: float) -> list[float]:
    span, scale = high - low, max(high, 1.0)
    if span < scale * _ONE_POINT:
        span = scale
    least = span / (MOST_BINS - 2)
    size = 10.0 ** math.floor(math.log10(least))
    step = next(size * factor for factor in (1, 2, 5, 10, 20) if size * factor >= least)
    first = math.floor(low / step)
    last = max(first + 1, math.floor(high / step) + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    edges = [
        10.0**e * f for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2) for f in (1, 2, 5)
    ]
    first = max(i for i, edge in enumerate(edges) if edge <= low)
    last = min(i for i, edge in enumerate(edges) if edge > high)
    edges = edges[first : last + 1]
    while len(edges) - 1 > MOST_BINS:
        edges = [*edges[:-1:2], edges[-1]]
    return edges


def svg(found: Bins, label: Callable[[float], str], what: str) -> str:
    """Draw the bins as SVG.

    `label` gives the text of an edge, and `what` names the values. Neither is escaped, so both must be safe in HTML.
    """
    if not found.counts:
        return '<p class="quiet">none</p>'
    width, most = _WIDTH / len(found.counts), max(found.counts)
    bars = []
    for i, count in enumerate(found.counts):
        height = 0.0 if not count else max(2.0, (_BASE - _TOP) * count / most)
        at = f'x="{i * width + 0.75:.2f}" width="{max(1.0, width - 1.5):.2f}"'
        title = f"{label(found.edges[i])} to {label(found.edges[i + 1])}: {count}"
        bars.append(f'<g><rect class="hit" {at} y="0" height="{_BASE}"><title>{title}</title></rect>')
        bars.append(f'<rect class="bar" {at} y="{_BASE - height:.1f}" height="{height:.1f}" rx="1.5"/></g>')
    ticks = "".join(_tick(found.edges, i, label) for i in _ticks(found.edges))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{what}, by {len(found.counts)} bins">'
        f'{"".join(bars)}<line class="axis" x1="0" x2="{_WIDTH}" y1="{_BASE}" y2="{_BASE}"/>'
        f'<text class="most" x="0" y="10">{most:,}</text>{ticks}</svg>'
    )


def _ticks(edges: Sequence[float]) -> list[int]:
    """Return the edges that get a label: the first, the last, and some between, one per `_TICK` pixels."""
    last = len(edges) - 1
    step = max(1, math.ceil(last * _TICK / _WIDTH))
    return [*(i for i in range(0, last, step) if i + step <= last), last]


def _tick(edges: Sequence[float], i: int, label: Callable[[float], str]) -> str:
    x = _WIDTH * i / (len(edges) - 1)
    anchor = "start" if not i else "end" if i == len(edges) - 1 else "middle"
    return f'<text x="{x:.1f}" y="{_BASE + 18}" text-anchor="{anchor}">{label(edges[i])}</text>'
