"""The commands' toolkit: types of arguments, output, and the decorator."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core import cli


@given(st.integers(1, cli.MAX_NUMBER))
def test_whole_numbers_from_1_are_positive_ints(number: int) -> None:
    assert cli.positive_int(str(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "", "1.5", "1e3", "٣", "many", str(cli.MAX_NUMBER + 1), "9" * 10_000])
def test_anything_else_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a whole number from 1 to") as refused:
        cli.positive_int(text)
    assert len(str(refused.value)) < 120


def test_a_positive_int_may_have_a_bound_of_its_own() -> None:
    assert cli.positive_int("7", 7) == 7
    with pytest.raises(argparse.ArgumentTypeError, match="from 1 to 7"):
        cli.positive_int("8", 7)


@given(st.floats(0, cli.MAX_NUMBER, exclude_min=True))
def test_numbers_above_0_are_positive_floats(number: float) -> None:
    assert cli.positive_float(repr(number)) == number


@pytest.mark.parametrize("text", ["0", "-1", "", "nan", "inf", "1e99", "0x1", "some", "9" * 10_000])
def test_any_other_number_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number above 0, at most") as refused:
        cli.positive_float(text)
    assert len(str(refused.value)) < 120
