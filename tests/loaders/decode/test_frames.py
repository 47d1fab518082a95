"""Every decoder gives the frames that plain decoding from the start gives, bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from headrace.dataio.core.errors import CapacityError, HeadraceError
from headrace.dataio.shards.sample import VideoInfo
from headrace.loaders.clip import Clip, Wanted, choose
from headrace.loaders.decode import dali
from headrace.loaders.decode.base import Decoded, Decoder, Request
from headrace.loaders.decode.dali import DaliDecoder, dali_installed, gpu_count
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.registry import candidates, open_decoder
from headrace.loaders.decode.registry import choose as choose_decoder

pytestmark = pytest.mark.slow

VIDEOS = [
    "action_xvid.avi",
    "arm_wrestling.mp4",
    "av1.mkv",
    "h265.mp4",
    "nasa_h264_aac.mp4",
    "pancake_h264.mkv",
    "rotated_90.mov",
    "testsrc2_vp9.webm",
    "youtube_clip.mp4",
]
MOST = 170
Reference = Callable[..., tuple[list[np.ndarray], list[int]]]
InfoOf = Callable[[bytes, str], VideoInfo]
needs_dali = pytest.mark.skipif(not dali_installed(), reason="DALI is not installed (it exists for Linux only)")


def frames_at(info: VideoInfo, *values: int, by: Any = "index") -> Wanted:
    keys = [key for key in info.key_frames if (key.index if by == "index" else key.pts) <= values[0]]
    return Wanted(by, values, max(keys, key=lambda key: key.index) if keys else info.key_frames[0])


def decode(decoder: Decoder, data: bytes, info: VideoInfo, wanted: Wanted) -> Decoded:
    result = decoder.decode([Request(memoryview(data), info, wanted)])[0]
    if isinstance(result, HeadraceError):
        raise result
    return result


@pytest.mark.parametrize("name", VIDEOS)
def test_frames_of_real_clips_chosen_by_number_or_time_equal_those_of_plain_decoding(
    name: str, media: Path, reference: Reference, info_of: InfoOf
) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    images, stamps = reference(data, info.stream, MOST)
    last = len(images) - 1
    middle = min(last, 163)  # behind a later key frame where the clip has one
    for values in ((0, 1, 2), (middle - 2, middle - 1, middle), (last // 3, last // 2, last, last, last)):
        wanted = frames_at(info, *[max(0, value) for value in values])
        decoded = decode(PyAVDecoder(), data, info, wanted)
        assert (decoded.frames.numpy() == np.stack([images[value] for value in wanted.values])).all()
        if not name.endswith(".avi"):  # where packed B-frames carry their neighbours' stamps
            assert decoded.pts == tuple(stamps[value] for value in wanted.values)
    if not name.endswith(".avi"):
        instants = np.linspace(stamps[0], stamps[-1], 7).astype(int).tolist()
        decoded = decode(PyAVDecoder(), data, info, frames_at(info, *instants, by="pts"))
        shown = [max(n for n, stamp in enumerate(stamps) if stamp <= instant) for instant in instants]
        assert (decoded.frames.numpy() == np.stack([images[n] for n in shown])).all()


def test_a_variable_frame_rate_and_a_late_start_are_exact(
    media: Path, reencode: Any, reference: Reference, info_of: InfoOf
) -> None:
    gaps = [4, 1, 30, 2, 2, 9, 4, 17, 1, 1, 50, 3] * 3
    stamps = [500 + sum(gaps[:n]) for n in range(len(gaps))]
    data = reencode(media / "arm_wrestling.mp4", "libx264", "matroska", stamps=stamps, options={"bf": "3"})
    info = info_of(data, "mkv")
    images, times = reference(data, info.stream)
    assert len({b - a for a, b in pairwise(times)}) > 5  # it does vary
    assert times[0] == info.start_pts > 0
    for epoch in range(8):
        wanted = choose(info, Clip(6, fps=3.7), 0, epoch, 0, 0)
        shown = [max((n for n, time in enumerate(times) if time <= value), default=0) for value in wanted.values]
        decoded = decode(PyAVDecoder(), data, info, wanted)
        assert decoded.pts == tuple(times[n] for n in shown)
        assert (decoded.frames.numpy() == np.stack([images[n] for n in shown])).all()
        by_count = decode(PyAVDecoder(), data, info, choose(info, Clip(5, 3), 0, epoch, 0, 0))
        assert all(
            (images[times.index(pts)] == frame).all()
            for pts, frame in zip(by_count.pts, by_count.frames.numpy(), strict=True)
        )


@pytest.mark.parametrize(
    ("codec", "pixel_format"), [("libx264", "yuv420p"), ("mjpeg", "yuvj420p"), ("libvpx-vp9", "yuv420p")]
)
@pytest.mark.parametrize("cut", [5, 17])
def test_frames_cut_off_by_an_edit_list_are_never_shown(
    codec: str, pixel_format: str, cut: int, media: Path, reencode: Any, reference: Reference, info_of: InfoOf
) -> None:
    stamps = [4 * (n - cut) for n in range(40)]
    data = reencode(media / "pancake_h264.mkv", codec, "mp4", pixel_format=pixel_format, stamps=stamps)
    info = info_of(data, "mp4")
    images, times = reference(data, info.stream)
    assert info.frames == len(images) < 40  # the list is there and is obeyed
    for epoch in range(6):
        by_count = choose(info, Clip(3, 2), 0, epoch, 0, 0)
        decoded = decode(open_decoder(), data, info, by_count)
        assert (decoded.frames.numpy() == np.stack([images[n] for n in by_count.values])).all()
        by_time = choose(info, Clip(3, fps=9), 0, epoch, 0, 0)
        shown = [max((n for n, time in enumerate(times) if time <= value), default=0) for value in by_time.values]
        assert (
            decode(open_decoder(), data, info, by_time).frames.numpy() == np.stack([images[n] for n in shown])
        ).all()


@pytest.mark.parametrize("container", ["mp4", "matroska"])
@pytest.mark.parametrize(
    ("codec", "parameters"),
    [
        ("libx265", {"x265-params": "open-gop=1:keyint=10:min-keyint=10:bframes=4:scenecut=0:log-level=none:pools=1"}),
        ("libx264", {"x264-params": "open-gop=1:keyint=10:bframes=4:scenecut=0"}),
        ("libx264", {"x264-params": "intra-refresh=1:keyint=10"}),
    ],
)
def test_open_groups_and_gradual_refreshes_are_exact_at_every_frame(
    codec: str,
    parameters: dict[str, str],
    container: str,
    media: Path,
    reencode: Any,
    reference: Reference,
    info_of: InfoOf,
) -> None:
    data = reencode(media / "nasa_h264_aac.mp4", codec, container, options=parameters, frames=40)
    info = info_of(data, container)
    assert _leading_pictures(data) > 0  # the case is there
    assert len(info.key_frames) > 2 or "intra-refresh" in str(parameters)  # which has no key frames but the first
    images, _ = reference(data, info.stream)
    for first in range(0, 39, 3):
        decoded = decode(PyAVDecoder(), data, info, frames_at(info, first, first + 1))
        assert (decoded.frames.numpy() == np.stack(images[first : first + 2])).all()


def _leading_pictures(data: bytes) -> int:
    leading, key = 0, 0
    with av.open(io.BytesIO(data), "r") as container:
        for packet in container.demux(video=0):
            if packet.pts is not None:
                key = packet.pts if packet.is_keyframe else key
                leading += packet.pts < key
    return leading


GOLDEN = [
    ("libvpx-vp9", "webm", "yuv420p"),
    ("libvpx", "webm", "yuv420p"),
    ("mjpeg", "matroska", "yuvj420p"),
    ("mjpeg", "avi", "yuvj422p"),
    ("mjpeg", "mov", "yuvj444p"),
]


@needs_dali
@pytest.mark.parametrize(("codec", "container", "pixel_format"), GOLDEN)
@pytest.mark.parametrize("name", ["arm_wrestling.mp4", "pancake_h264.mkv"])
def test_dali_and_pyav_give_the_same_pixels(
    name: str, codec: str, container: str, pixel_format: str, media: Path, reencode: Any, info_of: InfoOf
) -> None:
    data = reencode(media / name, codec, container, pixel_format=pixel_format)
    _compare_with_dali(data, info_of(data, container))


@needs_dali
def test_dali_and_pyav_give_the_same_pixels_of_a_real_vp9_clip(media: Path, info_of: InfoOf) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    _compare_with_dali(data, info_of(data, "webm"))


def _compare_with_dali(data: bytes, info: VideoInfo) -> None:
    wanted = frames_at(info, *range(info.frames // 2, info.frames, 3), info.frames - 1, info.frames - 1)
    assert choose_decoder(info, "bt601", candidates()).name == "pyav"  # the same bits for less
    dali, pyav = DaliDecoder(), PyAVDecoder()
    ours = decode(pyav, data, info, wanted)
    trimmed = decode(dali, data, info, wanted)
    whole = dali._run([(data, wanted.values)])[0]  # the whole file, as if there were no trimming
    assert np.abs(ours.frames.numpy().astype(int) - trimmed.frames.numpy()).max() == 0
    assert np.abs(ours.frames.numpy().astype(int) - whole.numpy()).max() == 0
    assert ours.pts == trimmed.pts
    dali.close()


@needs_dali
def test_dali_names_the_culprit_and_decodes_the_others(media: Path, info_of: InfoOf) -> None:
    data = (media / "testsrc2_vp9.webm").read_bytes()
    info = info_of(data, "webm")
    good = Request(memoryview(data), info, frames_at(info, 3, 4))
    bad = Request(memoryview(_garbled(data)), info, frames_at(info, 3, 4))
    dali = DaliDecoder()
    dali._batch = 3  # as a GPU would take them
    first, second, third = dali.decode([good, bad, good])
    assert isinstance(second, HeadraceError)
    assert isinstance(first, Decoded)
    assert isinstance(third, Decoded)
    assert (first.frames == third.frames).all()
    assert (first.frames == decode(PyAVDecoder(), data, info, good.wanted).frames).all()
    again = dali.decode([good])[0]
    assert isinstance(again, Decoded)
    assert (again.frames == first.frames).all()


def _garbled(data: bytes) -> bytes:
    with av.open(io.BytesIO(data), "r") as container:
        packet = next(p for p in container.demux(video=0) if p.size)
        at = data.index(bytes(packet)[:64])
    return data[:at] + b"\xff" * 64 + data[at + 64 :]


@pytest.mark.parametrize("asked", ["auto", "dali", "pyav"])
def test_the_chosen_decoder_does_not_change_the_frames(asked: str, media: Path, reencode: Any, info_of: InfoOf) -> None:
    data = reencode(media / "arm_wrestling.mp4", "libvpx", "webm")
    info = info_of(data, "webm")
    other = (media / "h265.mp4").read_bytes()
    requests = [
        Request(memoryview(data), info, frames_at(info, 5, 9)),
        Request(memoryview(other), info_of(other, "mp4"), frames_at(info_of(other, "mp4"), 2, 3)),
        Request(memoryview(_garbled(data)), info, frames_at(info, 0, 1)),
    ]
    assert choose_decoder(info, "bt601", candidates(asked)).name == ("dali_cpu" if asked == "dali" else "pyav")
    assert choose_decoder(requests[1].info, "bt601", candidates(asked)).name == "pyav"
    auto, plain = open_decoder(asked).decode(requests), PyAVDecoder().decode(requests)
    assert [type(result) for result in auto] == [type(result) for result in plain]
    assert isinstance(auto[2], HeadraceError)
    for one, other_ in zip(auto[:2], plain[:2], strict=True):
        assert isinstance(one, Decoded)
        assert isinstance(other_, Decoded)
        assert (one.frames == other_.frames).all()


def test_a_clip_of_impossible_size_is_refused_before_anything_is_allocated(media: Path, info_of: InfoOf) -> None:
    data = (media / "youtube_clip.mp4").read_bytes()
    info = info_of(data, "mp4")
    result = PyAVDecoder().decode([Request(memoryview(data), info, frames_at(info, *range(1000)))])[0]
    assert isinstance(result, CapacityError)


needs_gpu = pytest.mark.skipif(not (gpu_count() and dali.nvdec_missing() is None), reason="DALI decodes on no GPU here")


def _within_two(gpu: Decoded, cpu: Decoded) -> None:
    """As `test_nvdec` reckons: chroma is rounded before it is converted."""
    difference = np.abs(gpu.frames.cpu().numpy().astype(int) - cpu.frames.numpy())
    assert difference.max() <= 2
    assert (difference > 1).mean() < 2e-3
    assert gpu.pts == cpu.pts


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["arm_wrestling.mp4", "pancake_h264.mkv", "rotated_90.mov", "testsrc2_vp9.webm"])
def test_the_gpu_gives_the_same_pixels_within_two(name: str, media: Path, info_of: InfoOf) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    wanted = frames_at(info, *range(min(2, info.frames - 1), min(12, info.frames)), info.frames - 1, info.frames - 1)
    gpu = decode(DaliDecoder(0), data, info, wanted)
    assert gpu.frames.is_cuda
    _within_two(gpu, decode(PyAVDecoder(), data, info, wanted))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("codec", "container"), [("libx264", "mp4"), ("libx265", "matroska"), ("libvpx-vp9", "webm")])
def test_every_frame_of_what_is_encoded_with_frames_out_of_order_is_right_on_the_gpu(
    codec: str, container: str, media: Path, reencode: Any, info_of: InfoOf
) -> None:
    options = (
        {"bf": "4"}
        if codec == "libx264"
        else {"x265-params": "bframes=4:log-level=none"}
        if codec == "libx265"
        else None
    )
    data = reencode(media / "nasa_h264_aac.mp4", codec, container, options=options)
    info = info_of(data, container)
    dali = DaliDecoder(0)
    for first in range(0, info.frames - 3, 5):
        wanted = frames_at(info, first, first + 2, first + 3)
        _within_two(decode(dali, data, info, wanted), decode(PyAVDecoder(), data, info, wanted))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", [name for name in VIDEOS if name != "youtube_clip.mp4"])
def test_by_the_rule_every_clip_is_right_where_a_gpu_is(name: str, media: Path, info_of: InfoOf) -> None:
    data = (media / name).read_bytes()
    info = info_of(data, name[-3:])
    wanted = frames_at(info, 0, 1, min(6, info.frames - 1))
    _within_two(decode(open_decoder(device="cuda"), data, info, wanted), decode(PyAVDecoder(), data, info, wanted))
