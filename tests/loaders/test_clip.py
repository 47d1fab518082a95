"""Which frames make a clip."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders import Clip
from headrace.loaders.clip import ClipCounts, choose

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
    video = msgspec.structs.replace(
        VIDEO, frames=length, key_frames=tuple(k for k in VIDEO.key_frames if k.index < length)
    )
    wanted = choose(video, Clip(frames, stride), 7, epoch, sample, 0)
    assert len(wanted.values) == frames
    assert wanted.values[0] >= 0
    assert wanted.values[-1] < length
    assert wanted.key.index <= wanted.values[0]
    assert not any(wanted.key.index < key.index <= wanted.values[0] for key in video.key_frames)
    if (frames - 1) * stride < length:
        assert {b - a for a, b in zip(wanted.values, wanted.values[1:], strict=False)} <= {stride}


def test_a_video_that_is_too_short_is_played_from_its_start_and_its_last_frame_held() -> None:
    short = msgspec.structs.replace(VIDEO, frames=5, key_frames=(KeyFrame(5000, 0),))
    assert choose(short, Clip(8, 2), 0, 0, 0, 0).values == (0, 2, 4, 4, 4, 4, 4, 4)


def test_every_start_where_the_clip_fits_is_drawn() -> None:
    video = msgspec.structs.replace(VIDEO, frames=10, key_frames=(KeyFrame(5000, 0),))
    assert {choose(video, Clip(7), 0, epoch, 0, 0).values[0] for epoch in range(100)} == {0, 1, 2, 3}


def test_the_same_place_gives_the_same_clip_and_any_other_place_another() -> None:
    clip = Clip(4, per_video=3)
    long = msgspec.structs.replace(VIDEO, frames=10**9)
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
        choose(msgspec.structs.replace(VIDEO, frames=0), Clip(), 0, 0, 0, 0)


@pytest.mark.parametrize("clip", [Clip(4, 3, start="center", jitter=2), Clip(4, 3, start="every", jitter=2)])
def test_jitter_moves_a_clip_by_so_many_steps_at_most_anew_in_each_epoch_and_never_out_of_the_video(clip: Clip) -> None:
    still = dataclasses.replace(clip, jitter=0)
    for number in range(8 if clip.start == "every" else 1):
        middle = choose(VIDEO, still, 7, 0, 5, number).values
        drawn = [choose(VIDEO, clip, 7, epoch, 5, number).values for epoch in range(200)]
        moved = [values[0] - middle[0] for values in drawn]
        assert set(moved) == set(range(max(-6, -middle[0]), min(6, 99 - middle[-1]) + 1))
        assert all({b - a for a, b in pairwise(values)} == {3} for values in drawn)
        assert drawn == [choose(VIDEO, clip, 7, epoch, 5, number).values for epoch in range(200)]
    assert choose(VIDEO, clip, 7, 0, 5, 0).key.index <= choose(VIDEO, clip, 7, 0, 5, 0).values[0]


def test_jitter_of_clips_by_fps_counts_their_steps_in_time() -> None:
    clip = Clip(5, fps=10, start="center", jitter=1)
    middle = choose(VIDEO, dataclasses.replace(clip, jitter=0), 7, 0, 5, 0).values[0]
    moved = {choose(VIDEO, clip, 7, epoch, 5, 0).values[0] - middle for epoch in range(300)}
    assert min(moved) >= -100  # in units of the time base, 1/1000 s
    assert max(moved) <= 100
    assert len(moved) > 100


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 300))
def test_clips_end_to_end_cover_each_frame_at_most_once_and_leave_less_than_a_clip(
    frames: int, stride: int, length: int
) -> None:
    clip = Clip(frames, stride, start="every")
    video = msgspec.structs.replace(VIDEO, frames=length, key_frames=(KeyFrame(5000, 0),))
    number = ClipCounts(clip)(np.array([float(length)]), np.array([4.0]))
    begins = [choose(video, clip, 7, 0, 5, part).values[0] for part in range(int(number[0]))]
    assert begins == [part * frames * stride for part in range(len(begins))]
    assert length - len(begins) * frames * stride < frames * stride
