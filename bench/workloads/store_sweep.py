"""The measurements of `headrace bench store`: a cell for every operation, size and concurrency, and its objects.

All objects are below one fresh random prefix. The benchmark deletes exactly the keys that a sweep can have written, by
name. It never deletes the keys of a listing, so it never touches an object of another program. The knee of a curve is
where Kleinrock's power, throughput divided by response time, is largest (L. Kleinrock, "Power and deterministic rules
of thumb for probabilistic problems in computer communications", ICC 1979).
Invariant: the cells are the same for every client. `left_out` names the cells that a bound excludes.
Failure behaviour: an unknown operation is a `UsageError`. An error of the store is raised, and an object that could not
be deleted is named.
"""

from __future__ import annotations

import random
import statistics
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.bench.core.results import Metric, Samples
from headrace.bench.core.table import short
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import KIB, MIB, format_bytes
from headrace.dataio.store.base import Store

OPERATIONS: Mapping[str, str] = {
    "get": "whole objects",
    "range": "ranges at random places of the largest objects",
    "small": "4 KiB at random places of the largest objects",
    "put": "whole objects",
    "multipart": "objects as a stream of 8 MiB parts",
    "list": "pages of a prefix with 200 objects",
}
READS = ("get", "range", "small")
SMALL = 4 * KIB
PART = 8 * MIB
LISTED = 200
MAX_HELD = 512 * MIB
"""The most bytes that a cell may hold in memory at once. Larger cells are left out."""


@dataclass(frozen=True, order=True)
class Cell:
    """One measurement: requests of `size` bytes (0 for list), `width` at once."""

    operation: str
    size: int
    width: int

    @property
    def name(self) -> str:
        return f"{self.operation}_{self.size}_x{self.width}"

    @property
    def title(self) -> str:
        return f"{format_bytes(self.size)} ×{self.width}" if self.size else f"×{self.width}"


@dataclass(frozen=True)
class Sweep:
    """What to measure: operations, sizes in bytes, requests at once."""

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if unknown := [name for name in self.operations if name not in OPERATIONS]:
            raise UsageError(f"no operation {unknown[0]!r}", hint=f"there are {', '.join(OPERATIONS)}")
        if not self.sizes or not self.widths or min(self.sizes) < 1 or min(self.widths) < 1:
            raise UsageError("sizes and concurrencies are positive numbers")

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def cells(self) -> list[Cell]:
        """Return the cells that fit in memory."""
        return [cell for cell in self._all() if cell.size * cell.width <= MAX_HELD]

    def left_out(self) -> list[Cell]:
        """Return the cells that do not fit in memory."""
        return [cell for cell in self._all() if cell.size * cell.width > MAX_HELD]

    def _all(self) -> list[Cell]:
        return [
            Cell(operation, size, width)
            for operation in self.operations
            for size in self._sizes(operation)
            for width in self.widths
        ]

    def _sizes(self, operation: str) -> Sequence[int]:
        if operation == "list":
            return (0,)
        if operation == "small":
            return (SMALL,) if self.largest > SMALL else ()
        return tuple(size for size in self.sizes if operation != "multipart" or size >= PART)


def metrics(cells: Sequence[Cell]) -> dict[str, Metric]:
    """Return the metrics of a part: throughput, percentiles and CPU of every cell, and the peak memory of the
    client."""
    found: dict[str, Metric] = {}
    for cell in cells:
        axes: dict[str, str | float] = {
            "operation": cell.operation,
            "size": cell.size,
            "concurrency": cell.width,
        }
        unit = "MB/s" if cell.size else "keys/s"
        found[cell.name] = Metric(cell.title, unit, "higher", quantity="throughput", axes=axes)
        for share in ("p50", "p99", "p999"):
            found[f"{cell.name}_{share}"] = Metric(cell.title, "ms", quantity=f"latency {share}", axes=axes)
        if cell.size:
            found[f"{cell.name}_cpu"] = Metric(cell.title, "s/GiB", quantity="cpu", axes=axes)
    return found | {"peak_mib": Metric("peak MiB", "MiB")}


COUNT = 8
"""Objects of each size, read or written in turn."""
_BLOCK = 16 * MIB


def fresh_prefix() -> str:
    """Return a random prefix that no earlier run used."""
    return f"headrace-bench-{uuid.uuid4().hex}"


def key_of(cell: Cell, number: int, sweep: Sweep) -> str:
    """Return the key of a request. Reads share the prepared objects, and writers have their own."""
    if cell.operation == "list":
        return "list/"
    size = sweep.largest if cell.operation in ("range", "small") else cell.size
    kind = "read" if cell.operation in ("get", "range", "small") else cell.operation
    return f"{kind}/{size}/{number % COUNT}"


def prepared(sweep: Sweep) -> dict[str, int]:
    """Return the key and size of each object that must exist before the first request."""
    sizes = set(sweep.sizes if "get" in sweep.operations else ())
    if {"range", "small"} & set(sweep.operations):
        sizes.add(sweep.largest)
    found = {f"read/{size}/{number}": size for size in sorted(sizes) for number in range(COUNT)}
    if "list" in sweep.operations:
        found |= {f"list/{number:05d}": min(SMALL, 16) for number in range(LISTED)}
    return found


def all_keys(sweep: Sweep) -> list[str]:
    """Return every key that the sweep may have written."""
    written = {
        key_of(cell, number, sweep)
        for cell in sweep.cells()
        if cell.operation in ("put", "multipart")
        for number in range(COUNT)
    }
    return sorted(written | set(prepared(sweep)))


def prepare(store: Store, sweep: Sweep, tell: Callable[[str, float], None]) -> int:
    """Write the objects to read, and return their bytes. The contents are random, so that they cannot be compressed."""
    wanted = prepared(sweep)
    for place, (key, size) in enumerate(wanted.items()):
        tell("writing objects", place / len(wanted))
        if size <= _BLOCK:
            store.put(key, random.Random(key).randbytes(size))
        else:
            store.put_multipart(key, _blocks(key, size))
    return sum(wanted.values())


def _blocks(key: str, size: int) -> Iterator[bytes]:
    block = random.Random(key).randbytes(_BLOCK)
    while size > 0:
        yield block[:size]
        size -= len(block)


_ENOUGH = 0.9


@dataclass(frozen=True)
class Point:
    """One point of a curve: requests at once, throughput in any unit, and median latency in ms."""

    width: int
    throughput: float
    latency: float


@dataclass(frozen=True)
class Knee:
    """The knee of a curve.

    `best` is the point of the greatest power. `enough` is the smallest concurrency with nine tenths of the greatest
    throughput.
    """

    best: Point
    enough: Point


def find(points: Iterable[Point]) -> Knee | None:
    """Return the knee of one curve, if it has one."""
    known = sorted((point for point in points if point.latency > 0), key=lambda point: point.width)
    if not known:
        return None
    most = max(point.throughput for point in known)
    best = max(known, key=lambda point: point.throughput / point.latency)
    return Knee(best, next(point for point in known if point.throughput >= _ENOUGH * most))


def sentences(cells: Iterable[Cell], candidates: Mapping[str, Samples]) -> list[str]:
    """Describe the knee of the first candidate, in one sentence for each operation and size."""
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
