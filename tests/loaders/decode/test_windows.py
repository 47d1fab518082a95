"""Clips of a window show exactly the frames that the whole file has there, in every codec and container."""

from __future__ import annotations

import io
from bisect import bisect_right
from fractions import Fraction
from itertools import pairwise
from typing import Any

import av
import numpy as np
import pytest

from headrace.dataio.core.errors import HeadraceError, UnsupportedError, UsageError
from headrace.dataio.shards.media.probe import probe
from headrace.dataio.shards.media.windows import window
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Clip, choose
from headrace.loaders.decode import mp4_excerpt, trim
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from tests.support import numbered_video

pytestmark = pytest.mark.slow

FRAMES, GROUP = 57, 8
FILES: dict[str, tuple[str, str, dict[str, str]]] = {
    "H.264 with B-frames": ("libx264", "mp4", {"bf": "3", "x264-params": "keyint=8:min-keyint=8:scenecut=0"}),
    "H.264 with open groups": (
        "libx264",
        "mp4",
        {"bf": "3", "x264-params": "keyint=8:min-keyint=8:scenecut=0:open-gop=1"},
    ),
    "H.264 in Matroska": ("libx264", "matroska", {"bf": "2", "x264-params": "keyint=8:min-keyint=8:scenecut=0"}),
    "HEVC": ("libx265", "mp4", {"x265-params": "keyint=8:min-keyint=8:scenecut=0:bframes=3:open-gop=1:log-level=none"}),
    "VP9": ("libvpx-vp9", "matroska", {"deadline": "realtime", "cpu-used": "8"}),
    "AV1": ("libsvtav1", "mp4", {"preset": "12"}),
    "AV1 in Matroska": ("libsvtav1", "matroska", {"preset": "12"}),
}


@pytest.fixture(scope="module", params=FILES)
def file(request: pytest.FixtureRequest) -> tuple[bytes, VideoInfo]:
    codec, container, options = FILES[request.param]
    data = numbered_video.make(FRAMES, codec=codec, container=container, options={"g": str(GROUP)} | options)
    ext = "mp4" if container == "mp4" else "mkv"
    video = probe(data, ext=ext).video
    assert video is not None
    keys = tuple(numbered_video.with_positions(data, video))
    return data, numbered_video.replaced(video, key_frames=keys)


def parts(video: VideoInfo) -> list[VideoInfo]:
    """The file in windows of one, two and three groups, and the last frames."""
    count = len(video.key_frames)
    assert count >= 6
    bounds = [0, 1, 3, count - 2, count - 1, count]
    return [window(video, first, end) for first, end in pairwise(bounds)]


def decoded(data: bytes, info: VideoInfo, wanted: Any) -> tuple[Any, tuple[int, ...]]:
    (result,) = PyAVDecoder().decode([Request(memoryview(data), info, wanted)])
    if isinstance(result, HeadraceError):
        raise result
    assert isinstance(result, Decoded)
    return result.frames.numpy(), result.pts


def test_windows_have_all_frames_of_their_file(file: tuple[bytes, VideoInfo]) -> None:
    _, video = file
    windows = parts(video)
    assert sum(one.frames for one in windows) == video.frames == FRAMES
    assert sum(one.duration_pts for one in windows) == video.duration_pts
    assert all(one.is_window for one in windows)
    assert not video.is_window


@pytest.mark.parametrize("clip", [Clip(4), Clip(3, 2), Clip(4, fps=10), Clip(6, fps=25), Clip(100), Clip(100, fps=25)])
def test_clips_of_a_window_are_those_of_the_whole_file(
    file: tuple[bytes, VideoInfo], clip: Clip, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, video = file
    monkeypatch.setattr(mp4_excerpt, "FEW", 0)
    everything, stamps = decoded(data, video, choose(video, Clip(FRAMES, start="center"), 0, 0, 0, 0))
    assert [numbered_video.number_in(frame) for frame in everything] == list(range(FRAMES))
    first = 0
    for one in parts(video):
        for seed in range(3):
            wanted = choose(one, clip, seed, 0, 0, 0)
            frames, pts = decoded(data, one, wanted)
            if wanted.by == "index":
                expected = [first + value for value in wanted.values]
            else:
                expected = [max(bisect_right(stamps, value) - 1, 0) for value in wanted.values]
            assert all(first <= number < first + one.frames for number in expected)
            assert pts == tuple(stamps[number] for number in expected)
            assert np.array_equal(frames, everything[expected])
        last = choose(one, Clip(1), 0, 0, 0, 0)
        wanted = numbered_video.replaced(last, values=(one.frames - 1,), key=one.key_frames[0])
        frames, pts = decoded(data, one, wanted)
        assert numbered_video.number_in(frames[0]) == first + one.frames - 1
        first += one.frames


def test_a_window_begins_at_second_zero_of_its_clock(file: tuple[bytes, VideoInfo]) -> None:
    _, video = file
    one = parts(video)[2]
    assert one.seconds(one.start_pts) == 0
    assert one.seconds(one.start_pts + one.duration_pts) == one.duration_pts * one.time_base
    assert video.seconds(video.start_pts) == video.start_pts * video.time_base


def test_windows_of_mp4_are_cut_out_by_their_tables(
    file: tuple[bytes, VideoInfo], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, video = file
    if video.ext != "mp4":
        pytest.skip("only MP4 has such tables")
    made, real = list[bool](), mp4_excerpt.excerpt

    def excerpt(*asked: Any) -> Any:
        made.append((cut := real(*asked)) is not None)
        return cut

    monkeypatch.setattr(trim, "excerpt", excerpt)
    for one in parts(video):
        decoded(data, one, choose(one, Clip(2, start="center"), 0, 0, 0, 0))
    assert made == [False, True, True, True, False]  # libav trims the first and the last part by its own rules


def test_a_window_whose_frames_must_be_counted_is_refused() -> None:
    data = numbered_video.make(24, codec="mpeg4", container="mp4", options={"bf": "2", "g": "8"})
    video = probe(data, ext="mp4").video
    assert video is not None
    one = window(video, 1, 2)
    with pytest.raises(UnsupportedError, match="part of a longer file"):
        decoded(data, one, choose(one, Clip(1), 0, 0, 0, 0))


def test_an_impossible_window_is_refused(file: tuple[bytes, VideoInfo]) -> None:
    for first, end in ((1, 1), (-1, 2), (0, 99)):
        with pytest.raises(UsageError, match="are not a part of a video"):
            window(file[1], first, end)


def test_a_file_that_ends_before_its_window_is_damaged(file: tuple[bytes, VideoInfo]) -> None:
    data, video = file
    one = parts(video)[-1]
    longer = numbered_video.replaced(one, frames=one.frames + 4)
    wanted = numbered_video.replaced(choose(longer, Clip(1), 0, 0, 0, 0), values=(one.frames + 2,))
    with pytest.raises(HeadraceError):
        decoded(data, longer, wanted)


def test_the_clock_is_exact() -> None:
    assert VideoInfo(
        *("mp4", 0, "h264", 2, 2, Fraction(30), 1, Fraction(1, 90), 0, 1, "yuv420p", 0, ()), origin_pts=30
    ).seconds(120) == Fraction(1)


def test_the_patterns_tell_their_number() -> None:
    data = numbered_video.make(3, codec="mjpeg", container="matroska")
    with av.open(io.BytesIO(data), "r") as container:
        numbers = [numbered_video.number_in(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert numbers == [0, 1, 2]
