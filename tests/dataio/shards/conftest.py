"""Clips made for a test, and files with contents that a test needs."""

from __future__ import annotations

import gc
import warnings
import wave
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

MakeClip = Callable[..., Path]


@pytest.fixture
def make_clip() -> MakeClip:
    """`make_clip(path, codec=, frames=, options=)` writes a small moving picture, 64x48 at 30 frames a second."""
    return write_clip


@pytest.fixture
def make_wav() -> Callable[..., Path]:
    """`make_wav(path, seconds=)` writes a tone, 8 kHz mono."""
    return write_wav


@pytest.fixture
def read_with_webdataset() -> Callable[[Path], list[dict[str, bytes]]]:
    """Reads a tar file as the `webdataset` package does, to dicts with `__key__` and the members."""
    return _read_with_webdataset


def _read_with_webdataset(path: Path) -> list[dict[str, bytes]]:
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves its file to the garbage collector
        samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
        gc.collect()
    return samples


def write_clip(
    path: Path, codec: str = "libx264", frames: int = 12, gop: int = 6, options: dict[str, str] | None = None
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=30, options=options or {})
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
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = (np.sin(np.arange(int(8000 * seconds)) / 5) * 9000).astype("<i2")
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(samples.tobytes())
    return path
