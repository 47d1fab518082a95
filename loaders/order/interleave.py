"""Several streams merged into one by fixed shares, evenly, without a table.

Purpose: say which stream stands at place x of the merged one, and how many times it stood at earlier places, in O(log D) for D
streams. Mixtures take samples this way, buckets take batches.

How. Place x is the point u = (step * x + offset) mod Q of a circle of Q points, on which each stream owns an arc as long as
its quota; `step` is about Q divided by the golden ratio and has no factor in common with Q (Weyl's sequence; of all steps
the golden one spreads the points of every stretch most evenly, exactly so where Q is a Fibonacci number). Counting the
earlier places that fell on an arc is a sum of floors, which Euclid's algorithm gives in O(log Q) steps (Graham, Knuth,
Patashnik, Concrete Mathematics, 3.5).

Invariants: Q places in a row, wherever they begin, hold each stream exactly as often as its quota says; in any stretch the
number differs from its share by a few at most. `before` counts what `stream` says, at every place. Nothing is drawn, so
nothing has to be stored: the merged stream is a pure function of (quotas, offset).
Failure behaviour: `UsageError` for quotas that are negative, or all zero, or too many in sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.order.permutation import I64

MAX_QUOTAS = 1 << 30
"""Sum of the quotas at most: the sums of floors then fit 64 bits."""
_LOOK = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Interleave:
    """Streams 0 … D-1 by their `quotas`. Offsets, given with each question, start the circle elsewhere: lanes use their own."""

    quotas: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.quotas or min(self.quotas) < 0 or not 0 < sum(self.quotas) <= MAX_QUOTAS:
            raise UsageError(f"streams cannot be merged by the quotas {self.quotas}")

    @cached_property
    def period(self) -> int:
        """Q, the sum of the quotas."""
        return sum(self.quotas)

    @cached_property
    def step(self) -> int:
        """Near Q divided by the golden ratio, prime to Q, and of these the hardest to come near by fractions."""
        return golden(self.period)

    def stream(self, places: I64, offsets: int | I64 = 0) -> I64:
        """Which stream stands at each place, 0 <= place < 2^62."""
        points = (self.step * (np.asarray(places, np.int64) % self.period) + offsets) % self.period
        return np.searchsorted(self._ends, points, side="right").astype(np.int64)

    def before(self, streams: I64, places: I64, offsets: int | I64 = 0) -> I64:
        """How often `streams` stood at the places 0 … place-1. All three are broadcast."""
        streams, places, offsets = np.broadcast_arrays(
            np.asarray(streams, np.int64), np.asarray(places, np.int64), np.asarray(offsets, np.int64)
        )
        cycles, rest = places // self.period, places % self.period
        quotas = np.asarray(self.quotas, np.int64)[streams]
        end, offsets = self._ends[streams], offsets % self.period
        # floor((u - end) / Q) - floor((u - begin) / Q) is -1 on the arc [begin, end), 0 elsewhere, up to whole turns
        above = floor_sums(rest, self.period, self.step, offsets - end + self.period)
        below = floor_sums(rest, self.period, self.step, offsets - end + quotas + self.period)
        return cycles * quotas + below - above

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(np.asarray(self.quotas, np.int64))


@lru_cache(maxsize=64)
def golden(period: int) -> int:
    """The step that spreads the points of every stretch most evenly over `period` places, each of which it reaches."""
    return evenly(0, 1, period)


def evenly(step: int, modulus: int, factor: int) -> int:
    """Of the steps that are `step` modulo `modulus`, one that spreads points evenly over `modulus * factor` places."""
    wanted = round(factor * _GOLDEN)
    near = range(max(0, wanted - _LOOK), min(factor, wanted + _LOOK + 1))
    steps = (step + modulus * more for more in near)
    return min(
        (one for one in steps if math.gcd(one, modulus * factor) == 1),
        key=lambda one: _quotients(one, modulus * factor),
        default=1,
    )


def _quotients(a: int, b: int) -> int:
    """The sum of the partial quotients of a / b: the smaller, the more evenly a step of a spreads points on b places."""
    total = 0
    while a:
        total, a, b = total + b // a, b % a, a
    return total


def floor_sums(counts: I64, modulus: int, step: int, offsets: I64) -> I64:
    """For each element, the sum over 0 <= x < count of floor((step * x + offset) / modulus); nothing is negative."""
    n, b = np.broadcast_arrays(np.asarray(counts, np.int64), np.asarray(offsets, np.int64))
    n, b = n.copy(), b.copy()
    total, m, a = np.zeros(n.shape, np.int64), modulus, step
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        last = a * n + b
        n, b = np.where(n > 0, last // m, 0), last % m
        if a == 0 or not n.any():
            return total
        m, a = a, m
