"""The quality of a shuffle: compared with a full shuffle, and able to detect a bad one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.mixture import Mixed
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.quality import balance, batch_entropy, quality
from headrace.loaders.sampling.schedule import Population

pytestmark = pytest.mark.slow


def test_the_order_is_near_a_full_shuffle_and_reads_each_chunk_by_about_one_node() -> None:
    order = Order.of(50_000, 64, sample_bytes=450_000, seed=1)
    found = quality(order, np.arange(50_000) // 500, nodes=(1, 2, 8))
    assert found.groups == 100
    assert found.order.distance == pytest.approx(1 / 3, abs=0.03)
    assert found.full.distance == pytest.approx(1 / 3, abs=0.02)
    assert found.order.spread == pytest.approx(found.full.spread, abs=0.02)
    assert found.order.entropy > 0.95 * found.full.entropy
    assert found.reads[1] == 1
    assert found.reads[8] < 1.1
    assert found.full_reads[8] > 6


def test_an_order_that_is_no_shuffle_is_found_out() -> None:
    found = quality(Order.of(10_000, 50, sample_bytes=1e5, shuffle=False), np.arange(10_000) // 500)
    assert found.order.distance == 0
    assert found.order.entropy == 0
    assert found.order.neighbours == pytest.approx(49 / 50)
    assert found.order.spread < 0.01
    diagonal = [[x * 16 // 64 == y for x in range(64)] for y in range(16)]
    assert [[count > 0 for count in row] for row in found.picture] == diagonal


def test_a_shuffle_inside_windows_only_is_found_out() -> None:
    """One lane whose window is the whole of 20 neighbouring chunks moves samples less than a full shuffle."""
    found = quality(Order(4000, 1, 10, lanes=1, window=20, seed=3), batches=4000)
    plain = quality(Order(4000, 1, 10, lanes=1, window=20, shuffle=False), batches=4000)
    assert plain.order.distance == 0 < found.order.distance


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_entropy_is_that_of_the_definition(labels: list[int]) -> None:
    shares = np.array([labels.count(label) for label in set(labels)]) / 6
    assert batch_entropy(np.array(labels), 6) == pytest.approx(sum(share * np.log2(1 / share) for share in shares))


@given(st.integers(1, 400), st.integers(1, 40), st.booleans())
def test_any_order_can_be_measured(samples: int, batch: int, shuffle: bool) -> None:
    found = quality(Order.of(samples, batch, sample_bytes=1e6, shuffle=shuffle), nodes=(1, 3), batches=20)
    assert 0 <= found.order.distance <= 1
    assert found.reads[1] == 1
    assert 1 <= found.reads[3] <= 3
    assert sum(map(sum, found.picture)) == found.batches * found.batch


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="9 groups"):
        quality(Order.of(10, 2), [0] * 9)


def test_batches_of_a_mixture_are_nearer_to_the_shares_than_drawing() -> None:
    mixed = Mixed.of({"a": Population(10**6, 4e5), "b": Population(10**5, 4e5), "c": Population(3000, 4e5)}, 768)
    found = balance(mixed)
    exact = -sum(share * np.log2(share) for share in found.shares.values())
    assert found.shares["a"] == pytest.approx(10**6 / 1_103_000, abs=1e-5)
    assert abs(found.entropy - exact) < abs(found.drawn_entropy - exact) + 0.01
    assert found.away < 6 < found.drawn_away


def test_only_the_first_weights_of_a_curriculum_are_measured() -> None:
    weights = [(0, {"a": 1.0, "b": 0.0}), (5, {"a": 0.0, "b": 1.0})]
    found = balance(Mixed.of({"a": Population(900), "b": Population(900)}, 6, weights=weights))
    assert (found.batches, found.entropy, found.away) == (5, 0, 0)
