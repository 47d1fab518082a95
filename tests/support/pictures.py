"""Pictures for tests, encoded here: a smooth pattern that no two sizes share."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np

FORMATS = {"jpg": ("mjpeg", "yuvj420p"), "png": ("png", "rgb24"), "webp": ("libwebp", "yuv420p")}


def pattern(width: int, height: int) -> np.ndarray:
    """uint8 (height, width, 3)."""
    y, x = np.mgrid[:height, :width]
    planes = [255 * x / width, 255 * y / height, 127 + 127 * np.sin(x / 9 + y / 7)]
    return np.stack(planes, axis=-1).astype(np.uint8)


def picture(kind: str, width: int = 64, height: int = 48, pixel_format: str | None = None) -> bytes:
    """The pattern as a file: `kind` is jpg, png or webp."""
    codec, usual = FORMATS[kind]
    frame = av.VideoFrame.from_ndarray(pattern(width, height), format="rgb24").reformat(format=pixel_format or usual)
    context = av.CodecContext.create(codec, "w")
    context.width, context.height, context.pix_fmt = width, height, frame.format.name  # type: ignore[attr-defined]
    context.time_base = Fraction(1)
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])  # type: ignore[attr-defined]
