"""All the sound of a file, by a decoder that shares no code with the loaders: PyAV reads it once, from its beginning.

A frame follows the one before, unless its time stamp says that it lies more than 1.5 ms, or a tick and a half of the stream's
clock, away. Frames of Matroska whose blocks begin before time zero are left out; this module reads the blocks' times itself.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
_KINDS: dict[str, tuple[Any, int, int]] = {
    "u8": (np.uint8, 1 << 7, 1 << 7),
    "s16": (np.int16, 1 << 15, 0),
    "s32": (np.int32, 1 << 31, 0),
    "s64": (np.int64, 1 << 63, 0),
    "flt": (np.float32, 1, 0),
    "dbl": (np.float64, 1, 0),
}
"""How a sample is stored, which number is 1.0, and which is silence."""


@dataclass(frozen=True)
class Whole:
    """`first` is when the first sample sounds; `sound` begins with it. `gaps` counts places where frames do not follow."""

    rate: int
    first: Fraction
    sound: F32
    gaps: int
    errors: int

    def window(self, at: int, count: int) -> F32:
        """`count` samples from sample `at` on, with zeros where there is nothing."""
        out = np.zeros((len(self.sound), count), np.float32)
        low, high = max(0, at), min(self.sound.shape[1], at + count)
        if low < high:
            out[:, low - at : high - at] = self.sound[:, low:high]
        return out


def whole(data: bytes, stream: int) -> Whole | None:
    """The sound of this stream; None if none of it decodes."""
    frames, errors = _frames(data, stream)
    if not frames:
        return None
    rate, base = frames[0][2], frames[0][3]
    first = (frames[0][0] or 0) * base
    near = max(Fraction(3, 2) * base * rate, Fraction(3, 2000) * rate)
    places, end, gaps = list[int](), 0, 0
    for pts, samples, _, _ in frames:
        stamped = Fraction(end) if pts is None else (pts * base - first) * rate
        if abs(stamped - end) > near:
            end, gaps = round(stamped), gaps + 1
        places.append(end)
        end += samples.shape[1]
    length = max(place + samples.shape[1] for place, (_, samples, _, _) in zip(places, frames, strict=True))
    sound = np.zeros((frames[0][1].shape[0], length), np.float32)
    for place, (_, samples, _, _) in zip(places, frames, strict=True):
        low = max(0, -place)
        sound[:, place + low : place + samples.shape[1]] = samples[:, low:]
    return Whole(rate, first, sound, gaps, errors)


def _frames(data: bytes, number: int) -> tuple[list[tuple[int | None, F32, int, Fraction]], int]:
    found, errors = list[tuple[int | None, F32, int, Fraction]](), 0
    early = {at for at, time in block_times(data) if time < 0}
    with av.open(io.BytesIO(data), "r", metadata_errors="replace") as container:
        stream: Any = container.streams[number]
        for packet in container.demux(stream):
            try:
                for frame in packet.decode():
                    if packet.pos in early:
                        continue
                    found.append((frame.pts, _as_float(frame), frame.sample_rate, Fraction(stream.time_base)))
            except av.FFmpegError:
                errors += 1
    return found, errors


_SEGMENT, _CLUSTER, _GROUP, _BLOCK, _SIMPLE, _TIME = 0x18538067, 0x1F43B675, 0xA0, 0xA1, 0xA3, 0xE7


def block_times(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each block of a Matroska file begins, and its time in the file's ticks. Other files have none."""
    return _block_times(data, 0, len(data), [0]) if data[:4] == b"\x1a\x45\xdf\xa3" else iter(())


def _block_times(data: bytes, at: int, end: int, cluster: list[int]) -> Iterator[tuple[int, int]]:
    while at < end:
        kind, at = _number(data, at, marked=True)
        size, at = _number(data, at)
        if kind in (_SEGMENT, _CLUSTER, _GROUP):
            yield from _block_times(data, at, min(end, at + size), cluster)
        elif kind == _TIME:
            cluster[0] = int.from_bytes(data[at : at + size], "big")
        elif kind in (_BLOCK, _SIMPLE):
            _, behind = _number(data, at)
            yield at, cluster[0] + int.from_bytes(data[behind : behind + 2], "big", signed=True)
        at += size


def _number(data: bytes, at: int, *, marked: bool = False) -> tuple[int, int]:
    """EBML's number, and where it ends."""
    length = 9 - data[at].bit_length()
    value = int.from_bytes(data[at : at + length], "big")
    return value if marked else value & ((1 << 7 * length) - 1), at + length


def _as_float(frame: Any) -> F32:
    kind, channels = frame.format.packed.name, len(frame.layout.channels)
    stored, full, silence = _KINDS[kind]
    width = 1 if frame.format.is_planar else channels
    planes = [np.frombuffer(plane, stored)[: frame.samples * width] for plane in frame.planes]
    values = np.stack(planes) if frame.format.is_planar else planes[0].reshape(-1, channels).T
    made: F32 = ((values.astype(np.float64) - silence) / full).astype(np.float32)
    return made
