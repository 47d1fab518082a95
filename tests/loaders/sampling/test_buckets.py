"""Buckets: each clip in the nearest shape, batches within the budget, spread over the epoch, the same on any world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.buckets import MAX_BUCKETS, MAX_SIDE, Bucket, Bucketed, Buckets, Durations
from headrace.loaders.sampling.schedule import Population

pytestmark = pytest.mark.slow

SHAPES = [Bucket((64, 64)), Bucket((48, 80)), Bucket((80, 48)), Bucket((96, 160)), Bucket((96, 160), 32)]


def bucketed(buckets: Buckets, populations: Sequence[Population], **options: Any) -> Bucketed:
    """For clips of 16 frames."""
    return Bucketed.of(buckets.batches(16), populations, buckets.numbers(16), **options)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Buckets, Bucketed]:
    """Any buckets, some empty, some with less than a batch."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5, unique=True))
    multiple = draw(st.sampled_from([1, 2, 6]))
    buckets = Buckets(tuple(shapes), 96 * 160 * 32 * multiple, multiple=multiple)
    counts = draw(st.lists(st.integers(0, 300), min_size=len(shapes), max_size=len(shapes)).filter(any))
    populations = [Population(count, 1e6, draw(st.integers(1, 2))) for count in counts]
    return buckets, bucketed(
        buckets, populations, seed=draw(st.integers(0, 99)), shuffle=draw(st.booleans()), drop_last=False
    )


@given(schedules(), st.integers(0, 1000))
@settings(max_examples=30)
def test_an_epoch_holds_every_clip_once_in_batches_of_one_bucket(made: tuple[Buckets, Bucketed], epoch: int) -> None:
    buckets, schedule = made
    seen = Counter[tuple[int, int]]()
    for number in range(schedule.batches):
        share = schedule.share(epoch, number)
        assert share.bucket is not None
        assert len(share) * buckets.cost(share.bucket, 16) <= buckets.budget
        assert set(share.stream.tolist()) == {schedule.buckets.index(share.bucket)}
        seen.update((share.bucket, virtual) for virtual in share.virtual.tolist())
    assert set(seen.values()) == {1}
    assert len(seen) == sum(order.samples for order in schedule.orders)


@given(schedules(), st.integers(0, 1000))
@settings(max_examples=30)
def test_each_buckets_batches_come_in_their_own_sequence(made: tuple[Buckets, Bucketed], epoch: int) -> None:
    """Against a naive reference that counts the batches of each bucket so far."""
    _, schedule = made
    so_far = Counter[int]()
    for number in range(schedule.batches):
        share = schedule.share(epoch, number)
        stream = int(share.stream[0])
        assert share.virtual.tolist() == schedule.orders[stream].batch_of(epoch, so_far[stream]).tolist()
        so_far[stream] += 1


@given(schedules(), st.data())
@settings(max_examples=30)
def test_ranks_share_the_same_batch_evenly(made: tuple[Buckets, Bucketed], data: st.DataObject) -> None:
    buckets, schedule = made
    number = data.draw(st.integers(0, schedule.batches - 1))
    whole = schedule.share(3, number)
    for world_size in (1, 2, 3, 5):
        parts = [schedule.share(3, number, rank, world_size) for rank in range(world_size)]
        assert np.concatenate([part.virtual for part in parts]).tolist() == whole.virtual.tolist()
        assert {part.bucket for part in parts} == {whole.bucket}
        assert [len(part) for part in parts] == list(parts[0].sizes)
        even = len(whole) == schedule.orders[whole.stream[0]].batch and buckets.multiple % world_size == 0
        assert max(parts[0].sizes) - min(parts[0].sizes) <= (0 if even else 1)


def test_batches_of_a_bucket_are_spread_over_the_epoch_and_begin_elsewhere_in_the_next() -> None:
    buckets = Buckets((Bucket((64, 64)), Bucket((48, 80))), 64 * 64 * 16 * 4)
    schedule = bucketed(buckets, [Population(800), Population(200)])
    first, second = ([schedule.share(epoch, n).bucket for n in range(schedule.batches)] for epoch in (0, 1))
    assert first != second
    for start in range(0, schedule.batches - 50, 10):
        assert 7 <= first[start : start + 50].count(1) <= 13  # 20 % of 50


def test_a_clip_goes_to_the_nearest_aspect_then_the_largest_it_fills_then_the_longest() -> None:
    buckets = Buckets(tuple(SHAPES), 10**9)
    cases = [
        ((100, 100, 16), 0),  # square
        ((600, 750, 16), 0),  # 5:4 is nearer to 1 than to 5:3
        ((1080, 1920, 16), 3),  # wide and large
        ((60, 107, 99), 1),  # wide, smaller than 96x160
        ((20, 36, 99), 1),  # smaller than all: the smallest
        ((1920, 1080, 16), 2),  # tall
        ((1080, 1920, 40), 4),  # long enough for 32 frames
        ((1080, 1920, 3), 3),  # too short for any: the shortest
    ]
    heights, widths, lengths = np.array([case for case, _ in cases]).T
    assert buckets.assign(heights, widths, lengths.astype(float), 16).tolist() == [bucket for _, bucket in cases]


