"""Decoded audio frames, placed according to their time stamps.

Purpose: turn a decoder's frames and a time span into float32 samples of that span, at the source's rate.

Invariants:
- If their time stamps allow it, frames follow each other without gap or overlap.
- Time stamps of Matroska, WebM and FLV are in milliseconds. If all frames have the same length, frames are therefore
  placed by counting from the file's first sample.
- Samples that no frame contains are zero. The conversion to float32 gives the same values as FFmpeg's own conversion.
- Each frame is copied when it is added, so the decoder can reuse its memory. Consecutive frames are placed and
  converted together at the end.

Failure behaviour: `CorruptionError` for frames without time stamps, for far more frames than the span has room for, and
for audio that changes its rate, channels or format midway. `UnsupportedError` for sample formats that are not in
`_KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame

from headrace.dataio.core.errors import CorruptionError, UnsupportedError

F32 = npt.NDArray[np.float32]
_ROUNDED = Fraction(1, 1000)
"""Seconds. The time stamp resolution of Matroska, WebM and FLV, and of MP4 files remuxed from them."""
_KINDS: dict[str, tuple[Any, int, int]] = {
    "u8": (np.uint8, 1 << 7, 1 << 7),
    "s16": (np.int16, 0, 1 << 15),
    "s32": (np.int32, 0, 1 << 31),
    "s64": (np.int64, 0, 1 << 63),
    "flt": (np.float32, 0, 1),
    "dbl": (np.float64, 0, 1),
}
"""For each sample format: the dtype, the value of silence, and the value of 1.0."""


MOST_OF_WINDOW = 4
"""The limit on decoded samples, as a multiple of the number of samples in the span. Frames may overlap, so the limit is
above 1. It is needed because a few bytes may decode to hours of audio."""
_MOST_OF_SHORT = 1 << 18


class Head(msgspec.Struct, frozen=True):
    """The file's first frame, which may be shorter than the others."""

    pts: int
    samples: int


def pts(frame: AudioFrame) -> int:
    """The frame's time stamp; `CorruptionError` if it has none."""
    if frame.pts is None:
        raise CorruptionError("the sound carries no time stamps")
    return frame.pts


class FrameCollector:
    """Collects consecutive frames: about `seconds` of audio, or more."""

    def __init__(self, first: AudioFrame, seconds: Fraction) -> None:
        kind = _KINDS.get(first.format.packed.name)
        if kind is None:
            raise UnsupportedError(f"samples of the kind {first.format.name} are not known")
        self.rate, self.layout, self._format = first.sample_rate, first.layout.name, first.format.name
        self.tick = (first.time_base or Fraction(1, self.rate)) * self.rate
        self.channels = len(first.layout.channels)
        self._type, self._silence, self._full_scale = kind
        self._planar = bool(first.format.is_planar)
        self._width = 1 if self._planar else self.channels
        rows, room = self.channels if self._planar else 1, int(seconds * self.rate) + 2 * first.samples
        self._samples = np.empty((rows, room * self._width), self._type)
        self.stamps, self.lengths, self._end = list[int](), list[int](), 0
        self.gaps = 0
        self._max_values = MOST_OF_WINDOW * (room + _MOST_OF_SHORT) * self._width

    def add(self, frame: AudioFrame) -> None:
        """Copy the frame's samples."""
        if frame.sample_rate != self.rate or frame.layout.name != self.layout or frame.format.name != self._format:
            raise CorruptionError("the sound changes its rate or channels in the middle")
        self.stamps.append(pts(frame))
        self.lengths.append(frame.samples)
        count = frame.samples * self._width
        end = self._end + count
        if end > self._max_values:
            raise CorruptionError("there is far more sound in it than its time stamps have room for")
        while end > self._samples.shape[1]:
            self._samples = np.concatenate([self._samples, np.empty_like(self._samples)], axis=1)
        for row, plane in zip(self._samples, frame.planes, strict=True):
            row[self._end : end] = np.frombuffer(cast(Any, plane), self._type, count)
        self._end = end

    def placed(self, start: Fraction, seconds: Fraction, head: Head | None) -> tuple[F32, Fraction]:
        """The samples of `seconds` from `start` on, and the second up to which there is audio."""
        canvas = np.zeros((self.channels, round(seconds * self.rate)), np.float32)
        samples, end, at = self._samples[:, : self._end], 0, 0
        if not self._planar:
            samples = samples.reshape(-1, self.channels).T
        runs = _runs(_places(self, start * self.rate, head), self.lengths)
        self.gaps = len(runs) - 1
        for place, length in runs:
            low, high = max(0, -place), min(length, canvas.shape[1] - place)
            if low < high:
                self._draw(samples[:, at + low : at + high], canvas[:, place + low : place + high])
                end = max(end, place + high)
            at += length
        return canvas, Fraction(end, self.rate)

    def _draw(self, samples: npt.NDArray[Any], target: F32) -> None:
        if self._silence:
            samples = samples.astype(np.int16) - self._silence
        if self._full_scale == 1:
            target[:] = samples
        else:
            np.multiply(samples, np.float32(1 / self._full_scale), out=target, dtype=np.float32, casting="unsafe")


