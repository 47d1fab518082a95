"""DALI gets only streams that it decodes correctly on a GPU. PyAV decodes all others, and the log reports this.

The tests need no GPU, because the streams are rejected before DALI receives them.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace as replace_field
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import pytest
import torch
from av.video.stream import VideoStream
from msgspec.structs import replace

from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.decode import dali, registry, resize
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.dali import DaliDecoder, dali_installed
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.registry import open_decoder
from headrace.loaders.decode.trim import mux, open_window

InfoOf = Callable[[bytes, str], VideoInfo]
needs_dali = pytest.mark.skipif(not dali_installed(), reason="DALI is not installed (it exists for Linux only)")


def request(data: bytes, info: VideoInfo, *values: int) -> Request:
    return Request(memoryview(data), info, Wanted("index", values or (0, 1, 2), info.key_frames[0]))


def why_not(asked: Request) -> str:
    """Why DALI refuses the clip's packets; empty if it accepts them."""
    with open_window(asked) as window:
        try:
            dali.check_nvdec(window, asked.info.codec)
        except UnsupportedError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "name", ["arm_wrestling.mp4", "pancake_h264.mkv", "h265.mp4", "testsrc2_vp9.webm", "rotated_90.mov"]
)
def test_real_clips_of_one_picture_a_packet_are_decoded_on_the_gpu(name: str, media: Path, info_of: InfoOf) -> None:
    data = (media / name).read_bytes()
    assert why_not(request(data, info_of(data, name[-3:]))) == ""


def first_picture(data: bytes) -> npt.NDArray[Any]:
    with av.open(io.BytesIO(data), "r") as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


@pytest.mark.parametrize("name", ["pancake_h264.mkv", "h265.mp4", "testsrc2_vp9.webm", "av1.mkv"])
def test_what_dali_is_given_decodes_to_the_same_first_picture(name: str, media: Path, info_of: InfoOf) -> None:
    data = (media / name).read_bytes()
    with open_window(request(data, info_of(data, name.rpartition(".")[2]), 0)) as window:
        given = mux(window)
    assert np.array_equal(first_picture(data), first_picture(given))


def test_av1_that_repeats_a_picture_is_not_decoded_on_the_gpu(media: Path, info_of: InfoOf) -> None:
    data = (media / "av1.mkv").read_bytes()
    info = info_of(data, "mkv")
    assert "decoded before" in why_not(request(data, info, 0, 5))
    assert why_not(request(data, info, 0)) == "", "the first packet decodes all that it shows"


def test_av1_packets_are_read_unit_by_unit() -> None:
    delimiter, header, shows, frame = b"\x12\x00", b"\x1a\x02\x00\x00", b"\x1a\x01\xa0", b"\x32\x03\x80\x00\x00"
    assert not dali._av1_repeats(delimiter + frame)
    assert not dali._av1_repeats(delimiter + header + frame)
    assert dali._av1_repeats(delimiter + frame + shows)
    assert dali._av1_repeats(b"\x1e\x08\x01\xa0"), "with an extension"
    assert dali._av1_repeats(b"\x18\xa0"), "without a length"
    assert dali._av1_repeats(b"\x1a\x00"), "an empty header"
    with pytest.raises(UnsupportedError, match="no length"):
        dali._av1_repeats(b"\x1a" + b"\xff" * 9)


def test_vp9_packets_are_read_frame_by_frame() -> None:
    shown, repeated = b"\x82\x49\x83\x42", b"\x88"
    assert not dali._vp9_repeats(shown)
    assert dali._vp9_repeats(repeated)

    def superframe(*frames: bytes) -> bytes:
        marker = bytes([0xC0 | (len(frames) - 1)])
        return b"".join(frames) + marker + b"".join(bytes([len(frame)]) for frame in frames) + marker

    assert not dali._vp9_repeats(superframe(shown, shown))
    assert dali._vp9_repeats(superframe(shown, repeated))
    assert dali._vp9_repeats(superframe(shown, b"")), "a frame of nothing"
    assert not dali._vp9_repeats(shown + b"\xc1"), "only its last byte is that of a superframe"


