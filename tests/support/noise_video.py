"""A long video of noise, made here: all frames differ, and a second takes some hundred kilobytes."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np

GROUP = 12


def noise_video(frames: int, rate: int, container: str, seed: int) -> bytes:
    """Encode H.264 with B-frames and a key frame every `GROUP` frames."""
    random, target = np.random.default_rng(seed), io.BytesIO()
    options = {
        "bf": "2",
        "preset": "ultrafast",
        "qp": "20",
        "x264-params": f"keyint={GROUP}:min-keyint={GROUP}:scenecut=0",
    }
    with av.open(target, "w", format=container) as output:
        stream: Any = output.add_stream("libx264", rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = 96, 80, "yuv420p"
        for _ in range(frames):
            pixels = random.integers(0, 256, (80, 96, 3), np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        output.mux(stream.encode(None))
    return target.getvalue()
