"""Small media files that a test writes: a moving picture and a tone."""

from __future__ import annotations

import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
from av.video.stream import VideoStream

ReadTar = Callable[[Path], list[dict[str, Any]]]
"""Reads a tar to samples: `__key__` and the bytes of each member."""


class MakeClip(Protocol):
    """The type of `write_clip`, for fixtures."""

    def __call__(
        self, path: Path, codec: str = "libx264", frames: int = 12, gop: int = 6, options: dict[str, str] | None = None
    ) -> Path: ...


class MakeWav(Protocol):
    """The type of `write_wav`, for fixtures."""

    def __call__(self, path: Path, seconds: float = 0.5) -> Path: ...


def write_clip(
    path: Path, codec: str = "libx264", frames: int = 12, gop: int = 6, options: dict[str, str] | None = None
) -> Path:
    """Write a small moving picture, 64x48 at 30 frames a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options or {})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.gop_size = 64, 48, gop
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.thread_count = 1
        for i in range(frames):
            picture = np.zeros((48, 64, 3), np.uint8)
            picture[:, :, 0] = np.roll(np.arange(64) * 4, 3 * i)
            picture[8:24, (i * 4) % 48 : (i * 4) % 48 + 16] = 220
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(format=stream.pix_fmt)
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def write_wav(path: Path, seconds: float = 0.5) -> Path:
    """Write a tone, 8 kHz mono."""
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = (np.sin(np.arange(int(8000 * seconds)) / 5) * 9000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    return path
