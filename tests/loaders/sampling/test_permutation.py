"""Keyed permutations: bijective for any size and key, invertible, and stable between machines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.loaders.sampling.permutation import key_of, permute, unpermute

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 3000), keys)
def test_any_key_permutes_any_range(n: int, key: int) -> None:
    values = np.arange(n)
    assert sorted(permute(values, n, key_of(key))) == list(range(n))


@given(st.integers(1, 2**62), keys, st.data())
def test_the_inverse_brings_every_value_back(n: int, key: int, data: st.DataObject) -> None:
    values = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    there = permute(values, n, key_of(key))
    assert there.min() >= 0
    assert there.max() < n
    assert (unpermute(there, n, key_of(key)) == values).all()


@given(st.lists(st.tuples(st.integers(1, 500), keys), min_size=1, max_size=8))
def test_sizes_and_keys_may_differ_from_element_to_element(cases: list[tuple[int, int]]) -> None:
    sizes = np.array([n for n, _ in cases])
    secrets = np.array([key for _, key in cases], np.uint64)
    values = sizes // 2
    together = permute(values, sizes, secrets)
    alone = [permute(values[i : i + 1], int(sizes[i]), secrets[i : i + 1])[0] for i in range(len(cases))]
    assert together.tolist() == alone


def test_results_never_change_between_versions() -> None:
    assert permute(np.arange(10), 10, key_of(1, 2, 3)).tolist() == GOLDEN
    for n, expected in LARGE.items():
        assert permute(np.array([0, n // 2, n - 1]), n, key_of(n)).tolist() == expected
    assert key_of(1, -1).tolist() == [11917333196513764506]


GOLDEN = [1, 8, 5, 0, 2, 7, 4, 3, 6, 9]
LARGE = {
    1000: [796, 937, 894],
    2**32 + 1: [373234036, 3234176070, 2151601868],
    2**53 + 1: [700973115668461, 6273202433344101, 2248053491069561],
    2**62 - 1: [1952660940842280469, 3453285748944284743, 1788938465548462532],
}


def test_a_value_outside_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        permute(np.array([5]), 5, key_of(0))
    with pytest.raises(ValueError, match="outside"):
        unpermute(np.array([-1]), 5, key_of(0))


def test_neighbours_are_spread_evenly() -> None:
    n = 10_000
    moved = np.abs(np.diff(permute(np.arange(n), n, key_of(42)).astype(np.int64)))
    assert abs(moved.mean() / n - 1 / 3) < 0.02  # what independent uniform places give


@given(st.lists(st.integers(-(1 << 70), 1 << 70), min_size=1, max_size=6))
def test_one_key_is_the_one_that_arrays_of_it_have(parts: list[int]) -> None:
    wrapped: list[Any] = [np.array([part & ((1 << 64) - 1)] * 2, np.uint64) for part in parts]
    assert key_of(*wrapped).tolist() == key_of(*parts).tolist() * 2
