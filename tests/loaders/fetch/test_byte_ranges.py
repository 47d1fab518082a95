"""Which pieces are foreseen: enough for the clip, no more than its groups of pictures, and whole files where that is no gain."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.shards.sample import AudioInfo, KeyFrame, Member, Pieces, Sample, VideoInfo
from headrace.loaders.clip import Clip, choose
from headrace.loaders.fetch import byte_ranges

SIZE = 1 << 18
GROUP = 50


def film(groups: int, **changes: Any) -> VideoInfo:
    """25 frames a second, a key frame every 2 s, 300,000 bytes each, behind a header of 1,000,000."""
    keys = tuple(KeyFrame(1000 * GROUP * n + 500, GROUP * n, 1_000_000 + 300_000 * n) for n in range(groups))
    info = VideoInfo(
        ext="mp4",
        stream=0,
        codec="h264",
        width=64,
        height=64,
        fps=Fraction(25),
        frames=GROUP * groups,
        time_base=Fraction(1, 25_000),
        start_pts=500,
        duration_pts=1000 * GROUP * groups,
        pixel_format="yuv420p",
        rotation=0,
        key_frames=keys,
    )
    return replace(info, **changes)


def member(info: VideoInfo, ext: str = "mp4") -> Member:
    length = 1_000_000 + 300_000 * len(info.key_frames)
    return Member(ext, 512, length, 0, Pieces(SIZE, b"\0" * 8 * -(-length // SIZE), ((0, 4),)))


def sound(seconds: float, ext: str = "mp4") -> AudioInfo:
    return AudioInfo(ext, 1, "aac", 48_000, 2, round(48_000 * seconds))


@given(
    st.integers(20, 200), st.integers(1, 40), st.integers(1, 3), st.sampled_from([None, 5.0, 24.0]), st.integers(0, 99)
)
def test_a_clip_needs_everything_from_its_key_frame_to_the_next_one_after_it(
    groups: int, frames: int, stride: int, fps: float | None, epoch: int
) -> None:
    info = film(groups)
    clip = Clip(frames, fps=fps) if fps else Clip(frames, stride)
    wanted = choose(info, clip, 1, epoch, 2, 3)
    length = member(info).length
    first, end = byte_ranges.of_clip(info, wanted, length)
    last = wanted.values[-1]
    behind = [key.at for key in info.key_frames if (key.pts if wanted.by == "pts" else key.index) > last]
    assert first == wanted.key.at
    assert min([length, *behind]) <= end <= min([length, *behind]) + (64 << 10) <= length + (64 << 10)
    assert end <= length
    runs = byte_ranges.runs(member(info), [(first, end)])
    there = {number for at, count in runs for number in range(at, at + count)}
    assert there == {*range(4), *range(first // SIZE, (end - 1) // SIZE + 1)}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9))))
def test_runs_are_ordered_disjoint_and_cover_the_same_pieces(some: list[tuple[int, int]]) -> None:
    runs = byte_ranges.merged(some)
    assert {n for at, count in runs for n in range(at, at + count)} == {
        n for at, count in some for n in range(at, at + count)
    }
    assert all(one[0] + one[1] < other[0] for one, other in itertools.pairwise(runs))


def test_ranges_lie_in_the_shard_and_end_with_the_file() -> None:
    file = Member("mp4", 512, 2 * SIZE + 10, 0, Pieces(SIZE, b"\0" * 24))
    assert byte_ranges.ranges(file, ((0, 1), (2, 5))) == [(512, SIZE), (512 + 2 * SIZE, 10)]
    assert byte_ranges.size(file, ((0, 1), (2, 5))) == SIZE + 10


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"codec": "mpeg4"}, "its packets are not its frames, so they are counted from the first"),
        ({"ext": "avi"}, "AVI has no time stamps"),
        ({"key_frames": (KeyFrame(500, 0),)}, "the places of its key frames are unknown"),
    ],
)
def test_files_in_which_a_clip_cannot_be_found_are_read_whole(changes: dict[str, Any], why: str) -> None:
    info = film(100)
    assert byte_ranges.reads_part_of_video(member(info), info, Clip(16), with_audio=False)
    assert not byte_ranges.reads_part_of_video(member(info), replace(info, **changes), Clip(16), with_audio=False), why


def test_files_of_which_most_is_needed_are_read_whole() -> None:
    info = film(20)  # 40 s
    for clip, partial in ((Clip(16), True), (Clip(16, 12), True), (Clip(16, 50), False), (Clip(8, fps=0.2), False)):
        assert byte_ranges.reads_part_of_video(member(info), info, clip, with_audio=False) is partial
    assert not byte_ranges.reads_part_of_video(member(film(4)), film(4), Clip(16), with_audio=False)


def test_sound_among_pictures_lies_where_theirs_does() -> None:
    info = film(100)
    sample = Sample(0, "a", "s.tar", (member(info),), 200.0, info, sound(200))
    assert byte_ranges.reads_part_of_audio(sample, member(info), sound(200), 5)
    assert not byte_ranges.reads_part_of_audio(sample, member(info), sound(200), 120)
    first, end = byte_ranges.of_window(sample, sound(200), Fraction(101), Fraction(2), member(info).length)
    assert (first, end) == (info.key_frames[50].at, info.key_frames[52].at + (64 << 10))


@given(st.fractions(0, 190))
def test_sound_alone_is_looked_for_by_its_share_of_the_file(start: Fraction) -> None:
    audio, length = sound(200, "mp3"), 8_000_000
    file = Member("mp3", 0, length, 0, Pieces(SIZE, b"\0" * 8 * 31))
    sample = Sample(0, "a", "s.tar", (file,), 200.0, None, audio)
    assert byte_ranges.reads_part_of_audio(sample, file, audio, 10)
    first, end = byte_ranges.of_window(sample, audio, start, Fraction(10), length)
    assert 0 <= first <= start / 200 * length < (start + 10) / 200 * length <= end <= length
    assert end - first < length / 10


def test_files_without_pieces_are_no_long_files() -> None:
    info = film(100)
    short = Member("json", 0, 10, 0)
    sample = Sample(0, "a", "s.tar", (short, member(info)), 200.0, info)
    assert byte_ranges.member_of(sample, "mp4") == member(info)
    assert byte_ranges.member_of(sample, "json") is None
    assert byte_ranges.member_of(sample, "wav") is None
