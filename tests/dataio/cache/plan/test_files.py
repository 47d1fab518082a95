"""The list of what a cache file has, kept up to date block by block."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cache.plan.events import ObjectId
from headrace.dataio.cache.plan.files import ByteCounts, CacheFile, blocks_of

OBJECT = ObjectId("s", "k", 97, 0.0)
"""The last of its ten blocks is a short one."""


@given(st.lists(st.integers(0, 9), max_size=20))
def test_runs_are_the_present_bytes_sorted_and_joined_and_a_list_once_given_stays(numbers: list[int]) -> None:
    file = CacheFile(1, OBJECT, 0, ByteCounts(), 10)
    given_out: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []
    for number in numbers:
        file.arrived(number)
        runs = file.runs(100)
        given_out.append((runs, list(runs)))
        assert [n for first, end in runs for n in range(first // 10, -(-end // 10))] == sorted(file.present)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(runs))
        assert sum(end - first for first, end in runs) == file.cost(file.present)
        assert file.runs(2) == runs[:2]
    assert all(runs == copy for runs, copy in given_out)


@given(st.sets(st.integers(0, 9)), st.lists(st.tuples(st.integers(0, 97), st.integers(0, 97)), max_size=3))
def test_a_file_has_ranges_when_it_has_all_their_blocks(numbers: set[int], wanted: list[tuple[int, int]]) -> None:
    file = CacheFile(1, OBJECT, 0, ByteCounts(), 10)
    for number in numbers:
        file.arrived(number)
    ranges = tuple((offset, min(length, 97 - offset)) for offset, length in wanted)
    assert file.has(ranges) is (blocks_of(ranges, 10) <= file.present)


def test_a_ring_files_parts_are_joined_where_they_touch() -> None:
    file = CacheFile(1, OBJECT, 0, ByteCounts(), 10, parts=((5, 10), (15, 5), (40, 7)))
    for number in (2, 0, 1):
        file.arrived(number)
    assert file.runs(10) == [(5, 20), (40, 47)]
