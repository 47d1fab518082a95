"""Batches by shares: as near as whole numbers allow, in lanes and ranks too, counted without walking."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.interleave import MAX_QUOTAS, Strata, totals

shares = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)
sizes = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(lambda pair: (pair[0] * pair[1], pair[0]))
"""A batch, and lanes that divide it."""


def whole(strata: Strata, number: int) -> list[int]:
    return strata.streams(number, np.arange(strata.lanes)).ravel().tolist()


def off(streams: list[int], quotas: tuple[int, ...]) -> float:
    """By how much the worst stream is off its share."""
    wanted = np.array(quotas) / sum(quotas) * len(streams)
    return float(np.abs(np.bincount(streams, minlength=len(quotas)) - wanted).max())


@given(shares, sizes, st.integers(0, 10**15), st.integers(0, 10**20))
def test_every_batch_and_every_lane_hold_their_shares_rounded_up_or_down(
    quotas: tuple[int, ...], size: tuple[int, int], number: int, start: int
) -> None:
    strata = Strata(quotas, *size, start)
    assert off(whole(strata, number), quotas) < 1
    for row in strata.streams(number, np.arange(strata.lanes)).tolist():
        assert off(row, quotas) < 1


@pytest.mark.parametrize(
    ("quotas", "batch", "expected"),
    [((1, 1), 4, {0: 2, 1: 2}), ((1, 3), 8, {0: 2, 1: 6}), ((10, 5, 1), 32, {0: 20, 1: 10, 2: 2})],
)
def test_where_shares_are_whole_every_batch_has_just_them(
    quotas: tuple[int, ...], batch: int, expected: dict[int, int]
) -> None:
    for lanes in (1, 2, 4):
        strata = Strata(quotas, batch, lanes=lanes, start=12345)
        assert all(Counter(whole(strata, number)) == expected for number in range(100))


@given(shares, sizes, st.integers(0, 500))
@settings(max_examples=30)
def test_counting_equals_walking(quotas: tuple[int, ...], size: tuple[int, int], start: int) -> None:
    strata, walked = Strata(quotas, *size, start), np.zeros((size[1], len(quotas)), np.int64)
    every, lanes = np.arange(len(quotas)), np.arange(strata.lanes)
    for number in range(40):
        assert strata.before(every[None, :], number, lanes[:, None]).tolist() == walked.tolist()
        for lane, row in enumerate(strata.streams(number, lanes)):
            walked[lane] += np.bincount(row, minlength=len(quotas))


@given(st.lists(st.tuples(shares, sizes, st.integers(0, 500), st.integers(0, 10**6)), min_size=1, max_size=4))
@settings(max_examples=30)
def test_totals_are_the_sums_over_all_lanes(drawn: list[tuple[tuple[int, ...], tuple[int, int], int, int]]) -> None:
    merged = [(Strata(quotas, *size, start), number) for quotas, size, start, number in drawn]
    for (strata, number), counted in zip(merged, totals(merged), strict=True):
        every, lanes = np.arange(len(strata.quotas)), np.arange(strata.lanes)
        assert counted.tolist() == strata.before(every[None, :], number, lanes[:, None]).sum(axis=0).tolist()
        assert counted.sum() == number * strata.batch


@given(st.integers(1, 10**15), sizes)
def test_far_batches_are_counted_too(number: int, size: tuple[int, int]) -> None:
    strata = Strata((5, 700_001, 132_034), *size, 7)
    every, lanes = np.arange(3)[None, :], np.arange(strata.lanes)[:, None]
    gained = strata.before(every, number + 1, lanes) - strata.before(every, number, lanes)
    rows = strata.streams(number, np.arange(strata.lanes))
    assert gained.tolist() == [np.bincount(row, minlength=3).tolist() for row in rows]


QUOTAS = [(416_020, 416_020), (83_204, 748_836), (277_347, 277_347, 277_346), (1, 1, 100, 9), (7,)]


@pytest.mark.parametrize("quotas", QUOTAS)
@pytest.mark.parametrize(("batch", "lanes"), [(1, 1), (6, 1), (48, 48), (96, 24), (97, 97)])
def test_any_stretch_of_batches_and_every_slot_of_them_have_about_their_shares(
    quotas: tuple[int, ...], batch: int, lanes: int
) -> None:
    strata = Strata(quotas, batch, lanes)
    rows = np.array([whole(strata, number) for number in range(1000)])
    for stream, quota in enumerate(quotas):
        per_slot = np.cumsum(rows == stream, axis=0) - np.arange(1, 1001)[:, None] * quota / sum(quotas)
        assert np.ptp(per_slot, axis=0).max() < 6
        total = np.cumsum((rows == stream).sum(axis=1)) - np.arange(1, 1001) * batch * quota / sum(quotas)
        assert np.ptp(total) < 6


@pytest.mark.parametrize("quotas", QUOTAS)
@pytest.mark.parametrize(("batch", "lanes"), [(8, 1), (8, 8), (768, 192), (96, 1), (40, 8)])
def test_ranks_have_their_shares_rounded_where_their_number_is_a_power_of_two(
    quotas: tuple[int, ...], batch: int, lanes: int
) -> None:
    strata = Strata(quotas, batch, lanes=lanes, start=99)
    for number in range(0, 200, 7):
        row = whole(strata, number)
        for ranks in (2, 4, 8):
            each = batch // ranks
            assert all(off(row[rank * each : (rank + 1) * each], quotas) < 1 for rank in range(ranks))


@pytest.mark.parametrize(
    ("quotas", "batch", "lanes"),
    [((), 4, 1), ((0, 0), 4, 1), ((3, -1), 4, 1), ((MAX_QUOTAS, 1), 4, 1), ((1, 1), 4, 3), ((1,), 0, 1)],
)
def test_impossible_strata_are_refused(quotas: tuple[int, ...], batch: int, lanes: int) -> None:
    with pytest.raises(UsageError):
        Strata(quotas, batch, lanes)
