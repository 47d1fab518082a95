"""The sound of a clip: the same window of time, resampled, of an exact length.

Purpose: (compressed bytes, what the index says, when the clip begins) -> float32 samples.

Invariants: the result has exactly `AudioSpec.samples` samples a channel, the first of which is what sounds at the
instant of the clip's first frame, by time stamps and rounded to the nearest sample of the source. What the file does
not hold (before its first sound, after its last, a gap) is zero. Equal arguments give equal samples.
Failure behaviour: `CorruptionError` for what cannot be demultiplexed or decoded inside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo
from loaders.decode.trim import demuxed, open_media
from loaders.sound.spec import LAYOUTS, AudioSpec

F32 = npt.NDArray[np.float32]
Hear = Callable[[memoryview, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, here or in another process."""

_ROLL = Fraction(1, 2)
"""Seconds decoded before the window: codecs need some sound before what they say is right (Opus and MP3 a few packets)."""
_EDGE = Fraction(1, 20)
"""Seconds around the window that the resampler's filter looks at."""


def decode_audio(
    data: memoryview, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool = False
) -> tuple[F32, int]:
    """float32 (channels, samples) from `start` seconds, and how many of them are real sound.

    `start` is on the file's own time line, or with `from_first` after the sound's first sample.
    """
    seconds = Fraction(samples, spec.sample_rate)
    sound = np.zeros((spec.channels, samples), np.float32)
    with open_media(data) as container:
        stream = container.streams[info.stream] if info.stream < len(container.streams) else None
        if not isinstance(stream, AudioStream):
            raise CorruptionError(f"stream {info.stream} is not the audio stream that the index lists")
        if from_first and stream.start_time is not None and stream.time_base is not None:
            start += stream.start_time * stream.time_base
        frames = list(_frames(container, stream, start - _ROLL, start + seconds + _EDGE))
        if not frames:
            return sound, 0
        source, covered = _lay_out(frames, start - _EDGE, seconds + 2 * _EDGE)
        resampled = _resample(source, frames[0], spec)
    first = round(_EDGE * spec.sample_rate)
    part = resampled[:, first : first + samples]
    sound[:, : part.shape[1]] = part
    real = min(samples, max(0, round((covered - _EDGE) * spec.sample_rate)))
    sound[:, real:] = 0.0
    return sound, real


def _frames(
    container: av.container.InputContainer, stream: AudioStream, start: Fraction, end: Fraction
) -> Iterator[AudioFrame]:
    """Decoded frames that end after `start` and begin before `end`."""
    assert stream.time_base is not None
    if start > 0:
        container.seek(int(start / stream.time_base), stream=stream, backward=True)
    with demuxed(container, stream) as packets:
        for frame in (frame for packet in packets for frame in packet.decode()):
            if frame.pts is None or frame.time_base is None:
                raise CorruptionError("the sound carries no time stamps")
            if frame.pts * frame.time_base >= end:
                return
            yield frame


def _lay_out(frames: list[AudioFrame], start: Fraction, seconds: Fraction) -> tuple[F32, Fraction]:
    """Samples at the source's rate, placed by their stamps into `seconds` from `start`; and up to where there is sound."""
    rate, layout = frames[0].sample_rate, frames[0].layout
    planar = AudioResampler(format="fltp", layout=layout)
    canvas = np.zeros((len(layout.channels), round(seconds * rate)), np.float32)
    end = 0
    for frame in frames:
        if (
            frame.sample_rate != rate
            or frame.layout.name != layout.name
            or frame.pts is None
            or frame.time_base is None
        ):
            raise CorruptionError("the sound changes its rate or channels in the middle")
        at = round((frame.pts * frame.time_base - start) * rate)
        values = np.concatenate([piece.to_ndarray() for piece in planar.resample(frame)], axis=1)
        low, high = max(0, -at), min(values.shape[1], canvas.shape[1] - at)
        if low < high:
            canvas[:, at + low : at + high] = values[:, low:high]
            end = max(end, at + high)
    return canvas, Fraction(end, rate)


def _resample(source: F32, like: AudioFrame, spec: AudioSpec) -> F32:
    """The whole stretch at once: (channels, about source length times the ratio of rates)."""
    layout = like.layout.name
    if spec.policy == "first":
        source, layout = _first(source, spec.channels), LAYOUTS[spec.channels]
    resampler = AudioResampler(format="fltp", layout=LAYOUTS[spec.channels], rate=spec.sample_rate)
    frame = AudioFrame.from_ndarray(source, format="fltp", layout=layout)
    frame.sample_rate = like.sample_rate
    pieces = [piece.to_ndarray() for part in (frame, None) for piece in resampler.resample(part)]
    return np.concatenate(pieces, axis=1) if pieces else np.zeros((spec.channels, 0), np.float32)


def _first(source: F32, channels: int) -> F32:
    """The first channels, and the last one again where there are too few."""
    return np.ascontiguousarray(source[np.minimum(np.arange(channels), len(source) - 1)])
