"""Whether a read gets its blocks or its own bytes, the arithmetic of byte ranges, and parts of long files in a plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cache.plan import CachePlan
from headrace.dataio.cache.plan.events import Fetch, Instruction, ObjectId, Ranges, Ready, Want
from headrace.dataio.cache.plan.extents import GAP_BYTES, HOLE_BYTES, extents_of, is_part, joined, within, without

MIB = 1 << 20
BLOCK = 4 * MIB
FILM = ObjectId("s", "film", 100 * MIB, 0.0)
some_ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)


def runs_of(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(first, first + size) for first, size in extents_of(ranges, 1000, 0)]


def places(ranges: list[tuple[int, int]] | Ranges) -> set[int]:
    return {byte for offset, length in ranges for byte in range(offset, offset + length)}


@given(some_ranges, some_ranges)
def test_ranges_are_divided_into_what_is_inside_some_runs_and_what_is_outside(
    ranges: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    runs = runs_of(others)
    assert places(without(ranges, runs)) == places(ranges) - places(others)
    for offset, length in ranges:
        inside = within(runs, offset, length)
        assert places(inside) == places([(offset, length)]) & places(others)
        assert sum(size for _, size in inside) == len(places(inside))


@given(some_ranges, st.tuples(st.integers(0, 60), st.integers(1, 20)))
def test_a_run_that_joins_others_leaves_sorted_runs_with_gaps_between_them(
    others: list[tuple[int, int]], one: tuple[int, int]
) -> None:
    runs = runs_of(others)
    found = joined(runs, one[0], sum(one))
    assert places([(first, end - first) for first, end in found]) == places([*others, one])
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))


@given(some_ranges, st.integers(1, 9), st.integers(0, 9))
def test_extents_cover_their_ranges_and_only_small_gaps(ranges: list[tuple[int, int]], most: int, gap: int) -> None:
    found = extents_of(ranges, most, gap)
    assert places(ranges) <= places(found)
    assert all(0 < size <= most for _, size in found)
    assert len(places(found)) == sum(size for _, size in found)
    extra = sorted(places(found) - places(ranges))
    longest = max(
        (len(list(group)) for _, group in itertools.groupby(enumerate(extra), lambda e: e[1] - e[0])), default=0
    )
    assert longest <= gap


@pytest.mark.parametrize(
    ("ranges", "part"),
    [
        (((0, 50 * MIB),), False),
        (((0, MIB), (MIB + 512, MIB)), False),
        (((0, 10), (10 + HOLE_BYTES - 1, 10)), False),
        (((0, 10), (10 + HOLE_BYTES, 10)), True),
        (((7 * MIB, MIB), (0, 0), (20 * MIB, 0)), True),
        ((), False),
    ],
)
def test_a_read_is_a_part_if_it_leaves_out_much_between_its_ends(ranges: Ranges, part: bool) -> None:
    assert is_part(ranges) is part


def clip(at: int, size: int = MIB) -> Ranges:
    """A read of `size` bytes of the film."""
    return ((0, 0), (at, size), (FILM.size, 0))


def fetches(out: list[Instruction]) -> list[tuple[int, int]]:
    return [(one.offset, one.length) for one in out if isinstance(one, Fetch)]


def land(cache: CachePlan, out: list[Instruction]) -> list[Instruction]:
    done = list[Instruction]()
    for one in out:
        if isinstance(one, Fetch):
            done += cache.fetched((one.file, one.block))
    return done


def test_a_part_gets_its_own_bytes_and_keeps_them() -> None:
    cache = CachePlan(64 * MIB)
    out = cache.request(1, FILM, clip(10 * MIB))
    assert fetches(out) == [(10 * MIB, MIB)]
    assert any(isinstance(one, Ready) for one in land(cache, out))
    assert cache.used == MIB
    assert cache.take(FILM, clip(10 * MIB)) is not None
    assert fetches(cache.request(2, FILM, clip(10 * MIB + 5, 9))) == []


def test_of_a_part_only_what_is_missing_is_fetched_and_small_gaps_with_it() -> None:
    cache = CachePlan(64 * MIB)
    land(cache, cache.request(1, FILM, clip(10 * MIB)))
    assert fetches(cache.request(2, FILM, clip(9 * MIB, 3 * MIB))) == [(9 * MIB, MIB), (11 * MIB, MIB)]
    near = ((0, 0), (20 * MIB, 10), (20 * MIB + GAP_BYTES, 10), (FILM.size, 0))
    assert fetches(cache.request(3, FILM, near)) == [(20 * MIB, GAP_BYTES + 10)]


def test_two_reads_of_one_part_fetch_it_once() -> None:
    cache = CachePlan(64 * MIB)
    out = cache.request(1, FILM, clip(10 * MIB))
    assert fetches(cache.request(2, FILM, clip(10 * MIB, MIB // 2))) == []
    assert sorted(one.ticket for one in land(cache, out) if isinstance(one, Ready)) == [1, 2]


def test_a_small_sample_gets_its_block_and_takes_from_an_extent_what_that_has() -> None:
    cache = CachePlan(64 * MIB)
    land(cache, cache.request(1, FILM, clip(9 * MIB)))
    out = cache.request(2, FILM, ((11 * MIB, 100),))
    (fetch,) = [one for one in out if isinstance(one, Fetch)]
    assert (fetch.offset, fetch.length) == (2 * BLOCK, BLOCK)
    assert [(at, size) for _, at, size in fetch.copies] == [(9 * MIB, MIB)]
    land(cache, out)
    assert cache.used == BLOCK, "the extent's bytes count once"


def test_announced_parts_are_fetched_before_the_first_request_without_their_blocks() -> None:
    cache = CachePlan(512 * MIB, prefetch_parts=8)
    out = cache.announce(1, "s", [Want(FILM, clip(at * 10 * MIB)) for at in range(1, 6)])
    assert fetches(out) == [(at * 10 * MIB, MIB) for at in range(1, 6)]


def test_extents_that_fill_a_block_are_a_block() -> None:
    cache = CachePlan(64 * MIB)
    for number, at in enumerate(range(8, 12)):
        land(cache, cache.request(number, FILM, clip(at * MIB)))
    assert fetches(cache.request(9, FILM, ((8 * MIB, BLOCK),))) == []


def test_a_part_whose_fetch_failed_is_fetched_again() -> None:
    cache = CachePlan(64 * MIB)
    (fetch,) = [one for one in cache.request(1, FILM, clip(10 * MIB)) if isinstance(one, Fetch)]
    cache.failed(fetch.file, fetch.block)
    assert cache.used == 0
    assert fetches(cache.request(2, FILM, clip(10 * MIB))) == [(10 * MIB, MIB)]


def test_bytes_of_an_earlier_daemon_that_no_map_lists_are_counted() -> None:
    cache = CachePlan(64 * MIB)
    assert cache.adopt(FILM, [0], unlisted=20 * MIB) is not None
    assert cache.used == BLOCK + 20 * MIB
    assert cache.adopt(FILM._replace(key="b"), [0], unlisted=60 * MIB) is None, "there is no room for it"
