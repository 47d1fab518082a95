"""Samples of every kind that an index can hold, for tests that draw them."""

from __future__ import annotations

import math
from fractions import Fraction

import msgspec
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.shards.pieces import runs
from headrace.dataio.shards.sample import AudioInfo, Color, KeyFrame, Member, Pieces, Sample, VideoInfo

SHARD, SIZE = "shards/00000000-aa.tar", 1 << 40
i31 = st.integers(1, 2**31 - 1)
i64 = st.integers(-(2**62), 2**62)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
word = text.filter(bool)
rates = st.fractions(Fraction(1, 1000), 1000, max_denominator=1001)
videos = st.integers(1, 2**31 - 1).flatmap(
    lambda frames: st.builds(
        VideoInfo,
        ext=word,
        stream=st.integers(0, 99),
        codec=word,
        width=i31,
        height=i31,
        fps=rates,
        frames=st.just(frames),
        time_base=rates,
        start_pts=i64,
        duration_pts=st.integers(0, 2**62),
        pixel_format=text,
        rotation=st.sampled_from([0, 90, 180, 270]),
        key_frames=st.lists(st.builds(KeyFrame, i64, st.integers(0, frames)), min_size=1, max_size=4).map(tuple),
        color=st.none() | st.builds(Color, text, text, text, text),
    )
)
audios = st.builds(AudioInfo, word, st.integers(0, 99), word, i31, st.integers(1, 64), st.integers(1, 2**62))
member_lists = st.lists(
    st.builds(Member, word, st.just(512), st.integers(0, SIZE // 16), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=3,
)
fields = st.dictionaries(
    text, st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text, max_size=3
)
samples = st.builds(
    Sample,
    id=st.just(0),
    key=word,
    shard=st.just(SHARD),
    members=member_lists.map(tuple),
    duration=st.floats(0, 1e9),
    video=st.none() | videos,
    audio=st.none() | audios,
    text=st.none() | text,
    fields=fields.filter(lambda f: all(not isinstance(v, float) or math.isfinite(v) for v in f.values())),
)


@st.composite
def with_page_fields(draw: st.DrawFn, given: Sample) -> Sample:
    """The sample with pieces of some of its members, places of key frames, an origin and further videos."""
    members = [replace(m, pieces=draw(st.none() | pieces(m.length))) for m in given.members]
    video = None if given.video is None else draw(with_origin(given.video))
    drawn = draw(st.lists(videos.flatmap(with_origin), max_size=2))
    further = tuple(replace(one, ext=draw(st.sampled_from([m.ext for m in members]))) for one in drawn)
    return replace(given, members=tuple(members), video=video, videos=further)


@st.composite
def with_origin(draw: st.DrawFn, given: VideoInfo) -> VideoInfo:
    """The video with places of key frames, and with an origin of its clock."""
    keys = tuple(replace(k, at=draw(st.integers(-1, 2**40))) for k in given.key_frames)
    return replace(given, key_frames=keys, origin_pts=draw(st.just(0) | i64))


@st.composite
def pieces(draw: st.DrawFn, length: int) -> Pieces:
    size = (
        1 << max(0, length - 1).bit_length() - draw(st.integers(0, 4)) if length > 64 else 1 << draw(st.integers(3, 9))
    )
    count = -(-length // size)
    digests = draw(st.binary(min_size=8, max_size=8)) * count
    head = draw(st.lists(st.integers(0, count - 1), max_size=4)) if count else []
    marks = sorted(draw(st.sets(st.integers(0, length - 1), max_size=min(count, 5)))) if count else []
    return Pieces(size, digests, runs(head), tuple((at, 1152 * number) for number, at in enumerate(marks)))


def without_overlaps(written: list[Sample]) -> list[Sample]:
    """The samples with their members one behind the other."""
    at, placed = 512, []
    for given_sample in written:
        moved = []
        for member in given_sample.members:
            moved.append(msgspec.structs.replace(member, offset=at))
            at += member.length
        placed.append(msgspec.structs.replace(given_sample, members=tuple(moved)))
    return placed
