"""What a sweep measures: one cell for every operation, size and concurrency that the bounds leave.

Invariant: pure; the same for every client, so that cells can be compared. A cell that a bound leaves out is named in
`left_out`. Failure behaviour: an operation that nobody knows is a `UsageError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.bench.core.results import Metric
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import KIB, MIB, format_bytes

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
"""Cells that would hold more than this in memory at once are left out."""


@dataclass(frozen=True, order=True)
class Cell:
    """`size` in bytes of one request (0 for list), `width` requests at once."""

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
        """All cells that fit in memory."""
        return [cell for cell in self._all() if cell.size * cell.width <= MAX_HELD]

    def left_out(self) -> list[Cell]:
        """Those that do not."""
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
    """The metrics of a part: throughput, percentiles and CPU of every cell, and the peak memory of the client."""
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
