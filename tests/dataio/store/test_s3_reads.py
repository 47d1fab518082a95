"""The plan of a ranged read: pure, so it is tested against its invariants."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from headrace.dataio.store.s3_session import GAP_BYTES, SPAN_BYTES, plan

_SIZE = st.one_of(st.integers(1, 100), st.integers(1, 3 * SPAN_BYTES), st.just(SPAN_BYTES))
_AT = st.one_of(st.integers(0, 1000), st.integers(0, 4 * SPAN_BYTES))


@given(st.lists(st.tuples(_AT, _SIZE), min_size=1, max_size=8))
def test_spans_cover_every_range_exactly_and_keep_their_bounds(ranges: list[tuple[int, int]]) -> None:
    # each buffer is a window of one address space, so where a segment's bytes go tells which range it serves
    space = memoryview(bytearray(max(size for _, size in ranges)))
    spans = plan([(offset, space[:size]) for offset, size in ranges])
    wanted, planned = sum(size for _, size in ranges), 0
    for span in spans:
        assert 0 < span.stop - span.start <= SPAN_BYTES
        assert sum(length for length, _ in span.segments) == span.stop - span.start
        assert all(length <= GAP_BYTES for length, target in span.segments if target is None)
        assert span.segments[0][1] is not None
        assert span.segments[-1][1] is not None
        planned += sum(length for length, target in span.segments if target is not None)
    assert planned == wanted
    assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_neighbours_travel_together_and_distant_ranges_do_not() -> None:
    buffers = [memoryview(bytearray(10)) for _ in range(4)]
    near, gap, far = 10, 20 + GAP_BYTES, 1 << 30
    spans = plan([(far, buffers[3]), (0, buffers[0]), (gap, buffers[2]), (near, buffers[1])])
    assert [(span.start, span.stop) for span in spans] == [(0, gap + 10), (far, far + 10)]


def test_a_large_range_is_cut_into_spans_that_can_be_fetched_side_by_side() -> None:
    spans = plan([(3, memoryview(bytearray(3 * SPAN_BYTES + 1)))])
    assert [span.stop - span.start for span in spans] == [SPAN_BYTES] * 3 + [1]
