"""A latency histogram of bounded size and known error: logarithmic ranges, each cut into 64 equal buckets (as in HdrHistogram).

Invariant: a value between a microsecond and an hour lies in a bucket not wider than 1/64 of it, so a percentile is at
most 1.6 % too high, never too low; what is faster or slower goes into the first or last bucket. Histograms of several threads
or rounds add up. Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_STEPS = 64
_UNIT = 1e-6
_OCTAVES = 32


def edge(seconds: float) -> float:
    """The upper edge, in seconds, of the bucket that a latency lies in."""
    ticks = min(max(seconds / _UNIT, 1.0), 2.0**_OCTAVES)
    octave = int(ticks).bit_length() - 1
    width = 2.0**octave / _STEPS
    bucket = int((ticks - 2.0**octave) / width)
    return float((2.0**octave + (bucket + 1) * width) * _UNIT)


class Latencies:
    """Counts by bucket. Not locked: one a thread, added up afterwards."""

    def __init__(self, counts: Mapping[float, int] | None = None) -> None:
        self.counts = dict(counts or {})

    def add(self, seconds: float) -> None:
        """Count one latency."""
        at = edge(seconds)
        self.counts[at] = self.counts.get(at, 0) + 1

    def merge(self, others: Iterable[Latencies]) -> Latencies:
        """This one with all of `others` added."""
        for other in others:
            for at, count in other.counts.items():
                self.counts[at] = self.counts.get(at, 0) + count
        return self

    @property
    def total(self) -> int:
        """How many latencies were counted."""
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """Seconds that a `share` (0 to 1) of all latencies did not exceed; 0 when there are none."""
        wanted, seen = share * self.total, 0
        for at, count in sorted(self.counts.items()):
            seen += count
            if seen >= wanted:
                return at
        return 0.0

    def mean(self) -> float:
        """Mean of the buckets' edges in seconds; 0 when there are none."""
        return sum(at * count for at, count in self.counts.items()) / self.total if self.counts else 0.0

    def pairs(self) -> list[tuple[float, int]]:
        """(upper edge in seconds, how many), for the results document."""
        return sorted(self.counts.items())
