"""Merge several streams into one by fixed shares, evenly and without a table.

Purpose: `Interleave` computes which stream fills place x of a merged stream, and how often that stream filled earlier
places. Buckets are interleaved this way, batch by batch. `Strata` computes which stream fills slot s of batch t, and
how often that stream filled a lane's slots of earlier batches. Mixtures are composed this way, sample by sample. Both
take O(log D) for D streams.

How `Interleave` works. Place x is mapped to the point u = (step * x + offset) mod Q of a circle of Q points. On the
circle, each stream has an arc as long as its quota. `step` is about Q divided by the golden ratio and is coprime to Q
(a Weyl sequence). Of all steps, this one distributes the points of every range of places most evenly, and exactly so if
Q is a Fibonacci number. The number of earlier places on an arc is a sum of floors. Euclid's algorithm computes it in
O(log Q) steps (Graham, Knuth, Patashnik, Concrete Mathematics, 3.5).

How `Strata` works. The slots of a batch of G are G evenly spaced points on a circle. Each stream has an arc as long as
its share w. So it gets floor(w * G) or ceil(w * G) points, however the circle is rotated. Each batch rotates the points
by `step`. The step is chosen by the golden ratio for three moduli: the whole circle, the distance between a lane's
points, and the distance between adjacent points. So slots, lanes and the sum of batches all hold every stream in
proportion to its share. The G / K points of a lane are evenly spaced, too. By Hermite's identity (ibid., 3.2) a single
floor counts the points on an arc, and sums of floors count all earlier ones. Adjacent slots are far from each other on
the circle, in the order of van der Corput's sequence (in the bases of the factors of G). So the slots of a rank are
evenly distributed. They are exactly even for most world sizes, such as powers of two that divide K, or G if K is 1.

Invariants:
- `Interleave`: any Q consecutive places hold each stream exactly as often as its quota. In a range of any length, the
  count differs from the stream's share by a few at most.
- `Strata`: every batch, and every lane's part of a batch, holds a stream's share rounded down or up. Any number of
  consecutive batches holds its share to within a few slots.
- `before` agrees with `stream` and `streams` at every place. No random numbers are drawn, so nothing is stored.

Failure behaviour: `UsageError` for quotas that are negative, all zero, or too many in sum, and for lanes that do not
divide the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.permutation import I64

MAX_QUOTAS = 1 << 30
"""Maximum sum of the quotas. Up to it, the sums of floors fit 64 bits."""
_LOOK = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Interleave:
    """Streams 0 … D-1, merged by their `quotas`. The `offsets` argument of the methods rotates the circle."""

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
        """Close to Q divided by the golden ratio and coprime to Q.

        Of such numbers, it is the hardest to approximate by fractions.
        """
        return golden(self.period)

    def stream(self, places: I64, offsets: int | I64 = 0) -> I64:
        """The stream at each place, 0 <= place < 2^62."""
        points = (self.step * (np.asarray(places, np.int64) % self.period) + offsets) % self.period
        return np.searchsorted(self._ends, points, side="right").astype(np.int64)

    def before(self, streams: I64, places: I64, offsets: int | I64 = 0) -> I64:
        """How often `streams` occur at the places 0 … place-1. All three arguments are broadcast."""
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
    """The step that visits all of `period` places and distributes the points of every range of places most evenly."""
    return evenly(0, 1, period)


def evenly(step: int, modulus: int, factor: int) -> int:
    """A step congruent to `step` modulo `modulus` that distributes points evenly over `modulus * factor` places."""
    ideal = round(factor * _GOLDEN)
    near = range(max(0, ideal - _LOOK), min(factor, ideal + _LOOK + 1))
    steps = (step + modulus * more for more in near)
    return min(
        (one for one in steps if math.gcd(one, modulus * factor) == 1),
        key=lambda one: _quotients(one, modulus * factor),
        default=1,
    )


def _quotients(a: int, b: int) -> int:
    """The sum of the partial quotients of a / b.

    The smaller it is, the more evenly a step of a distributes points over b places.
    """
    total = 0
    while a:
        total, a, b = total + b // a, b % a, a
    return total


def floor_sums(counts: I64, modulus: int, step: int, offsets: I64) -> I64:
    """For each element, the sum over 0 <= x < count of floor((step * x + offset) / modulus).

    No argument may be negative.
    """
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


@dataclass(frozen=True)
class Strata:
    """Streams 0 … D-1, merged by their `quotas` in batches of `batch` slots.

    Each lane has an equal contiguous part of the slots. `start` rotates the points of the first batch; it may be any
    integer.
    """

    quotas: tuple[int, ...]
    batch: int
    lanes: int
    start: int = 0

    def __post_init__(self) -> None:
        if not self.quotas or min(self.quotas) < 0 or not 0 < sum(self.quotas) * self.lanes <= MAX_QUOTAS:
            raise UsageError(f"streams cannot be merged by the quotas {self.quotas} in {self.lanes} lanes")
        if self.batch < 1 or self.batch % self.lanes:
            raise UsageError(f"{self.lanes} lanes do not divide a batch of {self.batch}")

    def streams(self, number: int, lanes: I64) -> I64:
        """The streams in the slots of `lanes` in batch `number`, one row for each lane."""
        turned = (number * self._step + self.start) % self._circle
        inside = _spread(np.arange(self._lane_slots), self._lane_slots) * self._lane_period
        points = (turned + self._lane_points(lanes)[:, None] + inside) % self._circle
        return np.searchsorted(self._ends, points, side="right").astype(np.int64)

    def before(self, streams: I64, number: int, lanes: I64) -> I64:
        """How often `streams` filled the slots of `lanes` in the batches 0 … number-1. The arrays are broadcast."""
        streams, lanes = np.broadcast_arrays(np.asarray(streams, np.int64), np.asarray(lanes, np.int64))
        cycles, rest = divmod(number, self._lane_period)
        length, end = np.asarray(self.quotas, np.int64)[streams] * self.batch, self._ends[streams]
        point = (self._lane_points(lanes) + self.start % self._lane_period) % self._lane_period + self._circle - end
        turn, rests = self._step % self._lane_period, np.full(streams.shape, rest)
        above = floor_sums(rests, self._lane_period, turn, point)
        below = floor_sums(rests, self._lane_period, turn, point + length)
        return cycles * length + below - above

    def totals(self, number: int) -> I64:
        """How often each stream filled slots of the batches 0 … number-1, in all lanes together."""
        return totals([(self, number)])[0]

    @property
    def _period(self) -> int:
        """The distance between adjacent points of all lanes; also the number of batches after which they repeat."""
        return sum(self.quotas)

    @cached_property
    def _lane_slots(self) -> int:
        return self.batch // self.lanes

    @cached_property
    def _lane_period(self) -> int:
        """The distance between a lane's points; also the number of batches after which the lanes repeat."""
        return sum(self.quotas) * self.lanes

    @cached_property
    def _circle(self) -> int:
        return self._lane_period * self._lane_slots

    @cached_property
    def _step(self) -> int:
        return _golden_step(sum(self.quotas), self.lanes, self._lane_slots)

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(np.asarray(self.quotas, np.int64)) * self.batch

    def _lane_points(self, lanes: I64) -> I64:
        """One point of each lane."""
        return _spread(np.asarray(lanes, np.int64), self.lanes) * sum(self.quotas)


