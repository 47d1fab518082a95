"""Which frames make a clip."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataio.core.errors import CorruptionError, UsageError
from dataio.shards.contract import KeyFrame, VideoInfo
from loaders import Clip
from loaders.clip import choose

VIDEO = VideoInfo(
    ext="mp4",
    stream=0,
    codec="h264",
    width=64,
    height=48,
    fps=Fraction(25),
    frames=100,
    time_base=Fraction(1, 1000),
    start_pts=5000,
    duration_pts=4000,
    pixel_format="yuv420p",
    rotation=0,
    key_frames=(KeyFrame(5000, 0), KeyFrame(6600, 40), KeyFrame(8200, 80)),
)


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 300), st.integers(0, 99), st.integers(0, 5))
def test_a_random_clip_lies_inside_the_video_and_starts_at_a_key_frame_before_it(
    frames: int, stride: int, length: int, sample: int, epoch: int
) -> None:
    video = dataclasses.replace(VIDEO, frames=length, key_frames=tuple(k for k in VIDEO.key_frames if k.index < length))
    wanted = choose(video, Clip(frames, stride), 7, epoch, sample, 0)
    assert len(wanted.values) == frames
    assert wanted.values[0] >= 0
    assert wanted.values[-1] < length
    assert wanted.key.index <= wanted.values[0]
    assert not any(wanted.key.index < key.index <= wanted.values[0] for key in video.key_frames)
    if (frames - 1) * stride < length:
        assert {b - a for a, b in zip(wanted.values, wanted.values[1:], strict=False)} <= {stride}


def test_a_video_that_is_too_short_is_played_from_its_start_and_its_last_frame_held() -> None:
    short = dataclasses.replace(VIDEO, frames=5, key_frames=(KeyFrame(5000, 0),))
    assert choose(short, Clip(8, 2), 0, 0, 0, 0).values == (0, 2, 4, 4, 4, 4, 4, 4)


def test_every_start_where_the_clip_fits_is_drawn() -> None:
    video = dataclasses.replace(VIDEO, frames=10, key_frames=(KeyFrame(5000, 0),))
    assert {choose(video, Clip(7), 0, epoch, 0, 0).values[0] for epoch in range(100)} == {0, 1, 2, 3}


def test_the_same_place_gives_the_same_clip_and_any_other_place_another() -> None:
    clip = Clip(4, per_video=3)
    long = dataclasses.replace(VIDEO, frames=10**9)
    base = choose(long, clip, 1, 2, 3, 1)
    assert choose(long, clip, 1, 2, 3, 1) == base
    others = [
        choose(long, clip, *place)
        for place in ((0, 2, 3, 1), (1, 0, 3, 1), (1, 2, 0, 1), (1, 2, 3, 0), (1, 2, 3, 1, 1))
    ]
    assert all(other != base for other in others)


def test_centre_clips_are_the_middles_of_equal_parts() -> None:
    assert choose(VIDEO, Clip(1, start="center"), 0, 0, 0, 0).values == (50,)
    starts = [choose(VIDEO, Clip(1, start="center", per_video=4), 0, 0, 0, n).values[0] for n in range(4)]
    assert starts == [12, 37, 62, 87]
    assert choose(VIDEO, Clip(100, start="center"), 0, 0, 0, 0).values[0] == 0


@given(st.floats(0.5, 120), st.integers(1, 40), st.integers(0, 99))
def test_clips_by_fps_are_instants_inside_the_video(fps: float, frames: int, sample: int) -> None:
    wanted = choose(VIDEO, Clip(frames, fps=fps), 0, 0, sample, 0)
    assert wanted.by == "pts"
    assert wanted.values[0] >= 5000
    if (frames - 1) / fps < 3.9:
        assert wanted.values[-1] < 9000
    steps = [b - a for a, b in zip(wanted.values, wanted.values[1:], strict=False)]
    assert all(abs(step - 1000 / fps) <= 1 for step in steps)
    assert wanted.key.pts <= wanted.values[0]


@pytest.mark.parametrize(
    "wrong",
    [{"frames": 0}, {"stride": 0}, {"fps": 0.0}, {"fps": 25.0, "stride": 2}, {"start": "first"}, {"per_video": 0}],
)
def test_impossible_clips_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Clip(**wrong)  # type: ignore[arg-type]


def test_a_video_without_frames_is_damaged() -> None:
    with pytest.raises(CorruptionError):
        choose(dataclasses.replace(VIDEO, frames=0), Clip(), 0, 0, 0, 0)
