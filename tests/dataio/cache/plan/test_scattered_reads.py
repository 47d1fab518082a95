"""Reads of parts of large files come without the rest of their blocks; what is read often is kept all the same."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cache.plan import CachePlan
from headrace.dataio.cache.plan.events import Create, Drop, Fetch, ObjectId, Ranges, Ready, Want
from headrace.dataio.cache.plan.ring import KNOWN, STORES, ScatteredReads

BLOCK = 100
UNIT = 100
"""Of a plan's bytes: between ranges that lie closer what lies there is fetched along."""
FILM = ObjectId("films", "a", 40 * BLOCK * UNIT, 0.0)
CLIP = ((0, 40), (2010, 60))


def judged() -> ScatteredReads:
    apart = ScatteredReads(BLOCK)
    apart.read(FILM, CLIP)
    return apart


def test_reads_without_holes_are_of_whole_blocks() -> None:
    apart = ScatteredReads(BLOCK)
    for ranges in (((0, 40), (45, 60)), ((500, 10),), ((0, 0),), (), ((0, 10), (209, 10))):
        apart.read(FILM, ranges)
    assert not apart.skips_blocks(FILM, CLIP)
    assert judged().skips_blocks(FILM, CLIP)


def test_one_read_with_a_hole_shows_what_its_store_holds_and_those_without_are_no_matter() -> None:
    apart = judged()
    assert apart.skips_blocks(FILM._replace(key="b"), ((2010, 30),))
    assert not apart.skips_blocks(FILM._replace(source="clips"), CLIP)
    for offset in range(0, 3900, 13):
        apart.read(FILM, ((offset, 60),))  # the loader holds the head
    assert apart.skips_blocks(FILM, CLIP)
    assert apart.skips_blocks(FILM, ((2010, 30),))


def test_of_stores_a_bounded_number_is_known() -> None:
    apart = judged()
    for number in range(STORES):
        assert apart.skips_blocks(FILM, CLIP)
        apart.read(FILM._replace(source=f"{number}"), CLIP)
    assert not apart.skips_blocks(FILM, CLIP)
    assert apart.skips_blocks(FILM._replace(source="0"), CLIP)


def test_what_takes_up_half_of_its_blocks_comes_with_all_of_them() -> None:
    assert judged().skips_blocks(FILM, ((2010, 50),))
    assert not judged().skips_blocks(FILM, ((2010, 51),))


def test_of_blocks_a_bounded_number_is_counted() -> None:
    apart, huge = judged(), FILM._replace(size=10 * KNOWN * BLOCK)
    assert list(apart.count_fetched(huge, ((0, BLOCK - 1),))) == []
    for block in range(1, KNOWN + 1):
        assert list(apart.count_fetched(huge, ((block * BLOCK, 1),))) == []
    assert list(apart.count_fetched(huge, ((0, 1),))) == [], "forgotten"
    assert list(apart.count_fetched(huge, ((1 * BLOCK, BLOCK - 1),))) == []
    assert list(apart.count_fetched(huge, ((KNOWN * BLOCK, BLOCK - 1),))) == [KNOWN]


def run(cache: CachePlan, units: Ranges, number: int) -> int:
    """Announce a read and do it; what the store sent, in units."""
    read = tuple((offset * UNIT, length * UNIT) for offset, length in units)
    out, sent = cache.announce(1, FILM.source, [Want(FILM, read, 1.0)]), 0
    out += cache.request(number, FILM, read, 1)
    while out:
        match out.pop(0):
            case Fetch(file, block, _, length, here):
                sent += length - sum(size for _, _, size in here)
                out += cache.fetched((file, block))
            case Ready(_, file):
                out += cache.released(file)
            case i:
                assert isinstance(i, (Create, Drop))
    return sent // UNIT


def test_a_clip_of_a_film_is_fetched_alone_and_the_head_of_all_its_clips_is_kept_at_last() -> None:
    cache = CachePlan(100 * BLOCK * UNIT, block_bytes=BLOCK * UNIT)
    assert run(cache, ((2010, 60), (3810, 40)), 0) == 200, "before anything is known: its blocks"
    alone = [run(cache, ((0, 40), (2410 + 300 * clip, 60)), 1 + clip) for clip in range(5)]
    assert alone[:2] == [100, 100], "exactly what is read"
    assert alone[2:] == [200, 60, 60], "the head's block was worth it by then, and then it is there"
    assert cache.counts()["ring_bytes"] == 0


@given(st.lists(st.tuples(st.integers(2, 39), st.integers(1, 50)), min_size=20, max_size=60), st.integers(0, 9))
def test_the_store_sends_at_most_twice_what_is_read_or_what_there_is(places: list[tuple[int, int]], seed: int) -> None:
    cache, draw = CachePlan(100 * BLOCK * UNIT, block_bytes=BLOCK * UNIT), random.Random(seed)
    sent = run(cache, CLIP, 0)
    asked, touched = sum(size for _, size in CLIP), {0, 20}
    for number, (block, size) in enumerate(places, 1):
        read = ((draw.randrange(4), 5), (block * 100 + draw.randrange(100 - size + 1), size))
        sent += run(cache, read, number)
        asked += 5 + size
        touched |= {0, block}
    assert sent <= 2 * min(asked, len(touched) * 100) + 200