def collect_frames(frames: Iterable[AudioFrame], seconds: Fraction) -> FrameCollector | None:
    """Collect all frames, or return None if there are none.

    `seconds` is their expected duration, which sizes the buffer.
    """
    collector: FrameCollector | None = None
    for frame in frames:
        collector = collector or FrameCollector(frame, seconds)
        collector.add(frame)
    return collector


def _runs(places: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Merge frames that follow each other without a gap into runs of (start, length)."""
    out, end = list[tuple[int, int]](), None
    for place, length in zip(places, lengths, strict=True):
        if place == end:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((place, length))
        end = place + length
    return out


def _places(sound: FrameCollector, start: Fraction, head: Head | None) -> list[int]:
    """Where each frame begins, in samples from `start`. Time stamps are in ticks, and a tick is `sound.tick` samples.

    Frames are consecutive while each time stamp is within a millisecond, or a tick, of the end of the frame before.
    Such a run begins at the time that fits all of its time stamps best. Between runs there is a gap or an overlap.
    """
    stamps, lengths, tick = sound.stamps, sound.lengths, sound.tick
    unit = tick.denominator  # integers are faster than fractions
    tolerance = math.ceil(max(tick, _ROUNDED * sound.rate + 1) * unit)
    places, first = list[int](), 0
    while first < len(stamps):
        ends, away = [0], [0]
        for stamp, length in zip(stamps[first + 1 :], lengths[first:], strict=False):
            off = (stamp - stamps[first]) * tick.numerator - (ends[-1] + length) * unit
            if abs(off) >= tolerance:
                break
            ends.append(ends[-1] + length)
            away.append(off)
        begin = stamps[first] * tick
        if head is None or stamps[first] != head.pts:
            begin += Fraction(max(away) + min(away), 2 * unit)
            if head is not None:
                # the last frame may be shorter than the others, and so may the file's first
                frame_lengths = lengths[first : first + len(ends) - 1] or [max(lengths[first], head.samples)]
                begin = _nearest_boundary(head, begin, set(frame_lengths), tick)
        at = int(begin) + round(-start) if begin.denominator == 1 else round(begin - start)
        places += [at + end for end in ends]
        first += len(ends)
    return places


def _nearest_boundary(head: Head, begin: Fraction, lengths: set[int], tick: Fraction) -> Fraction:
    """The frame boundary at most a tick from `begin`, if all frames since the first have the one length in `lengths`.

    Otherwise `begin`.
    """
    if len(lengths) != 1:
        return begin
    (length,) = lengths
    second = head.pts * tick + head.samples
    exact = second + round((begin - second) / length) * length
    return exact if abs(exact - begin) <= tick else begin  # both are rounded, by half a tick at most
