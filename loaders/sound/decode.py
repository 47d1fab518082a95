"""The sound of a clip: the same window of time, resampled, of an exact length.

Purpose: (compressed bytes, what the index says, when the clip begins) -> float32 samples.

Invariants: the result has exactly `AudioSpec.samples` samples a channel, the first of which is what sounds at the
instant of the clip's first frame, by time stamps and rounded to the nearest sample of the source. Frames that follow each
other as far as their stamps tell do so without gap or overlap, and where all are of one length they lie where counting from
the file's first sample has them: Matroska, WebM and FLV stamp in milliseconds. What the file does not hold (before its first
sound, after its last, a gap) is zero. Equal arguments give equal samples.
Failure behaviour: `CorruptionError` for what cannot be demultiplexed or decoded inside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from fractions import Fraction

import av
import msgspec
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo
from loaders.decode.trim import demuxed, open_media
from loaders.partial.file import Media
from loaders.sound.spec import LAYOUTS, AudioSpec

F32 = npt.NDArray[np.float32]
Hear = Callable[[Media, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, here or in another process."""

_ROLL = Fraction(1, 2)
"""Seconds decoded before the window: codecs need some sound before what they say is right (Opus and MP3 a few packets)."""
_EDGE = Fraction(1, 20)
"""Seconds around the window that the resampler's filter looks at."""
_ROUNDED = Fraction(1, 1000)
"""Seconds in which Matroska, WebM and FLV count, and with them MP4 made of those."""


def decode_audio(
    data: Media, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool = False
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
        head = _head(container, stream) if _is_coarse(stream) and start > _ROLL else None
        frames = list(_frames(container, stream, start - _ROLL, start + seconds + _EDGE))
        if not frames:
            return sound, 0
        if start <= _ROLL:  # they begin with it
            head = _Head(_pts(frames[0]), frames[0].samples)
        source, covered = _lay_out(frames, start - _EDGE, seconds + 2 * _EDGE, head)
        resampled = _resample(source, frames[0], spec)
    first = round(_EDGE * spec.sample_rate)
    part = resampled[:, first : first + samples]
    sound[:, : part.shape[1]] = part
    real = min(samples, max(0, round((covered - _EDGE) * spec.sample_rate)))
    sound[:, real:] = 0.0
    return sound, real


class _Head(msgspec.Struct, frozen=True):
    """The file's first frame, which may be shorter than the others."""

    pts: int
    samples: int


def _is_coarse(stream: AudioStream) -> bool:
    """Whether stamps are too coarse to say which sample is meant."""
    return stream.time_base is not None and stream.time_base * stream.sample_rate > 1


def _head(container: av.container.InputContainer, stream: AudioStream) -> _Head | None:
    with demuxed(container, stream) as packets:
        for frame in (frame for packet in packets for frame in packet.decode()):
            return _Head(_pts(frame), frame.samples)
    return None


def _pts(frame: AudioFrame) -> int:
    if frame.pts is None:
        raise CorruptionError("the sound carries no time stamps")
    return frame.pts


def _frames(
    container: av.container.InputContainer, stream: AudioStream, start: Fraction, end: Fraction
) -> Iterator[AudioFrame]:
    """Decoded frames that end after `start` and begin before `end`."""
    if start <= 0:
        yield from _decoded(container, stream, start, end)
        return
    for guide in _guides(container, stream):
        assert guide.time_base is not None
        assert stream.time_base is not None
        container.seek(int(start / guide.time_base), stream=guide, backward=True)
        frames = _decoded(container, stream, start, end)
        first = next(frames, None)
        if first is not None and (guide is stream or _pts(first) * stream.time_base <= start):
            yield first
            yield from frames
            return
        frames.close()


def _guides(container: av.container.InputContainer, stream: AudioStream) -> Iterator[AudioStream | VideoStream]:
    """By which streams to look for an instant, one after the other. Matroska knows where pictures are; looking for sound, libav
    would read all that lies before it."""
    if "matroska" in container.format.name:
        yield from container.streams.video[:1]
    yield stream


def _decoded(
    container: av.container.InputContainer, stream: AudioStream, start: Fraction, end: Fraction
) -> Generator[AudioFrame]:
    assert stream.time_base is not None
    with demuxed(container, stream) as packets:
        for packet in packets:
            if (
                packet.pts is not None
                and packet.duration
                and (packet.pts + packet.duration) * stream.time_base <= start
            ):
                continue
            for frame in packet.decode():
                if _pts(frame) * stream.time_base >= end:
                    return
                yield frame


def _lay_out(frames: list[AudioFrame], start: Fraction, seconds: Fraction, head: _Head | None) -> tuple[F32, Fraction]:
    """Samples at the source's rate, placed by their stamps into `seconds` from `start`; and up to where there is sound."""
    rate, layout = frames[0].sample_rate, frames[0].layout
    planar = AudioResampler(format="fltp", layout=layout)
    canvas = np.zeros((len(layout.channels), round(seconds * rate)), np.float32)
    pieces = list[F32]()
    for frame in frames:
        if frame.sample_rate != rate or frame.layout.name != layout.name:
            raise CorruptionError("the sound changes its rate or channels in the middle")
        pieces.append(np.concatenate([piece.to_ndarray() for piece in planar.resample(frame)], axis=1))
    tick = (frames[0].time_base or Fraction(1, rate)) * rate
    end, lengths = 0, [piece.shape[1] for piece in pieces]
    places = _places([_pts(frame) for frame in frames], lengths, rate, tick, start * rate, head)
    for at, values in zip(places, pieces, strict=True):
        low, high = max(0, -at), min(values.shape[1], canvas.shape[1] - at)
        if low < high:
            canvas[:, at + low : at + high] = values[:, low:high]
            end = max(end, at + high)
    return canvas, Fraction(end, rate)


def _places(
    stamps: list[int], lengths: list[int], rate: int, tick: Fraction, start: Fraction, head: _Head | None
) -> list[int]:
    """Where each frame begins, in samples from `start`; stamps are in ticks of so many samples. Where they are within a
    millisecond, or a tick, of what the lengths of the frames before say, frames follow each other, from the instant that fits
    all their stamps best; where not, there is a gap, or an overlap."""
    one, near = tick.denominator, max(tick, _ROUNDED * rate + 1) * tick.denominator  # whole numbers are quicker
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
                begin = _counted(head, begin, set(lengths[first : first + len(ends) - 1]), tick)
        at = round(begin - start)
        places += [at + end for end in ends]
        first += len(ends)
    return places


def _counted(head: _Head, begin: Fraction, lengths: set[int], tick: Fraction) -> Fraction:
    """What lies within a tick of `begin` and would begin a frame, if all since the first had this one length; else `begin`."""
    if len(lengths) != 1:
        return begin
    (length,) = lengths
    second = head.pts * tick + head.samples
    exact = second + round((begin - second) / length) * length
    return exact if abs(exact - begin) < tick else begin


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
