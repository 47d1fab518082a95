"""Decoded frames of sound, put where their stamps say.

Purpose: (frames as a decoder gives them, a stretch of time) -> float32 samples of that stretch, at the source's rate.
Invariants: frames that follow each other as far as their stamps tell do so without gap or overlap, and where all are of one
length they lie where counting from the file's first sample has them: Matroska, WebM and FLV stamp in milliseconds. What no frame
holds is zero. Samples become float32 as FFmpeg's own conversion makes them. Frames are copied as they come, so that the decoder
can use their memory again; what becomes of them is decided for all that follow each other at once.
Failure behaviour: `CorruptionError` for frames without stamps, for far more of them than a stretch has room for, and for sound
that changes what it is in the middle; `UnsupportedError` for samples of another kind than decoders here give.
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
"""Seconds in which Matroska, WebM and FLV count, and with them MP4 made of those."""
_KINDS: dict[str, tuple[Any, int, int]] = {
    "u8": (np.uint8, 1 << 7, 1 << 7),
    "s16": (np.int16, 0, 1 << 15),
    "s32": (np.int32, 0, 1 << 31),
    "s64": (np.int64, 0, 1 << 63),
    "flt": (np.float32, 0, 1),
    "dbl": (np.float64, 0, 1),
}
"""What a sample is, which one is silence, and which one is 1.0."""


MOST_OF_WINDOW = 4
"""So many times the samples that a stretch should have are decoded for it: frames may overlap, but a few bytes may be hours."""
_MOST_OF_SHORT = 1 << 18


class Head(msgspec.Struct, frozen=True):
    """The file's first frame, which may be shorter than the others."""

    pts: int
    samples: int


def pts(frame: AudioFrame) -> int:
    """Its stamp, which it must have."""
    if frame.pts is None:
        raise CorruptionError("the sound carries no time stamps")
    return frame.pts


class Heard:
    """Frames one after the other: about `seconds` of them, or more."""

    def __init__(self, first: AudioFrame, seconds: Fraction) -> None:
        kind = _KINDS.get(first.format.packed.name)
        if kind is None:
            raise UnsupportedError(f"samples of the kind {first.format.name} are not known")
        self.rate, self.layout, self._format = first.sample_rate, first.layout.name, first.format.name
        self.tick = (first.time_base or Fraction(1, self.rate)) * self.rate
        self.channels = len(first.layout.channels)
        self._type, self._silence, self._one = kind
        self._planar = bool(first.format.is_planar)
        self._width = 1 if self._planar else self.channels
        rows, room = self.channels if self._planar else 1, int(seconds * self.rate) + 2 * first.samples
        self._held = np.empty((rows, room * self._width), self._type)
        self.stamps, self.lengths, self._end = list[int](), list[int](), 0
        self.gaps = 0
        self._most = MOST_OF_WINDOW * (room + _MOST_OF_SHORT) * self._width

    def add(self, frame: AudioFrame) -> None:
        """Copy it."""
        if frame.sample_rate != self.rate or frame.layout.name != self.layout or frame.format.name != self._format:
            raise CorruptionError("the sound changes its rate or channels in the middle")
        self.stamps.append(pts(frame))
        self.lengths.append(frame.samples)
        count = frame.samples * self._width
        end = self._end + count
        if end > self._most:
            raise CorruptionError("there is far more sound in it than its time stamps have room for")
        while end > self._held.shape[1]:
            self._held = np.concatenate([self._held, np.empty_like(self._held)], axis=1)
        for row, plane in zip(self._held, frame.planes, strict=True):
            row[self._end : end] = np.frombuffer(cast(Any, plane), self._type, count)
        self._end = end

    def placed(self, start: Fraction, seconds: Fraction, head: Head | None) -> tuple[F32, Fraction]:
        """The samples in `seconds` from `start`, and up to where there is sound."""
        canvas = np.zeros((self.channels, round(seconds * self.rate)), np.float32)
        held, end, at = self._held[:, : self._end], 0, 0
        if not self._planar:
            held = held.reshape(-1, self.channels).T
        runs = _runs(_places(self, start * self.rate, head), self.lengths)
        self.gaps = len(runs) - 1
        for place, length in runs:
            low, high = max(0, -place), min(length, canvas.shape[1] - place)
            if low < high:
                self._draw(held[:, at + low : at + high], canvas[:, place + low : place + high])
                end = max(end, place + high)
            at += length
        return canvas, Fraction(end, self.rate)

    def _draw(self, samples: npt.NDArray[Any], target: F32) -> None:
        if self._silence:
            samples = samples.astype(np.int16) - self._silence
        if self._one == 1:
            target[:] = samples
        else:
            np.multiply(samples, np.float32(1 / self._one), out=target, dtype=np.float32, casting="unsafe")


def heard(frames: Iterable[AudioFrame], seconds: Fraction) -> Heard | None:
    """All of them; about so many seconds are expected. None if there are none."""
    found: Heard | None = None
    for frame in frames:
        found = found or Heard(frame, seconds)
        found.add(frame)
    return found


def _runs(places: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """Frames without a gap between them, as one: where each begins, and how long it is."""
    out, end = list[tuple[int, int]](), None
    for place, length in zip(places, lengths, strict=True):
        if place == end:
            out[-1] = (out[-1][0], out[-1][1] + length)
        else:
            out.append((place, length))
        end = place + length
    return out


def _places(sound: Heard, start: Fraction, head: Head | None) -> list[int]:
    """Where each frame begins, in samples from `start`; stamps are in ticks of so many samples. Where they are within a
    millisecond, or a tick, of what the lengths of the frames before say, frames follow each other, from the instant that fits
    all their stamps best; where not, there is a gap, or an overlap."""
    stamps, lengths, tick = sound.stamps, sound.lengths, sound.tick
    one = tick.denominator  # whole numbers are quicker
    near = math.ceil(max(tick, _ROUNDED * sound.rate + 1) * one)
    places, first = list[int](), 0
    while first < len(stamps):
        ends, away = [0], [0]
        for stamp, length in zip(stamps[first + 1 :], lengths[first:], strict=False):
            off = (stamp - stamps[first]) * tick.numerator - (ends[-1] + length) * one
            if abs(off) >= near:
                break
            ends.append(ends[-1] + length)
            away.append(off)
        begin = stamps[first] * tick
        if head is None or stamps[first] != head.pts:
            begin += Fraction(max(away) + min(away), 2 * one)
            if head is not None:
                # the last frame may be shorter than the others, and so may the file's first
                before = lengths[first : first + len(ends) - 1] or [max(lengths[first], head.samples)]
                begin = _counted(head, begin, set(before), tick)
        at = int(begin) + round(-start) if begin.denominator == 1 else round(begin - start)
        places += [at + end for end in ends]
        first += len(ends)
    return places


def _counted(head: Head, begin: Fraction, lengths: set[int], tick: Fraction) -> Fraction:
    """What lies within a tick of `begin` and would begin a frame, if all since the first had this one length; else `begin`."""
    if len(lengths) != 1:
        return begin
    (length,) = lengths
    second = head.pts * tick + head.samples
    exact = second + round((begin - second) / length) * length
    return exact if abs(exact - begin) < tick else begin
