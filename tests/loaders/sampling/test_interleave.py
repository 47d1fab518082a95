"""Streams merged by quotas: exact over a period, even in between, counted without walking."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.interleave import MAX_QUOTAS, Interleave, floor_sums

quotas = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)


@given(quotas, st.integers(0, 10**6), st.integers(0, 10**9))
def test_any_period_holds_each_stream_as_often_as_its_quota(shares: tuple[int, ...], start: int, offset: int) -> None:
    merged = Interleave(shares)
    streams = merged.stream(start + np.arange(merged.period), offset)
    assert np.bincount(streams, minlength=len(shares)).tolist() == list(shares)


@given(quotas, st.integers(0, 500))
def test_counting_equals_walking(shares: tuple[int, ...], offset: int) -> None:
    merged = Interleave(shares)
    streams = merged.stream(np.arange(2 * merged.period + 3), offset)
    walked = dict.fromkeys(range(len(shares)), 0)
    counted = merged.before(streams, np.arange(len(streams)), offset)
    for stream, count in zip(streams.tolist(), counted.tolist(), strict=True):
        assert walked[stream] == count
        walked[stream] += 1
    for stream, count in walked.items():
        assert merged.before(np.array([stream]), np.array([len(streams)]), offset) == count


@given(st.integers(1, 10**15), st.integers(1, 30))
def test_far_places_are_counted_too(start: int, length: int) -> None:
    merged = Interleave((5, 700_001, 132_034))
    places = start + np.arange(length + 1)
    streams, counts = merged.stream(places), merged.before(np.full(length + 1, 1), places)
    assert (np.diff(counts) == (streams[:-1] == 1)).all()


@pytest.mark.parametrize("shares", [(416_020, 416_020), (83_204, 748_836), (1, 1, 100, 9), (5000, 1, 333, 4666), (7,)])
def test_every_stretch_has_about_the_right_share(shares: tuple[int, ...]) -> None:
    merged = Interleave(shares)
    streams = merged.stream(np.arange(50_000))
    for stream, quota in enumerate(shares):
        away = np.cumsum(streams == stream) - np.arange(1, 50_001) * quota / merged.period
        assert np.ptp(away) < 8


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 500), st.integers(0, 900))
def test_sums_of_floors_are_those(n: int, modulus: int, step: int, offset: int) -> None:
    expected = sum((step * x + offset) // modulus for x in range(n))
    assert floor_sums(np.array([n]), modulus, step, np.array([offset])).tolist() == [expected]


@given(st.integers(1, MAX_QUOTAS))
def test_the_step_visits_every_point(period: int) -> None:
    step = Interleave((period,)).step
    assert math.gcd(step, period) == 1
    assert 0 <= step < period


@pytest.mark.parametrize("wrong", [(), (0, 0), (3, -1), (MAX_QUOTAS, 1)])
def test_impossible_quotas_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        Interleave(wrong)
