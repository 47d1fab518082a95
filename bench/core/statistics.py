"""Whether two sets of samples differ beyond noise.

The test is the exact Mann–Whitney U test (H. B. Mann and D. R. Whitney, "On a test of whether one of two random variables
is stochastically larger than the other", 1947): over all ways to deal the pooled ranks, the share that is at least as
lopsided as what was seen. Many metrics are compared at once, so the p values are judged together by the procedure of
Benjamini and Hochberg (1995), which bounds the share of false alarms among the changes reported. The size of a change is
the ratio of medians with a percentile-bootstrap interval (Efron, 1979), seeded.
Invariant: pure and deterministic. With too few samples to reach the level at all, that is the answer, not "no change".
Failure behaviour: empty samples are a `ValueError`.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.05
_EXACT = 50_000
_RESAMPLES = 2000


def mann_whitney(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Two-sided p value; exact up to 50,000 deals, of which more are sampled (seeded)."""
    if not ours or not theirs:
        raise ValueError("no samples")
    ranks = _ranks([*ours, *theirs])
    n, middle = len(ours), len(ours) * (len(ranks) + 1) / 2
    seen = abs(sum(ranks[:n]) - middle) - 1e-9
    deals = math.comb(len(ranks), n)
    if deals <= _EXACT:
        hits = sum(abs(sum(chosen) - middle) >= seen for chosen in itertools.combinations(ranks, n))
        return hits / deals
    rng = random.Random(0)
    hits = sum(abs(sum(rng.sample(ranks, n)) - middle) >= seen for _ in range(_EXACT))
    return (hits + 1) / (_EXACT + 1)


def smallest_p(ours: int, theirs: int) -> float:
    """What `mann_whitney` returns at the least for so many samples that are all different."""
    return 2 / math.comb(ours + theirs, ours)


def _ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    for _, group in itertools.groupby(enumerate(order), key=lambda pair: values[pair[1]]):
        members = list(group)
        shared = statistics.fmean(place + 1 for place, _ in members)
        for _, index in members:
            ranks[index] = shared
    return ranks


def benjamini_hochberg(p_values: Mapping[str, float], level: float = LEVEL) -> set[str]:
    """The names whose p values count as discoveries at this false discovery rate."""
    order = sorted(p_values, key=p_values.__getitem__)
    cut = max((place for place, name in enumerate(order, 1) if p_values[name] <= level * place / len(order)), default=0)
    return set(order[:cut])


@dataclass(frozen=True)
class Interval:
    """Ratio of medians, and the 95 % bootstrap interval around it."""

    ratio: float
    low: float
    high: float


def ratio_of_medians(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Median of `ours` over that of `theirs`; None where a median of `theirs` is zero."""
    if not statistics.median(theirs):
        return None
    rng = random.Random(0)
    drawn = sorted(
        statistics.median(rng.choices(ours, k=len(ours))) / below
        for _ in range(_RESAMPLES)
        if (below := statistics.median(rng.choices(theirs, k=len(theirs))))
    )
    low, high = drawn[int(0.025 * len(drawn))], drawn[int(0.975 * len(drawn))]
    return Interval(statistics.median(ours) / statistics.median(theirs), low, high)
