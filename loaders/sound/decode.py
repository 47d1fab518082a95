"""The sound of a clip: the same window of time, resampled, of an exact length.

Purpose: (compressed bytes, what the index says, when the clip begins) -> float32 samples.

Invariants: the result has exactly `AudioSpec.samples` samples a channel, the first of which is what sounds at the
instant of the clip's first frame, by time stamps (`loaders.sound.layout`) and rounded to the nearest sample of the source.
What the file does not hold (before its first sound, after its last, a gap) is zero. Equal arguments give equal samples.
Failure behaviour: `CorruptionError` for what cannot be demultiplexed or decoded inside the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from fractions import Fraction

import av
import msgspec
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo
from loaders.decode.trim import demuxed, open_media
from loaders.partial.file import Media
from loaders.sound import marked
from loaders.sound.flac import read_flac
from loaders.sound.layout import F32 as F32
from loaders.sound.layout import I16, Head, heard, pts
from loaders.sound.resample import resampled
from loaders.sound.spec import LAYOUTS, AudioSpec

Hear = Callable[[Media, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, here or in another process."""

_ROLL = Fraction(1, 2)
"""Seconds decoded before the window: codecs need some sound before what they say is right (Opus and MP3 a few packets)."""
_EDGE = Fraction(1, 20)
"""Seconds around the window that the resampler's filter looks at."""
_WITHOUT_MEMORY = frozenset(["flac", "alac", "pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s32le", "pcm_f32le"])
"""Codecs of which every frame says all by itself."""


class Found(msgspec.Struct, frozen=True):
    """(channels, samples) at the source's rate, up to where there is sound, and what it is."""

    source: F32 | I16
    covered: Fraction
    rate: int
    layout: str


def decode_audio(
    data: Media, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool = False
) -> tuple[F32, int]:
    """float32 (channels, samples) from `start` seconds, and how many of them are real sound.

    `start` is on the file's own time line, or with `from_first` after the sound's first sample.
    """
    seconds = Fraction(samples, spec.sample_rate)
    sound = np.zeros((spec.channels, samples), np.float32)
    known = read_flac(data, info, start - _EDGE, seconds + 2 * _EDGE)
    if known is None:
        found = _found(data, info, start, seconds, from_first)
    else:
        found = Found(*known, info.sample_rate, LAYOUTS[info.channels])
    if found is None:
        return sound, 0
    first, made = round(_EDGE * spec.sample_rate), resampled(found.source, found.rate, found.layout, spec)
    part = made[:, first : first + samples]
    sound[:, : part.shape[1]] = part
    real = min(samples, max(0, round((found.covered - _EDGE) * spec.sample_rate)))
    sound[:, real:] = 0.0
    return sound, real


def _found(data: Media, info: AudioInfo, start: Fraction, seconds: Fraction, from_first: bool) -> Found | None:
    """What lies around the window, by libav."""
    with open_media(data) as container:
        stream = container.streams[info.stream] if info.stream < len(container.streams) else None
        if not isinstance(stream, AudioStream):
            raise CorruptionError(f"stream {info.stream} is not the audio stream that the index lists")
        if from_first and stream.start_time is not None and stream.time_base is not None:
            start += stream.start_time * stream.time_base
        coarse = _is_coarse(stream)
        before = _EDGE if info.codec in _WITHOUT_MEMORY and not coarse else _ROLL
        head = _head(container, stream) if coarse and start > before else None
        low, high = start - before, start + seconds + _EDGE
        frames = marked.frames(data, info, stream, low, high) or _frames(container, stream, low, high)
        sound = heard(frames, seconds + before + _EDGE)
    if sound is None:
        return None
    if start <= before:  # it begins with the file's first
        head = Head(sound.stamps[0], sound.lengths[0])
    source, covered = sound.placed(start - _EDGE, seconds + 2 * _EDGE, head)
    return Found(source, covered, sound.rate, sound.layout)


def _is_coarse(stream: AudioStream) -> bool:
    """Whether stamps are too coarse to say which sample is meant."""
    return stream.time_base is not None and stream.time_base * stream.sample_rate > 1


def _head(container: av.container.InputContainer, stream: AudioStream) -> Head | None:
    with demuxed(container, stream) as packets:
        for frame in (frame for packet in packets for frame in packet.decode()):
            return Head(pts(frame), frame.samples)
    return None


def _frames(
    container: av.container.InputContainer, stream: AudioStream, start: Fraction, end: Fraction
) -> Iterator[AudioFrame]:
    """Decoded frames that end after `start` and begin before `end`."""
    if start <= 0:
        yield from _decoded(container, stream, start, end)
        return
    for guide in _guides(container, stream):
        assert stream.time_base is not None
        _seek(container, guide, start)
        frames = _decoded(container, stream, start, end)
        first = next(frames, None)
        if first is not None and (guide is stream or pts(first) * stream.time_base <= start):
            yield first
            yield from frames
            return
        frames.close()


def _seek(container: av.container.InputContainer, guide: AudioStream | VideoStream, start: Fraction) -> None:
    """To `start`, or before it: near the end of FLAC libav finds no place, and says that it is not permitted."""
    assert guide.time_base is not None
    back = Fraction(0)
    while True:
        at = max(Fraction(0), start - back)
        try:
            return container.seek(int(at / guide.time_base), stream=guide, backward=True)
        except PermissionError:
            if not at:
                raise
            back = 2 * back + 1


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
    early, late = math.floor(start / stream.time_base), math.ceil(end / stream.time_base)  # whole numbers are quicker
    with demuxed(container, stream) as packets:
        for packet in packets:
            if packet.pts is not None and packet.duration and packet.pts + packet.duration <= early:
                continue
            for frame in packet.decode():
                if pts(frame) >= late:
                    return
                yield frame
