"""Mixtures in buckets: every batch of one bucket, sources by their shares, counted on without holes, on any world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling import interleave, mixed_buckets
from headrace.loaders.sampling.mixed_buckets import MixedBuckets, Turns, apportion
from headrace.loaders.sampling.mixture import RESOLUTION, Segment, Weights
from headrace.loaders.sampling.quality import bucket_balances
from headrace.loaders.sampling.schedule import Population

pytestmark = pytest.mark.slow

Change = tuple[int, dict[str, float]]


def mixed(cells: Mapping[str, Sequence[int]], batches: Sequence[int] = (4, 6), **options: Any) -> MixedBuckets:
    """Sources, with how many samples each has in each bucket."""
    sources = {name: [Population(count, 1e6) for count in row] for name, row in cells.items()}
    return MixedBuckets.of(sources, batches, [1, 2, 3], **options)


@st.composite
def schedules(draw: st.DrawFn) -> MixedBuckets:
    """Any sources and buckets, some empty, and weights that change, also to 0."""
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map(sorted))
    buckets = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 40), min_size=buckets, max_size=buckets).filter(any)
    weight = st.sampled_from([0.0, 1.0, 2.5, 100.0])
    steps = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=3)))]
    weights: list[tuple[int, Weights]] = []
    for step in steps:
        some = draw(st.fixed_dictionaries(dict.fromkeys(names, weight)).filter(lambda values: any(values.values())))
        weights.append((step, some))
    sizes = draw(st.lists(st.sampled_from([1, 2, 4, 6, 12]), min_size=buckets, max_size=buckets))
    cells = {name: draw(row) for name in names}
    return mixed(cells, sizes, weights=weights, seed=draw(st.integers(0, 99)), epoch_batches=draw(st.integers(1, 30)))


def walk(schedule: MixedBuckets, steps: int) -> list[Any]:
    return [schedule.share(*divmod(step, schedule.batches)) for step in range(steps)]


@given(schedules())
@settings(max_examples=12)
def test_each_batch_is_of_one_bucket_and_what_a_source_has_in_it_comes_without_holes(schedule: MixedBuckets) -> None:
    seen: list[Counter[tuple[int, int]]] = [Counter() for _ in schedule.streams]
    taken = Counter[str]()
    for step, share in enumerate(walk(schedule, 50)):
        if step % 7 == 0:
            counted = schedule.taken(*divmod(step, schedule.batches))
            assert counted == {name: taken[name] for name in schedule.names}
        assert {schedule.buckets[stream] for stream in share.stream.tolist()} == {share.bucket}
        for stream, epoch, virtual in zip(
            *(a.tolist() for a in (share.stream, share.epoch, share.virtual)), strict=True
        ):
            seen[stream][epoch, virtual] += 1
            taken[schedule.streams[stream][0]] += 1
    for stream, places in enumerate(seen):
        assert set(places.values()) <= {1}  # nothing twice in one epoch of the cell
        order = schedule.orders[stream]
        count = len(places)
        open_ = [
            epoch
            for epoch in range(count // order.samples + 2)
            if 0 < sum(e == epoch for e, _ in places) < order.samples
        ]
        assert len(open_) <= 2 or order.samples <= order.batch  # lanes are a few places out of step at a seam


@given(schedules(), st.integers(0, 10**9), st.data())
@settings(max_examples=25)
def test_any_world_size_shares_the_same_batch_at_any_step(
    schedule: MixedBuckets, epoch: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, schedule.batches - 1))
    whole = schedule.share(epoch, number)
    for world_size in (2, 3, 7):
        parts = [schedule.share(epoch, number, rank, world_size) for rank in range(world_size)]
        for field in ("stream", "epoch", "virtual"):
            assert np.concatenate([getattr(part, field) for part in parts]).tolist() == getattr(whole, field).tolist()
        assert [len(part) for part in parts] == list(whole.sizes if world_size == 1 else parts[0].sizes)
        assert {part.bucket for part in parts} == {whole.bucket}


@given(
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 10**6),
)
@settings(max_examples=25)
def test_turns_are_counted_as_they_come(changes: list[tuple[int, list[int]]], offset: int) -> None:
    segments, step = [], 0
    for length, quotas in changes:
        segments.append(Segment(step, apportion(quotas)))
        step += length
    turns, so_far = Turns(tuple(segments), offset % RESOLUTION), Counter[int]()
    for place in range(step + 5):
        assert turns.counts(place).tolist() == [so_far[n] for n in range(3)]
        stream, before = turns.at(place)
        assert before == so_far[stream]
        so_far[stream] += 1


@given(st.lists(st.integers(0, 10**30), min_size=1, max_size=30).filter(any))
def test_whole_shares_add_up_and_leave_no_source_out(values: list[int]) -> None:
    found = apportion(values)
    assert sum(found) == RESOLUTION
    for value, whole in zip(values, found, strict=True):
        assert (whole > 0) == (value > 0)
        assert abs(whole - value * RESOLUTION / sum(values)) <= len(values)


def test_sources_have_their_shares_of_the_samples_whatever_the_buckets_hold() -> None:
    cells = {"tall": [900, 100], "wide": [50, 450]}
    schedule = mixed(cells, (12, 4), weights=[(0, {"tall": 3, "wide": 1}), (4000, {"tall": 1, "wide": 1})])
    first, second = schedule.taken(0, 0), schedule.taken(*divmod(4000, schedule.batches))
    assert not any(first.values())
    assert second["tall"] / sum(second.values()) == pytest.approx(0.75, abs=0.002)
    last = schedule.taken(*divmod(9000, schedule.batches))
    since = {name: last[name] - second[name] for name in last}
    assert since["tall"] / sum(since.values()) == pytest.approx(0.5, abs=0.002)
    samples = Counter[int]()
    for share in walk(schedule, 400):
        samples[share.bucket] += len(share)
    assert samples[0] / sum(samples.values()) == pytest.approx(0.75 * 0.9 + 0.25 * 0.1, abs=0.02)


def test_an_epoch_has_as_many_batches_as_all_clips_fill_and_weights_default_to_their_numbers() -> None:
    schedule = mixed({"a": [40, 60], "b": [80, 0]}, (4, 6))
    assert schedule.batches == 30 + 10
    assert mixed({"a": [40, 60]}, (4, 6), epoch_batches=7).batches == 7
    taken = schedule.taken(1, 0)
    assert taken["a"] == pytest.approx(100, abs=6)
    assert taken["b"] == pytest.approx(80, abs=6)


def test_weights_of_the_future_are_not_described_and_those_of_the_past_are() -> None:
    cells = {"a": [40, 60], "b": [80, 20]}
    one = mixed(cells, weights=[(0, {"a": 1, "b": 1}), (10, {"a": 1, "b": 2})])
    other = mixed(cells, weights=[(0, {"a": 1, "b": 1}), (10, {"a": 5, "b": 2})])
    assert one.described(0, 10) == other.described(0, 10)
    assert one.described(0, 11) != other.described(0, 11)
    assert [s.virtual.tolist() for s in walk(one, 10)] == [s.virtual.tolist() for s in walk(other, 10)]


def test_a_batch_outside_the_epoch_is_refused() -> None:
    schedule = mixed({"a": [40, 60]})
    with pytest.raises(UsageError, match="outside"):
        schedule.share(0, schedule.batches)


def test_every_bucket_of_a_mixture_is_compared_with_random_drawing() -> None:
    sources = {"a": [Population(900), Population(100)], "b": [Population(100), Population(300)]}
    mixed = MixedBuckets.of(sources, [12, 6], [1, 2], seed=3)
    found = bucket_balances(mixed, batches=64)
    assert [one.bucket for one in found] == [0, 1]
    assert sum(one.share for one in found) == pytest.approx(1)
    for one, (a, b) in zip(found, [(900, 100), (100, 300)], strict=True):
        assert one.balance.shares == pytest.approx({"a": a / (a + b), "b": b / (a + b)}, abs=1e-3)
        assert one.balance.away < one.balance.drawn_away


def test_counting_what_many_sources_have_given_takes_two_sums_for_all_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    sums, plain = list[int](), interleave.floor_sums
    names, buckets = [f"s{n:02}" for n in range(20)], range(6)
    schedule = mixed({name: [100 + n for n in buckets] for name in names}, [8, 16, 24, 32, 40, 48])
    schedule.turns.counts(0)

    def counted(counts: Any, *rest: Any) -> Any:
        sums.append(len(counts))
        return plain(counts, *rest)

    monkeypatch.setattr(interleave, "floor_sums", counted)
    taken = schedule.taken(0, 40)
    assert [size for size in sums if size > len(buckets)] == [120, 120]  # not one for each bucket and lane
    assert sum(taken.values()) > 0


def test_the_description_of_an_order_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = mixed({"a": [40, 20], "b": [10, 30]}, weights=[(0, {"a": 1, "b": 1}), (5, {"a": 1, "b": 3})])
    first = [schedule.described(0, number) for number in (3, 9)]
    monkeypatch.setattr(mixed_buckets, "orders_digest", None)
    assert [schedule.described(0, number) for number in (3, 9)] == first
    assert first[0]["weights"] != first[1]["weights"]
