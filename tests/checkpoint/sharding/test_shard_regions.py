"""Which bytes of a shard belong where: against numpy's own slicing."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.sharding import assign_writers, copy_overlap, coverage_error, offset_in, overlaps, run_parts


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(shape, tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_run_is_a_few_boxes_that_hold_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    shape = (*shape, 2)
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    numbers = np.arange(size).reshape(shape)
    parts = list(run_parts(shape, start, stop))
    found = [numbers[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))].ravel() for part in parts]
    assert np.concatenate([*found, np.zeros(0, int)]).tolist() == list(range(start, stop))
    assert len(parts) <= 2 * len(shape) - 1


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 16]), st.data())
def test_runs_of_one_shard_fill_exactly_what_another_has_of_it(
    shape: tuple[int, ...], item: int, data: st.DataObject
) -> None:
    source, target = data.draw(boxes(shape)), data.draw(boxes(shape))
    whole = np.random.default_rng(1).integers(1, 255, (*shape, item), np.uint8)
    cut = {
        box: whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.local, strict=True))]
        for box in (source, target)
    }
    given_bytes, memory = cut[source].tobytes(), bytearray(cut[target].size)
    edges = sorted({0, len(given_bytes), *data.draw(st.lists(st.integers(0, len(given_bytes)), max_size=4))})
    for start, stop in itertools.pairwise(edges):
        before = bytes(memory)
        copy_overlap(source, target, item, start, memoryview(given_bytes)[start:stop], memory)
        at = offset_in(source, target, item, start, stop - start)
        assert at is None or memory[at : at + stop - start] == given_bytes[start:stop]
        assert overlaps(source, target, item, start, stop - start) or bytes(memory) == before
    expected = np.zeros_like(whole)
    for box in (source, target):  # what both have
        inside = np.zeros(shape, bool)
        inside[tuple(slice(a, a + n) for a, n in zip(box.offset, box.local, strict=True))] = True
        expected = np.where(inside[..., None], whole if box is source else expected, 0)
    there = tuple(slice(a, a + n) for a, n in zip(target.offset, target.local, strict=True))
    assert bytes(memory) == expected[there].tobytes()


def test_rows_lie_as_one_run_in_every_shard_of_rows_that_has_them() -> None:
    whole, half, last = Box((8, 3), (0, 0), (8, 3)), Box((8, 3), (2, 0), (4, 3)), Box((8, 3), (6, 0), (2, 3))
    column = Box((8, 3), (0, 1), (8, 1))
    assert offset_in(half, whole, 4, 12, 24) == 2 * 12 + 12
    assert offset_in(whole, half, 4, 3 * 12, 24) == 12
    assert offset_in(half, last, 4, 0, 12) is None
    assert offset_in(whole, half, 4, 12, 24) is None  # a part of it
    assert offset_in(whole, column, 4, 0, 12) is None
    assert offset_in(column, column, 4, 8, 16) == 8
    assert offset_in(Box((), (), ()), Box((), (), ()), 4, 0, 4) == 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.data())
def test_a_grid_of_shards_covers_its_tensor_and_any_change_to_it_is_a_flaw(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    grid = [Box(shape, (), ())]
    for edges in cuts:
        ends = list(itertools.pairwise(edges))
        grid = [Box(shape, (*g.offset, a), (*g.local, b - a)) for g in grid for a, b in ends]
    grid = data.draw(st.permutations(grid))
    assert coverage_error(grid) is None
    assert coverage_error([*grid, Box(shape, (0,) * len(shape), (0,) * len(shape))]) is None  # an empty shard is none
    assert "overlap" in (coverage_error([*grid, grid[0]]) or "")
    if len(grid) > 1:
        assert "elements" in (coverage_error(grid[1:]) or "")


def test_shards_that_overlap_without_sharing_an_edge_are_found() -> None:
    assert "overlap" in (coverage_error([Box((4, 4), (0, 0), (3, 4)), Box((4, 4), (2, 0), (2, 4))]) or "")
    assert (
        coverage_error([Box((4, 4), (0, 0), (4, 2)), Box((4, 4), (0, 2), (2, 2)), Box((4, 4), (2, 2), (2, 2))]) is None
    )


def test_a_tensor_in_many_shards_is_judged_without_comparing_each_with_each() -> None:
    shards = [Box((4096, 8), (i, j * 4), (1, 4)) for i in range(4096) for j in range(2)]
    compared = 0

    class Counted(Box, frozen=True):
        def overlaps(self, other: Box) -> bool:
            nonlocal compared
            compared += 1
            return super().overlaps(other)

    assert coverage_error([Counted(b.shape, b.offset, b.local) for b in shards]) is None
    assert compared == 0


def test_each_holder_set_spreads_its_own_work_and_ignores_who_does_not_hold_it() -> None:
    held = [("a", 10, (0, 2)), ("b", 8, (0, 2)), ("c", 1, (1,)), ("d", 3, (0, 2))]
    assert assign_writers(held) == assign_writers(reversed(held)) == {"a": 0, "b": 2, "c": 1, "d": 2}
    assert assign_writers(held[2:]) == {"c": 1, "d": 0}
