"""The global order: an exact permutation for any sizes, the same for every world size, seekable anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.order import MAX_LANES, Order, lanes_for


@st.composite
def orders(draw: st.DrawFn, max_samples: int = 600) -> Order:
    """Any description: uneven lanes, a short last chunk, empty lanes, a batch larger than the dataset."""
    lanes, share = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    return Order(
        samples=draw(st.integers(1, max_samples)),
        batch=lanes * share,
        chunk=draw(st.integers(1, 40)),
        lanes=lanes,
        window=draw(st.integers(1, 9)),
        seed=draw(st.integers(-(2**63), 2**64)),
        shuffle=draw(st.sampled_from([True, True, True, False])),
    )


epochs = st.integers(0, 2**40)


@given(orders(), epochs)
def test_an_epoch_is_a_permutation_of_the_samples(order: Order, epoch: int) -> None:
    assert sorted(order.take(epoch, np.arange(order.samples))) == list(range(order.samples))


@given(orders(), epochs)
def test_seeking_equals_iterating(order: Order, epoch: int) -> None:
    whole = order.take(epoch, np.arange(order.samples))
    at = np.array([0, order.samples // 2, order.samples - 1])
    assert (order.take(epoch, at) == whole[at]).all()
    number = order.full_batches // 2
    if number < order.full_batches:
        assert (order.batch_of(epoch, number) == whole[number * order.batch : (number + 1) * order.batch]).all()


@given(orders(), epochs, st.sampled_from([1, 2, 3, 4, 8]))
def test_every_world_size_sees_the_same_global_batches(order: Order, epoch: int, world_size: int) -> None:
    for number in {0, order.full_batches // 2, order.full_batches - bool(not order.tail)}:
        assume(0 <= number < order.full_batches + bool(order.tail))
        parts = [order.batch_of(epoch, number, rank, world_size) for rank in range(world_size)]
        assert np.concatenate(parts).tolist() == order.batch_of(epoch, number).tolist()
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 10**7), st.integers(1, 5000), st.floats(1, 1e9), st.integers(1, 4), st.integers(0, 99))
def test_what_is_made_from_a_dataset_is_well_formed(n: int, batch: int, size: float, clips: int, seed: int) -> None:
    order = Order.of(n, batch, sample_bytes=size, clips=clips, seed=seed)
    assert order.batch % order.lanes == 0
    assert order.lanes <= MAX_LANES
    assert order.chunk % clips == 0
    assert order.samples == n * clips
    taken = order.take(3, np.linspace(0, order.samples - 1, 50).astype(np.int64))
    assert len(set(taken.tolist())) == len(set(np.linspace(0, order.samples - 1, 50).astype(np.int64).tolist()))


def test_a_million_samples_are_a_permutation() -> None:
    order = Order.of(1_000_003, 768, sample_bytes=500_000, seed=5)
    taken = order.take(1, np.arange(order.samples))
    assert (np.bincount(taken, minlength=order.samples) == 1).all()


@given(st.integers(0, 1000), st.integers(0, 50))
def test_epochs_and_seeds_differ(seed: int, epoch: int) -> None:
    first = Order.of(500, 8, seed=seed)
    other = Order.of(500, 8, seed=seed + 1)
    positions = np.arange(500)
    assert (first.take(epoch, positions) != first.take(epoch + 1, positions)).any()
    assert (first.take(epoch, positions) != other.take(epoch, positions)).any()


def test_a_lane_keeps_its_chunks_in_every_epoch_and_for_every_seed() -> None:
    lanes, share, chunk = 4, 2, 5
    whole = {}
    for seed, epoch in ((0, 0), (0, 7), (9, 1)):
        order = Order(
            lanes * 10 * chunk, lanes * share, chunk, lanes=lanes, window=3, seed=seed
        )  # even lanes: no lane lends samples to another
        taken = order.take(epoch, np.arange(order.samples)).reshape(-1, lanes, share)
        whole[seed, epoch] = [frozenset((taken[:, lane] // chunk).ravel().tolist()) for lane in range(lanes)]
    assert len({tuple(sets) for sets in whole.values()}) == 1
    assert all(len(chunks) == 10 for chunks in whole[0, 0])


def test_samples_of_a_chunk_stay_close_enough_for_a_cache() -> None:
    order = Order(8 * 100 * 10, 16, 10, lanes=8, window=4, seed=1)
    taken = order.take(0, np.arange(order.samples)).reshape(-1, 8, 2)
    for lane in range(8):
        chunks = (taken[:, lane] // 10).ravel()
        spans = [np.ptp(np.flatnonzero(chunks == chunk)) for chunk in np.unique(chunks)]
        assert max(spans) < 4 * 10  # never longer than a window


def test_shuffling_shuffles() -> None:
    order = Order.of(20_000, 64, sample_bytes=100_000, seed=3)
    positions = np.arange(order.samples)
    moved = np.abs(order.take(0, positions) - positions)
    assert moved.mean() > order.samples / 5  # 1/3 for a perfect shuffle
    together = np.diff(order.take(0, positions)) == 1
    assert together.mean() < 0.02


def test_without_shuffling_the_order_is_that_of_the_numbers() -> None:
    order = Order.of(100, 8, shuffle=False)
    assert order.take(5, np.arange(100)).tolist() == list(range(100))


@pytest.mark.parametrize(
    ("batch", "chunks", "lanes"), [(8, 1, 1), (8, 64, 4), (7, 10_000, 7), (768, 10**6, 192), (1, 99, 1)]
)
def test_lanes_divide_the_batch_and_leave_each_lane_enough_chunks(batch: int, chunks: int, lanes: int) -> None:
    assert lanes_for(batch, chunks) == lanes


@given(st.integers(2, 300), st.integers(1, 3), st.integers(1, 30), st.data())
def test_substitutes_are_all_the_neighbours_once_and_never_the_sample(
    n: int, clips: int, chunk: int, data: st.DataObject
) -> None:
    order = Order(n * clips, 1, chunk * clips, lanes=1, window=2)
    sample = data.draw(st.integers(0, n * clips - 1))
    found: list[int] = []
    while (candidate := order.substitute(sample, len(found), clips)) is not None:
        found.append(candidate)
    assert len({f // clips for f in found}) == len(found) == min(n, max(chunk, 16)) - 1
    assert sample // clips not in {f // clips for f in found}
    assert {f % clips for f in found} == {sample % clips}
    assert 0 <= min(found) <= max(found) < n * clips


def test_a_dataset_of_one_sample_has_no_substitute() -> None:
    assert Order.of(1, 1).substitute(0, 0) is None


def test_impossible_orders_and_places_are_refused() -> None:
    order = Order.of(10, 4)
    for wrong in (
        lambda: Order.of(0, 4),
        lambda: Order(10, 4, 1, lanes=3, window=1),
        lambda: order.take(0, np.array([10])),
        lambda: order.batch_of(0, 3),
        lambda: order.batch_of(0, 0, 2, 2),
    ):
        with pytest.raises(UsageError):
            wrong()
