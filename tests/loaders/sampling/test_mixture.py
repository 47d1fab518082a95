"""Mixtures: each source in its own order and its own epochs, by weights that change with the step, on any world size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling import mixed_buckets, mixture
from headrace.loaders.sampling.mixture import MAX_SEGMENTS, RESOLUTION, Mixed, quotas
from headrace.loaders.sampling.schedule import Population

pytestmark = pytest.mark.slow

BIG = 450_000.0


@st.composite
def mixtures(draw: st.DrawFn) -> Mixed:
    """One to four sources of any size, up to three changes of weights, lanes where a source has chunks enough."""
    names = [f"s{n}" for n in range(draw(st.integers(1, 4)))]
    weight = st.one_of(st.just(0.0), st.floats(0.01, 5))
    steps = sorted({0, *draw(st.lists(st.integers(1, 25), max_size=3))})
    weights = [(step, {name: draw(weight) for name in names} | {names[0]: 1.0}) for step in steps]
    sources = {
        n: Population(draw(st.integers(1, 90)), draw(st.sampled_from([1.0, 5e6])), draw(st.integers(1, 3)))
        for n in names
    }
    return Mixed.of(
        sources,
        draw(st.sampled_from([1, 4, 6, 12, 24])),
        weights=weights,
        temperature=draw(st.sampled_from([0.5, 1.0, 3.0])),
        seed=draw(st.integers(0, 99)),
        shuffle=draw(st.booleans()),
        epoch_batches=draw(st.integers(1, 9)),
    )


def walk(mixed: Mixed, steps: int) -> list[tuple[int, int, int]]:
    """(stream, the stream's epoch, virtual sample) of every slot of so many steps."""
    shares = [mixed.share(*divmod(step, mixed.batches)) for step in range(steps)]
    return [row for s in shares for row in zip(s.stream.tolist(), s.epoch.tolist(), s.virtual.tolist(), strict=True)]


@given(mixtures())
@settings(max_examples=30)
def test_no_sample_is_skipped_or_comes_twice_in_an_epoch_of_its_source(mixed: Mixed) -> None:
    found = walk(mixed, 40)
    assert len(set(found)) == len(found)
    for stream, order in enumerate(mixed.orders):
        epochs = Counter(epoch for s, epoch, _ in found if s == stream)
        for epoch in epochs:
            assert {v for s, e, v in found if (s, e) == (stream, epoch)} <= set(range(order.samples))
            if epoch < max(epochs) - 6 * mixed.lanes // order.samples - 1:  # lanes may be a few picks apart
                assert epochs[epoch] == order.samples


@given(mixtures())
@settings(max_examples=30)
def test_the_picks_of_a_lane_are_its_places_of_the_source_one_after_the_other(mixed: Mixed) -> None:
    """Against a naive mixer, which walks every lane and counts."""
    picks, each = Counter[tuple[int, int]](), mixed.batch // mixed.lanes
    for step in range(30):
        share = mixed.share(*divmod(step, mixed.batches))
        assert mixed.taken(*divmod(step, mixed.batches)) == {
            name: sum(n for (_, s), n in picks.items() if s == stream) for stream, name in enumerate(mixed.names)
        }
        for slot, (stream, epoch) in enumerate(zip(share.stream.tolist(), share.epoch.tolist(), strict=True)):
            lane = slot // each
            assert epoch == (picks[lane, stream] * mixed.lanes + lane) // mixed.orders[stream].samples
            picks[lane, stream] += 1


@given(mixtures(), st.integers(0, 10**6))
@settings(max_examples=50)
def test_ranks_put_together_are_the_global_batch(mixed: Mixed, epoch: int) -> None:
    whole = mixed.share(epoch, mixed.batches - 1)
    for world_size in (1, 2, 3, 5):
        parts = [mixed.share(epoch, mixed.batches - 1, rank, world_size) for rank in range(world_size)]
        for name in ("stream", "epoch", "virtual"):
            assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole, name).tolist()
        assert [len(part) for part in parts] == list(whole_sizes(parts[0])) == list(parts[-1].sizes)


def whole_sizes(share: Any) -> tuple[int, ...]:
    sizes: tuple[int, ...] = share.sizes
    assert max(sizes) - min(sizes) <= 1
    return sizes


def test_every_batch_holds_its_shares_as_nearly_as_whole_numbers_can_and_ranks_parts_nearly() -> None:
    mixed = Mixed.of(
        {"a": Population(10**6, BIG), "b": Population(10**5, BIG), "c": Population(3000, BIG)}, 768, temperature=2
    )
    share_of = np.array(mixed.segments[0].quotas) / RESOLUTION
    for step in range(0, 400, 7):
        for rank, world_size in ((0, 1), (3, 8), (40, 48)):
            share = mixed.share(0, step, rank, world_size)
            away = np.bincount(share.stream, minlength=3) - share_of * len(share)
            assert np.abs(away).max() < (3 if world_size == 48 else 1)


@pytest.mark.parametrize("sample_bytes", [1.0, BIG])
def test_two_equal_sources_share_every_small_batch_evenly(sample_bytes: float) -> None:
    sources = {"a": Population(1000, sample_bytes), "b": Population(3000, sample_bytes)}
    mixed = Mixed.of(sources, 4, weights={"a": 1, "b": 1})
    assert all(mixed.share(0, step).stream.sum() == 2 for step in range(mixed.batches))


