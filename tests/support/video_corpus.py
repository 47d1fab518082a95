"""Clips made here, for a checkout without real ones: every codec, container and oddity that the encoders on board can make."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame

RATE = 48_000


@dataclass(frozen=True)
class Made:
    """One file: `stamps` are its frames' times in units of 1/100 s; `options` are the codec's, `muxed` the container's."""

    name: str
    codec: str
    container: str
    pixel_format: str = "yuv420p"
    width: int = 64
    height: int = 48
    frames: int = 40
    stamps: Sequence[int] = ()
    rotation: int = 0
    options: dict[str, str] = field(default_factory=dict)
    sound: str = ""
    second_video: bool = False
    muxed: dict[str, str] = field(default_factory=dict)


_VFR = tuple(np.cumsum([4, 1, 9, 2, 2, 30, 4, 3, 1, 7] * 4).tolist())
_X265 = {"x265-params": "log-level=none:pools=1:keyint=12"}
_VPX = {"deadline": "realtime", "cpu-used": "8", "g": "12"}
ALL = [
    Made("h264.mp4", "libx264", "mp4", options={"bf": "3", "g": "12"}, sound="aac"),
    Made("h264-late.mkv", "libx264", "matroska", stamps=[250 + 4 * n for n in range(40)], options={"g": "12"}),
    Made("h264-vfr.mkv", "libx264", "matroska", stamps=_VFR, options={"bf": "2", "g": "12"}, sound="flac"),
    Made("h264-10bit.mkv", "libx264", "matroska", "yuv420p10le", options={"g": "12"}),
    Made("h264-odd.mkv", "libx264", "matroska", "yuv444p", 63, 47, options={"g": "12"}),
    Made("h264-rotated.mov", "libx264", "mov", rotation=90, options={"g": "12"}),
    Made("h264-two.mkv", "libx264", "matroska", second_video=True, options={"g": "12"}),
    Made("h265.mp4", "libx265", "mp4", options=_X265),
    Made("vp8.webm", "libvpx", "webm", options=_VPX, sound="libopus"),
    Made("vp9.webm", "libvpx-vp9", "webm", options=_VPX, sound="libopus"),
    Made("mpeg4.avi", "mpeg4", "avi", options={"g": "12"}, sound="libmp3lame"),
    Made("mpeg4.mp4", "mpeg4", "mp4", options={"g": "12"}),
    Made("mjpeg.mkv", "mjpeg", "matroska", "yuvj420p"),
    Made("ffv1.mkv", "ffv1", "matroska"),
    Made("phone.3gp", "libx264", "3gp", options={"g": "12"}, sound="aac"),
]


def picture(number: int, width: int, height: int) -> np.ndarray:
    """A pattern that moves: uint8 (height, width, 3)."""
    y, x = np.mgrid[:height, :width]
    planes = [
        127 + 127 * np.sin(x / 5 + number / 3),
        127 + 127 * np.cos(y / 7 - number / 4),
        (x * 3 + y + 5 * number) % 256,
    ]
    return np.stack(planes, axis=-1).astype(np.uint8)


def make(what: Made, *, sound_late: Fraction = Fraction(0)) -> bytes:
    """The file's bytes. Its sound begins at `sound_late`, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "made")
        _encode(what, str(target), sound_late)
        return target.read_bytes()


def _encode(what: Made, target: str, sound_late: Fraction) -> None:
    keep = {} if what.container in ("mpeg", "flv") else {"avoid_negative_ts": "disabled"}  # which cannot say them
    with av.open(target, "w", format=what.container, container_options=keep | what.muxed) as output:
        small = _video(output, what, what.width // 2, what.height // 2) if what.second_video else None
        stream = _video(output, what, what.width, what.height)
        sound: Any = output.add_stream(what.sound, rate=RATE, layout="mono") if what.sound else None
        if what.rotation:
            stream.set_display_rotation(what.rotation)
        _write(output, what, stream)
        if small is not None:
            _write(output, what, small)
        if sound is not None:
            _write_sound(output, sound, (_stamps(what)[-1] + 4) / 100, sound_late)


def _video(output: Any, what: Made, width: int, height: int) -> Any:
    stream: Any = output.add_stream(what.codec, rate=25, options=dict(what.options))
    stream.width, stream.height, stream.pix_fmt = width, height, what.pixel_format
    frames_only = what.codec in ("mpeg4", "mpeg2video", "flv")
    stream.time_base = stream.codec_context.time_base = Fraction(1, 25 if frames_only else 100)
    return stream


def _stamps(what: Made) -> Sequence[int]:
    return what.stamps or [4 * n for n in range(what.frames)]


def _write(output: Any, what: Made, stream: Any) -> None:
    for number, stamp in enumerate(_stamps(what)):
        frame = av.VideoFrame.from_ndarray(picture(number, stream.width, stream.height), format="rgb24")
        frame = frame.reformat(format=what.pixel_format)
        base = Fraction(stream.codec_context.time_base)
        frame.pts, frame.time_base = int(Fraction(stamp, 100) / base), base
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))


def _write_sound(output: Any, stream: Any, seconds: float, late: Fraction) -> None:
    """A tone that rises, so that every moment sounds different."""
    time = np.arange(round(seconds * RATE)) / RATE
    samples = (0.4 * np.sin(2 * np.pi * (200 + 300 * time) * time) * 32767).astype(np.int16)
    for at in range(0, len(samples), 960):
        frame = AudioFrame.from_ndarray(samples[None, at : at + 960], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, at + round(late * RATE), Fraction(1, RATE)
        output.mux(stream.encode(frame))
    output.mux(stream.encode(None))
