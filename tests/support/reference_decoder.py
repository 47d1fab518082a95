"""Frames and sound by plain PyAV: from the beginning, to the end, and independent of all code under test."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.filter import Graph


def frames(data: bytes, most: int = 100_000) -> tuple[list[np.ndarray], list[Fraction]]:
    """Of the largest video stream, RGB by BT.601 and seconds of each frame shown, in order of presentation."""
    images, times = [], []
    with av.open(io.BytesIO(data), "r") as container:
        stream: Any = max(container.streams.video, key=lambda s: s.codec_context.width * s.codec_context.height)
        for frame in container.decode(stream):
            images.append(bt601(frame))
            times.append(Fraction(frame.pts or 0) * frame.time_base)
            if len(images) == most:
                break
    return images, times


def bt601(frame: av.VideoFrame) -> np.ndarray:
    """uint8 (height, width, 3)."""
    graph = Graph()
    source = graph.add_buffer(
        width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1, 1000), name="in"
    )
    scale = graph.add("scale", "in_color_matrix=bt601:flags=accurate_rnd+full_chroma_int+bilinear")
    graph.link_nodes(source, scale, graph.add("format", "rgb24"), graph.add("buffersink")).configure()
    graph.vpush(frame)
    return graph.vpull().to_ndarray()


def sound(data: bytes, stream: int, seconds: float) -> tuple[np.ndarray, int]:
    """float32 (channels, samples) of the first `seconds` and a little more, and the rate; silence where stamps leave a gap
    of more than the millisecond that some containers count in."""
    pieces: list[tuple[int, np.ndarray]] = []
    with av.open(io.BytesIO(data), "r") as container:
        audio: Any = container.streams[stream]
        planar, first = AudioResampler(format="fltp"), None
        for frame in container.decode(audio):
            rate = frame.sample_rate
            first = frame.pts * frame.time_base if first is None else first
            at = round((frame.pts * frame.time_base - first) * rate)
            near = pieces[-1][0] + pieces[-1][1].shape[1] if pieces else 0
            at = near if abs(at - near) <= rate / 1000 else at
            if at > (seconds + 1) * rate:
                break
            pieces += [(at, piece.to_ndarray()) for piece in planar.resample(frame)]
    whole = np.zeros((pieces[0][1].shape[0], max(at + piece.shape[1] for at, piece in pieces)), np.float32)
    for at, piece in pieces:
        whole[:, at : at + piece.shape[1]] = piece
    return whole, rate
