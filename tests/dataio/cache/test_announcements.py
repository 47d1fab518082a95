"""An announcement that continues the last one has the same result as one with the complete list."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.cache.announcements import (
    AnnouncementList,
    DueTimes,
    Forecast,
    Upcoming,
    _group_neighbours,
    dropped_count,
)
from headrace.dataio.cache.plan.core import LOOK_AHEAD, CachePlan
from headrace.dataio.cache.plan.events import ObjectId, Want
from headrace.dataio.cache.plan.extents import HOLE_BYTES, is_part
from headrace.dataio.cache.plan.streams import Stream, continued
from headrace.dataio.core.errors import NotFoundError

AT_MOST = 100


def find(key: str) -> ObjectId:
    if key == "gone":
        raise NotFoundError("it is gone")
    return ObjectId("s", key, 1000, 0.0)


def renewed(announced: AnnouncementList, upcoming: Upcoming, now: float = 0.0, pace: float = 1.0) -> list[Want]:
    reads = announced.renew(upcoming, AT_MOST, find)
    return announced.wants(DueTimes(now, pace, len(reads)))


def values(wants: Sequence[Want]) -> list[tuple[ObjectId, object]]:
    return [(want.object, want.ranges) for want in wants]


ranges = st.tuples(st.sampled_from(["a", "b", "gone"]), st.sampled_from([0, 10, 20, 990, 1000]), st.integers(0, 60))


@given(st.lists(ranges, max_size=30), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_a_list_that_goes_on_gives_the_wants_of_the_whole_list(
    everything: list[tuple[str, int, int]], moves: list[tuple[int, int]]
) -> None:
    announced, first, end = AnnouncementList(), 0, 0
    for gone, more in [(0, 5), *moves]:
        first, end = min(first + gone, len(everything)), end + more
        upcoming = everything[first:end]
        assert values(renewed(announced, upcoming)) == values(renewed(AnnouncementList(), upcoming))


def test_what_is_named_again_is_the_same_want_until_it_is_foreseen_differently() -> None:
    samples = [("a", 100 * n, 60) for n in range(10)]
    announced = AnnouncementList()
    before = renewed(announced, samples[:8])
    after = renewed(announced, samples[2:], now=2.0)
    assert continued(before, after) == 2
    assert [want.due for want in after] == [3, 4, 5, 6, 7, 8, 9, 10]
    hurried = renewed(announced, samples[2:], now=2.0, pace=0.1)
    assert continued(after, hurried) is None
    assert hurried[0].due == 2.1


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8), st.integers(0, 8))
def test_a_list_goes_on_wherever_it_may(old: list[str], more: list[str], first: int) -> None:
    for new in (more, [*old[first:], *more]):
        fits = [n for n in range(len(old)) if new and old[n:] == new[: len(old) - n]]
        assert dropped_count(old, new) == (fits[0] if fits else None)


def test_films_whose_heads_are_named_again_and_again_are_known_and_foreseen_as_others_are() -> None:
    clips = [(film, offset, 40) for film, place in zip("abacab", range(6), strict=True) for offset in (0, 200 + place)]
    announced, forecast = AnnouncementList(), Forecast()
    before = renewed(announced, clips[:10])
    forecast.announced(1, [(want.object.key, want.ranges[0][0]) for want in before], 0.0)
    after = renewed(announced, clips[4:], now=2.0)
    assert continued(before, after) == 2, "the third clip is of the first one's film"
    due = forecast.announced(1, [(want.object.key, want.ranges[0][0]) for want in after], 2.0)
    assert due.from_to(0, due.count) == [3.0, 4.0, 5.0, 6.0], "one a second"


def test_a_sample_whose_first_member_was_at_the_end_of_the_list_is_one_read_when_the_others_follow() -> None:
    announced = AnnouncementList()
    renewed(announced, [("a", 0, 10), ("a", 20, 10)])
    (want,) = renewed(announced, [("a", 0, 10), ("a", 20, 10), ("a", 40, 10)])
    assert want.ranges == ((0, 10), (20, 10), (40, 10))


def test_a_part_of_a_file_is_a_read_of_its_own_whatever_its_size() -> None:
    sample, part = [("a", 0, 5)], [("a", 10, 0), ("a", 12, 30), ("a", 60, 4), ("a", 90, 0)]
    other = [("a", 90, 0), ("a", 95, 3), ("a", 99, 0), ("a", 99, 1)]
    groups = [ranges for _, _, ranges in _group_neighbours([*sample, *part, *other], 20)]
    assert groups == [
        ((0, 5),),
        ((10, 0), (12, 30), (60, 4), (90, 0)),
        ((90, 0), (95, 3), (99, 0)),
        ((99, 1),),
    ]


def test_neighbours_that_are_far_apart_are_reads_of_their_own_since_together_they_would_be_a_part() -> None:
    apart = HOLE_BYTES + 10
    near, far = [("a", 0, 10), ("a", 10 + HOLE_BYTES - 1, 10)], [("a", 0, 10), ("a", apart, 10)]
    assert [ranges for _, _, ranges in _group_neighbours(near, 100)] == [((0, 10), (10 + HOLE_BYTES - 1, 10))]
    groups = [ranges for _, _, ranges in _group_neighbours(far, 100)]
    assert groups == [((0, 10),), ((apart, 10),)]
    assert not any(map(is_part, groups))
    assert is_part(((0, 10), (apart, 10)))


@given(st.data())
def test_a_stream_that_goes_on_is_as_one_that_is_announced_anew(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 1 << 30)))
    pool = [Want(find("a"), ((n, 1),), float(n)) for n in range(6)]
    everything = [replace(rng.choice(pool)) for _ in range(40)]
    going_on, anew, first, end = Stream("s"), Stream("s"), 0, 0
    for _ in range(12):
        first, end = min(first + rng.randrange(4), 40), min(end + rng.randrange(6), 40)
        going_on.announce(everything[first:end])
        anew.announce([replace(want) for want in everything[first:end]])
        for _ in range(rng.randrange(4)):
            if going_on.wants and rng.random() < 0.7:
                for stream in (going_on, anew):
                    stream.pop()
            elif rng.random() < 0.3:
                read = rng.choice(pool)
                for stream in (going_on, anew):
                    stream.read((read.object, read.ranges))
        assert values(going_on.wants) == values(anew.wants)
        assert going_on.placed == anew.placed
        assert {r: n for r, n in going_on.times.items() if n} == {r: n for r, n in anew.times.items() if n}


def test_a_list_that_continues_the_last_one_costs_its_new_part() -> None:
    samples, found = [(f"s{n}", 0, 60) for n in range(300)], list[str]()

    def counted(key: str) -> ObjectId:
        found.append(key)
        return find(key)

    announced = AnnouncementList()
    first = announced.renew(samples[:200], AT_MOST, counted)
    before = announced.wants(DueTimes(0.0, 1.0, len(first)))
    found.clear()
    assert announced.new_part(samples[10:210]) == samples[200:210]
    assert announced.new_part(samples[250:]) == samples[250:]
    after = announced.renew(samples[10:210], AT_MOST, counted)
    assert found == [f"s{n}" for n in range(200, 210)]
    assert after[:190] == first[10:]
    assert continued(before, announced.wants(DueTimes(10.0, 1.0, len(after)))) == 10
    pairs = [(f"s{n // 2}", 10 * (n % 2), 5) for n in range(20)]
    announced = AnnouncementList()
    announced.renew(pairs[:10], AT_MOST, find)
    assert announced.new_part(pairs[2:12]) == pairs[10:12]
    assert announced.new_part(pairs[3:12]) == pairs[3:12], "it begins in the middle of a sample"


def test_one_event_examines_a_bounded_number_of_present_reads() -> None:
    plan = CachePlan(1 << 30, block_bytes=100)
    obj = ObjectId("s", "a", 1000, 0.0)
    plan.request(1, obj, ((0, 1000),))
    plan.fetched(*[(1, block) for block in range(10)])
    reads = [Want(obj, ((n % 900, 50),), float(n)) for n in range(3 * LOOK_AHEAD)]
    plan.announce(1, "s", reads)
    assert plan.counts()["announced"] == 2 * LOOK_AHEAD
    plan.released(1)  # a read has ended
    assert plan.counts()["announced"] == LOOK_AHEAD
    plan.announce(1, "s", reads)
    assert plan.counts()["announced"] == 0
