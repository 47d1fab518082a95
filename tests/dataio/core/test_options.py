"""Types of command-line options."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core import options


@given(st.integers(1, options.MOST))
def test_whole_numbers_from_1_are_counts(number: int) -> None:
    assert options.count(str(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "1e3", "٣", "many", str(options.MOST + 1), "9" * 10_000])
def test_anything_else_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to") as refused:
        options.count(text)
    assert len(str(refused.value)) < 120


def test_a_count_may_have_a_bound_of_its_own() -> None:
    assert options.count("7", 7) == 7
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 7"):
        options.count("8", 7)


@given(st.floats(0, options.MOST, exclude_min=True))
def test_numbers_above_0_are_amounts(number: float) -> None:
    assert options.amount(repr(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "", "nan", "inf", "1e99", "0x1", "some", "9" * 10_000])
def test_what_is_no_amount_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0, at most") as refused:
        options.amount(text)
    assert len(str(refused.value)) < 120