def totals(merged: Sequence[tuple[Strata, int]]) -> list[I64]:
    """`Strata.totals` of each (strata, number).

    Strata with quotas of one sum are computed together, which takes a fraction of the time.
    """
    results: list[I64] = [np.zeros(0, np.int64)] * len(merged)
    alike: dict[tuple[int, int], list[int]] = {}
    for place, (strata, _) in enumerate(merged):
        alike.setdefault((strata._period, strata._step % strata._period), []).append(place)
    for (period, step), places in alike.items():
        group = [merged[place] for place in places]
        sizes = [len(strata.quotas) for strata, _ in group]
        counts = np.repeat([number % period for _, number in group], sizes)
        cycles = np.repeat([number // period for _, number in group], sizes)
        lengths = np.concatenate([np.asarray(strata.quotas, np.int64) * strata.batch for strata, _ in group])
        # the points of all lanes are `period` apart, so one floor counts those of a batch before a place on the circle
        above = np.concatenate([strata.start % period + strata._circle - strata._ends for strata, _ in group])
        sums = floor_sums(counts, period, step, above + lengths) - floor_sums(counts, period, step, above)
        for place, part in zip(places, np.split(cycles * lengths + sums, np.cumsum(sizes)[:-1]), strict=True):
            results[place] = part
    return results


def _spread(places: I64, count: int) -> I64:
    """A permutation of 0 … count-1 that moves adjacent numbers far apart.

    It reverses the digits of a number, in the mixed radix of the prime factors of `count`.
    """
    digits, unit, spread = places, count, np.zeros_like(places)
    for factor in _factors(count):
        unit //= factor
        spread += digits % factor * golden(factor) % factor * unit
        digits = digits // factor
    return spread


@lru_cache(maxsize=64)
def _factors(number: int) -> tuple[int, ...]:
    """The prime factors, the largest first.

    If a world size is a power of two that divides `number`, each rank then has a complete block of the reversed order.
    """
    factors, factor = list[int](), 2
    while factor * factor <= number:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(sorted([*factors, *([number] if number > 1 else [])], reverse=True))


@lru_cache(maxsize=64)
def _golden_step(period: int, lanes: int, lane_slots: int) -> int:
    """A step chosen by the golden ratio modulo `period`, `period * lanes` and `period * lanes * each`."""
    step, modulus = golden(period), period
    for factor in (lanes, lane_slots):
        step, modulus = evenly(step, modulus, factor), modulus * factor
    return step
