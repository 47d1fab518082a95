"""Batches of several streams by fixed shares, each as near to them as whole numbers allow, without a table.

Purpose: say which stream stands in slot s of batch t, and how often it stood in a lane's slots of earlier batches. Mixtures take
samples this way: what one stratum is in sampling, one source is in a batch.

How. The slots of a batch of G are G points on a circle, spread evenly over it; each stream owns an arc as long as its share w, so
it gets floor(w * G) or ceil(w * G) of them, however the points are turned. Each batch turns them by `step`, which is golden on
the circle, on that of a lane's points and on that of one point's neighbourhood, so slots, lanes and the sum of batches see every
stream by its share. A lane's G / K points are evenly spread, too; hence by Hermite's identity (Graham, Knuth, Patashnik, Concrete
Mathematics, 3.2) one floor counts those on an arc, and sums of floors (`headrace.loaders.order.interleave`) all that
lay there before.
Neighbouring slots lie far apart, in the order of van der Corput's sequence (to the bases of the factors of G): so the slots of a
rank are evenly spread, too, exactly so for most world sizes, as for powers of two that divide K, or G where K is 1.

Invariants: of every batch, and of every lane's part of one, a stream has its share rounded down or up. Of any number of
batches in a row it has its share give or take a few. `before` counts what `streams` says. Nothing is drawn or stored; a batch
takes O(G log Q), wherever it is.
Failure behaviour: `UsageError` for quotas that are negative, all zero, or too many, and for lanes that do not divide the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.order.interleave import MAX_QUOTAS, evenly, floor_sums, golden
from headrace.loaders.order.permutation import I64


@dataclass(frozen=True)
class Strata:
    """Streams 0 … D-1 by their `quotas` in batches of `batch` slots, of which each of `lanes` has an equal part in a row.

    `start` turns the first batch's points: any whole number.
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
        """The streams in the slots of `lanes` in batch `number`: a row for each lane."""
        turned = (number * self._step + self.start) % self._circle
        inside = _spread(np.arange(self._each), self._each) * self._around
        points = (turned + self._first(lanes)[:, None] + inside) % self._circle
        return np.searchsorted(self._ends, points, side="right").astype(np.int64)

    def before(self, streams: I64, number: int, lanes: I64) -> I64:
        """How often `streams` stood in the slots of `lanes` in the batches 0 … number-1. Arrays are broadcast."""
        streams, lanes = np.broadcast_arrays(np.asarray(streams, np.int64), np.asarray(lanes, np.int64))
        cycles, rest = divmod(number, self._around)
        length, end = np.asarray(self.quotas, np.int64)[streams] * self.batch, self._ends[streams]
        point = (self._first(lanes) + self.start % self._around) % self._around + self._circle - end
        turn, rests = self._step % self._around, np.full(streams.shape, rest)
        above = floor_sums(rests, self._around, turn, point)
        below = floor_sums(rests, self._around, turn, point + length)
        return cycles * length + below - above

    @cached_property
    def _each(self) -> int:
        return self.batch // self.lanes

    @cached_property
    def _around(self) -> int:
        """From a lane's point to its next one; also the number of batches after which lanes begin again."""
        return sum(self.quotas) * self.lanes

    @cached_property
    def _circle(self) -> int:
        return self._around * self._each

    @cached_property
    def _step(self) -> int:
        return _turn(sum(self.quotas), self.lanes, self._each)

    @cached_property
    def _ends(self) -> I64:
        return np.cumsum(np.asarray(self.quotas, np.int64)) * self.batch

    def _first(self, lanes: I64) -> I64:
        """One point of each lane."""
        return _spread(np.asarray(lanes, np.int64), self.lanes) * sum(self.quotas)


def _spread(places: I64, count: int) -> I64:
    """A permutation of 0 … count-1 that spreads neighbours: digits to the bases of `count`'s factors, in reverse."""
    rest, unit, found = places, count, np.zeros_like(places)
    for factor in _factors(count):
        unit //= factor
        found += rest % factor * golden(factor) % factor * unit
        rest = rest // factor
    return found


@lru_cache(maxsize=64)
def _factors(number: int) -> tuple[int, ...]:
    """The prime factors, the largest first: world sizes that are powers of two then get whole blocks of what they divide."""
    found, factor = list[int](), 2
    while factor * factor <= number:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return tuple(sorted([*found, *([number] if number > 1 else [])], reverse=True))


@lru_cache(maxsize=64)
def _turn(period: int, lanes: int, each: int) -> int:
    """A step that is golden modulo `period`, modulo `period * lanes` and modulo `period * lanes * each`."""
    step, modulus = golden(period), period
    for factor in (lanes, each):
        step, modulus = evenly(step, modulus, factor), modulus * factor
    return step
