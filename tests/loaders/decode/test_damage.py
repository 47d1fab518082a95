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

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.shards.sample import KeyFrame, VideoInfo
from headrace.loaders.clip import Wanted
from headrace.loaders.decode.base import Decoded, Request
from headrace.loaders.decode.pyav import PyAVDecoder
from headrace.loaders.decode.registry import open_decoder
from tests.support import video_corpus

CUTS = 24
InfoOf = Callable[[bytes, str], VideoInfo]


def clip(info: VideoInfo, values: Sequence[int]) -> Wanted:
    key = max((key for key in info.key_frames if key.index <= values[0]), key=lambda key: key.index)
    return Wanted("index", tuple(values), key)


def outcome(data: bytes | memoryview, info: VideoInfo, wanted: Wanted) -> np.ndarray | HeadraceError:
    result = open_decoder().decode([Request(memoryview(data), info, wanted)])[0]
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
            assert isinstance(found, HeadraceError) or (found == frames).all()
    half = outcome(data[: len(data) // 2], info, late)
    assert isinstance(half, CorruptionError)


def test_damage_that_hits_the_wanted_frames_is_an_error_and_frames_before_it_are_exact(
    media: Path, reference: Any, info_of: InfoOf
) -> None:
    data = (media / "corrupted.mp4").read_bytes()
    info = info_of(data, "mp4")
    images = []
    with av.open(io.BytesIO(data), "r") as container, pytest.raises(av.FFmpegError):
        for frame in container.decode(video=0):
            images.append(frame)
    good = len(images) - 8  # what a decoder still holds back when the error comes is not judged here
    before = outcome(data, info, clip(info, range(good - 4, good)))
    assert isinstance(before, np.ndarray)
    assert (before == np.stack(reference(data, info.stream, good)[0][good - 4 :])).all()
    for values in (range(info.frames - 4, info.frames), range(len(images), len(images) + 2)):
        assert isinstance(outcome(data, info, clip(info, values)), CorruptionError)


@pytest.mark.parametrize("decoder", [open_decoder, PyAVDecoder])
def test_what_is_no_video_at_all_is_an_error(decoder: type, media: Path, info_of: InfoOf) -> None:
    data = (media / "arm_wrestling.mp4").read_bytes()
    info = info_of(data, "mp4")
    sound = (media / "action.wav").read_bytes()
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
    for wrong in (b"", b"\0" * 5000, b"RIFF", sound, playlist, b"ffconcat version 1.0\nfile /etc/hostname\n"):
        result = decoder().decode([Request(memoryview(wrong), info, clip(info, [0]))])[0]
        assert isinstance(result, HeadraceError)


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


# --- damage that the codec can tell


def payloads(data: bytes) -> list[tuple[int, int, bool]]:
    """Where the packets of the first video lie: begin, end, and whether it is a key frame."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    found = []
    for packet in packets:
        at = data.index(bytes(packet))
        found.append((at, at + packet.size, packet.is_keyframe))
    return found


@pytest.mark.parametrize("options", [{}, {"slices": "9"}, {"level": "4", "slicecrc": "2", "strict": "experimental"}])
def test_checksums_of_ffv1_are_compared(options: dict[str, str], info_of: InfoOf) -> None:
    data = video_corpus.make(
        video_corpus.Made("", "ffv1", "matroska", width=160, height=128, frames=6, options=options)
    )
    info, (begin, end, _) = info_of(data, "mkv"), payloads(data)[3]
    assert isinstance(outcome(data, info, clip(info, [2, 3])), np.ndarray)
    for at in np.linspace(begin, end - 1, 12).astype(int):
        spoilt = bytearray(data)
        spoilt[at] ^= 4
        found = outcome(bytes(spoilt), info, clip(info, [3]))
        assert isinstance(found, CorruptionError), at
        assert isinstance(outcome(bytes(spoilt), info, clip(info, [2])), np.ndarray)


@pytest.mark.parametrize("options", [{"slicecrc": "0"}, {"level": "1"}])
def test_ffv1_without_checksums_is_decoded(options: dict[str, str], info_of: InfoOf) -> None:
    data = video_corpus.make(
        video_corpus.Made("", "ffv1", "matroska", width=160, height=128, frames=6, options=options)
    )
    info = info_of(data, "mkv")
    assert isinstance(outcome(data, info, clip(info, [2, 3])), np.ndarray)


def test_a_packet_of_hevc_that_was_lost_before_the_file_was_packed_is_noticed(info_of: InfoOf) -> None:
    options = {"x265-params": "log-level=none:pools=1:keyint=40:bframes=0"}
    kind = video_corpus.Made("", "libx265", "mp4", width=160, height=128, options=options)
    data, target = video_corpus.make(kind), io.BytesIO()
    with av.open(io.BytesIO(data), "r") as source, av.open(target, "w", format="mp4") as output:
        copy = output.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(video=0)):
            if packet.size and number != 10:
                packet.stream = copy
                output.mux(packet)
    lossy = target.getvalue()
    info = info_of(lossy, "mp4")
    assert isinstance(outcome(lossy, info, clip(info, [5, 8])), np.ndarray)
    assert isinstance(outcome(lossy, info, clip(info, [14, 16])), CorruptionError)


def test_damage_of_a_picture_that_is_shown_after_the_clip_and_needed_by_it_is_noticed(info_of: InfoOf) -> None:
    options = {"x264-params": "bframes=3:b-adapt=0:b-pyramid=none:keyint=40:scenecut=0"}
    data = video_corpus.make(video_corpus.Made("", "libx264", "mp4", width=160, height=128, options=options))
    info, places = info_of(data, "mp4"), payloads(data)
    spoilt = bytearray(data)
    begin, end, _ = places[5]  # I P B B B P: the sixth packet is the picture that is shown as number 8
    spoilt[(begin + end) // 2 : (begin + end) // 2 + 40] = bytes(40)
    assert isinstance(outcome(bytes(spoilt), info, clip(info, [1, 3])), np.ndarray)
    assert isinstance(outcome(data, info, clip(info, [5, 6])), np.ndarray)
    assert isinstance(outcome(bytes(spoilt), info, clip(info, [5, 6])), CorruptionError)


def test_messages_that_a_strict_decoder_refuses_say_nothing_of_the_pictures(info_of: InfoOf) -> None:
    for codec, unit in (("libx264", b"\x06\x05\xff\xff\x01"), ("libx265", b"\x4e\x01\x05\xff\xff\x01")):
        params = {"x264-params": "keyint=20", "x265-params": "log-level=none:pools=1:keyint=20"}
        data, target = video_corpus.make(video_corpus.Made("", codec, "mp4", options=params)), io.BytesIO()
        with av.open(io.BytesIO(data), "r") as source, av.open(target, "w", format="mp4") as output:
            stream = source.streams.video[0]
            copy = output.add_stream_from_template(stream)
            for packet in source.demux(stream):
                if packet.size:
                    more: Any = av.Packet(len(unit).to_bytes(4, "big") + unit + bytes(packet))
                    more.pts, more.dts, more.duration = packet.pts, packet.dts, packet.duration
                    more.time_base, more.is_keyframe, more.stream = packet.time_base, packet.is_keyframe, copy
                    output.mux(more)
        odd = target.getvalue()
        with av.open(io.BytesIO(odd), "r") as container, pytest.raises(av.FFmpegError):
            container.streams.video[0].codec_context.options = {"err_detect": "explode"}
            list(container.decode(video=0))
        info = info_of(odd, "mp4")
        wanted = clip(info, [21, 24])
        found, right = outcome(odd, info, wanted), outcome(data, info_of(data, "mp4"), wanted)
        assert isinstance(found, np.ndarray), found
        assert (found == right).all()
