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
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo
from loaders.decode.trim import demuxed, open_media
from loaders.partial.file import Media
from loaders.sound.excerpts import cut
from loaders.sound.excerpts.contract import Excerpt
from loaders.sound.excerpts.cut import WARM_UP
from loaders.sound.excerpts.decoded import decoded
from loaders.sound.layout import F32 as F32
from loaders.sound.layout import Head, heard, pts
from loaders.sound.resample import resampled
from loaders.sound.spec import AudioSpec

Made = tuple[F32, Fraction]
"""(channels, samples) as they are wanted, and up to which second there is sound."""
Hear = Callable[[Media, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, here or in another process."""

_EDGE = Fraction(1, 25)
"""Seconds around the window that the resampler's filter looks at; whole samples of every usual rate, so that none is shifted."""
_WITHOUT_MEMORY = frozenset(["flac", "alac", "pcm_u8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s32le", "pcm_f32le"])
"""Codecs of which every frame says all by itself."""


def decode_audio(
    data: Media, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool = False
) -> tuple[F32, int]:
    """float32 (channels, samples) from `start` seconds, and how many of them are real sound.

    `start` is on the file's own time line, or with `from_first` after the sound's first sample.
    """
    found = _found(data, info, start, Fraction(samples, spec.sample_rate), spec, from_first)
    if found is None:
        return np.zeros((spec.channels, samples), np.float32), 0
    (made, covered), first = found, round(_EDGE * spec.sample_rate)
    real = min(samples, max(0, round((covered - _EDGE) * spec.sample_rate)))
    part = made[:, first : first + real]
    if part.shape[1] < samples:
        part = np.pad(part, ((0, 0), (0, samples - part.shape[1])))
    return part, real


def _found(
    data: Media, info: AudioInfo, start: Fraction, seconds: Fraction, spec: AudioSpec, from_first: bool
) -> Made | None:
    """The window and what lies around it; None if it is all silence."""
    found = cut.closed(data, info, start - _EDGE, start + seconds + _EDGE, from_first)
    made = None if found is None else _at_once(found[0], info, found[1], seconds, spec)
    if made is not None:
        return made
    with open_media(data) as container:
        stream = container.streams[info.stream] if info.stream < len(container.streams) else None
        if not isinstance(stream, AudioStream):
            raise CorruptionError(f"stream {info.stream} is not the audio stream that the index lists")
        if from_first and stream.start_time is not None and stream.time_base is not None:
            start += stream.start_time * stream.time_base
        excerpt = cut.opened(data, info, (container, stream), start - _EDGE, start + seconds + _EDGE)
        made = None if excerpt is None else _at_once(excerpt, info, start - _EDGE, seconds, spec)
        return made or _by_packets(container, stream, info, start, seconds, spec)


def _at_once(excerpt: Excerpt, info: AudioInfo, begin: Fraction, seconds: Fraction, spec: AudioSpec) -> Made | None:
    """An excerpt's sound from `begin` on."""
    first, count = -round(-begin * info.sample_rate), round((seconds + 2 * _EDGE) * info.sample_rate)
    made = decoded(excerpt, info, first, count, spec)
    return None if made is None else (made[0], Fraction(made[1], info.sample_rate))


def _by_packets(
    container: av.container.InputContainer,
    stream: AudioStream,
    info: AudioInfo,
    start: Fraction,
    seconds: Fraction,
    spec: AudioSpec,
) -> Made | None:
    """As libav demultiplexes the file."""
    coarse = _is_coarse(stream)
    before = _EDGE if info.codec in _WITHOUT_MEMORY and not coarse else _EDGE + WARM_UP
    head = _head(container, stream) if coarse and start > before else None
    sound = heard(_frames(container, stream, start - before, start + seconds + _EDGE), seconds + before + _EDGE)
    if sound is None:
        return None
    if start <= before:  # it begins with the file's first
        head = Head(sound.stamps[0], sound.lengths[0])
    source, covered = sound.placed(start - _EDGE, seconds + 2 * _EDGE, head)
    return resampled(source, sound.rate, sound.layout, spec), covered


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