def test_a_state_of_another_way_of_merging_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"a": Population(40), "b": Population(60)}
    plain, shaped = {}, {}
    for version in (1, mixture.MERGED):
        monkeypatch.setattr(mixture, "MERGED", version)
        monkeypatch.setattr(mixed_buckets, "MERGED", version)
        plain[version] = Mixed.of(sources, 4).described()["order"]
        cells = {name: [one] for name, one in sources.items()}
        shaped[version] = mixed_buckets.MixedBuckets.of(cells, [4], [1]).described()["order"]
    assert plain[1] != plain[2]
    assert shaped[1] != shaped[2]


def test_a_lane_reads_the_same_chunks_of_a_source_in_all_its_epochs() -> None:
    mixed = Mixed.of({"a": Population(1003, 1 << 20), "b": Population(50, 1 << 20)}, 8, weights={"a": 3, "b": 1})
    assert mixed.orders[0].lanes == mixed.lanes == 4
    chunks: dict[tuple[int, int], set[int]] = {}
    for step in range(700):
        share = mixed.share(*divmod(step, mixed.batches))
        for slot in range(8):
            if share.stream[slot] == 0:
                key = (int(share.epoch[slot]), slot // 2)
                chunks.setdefault(key, set()).add(int(share.virtual[slot]) // mixed.orders[0].chunk)
    for lane in range(4):
        assert len(chunks[0, lane] & chunks[2, lane]) > 0.75 * len(chunks[0, lane])  # all but what short lanes are lent
        assert len(chunks[0, lane]) < 45


def test_weights_by_default_are_sizes_and_temperature_flattens_them() -> None:
    assert quotas(("a", "b"), {"a": 900, "b": 100}) == (748_836, 83_204)
    assert quotas(("a", "b"), {"a": 900, "b": 100}, 2.0) == (624_030, 208_010)
    assert quotas(("a", "b"), {"a": 900, "b": 100}, 1e9) == (416_020, 416_020)
    assert Mixed.of({"a": Population(900), "b": Population(50, clips=2)}, 10).segments[0].quotas == (748_836, 83_204)


def test_an_epoch_is_as_many_batches_as_all_sources_fill_once() -> None:
    assert Mixed.of({"a": Population(100, clips=2), "b": Population(55)}, 10, weights={"a": 1, "b": 9}).batches == 25
    assert Mixed.of({"a": Population(3)}, 10).batches == 1
    assert Mixed.of({"a": Population(3)}, 10, epoch_batches=7).batches == 7


def test_a_source_of_weight_0_waits_for_its_segment() -> None:
    mixed = Mixed.of(
        {"a": Population(40), "b": Population(40)}, 4, weights=[(0, {"a": 1, "b": 0}), (5, {"a": 0, "b": 1})]
    )
    streams = [mixed.share(*divmod(step, mixed.batches)).stream.tolist() for step in range(10)]
    assert streams == [[0] * 4] * 5 + [[1] * 4] * 5


def test_a_change_of_weights_in_the_future_leaves_the_past_and_its_name_alone() -> None:
    sources = {"a": Population(40), "b": Population(60)}
    short = Mixed.of(sources, 4, weights=[(0, {"a": 1, "b": 1})])
    longer = Mixed.of(sources, 4, weights=[(0, {"a": 1, "b": 1}), (10, {"a": 5, "b": 1})])
    assert walk(short, 10) == walk(longer, 10)
    assert walk(short, 12) != walk(longer, 12)
    assert short.described(0, 10) == longer.described(0, 10)
    assert short.described(0, 11) != longer.described(0, 11)


def test_a_seek_far_away_gives_what_going_there_gives() -> None:
    mixed = Mixed.of({"a": Population(7), "b": Population(5000, BIG)}, 12, weights={"a": 2, "b": 1}, epoch_batches=1000)
    share, taken = mixed.share(10**9, 3), mixed.taken(10**9, 3)
    assert sum(taken.values()) == (10**12 + 3) * 12
    following = mixed.taken(10**9, 4)
    assert [following[name] - taken[name] for name in mixed.names] == np.bincount(share.stream, minlength=2).tolist()


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"a": 1}, "'b'"),
        ({"a": 1, "b": 1, "c": 1}, "'c'"),
        ({"a": 1, "b": -1}, "'b'"),
        ({"a": 1, "b": float("nan")}, "'b'"),
        ({"a": 0, "b": 0}, "all weights"),
        ({"a": 1, "b": 1e-9}, "'b'"),
        ([(1, {"a": 1, "b": 1})], r"\[1\]"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1, "b": 1})], r"\[0, 0\]"),
        ([(n, {"a": 1, "b": 1}) for n in range(MAX_SEGMENTS + 1)], f"{MAX_SEGMENTS + 1} times"),
        ([], "0 times"),
    ],
)
def test_impossible_weights_are_refused_by_name(weights: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Mixed.of({"a": Population(4), "b": Population(4)}, 4, weights=weights)


def test_impossible_mixtures_are_refused() -> None:
    one = {"a": Population(4)}
    for wrong in (
        lambda: Mixed.of({}, 4),
        lambda: Mixed.of(one, 4, temperature=0),
        lambda: Mixed.of(one, 4, epoch_batches=0),
        lambda: Mixed.of({"a": Population(0)}, 4),
        lambda: Mixed.of(one, 4).share(0, 1),
        lambda: Mixed.of(one, 4).share(0, 0, 2, 2),
    ):
        with pytest.raises(UsageError):
            wrong()
