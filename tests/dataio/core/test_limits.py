"""Sizes that people write."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("4MiB", 4 << 20),
        ("256M", 256 << 20),
        ("1.5GB", 1_500_000_000),
        (" 2 kb ", 2000),
        ("1t", 1 << 40),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e6", "4 parsecs", "4MiBs", "1,5GB", "nan"])
def test_what_is_no_size_is_refused_and_quoted(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_is_near_the_size(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.06)