@given(st.integers(0, 999), st.sampled_from([1, 4, 2000]))
def test_a_bucket_does_not_depend_on_other_videos(seed: int, sizes: int) -> None:
    buckets, random = Buckets((*SHAPES, Bucket((96, 160), 8)), 10**9), np.random.default_rng(seed)
    heights, widths = 1 + random.integers(0, sizes, (2, 50)) * (2000 // sizes)
    lengths = random.integers(0, 40, 50) + random.choice([0, 0.5, np.nan], 50)
    one_by_one = [buckets.assign(heights[n : n + 1], widths[n : n + 1], lengths[n : n + 1], 16) for n in range(50)]
    assert buckets.assign(heights, widths, lengths, 16).tolist() == np.concatenate(one_by_one).tolist()
    assert buckets.assign(heights[:0], widths[:0], lengths[:0], 16).tolist() == []


def test_images_take_buckets_of_one_frame_and_videos_the_others() -> None:
    shapes = (Bucket((64, 64), 1), Bucket((64, 64), 8), Bucket((64, 128), 1), Bucket((64, 64), 16))
    cases = [
        ((64, 64, 1), 0),
        ((64, 128, 1), 2),  # an image
        ((64, 128, 9), 1),  # a video, although another bucket has its shape
        ((64, 64, 99), 3),
        ((64, 64, 5), 1),  # repeats its last frame
    ]
    heights, widths, lengths = np.array([case for case, _ in cases]).T
    assert Buckets(shapes, 10**9).assign(heights, widths, lengths.astype(float), 4).tolist() == [b for _, b in cases]
    short = Buckets(shapes, 10**9, short_as_images=True)
    assert short.assign(heights, widths, lengths.astype(float), 4).tolist() == [0, 2, 1, 3, 0]
    assert short.numbers(4) != Buckets(shapes, 10**9).numbers(4)
    assert Buckets(shapes[::2], 10**9).assign(heights, widths, lengths.astype(float), 4).tolist() == [0, 1, 1, 0, 0]


def test_tokens_are_patches_rounded_up() -> None:
    buckets = Buckets((Bucket((50, 33), 5),), 1000, patch=(4, 16, 16), multiple=5)
    assert buckets.cost(0, 16) == 2 * 4 * 3
    assert buckets.batch(0, 16) == 40
    assert Buckets((Bucket((8, 8)),), 6400).batch(0, 10) == 10


def test_what_changes_the_order_changes_the_description() -> None:
    def described(**changes: object) -> dict[str, object]:
        buckets = Buckets(**({"buckets": tuple(SHAPES), "budget": 10**7, "patch": (1, 1, 1), "multiple": 1} | changes))  # type: ignore[arg-type]
        return bucketed(buckets, [Population(100)] * len(buckets.buckets)).described()

    same = described()
    assert same == described()
    for change in ({"budget": 10**7 + 1}, {"patch": (1, 2, 1)}, {"multiple": 2}, {"buckets": tuple(SHAPES[::-1])}):
        assert described(**change)["buckets"] != same["buckets"]


def test_impossible_buckets_are_refused() -> None:
    one = (Bucket((64, 64)),)
    for wrong in (
        lambda: Bucket((0, 64)),
        lambda: Bucket((64, 64), 0),
        lambda: Bucket((64, MAX_SIDE + 1)),
        lambda: Buckets((), 100),
        lambda: Buckets(one * 2, 100),
        lambda: Buckets(tuple(Bucket((n, 8)) for n in range(1, MAX_BUCKETS + 2)), 100),
        lambda: Buckets(one, 0),
        lambda: bucketed(Buckets(one, 10**6, multiple=4), [Population(3)]),
        lambda: bucketed(Buckets(one, 10**6), [Population(100)]).share(0, 7),
    ):
        with pytest.raises(UsageError):
            wrong()
    with pytest.raises(UsageError, match="bucket 64x64 is given twice"):
        Buckets((*one, Bucket((32, 64)), *one), 10**6)
    with pytest.raises(UsageError, match=r"such as Bucket\(\(192, 336\)\)"):
        Bucket(192, 336)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"\(Bucket\(\(256, 256\)\), "):
        Buckets([(256, 256)], 10**6)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a whole batch: 0 has 3, and its global batch 15"):
        bucketed(Buckets(one, 10**6), [Population(3)])
    with pytest.raises(UsageError, match="a clip costs 65536"):
        bucketed(Buckets(one, 65_535), [Population(100)])


def test_a_recording_goes_to_the_shortest_bucket_that_holds_it_and_long_ones_to_the_longest() -> None:
    durations = Durations((1, 2.5, 10), budget=60, multiple=4)
    found = durations.assign(np.array([0.2, 1.0, 1.001, 2.5, 9.0, 10.0, 99.0]))
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert durations.batches() == [60, 24, 4]


@pytest.mark.parametrize(
    "wrong", [((), 10, 1), ((2, 1), 10, 1), ((0,), 10, 1), ((1, 1), 10, 1), ((1,), 10, 0), ((1, 5), 9, 2)]
)
def test_impossible_durations_are_refused(wrong: tuple[tuple[float, ...], float, int]) -> None:
    with pytest.raises(UsageError):
        Durations(*wrong)