def test_interlaced_video_is_not_decoded_on_the_gpu(media: Path, reencode: Any, info_of: InfoOf) -> None:
    source = media / "nasa_h264_aac.mp4"
    interlaced = reencode(source, "libx264", "mp4", options={"x264-params": "interlaced=1"}, frames=6)
    assert "interlaced" in why_not(request(interlaced, info_of(interlaced, "mp4")))
    progressive = reencode(source, "libx264", "mp4", frames=6)
    assert why_not(request(progressive, info_of(progressive, "mp4"))) == ""


def test_frames_within_one_millisecond_are_not_decoded_on_the_gpu(media: Path, info_of: InfoOf) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    asked = request(data, info_of(data, "webm"))
    with open_window(asked) as window:
        close = replace(window, times=[time // 100 for time in window.times])
        with pytest.raises(UnsupportedError, match="within a millisecond"):
            dali.check_nvdec(close, "vp9")


def test_what_begins_at_a_point_of_recovery_is_not_decoded_on_the_gpu(
    media: Path, reencode: Any, info_of: InfoOf
) -> None:
    options = {"x264-params": "open-gop=1:keyint=10:bframes=4:scenecut=0"}
    data = reencode(media / "nasa_h264_aac.mp4", "libx264", "mp4", options=options, frames=40)
    info = info_of(data, "mp4")
    assert why_not(request(data, info)) == ""
    later = Request(memoryview(data), info, Wanted("index", (info.key_frames[2].index,), info.key_frames[2]))
    assert "instantaneous refresh" in why_not(later)


def chosen(info: VideoInfo) -> str:
    """The decoder for a stream on a GPU."""
    return registry.choose(info, "bt601", registry.candidates(device="cuda")).name


def test_pictures_that_the_cards_decoders_are_not_made_for_are_decoded_on_the_cpu(media: Path, info_of: InfoOf) -> None:
    data = (media / "arm_wrestling.mp4").read_bytes()
    plain = info_of(data, "mp4")
    assert chosen(plain) == "dali_gpu"
    for codec, width, height in (
        ("hevc", 128, 128),
        ("h264", 641, 480),
        ("vp9", 640, 361),
        ("h264", 4098, 2160),
        ("av1", 144, 8194),
    ):
        assert chosen(replace(plain, codec=codec, width=width, height=height)) == "pyav"
    for codec, width, height in (("hevc", 144, 8192), ("h264", 4096, 4096), ("vp9", 4098, 2160)):
        assert chosen(replace(plain, codec=codec, width=width, height=height)) == "dali_gpu"
    assert chosen(replace(plain, pixel_format="yuv420p10le")) == "pyav"
    assert chosen(replace(plain, ext="avi")) == "pyav"


def test_pictures_of_full_range_are_decoded_on_the_gpu_only_where_their_format_says_so(
    media: Path, info_of: InfoOf
) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    plain = info_of(data, "webm")
    assert plain.color is not None
    assert chosen(plain) == "dali_gpu"
    for color in (None, replace(plain.color, range="unknown")):
        assert chosen(replace(plain, color=color)) == "dali_gpu"
    full = replace(plain, color=replace(plain.color, range="pc"))
    assert chosen(full) == "pyav", "whether the driver's parser tells of VP9's range is not documented"


@pytest.mark.parametrize(("bframes", "picks", "refused"), [
    (3, (0, 13, 26, 40), True),
    (3, (0, 3, 14, 20, 31, 40), False),  # DALI goes on from where it is
    (3, (1, 11), False),
    (0, (0, 13, 26, 40), False),  # nothing leads a key frame
])  # fmt: skip
def test_hevc_whose_groups_are_open_is_not_decoded_on_the_gpu_where_dali_would_leap_into_it(
    bframes: int, picks: tuple[int, ...], refused: bool, media: Path, reencode: Any, info_of: InfoOf
) -> None:
    options = {"x265-params": f"log-level=none:scenecut=0:open-gop=1:bframes={bframes}"}
    data = reencode(media / "nasa_h264_aac.mp4", "libx265", "mp4", options=options, frames=48)
    info = info_of(data, "mp4")
    assert len(info.key_frames) == 4
    assert ("skip to a key frame" in why_not(request(data, info, *picks))) == refused


@needs_dali
def test_a_frame_that_dali_does_not_find_is_an_error_and_no_black_picture(media: Path) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    (whole,), (beyond,) = (DaliDecoder()._run_safely([(data, picks)]) for picks in ((0, 5), (0, 5000)))
    assert isinstance(whole, torch.Tensor)
    assert isinstance(beyond, CorruptionError)
    assert "out-of-bounds frame index 5000" in str(beyond)


@needs_dali
def test_clips_that_do_not_fit_the_memory_together_are_decoded_one_by_one(
    media: Path, info_of: InfoOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What DALI cannot allocate on a card is a `std::bad_alloc`, which Python sees as a MemoryError."""
    run, tried = dali._Pipeline.run, list[int]()

    def short_of_memory(self: dali._Pipeline, feeds: Any) -> Any:
        tried.append(len(feeds))
        if len(feeds) > 1 or len(tried) == 2:
            raise MemoryError("Can't allocate 33554432 bytes on device 0.")
        return run(self, feeds)

    monkeypatch.setattr(dali._Pipeline, "run", short_of_memory)
    data = (media / "testsrc2_vp9.webm").read_bytes()
    decoder = DaliDecoder()
    decoder._batch = 2
    refused, found = decoder.decode([request(data, info_of(data, "webm"))] * 2)
    assert tried == [2, 1, 1]
    assert isinstance(found, Decoded)
    assert isinstance(refused, CapacityError)
    assert "Can't allocate 33554432 bytes on device 0." in str(refused)


@needs_dali
def test_a_clip_that_the_gpu_has_no_memory_to_scale_is_refused_by_itself(
    media: Path, info_of: InfoOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled, tried = resize.apply, list[int]()

    def short_of_memory(frames: torch.Tensor, how: Any) -> torch.Tensor:
        tried.append(len(frames))
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return scaled(frames, how)

    monkeypatch.setattr(resize, "apply", short_of_memory)
    data = (media / "testsrc2_vp9.webm").read_bytes()
    refused, found = DaliDecoder().decode([request(data, info_of(data, "webm"))] * 2)
    assert isinstance(refused, CapacityError)
    assert "CUDA out of memory" in str(refused)
    assert isinstance(found, Decoded)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that DALI sees, in a container that was not given the driver's library for video."""
    monkeypatch.setattr(dali, "_LIBRARY", "libnvcuvid.so.missing")
    monkeypatch.setattr(dali, "gpu_count", lambda: 1)
    dali.nvdec_missing.cache_clear()
    yield
    dali.nvdec_missing.cache_clear()


@needs_dali
@pytest.mark.usefixtures("no_library")
def test_without_the_drivers_video_library_pyav_decodes_and_the_log_says_what_to_do(
    media: Path, info_of: InfoOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataio.core.log._logged", set())
    with pytest.raises(UnsupportedError, match="NVIDIA_DRIVER_CAPABILITIES"):
        DaliDecoder(0)
    data = (media / "arm_wrestling.mp4").read_bytes()
    asked = request(data, info_of(data, "mp4"))
    with caplog.at_level(logging.WARNING, "headrace"):
        decoder = open_decoder(device="cuda")
        (found,) = decoder.decode([asked])
    (expected,) = PyAVDecoder().decode([asked])
    assert isinstance(found, Decoded)
    assert isinstance(expected, Decoded)
    assert (found.frames == expected.frames).all()
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video" in caplog.text


class RefusingDecoder:
    """In the place of the GPU's decoder: refuses everything."""

    name = "refusing"

    def decode(self, requests: Sequence[Request]) -> list[Any]:
        return [UnsupportedError("the stream is of a kind")] * len(requests)

    def clip_bytes(self, *_: Any) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_refusal_by_dali_is_logged_once_per_codec_and_damage_is_not(
    media: Path, info_of: InfoOf, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, fallback = registry.candidates(device="cuda")
    refusing = replace_field(gpu, build=lambda device_id: RefusingDecoder(), missing=lambda device_id: None)
    decoder = registry.ChoosingDecoder([refusing, fallback])
    data = (media / "arm_wrestling.mp4").read_bytes()
    good, bad = request(data, info_of(data, "mp4")), request(b"no video at all", info_of(data, "mp4"))
    with caplog.at_level(logging.WARNING, "headrace"):
        (damaged,) = decoder.decode([bad])
        assert isinstance(damaged, CorruptionError)
        assert caplog.text == ""
        found = decoder.decode([good, bad, good])
    assert [type(one) for one in found] == [Decoded, CorruptionError, Decoded]
    assert caplog.text.count("pyav decodes some h264 that the chosen decoder refuses: the stream is of a kind") == 1


@needs_dali
def test_dali_decodes_a_repeated_frame_once(media: Path, info_of: InfoOf, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    asked = request(data, info_of(data, "webm"), 1, 1, 4, 4, 4, 9, 9)
    fed: list[tuple[int, ...]] = []
    run = DaliDecoder._run_safely

    def spied(self: DaliDecoder, feeds: Any) -> Any:
        fed.extend(picks for _, picks in feeds)
        return run(self, feeds)

    monkeypatch.setattr(DaliDecoder, "_run_safely", spied)
    (found,), (expected,) = DaliDecoder().decode([asked]), PyAVDecoder().decode([asked])
    assert isinstance(found, Decoded)
    assert isinstance(expected, Decoded)
    assert fed == [(1, 4, 9)]
    assert (found.frames == expected.frames).all()
    assert found.pts == expected.pts


Plane = npt.NDArray[np.float32]


def doubled(plane: npt.NDArray[np.uint8]) -> Plane:
    """Chroma at each pixel of luma: bilinear, its samples amid four pixels, the border repeated, rounded to a byte."""
    whole = plane.astype(np.float32)
    for axis in (0, 1):
        before = np.concatenate([whole.take([0], axis), whole], axis).take(range(whole.shape[axis]), axis)
        after = np.concatenate([whole, whole.take([-1], axis)], axis).take(range(1, whole.shape[axis] + 1), axis)
        both = np.stack([0.25 * before + 0.75 * whole, 0.75 * whole + 0.25 * after], axis + 1)
        shape = [side * (1 + (n == axis)) for n, side in enumerate(whole.shape)]
        whole = both.reshape(shape)
    return np.rint(whole)


def as_on_a_gpu(frame: av.VideoFrame) -> npt.NDArray[np.uint8]:
    """The arithmetic of DALI's kernel, as far as it can be told from its source: chroma is rounded before it is converted."""
    height, width = frame.height, frame.width
    flat = np.asarray(frame.to_ndarray(format="yuv420p"), np.uint8).ravel()
    luma = 1.164 * (flat[: height * width].reshape(height, width).astype(np.float32) - 16)
    blue, red = (doubled(half.reshape(height // 2, width // 2)) - 128 for half in np.split(flat[height * width :], 2))
    rgb = np.stack([luma + 1.596 * red, luma - 0.813 * red - 0.392 * blue, luma + 2.017 * blue], -1)
    return np.rint(rgb).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "name", ["arm_wrestling.mp4", "pancake_h264.mkv", "nasa_h264_aac.mp4", "h265.mp4", "testsrc2_vp9.webm"]
)
def test_the_arithmetic_of_the_gpu_is_within_two_of_the_cpus_and_seldom_more_than_one(
    name: str, media: Path, info_of: InfoOf
) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    (ours,) = PyAVDecoder().decode([request(data, info, 0, 1, 2)])
    assert isinstance(ours, Decoded)
    with av.open(str(media / name)) as container:
        stream = container.streams[info.stream]
        assert isinstance(stream, VideoStream)
        frames = list(islice(container.decode(stream), 3))
    for frame, expected in zip(frames, ours.frames.numpy(), strict=True):
        difference = np.abs(as_on_a_gpu(frame).astype(int) - expected)
        assert difference.max() <= 2
        assert (difference > 1).mean() < 2e-3
