"""Histograms: every value in one bin of round edges."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.dataio.shards.look import histogram

VALUES = st.lists(st.floats(0, 1e15, allow_subnormal=False), min_size=1, max_size=50)


@given(VALUES)
@example([0.0, 1.07e-217])
@example([1e15, 1e15 + 0.125])
@example([5.0, 5.0 + 1e-12])
def test_every_value_lies_in_one_of_a_few_bins(values: list[float]) -> None:
    found = histogram.bins(values)
    assert 1 <= len(found.counts) <= histogram.MOST_BINS
    assert len(found.edges) == len(found.counts) + 1
    assert list(found.edges) == sorted(set(found.edges))
    assert sum(found.counts) == len(values)


def test_edges_are_round() -> None:
    assert histogram.bins([2.1, 9.7]).edges[:3] == (2.0, 2.5, 3.0)
    assert histogram.bins([1, 30_000]).edges[:5] == (1, 2, 5, 10, 20)
    assert histogram.bins([5, 5, 5]).counts.count(3) == 1


def test_what_is_no_number_is_left_out() -> None:
    assert histogram.bins([float("nan"), float("inf"), -1, 3]).counts.count(1) == 1
    assert histogram.bins([]) == histogram.Bins((), ())
    assert "none" in histogram.svg(histogram.bins([]), str, "nothing")


def test_the_tallest_bar_is_the_fullest_bin() -> None:
    text = histogram.svg(histogram.bins(np.array([1.0] * 9 + [2.0])), lambda v: f"{v:g}", "things")
    assert text.count('class="bar"') >= 2
    assert ">9</text>" in text
