"""Videos whose pixels tell the number of each frame: ten bits as bright and dark columns."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from msgspec.structs import replace as replaced

from headrace.dataio.shards.sample import KeyFrame, VideoInfo

__all__ = ["make", "number_in", "numbers_in", "replaced", "with_positions"]

BITS, SIDE = 10, 16


def picture(number: int, height: int, offset: int = 0) -> np.ndarray:
    """The picture of a frame. `offset` is added to the dark columns, so cameras differ."""
    bits = (number >> np.arange(BITS)) & 1
    row = np.repeat(np.where(bits, 225, 30 + offset), SIDE).astype(np.uint8)
    return np.broadcast_to(row[None, :, None], (height, BITS * SIDE, 3)).copy()


def number_in(frame: Any) -> int:
    """The number of a frame from its pixels, (H, W, 3)."""
    columns = np.asarray(frame)[..., 0].mean(0).reshape(BITS, -1)
    return int(((columns[:, columns.shape[1] // 4 : -columns.shape[1] // 4].mean(1) > 128) << np.arange(BITS)).sum())


def numbers_in(clip: Any) -> list[int]:
    """The numbers of the frames of a clip, (T, 3, H, W)."""
    return [number_in(frame) for frame in np.moveaxis(np.asarray(clip), 1, -1)]


def make(
    frames: int,
    *,
    codec: str = "libx264",
    container: str = "mp4",
    rate: Fraction | int = 25,
    time_base: Fraction | None = None,
    stamps: Sequence[int] | None = None,
    height: int = 64,
    offset: int = 0,
    options: dict[str, str] | None = None,
) -> bytes:
    """Encode frames 0, 1, …. `stamps` are their times in units of `time_base` (default: 1 / `rate`)."""
    target = io.BytesIO()
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    keep = {"avoid_negative_ts": "disabled"}
    with av.open(target, "w", format=container, container_options=keep) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = BITS * SIDE, height, pixel_format
        stream.codec_context.time_base = stream.time_base = time_base or 1 / Fraction(rate)
        if codec != "libsvtav1":
            stream.codec_context.gop_size = int((options or {}).get("g", 12))
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, height, offset), format="rgb24")
            frame = frame.reformat(format=pixel_format)
            frame.pts = number if stamps is None else stamps[number]
            frame.time_base = stream.codec_context.time_base
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return target.getvalue()


def with_positions(data: bytes, video: VideoInfo) -> Iterator[KeyFrame]:
    """The key frames with the positions of their packets, which the index has only for long files."""
    with av.open(io.BytesIO(data), "r") as container:
        packets = [packet for packet in container.demux(container.streams[video.stream]) if packet.size]
        places = {packet.pts: packet.pos for packet in packets if packet.is_keyframe}
    for key in video.key_frames:
        yield replaced(key, at=places[key.pts])
