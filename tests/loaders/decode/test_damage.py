"""Damaged and truncated files give the right frames or an error: never zeros, stale frames or neighbours."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from msgspec.structs import replace

from dataio.core.errors import CorruptionError, MillraceError
from dataio.shards.contract import KeyFrame, VideoInfo
from loaders.clip import Wanted
from loaders.decode.choose import AutoDecoder
from loaders.decode.contract import Decoded, Request
from loaders.decode.pyav import PyAVDecoder

CUTS = 24
InfoOf = Callable[[bytes, str], VideoInfo]


def clip(info: VideoInfo, values: Sequence[int]) -> Wanted:
    key = max((key for key in info.key_frames if key.index <= values[0]), key=lambda key: key.index)
    return Wanted("index", tuple(values), key)


def outcome(data: bytes | memoryview, info: VideoInfo, wanted: Wanted) -> np.ndarray | MillraceError:
    result = AutoDecoder().decode([Request(memoryview(data), info, wanted)])[0]
    return result.frames.numpy() if isinstance(result, Decoded) else result


@pytest.mark.parametrize(
    ("codec", "container", "pixel_format", "options"),
    [
        ("libx264", "mp4", "yuv420p", {"movflags": "faststart"}),
        ("libx264", "mp4", "yuv420p", {}),
        ("libx264", "matroska", "yuv420p", {}),
        ("libvpx-vp9", "webm", "yuv420p", None),
        ("libvpx", "webm", "yuv420p", None),
        ("mjpeg", "mov", "yuvj420p", {}),
        ("mjpeg", "avi", "yuvj420p", {}),
        ("mpeg4", "avi", "yuv420p", {}),
    ],
)
def test_truncated_files_never_give_other_frames(
    codec: str, container: str, pixel_format: str, options: Any, media: Path, reencode: Any, info_of: InfoOf
) -> None:
    data = reencode(media / "nasa_h264_aac.mp4", codec, container, pixel_format=pixel_format, options=options)
    info = info_of(data, container)
    early, late = clip(info, [2, 3, 4]), clip(info, range(info.frames - 6, info.frames))
    right = {wanted: outcome(data, info, wanted) for wanted in (early, late)}
    for cut in np.linspace(1, len(data) - 1, CUTS).astype(int):
        for wanted, frames in right.items():
            found = outcome(data[:cut], info, wanted)
            assert isinstance(frames, np.ndarray)
            assert isinstance(found, MillraceError) or (found == frames).all()
    half = outcome(data[: len(data) // 2], info, late)
    assert isinstance(half, CorruptionError)


def test_damage_that_hits_the_wanted_frames_is_an_error_and_frames_before_it_are_exact(
    media: Path, reference: Any, info_of: InfoOf
) -> None:
    data = (media / "corrupted.mp4").read_bytes()
    info = info_of(data, "mp4")
    images = []
    with av.open(io.BytesIO(data)) as container, pytest.raises(av.FFmpegError):
        for frame in container.decode(video=0):
            images.append(frame)
    good = len(images) - 8  # what a decoder still holds back when the error comes is not judged here
    before = outcome(data, info, clip(info, range(good - 4, good)))
    assert isinstance(before, np.ndarray)
    assert (before == np.stack(reference(data, info.stream, good)[0][good - 4 :])).all()
    for values in (range(info.frames - 4, info.frames), range(len(images), len(images) + 2)):
        assert isinstance(outcome(data, info, clip(info, values)), CorruptionError)


@pytest.mark.parametrize("decoder", [AutoDecoder, PyAVDecoder])
def test_what_is_no_video_at_all_is_an_error(decoder: type, media: Path, info_of: InfoOf) -> None:
    data = (media / "arm_wrestling.mp4").read_bytes()
    info = info_of(data, "mp4")
    sound = (media / "action.wav").read_bytes()
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    for wrong in (b"", b"\0" * 5000, b"RIFF", sound, playlist, b"ffconcat version 1.0\nfile /etc/hostname\n"):
        result = decoder().decode([Request(memoryview(wrong), info, clip(info, [0]))])[0]
        assert isinstance(result, MillraceError)


def test_an_index_that_does_not_fit_the_file_is_found_out(media: Path, info_of: InfoOf) -> None:
    data = (media / "arm_wrestling.mp4").read_bytes()
    info = info_of(data, "mp4")
    wrong = [
        (replace(info, stream=3), clip(info, [0])),
        (replace(info, frames=900), clip(replace(info, frames=900), [899])),
        (replace(info, frames=270), clip(info, [269, 275, 279])),
        (replace(info, width=320), clip(info, [0])),
        (replace(info, key_frames=(KeyFrame(77, 0),)), Wanted("index", (5,), KeyFrame(77, 0))),
    ]
    for described, wanted in wrong:
        assert isinstance(outcome(data, described, wanted), CorruptionError)
