"""The sound of a clip: the same window of time, resampled, of an exact length.

Purpose: (compressed bytes, what the index says, when the clip begins) -> float32 samples.

Invariants: the result has exactly `AudioSpec.samples` samples a channel, the first of which is what sounds at the
instant of the clip's first frame, by time stamps (`headrace.loaders.audio.frames`) and rounded to the nearest sample of
the source.
What the file does not hold (before its first sound, after its last, a gap) is zero. Equal arguments give equal samples.
Failure behaviour: `CorruptionError` for what cannot be demultiplexed or decoded inside the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from fractions import Fraction
from typing import TypeVar

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.contract import AudioInfo, SoundMark
from headrace.dataio.shards.media.probe import DECODING_SOUND
from headrace.loaders.audio.excerpts import ogg
from headrace.loaders.audio.excerpts.base import Excerpt, mark_before
from headrace.loaders.audio.excerpts.decode import SETTLING, WARM_UP, decoded, excerpt_of
from headrace.loaders.audio.frames import F32 as F32
from headrace.loaders.audio.frames import Head, Heard, heard, pts
from headrace.loaders.audio.resample import resampled
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.decode.trim import demuxed, open_media
from headrace.loaders.fetch.partial_file import Media

T = TypeVar("T")
Made = tuple[F32, Fraction]
"""(channels, samples) as they are wanted, and up to which second there is sound."""
AudioDecoder = Callable[[Media, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, here or in another process."""

_EDGE = Fraction(1, 25)
"""Seconds around the window that the resampler's filter looks at; whole samples of every usual rate, so that none is shifted."""
_FINE = Fraction(1, 4)
"""Samples: stamps that are rounded by less say which one is meant."""
_WITHOUT_MEMORY = frozenset(["flac", "alac", "wavpack", "adpcm_ima_wav", "adpcm_ms"])
"""Codecs of which every packet says all by itself, as those of PCM."""
_WITHOUT_GAPS = frozenset(["wav", "mp3", "flac"])
_MORE_PACKETS = 1 << 12
"""Packets that may be decoded for a window besides two for each of its samples."""
_STAMPED_BY_SEEKING = frozenset(["ogg", "mp3", "flac"])
"""Containers in which libav works out what packets are stamped where it begins to read: sometimes wrongly."""


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
    first = _read(data, info, _first) if info.start is None else info.start  # an older index does not say
    start += first if from_first else 0
    excerpt = excerpt_of(data, info, start - _EDGE, start + seconds + _EDGE)
    made = None if excerpt is None else _at_once(excerpt, info, start - _EDGE, seconds, spec)
    return made or _read(data, info, lambda *file: _by_packets(data, file, info, first, start, seconds, spec))


def _read(data: Media, info: AudioInfo, read: Callable[[InputContainer, AudioStream], T]) -> T:
    """What is read of an open file's stream."""
    with open_media(data) as container:
        stream = container.streams[info.stream] if info.stream < len(container.streams) else None
        if not isinstance(stream, AudioStream) or stream.codec_context is None:
            raise CorruptionError(f"stream {info.stream} is not the audio stream that the index lists")
        stream.codec_context.options = DECODING_SOUND
        return read(container, stream)


def _at_once(excerpt: Excerpt, info: AudioInfo, begin: Fraction, seconds: Fraction, spec: AudioSpec) -> Made | None:
    """An excerpt's sound from `begin` on."""
    first, count = -round(-begin * info.sample_rate), round((seconds + 2 * _EDGE) * info.sample_rate)
    made = decoded(excerpt, info, first, count, spec)
    return None if made is None else (made[0], Fraction(made[1], info.sample_rate))


def _by_packets(
    data: Media,
    file: tuple[InputContainer, AudioStream],
    info: AudioInfo,
    first: Fraction,
    start: Fraction,
    seconds: Fraction,
    spec: AudioSpec,
) -> Made | None:
    """As libav demultiplexes the file, whose sound begins at `first`."""
    container, stream = file
    coarse, head = _is_coarse(stream), None
    before = _EDGE if _is_without_memory(info.codec) and not coarse else _EDGE + WARM_UP
    early, late = start - before, start + seconds + _EDGE
    if coarse and early > first:
        # a decoder that depends on all that was before must not get the first packet twice
        head = _head(container, stream) if _settles(info.codec) else _read(data, info, _head)
    sound = heard(_frames(container, stream, info, first, early, late), seconds + before + _EDGE)
    if sound is None:
        _check_silence(container, info, start - first, seconds)
        return None
    if early <= first:  # it begins with the file's first
        head = Head(sound.stamps[0], sound.lengths[0])
    source, covered = sound.placed(start - _EDGE, seconds + 2 * _EDGE, head)
    _check(data, container, info, early, late, sound)
    return resampled(source, sound.rate, sound.layout, spec), covered


def _check(
    data: Media, container: InputContainer, info: AudioInfo, early: Fraction, late: Fraction, sound: Heard
) -> None:
    """Raise `CorruptionError` for damage over which libav passes in silence."""
    if container.format.name == "ogg" and (sound.gaps or info.marks):  # to look through all of a file takes long
        ogg.check(data, info, early, late)
    ends = [stamp + length for stamp, length in zip(sound.stamps, sound.lengths, strict=True)]
    if container.format.name == "flac" and sound.tick == 1 and ends[:-1] != sound.stamps[1:]:
        raise CorruptionError("frames of FLAC are missing, or damaged", hint="look at the file with flac --test")


def _check_silence(container: InputContainer, info: AudioInfo, start: Fraction, seconds: Fraction) -> None:
    """Raise `CorruptionError` where nothing decodes of a window that begins `start` after the sound, if it cannot be a gap."""
    whole = Fraction(info.samples, info.sample_rate)
    if container.format.name in _WITHOUT_GAPS and start + seconds > _EDGE and start < whole - _EDGE:
        raise CorruptionError(f"no sound can be decoded {float(start):.2f} s after it begins, and the index lists some")


def _is_coarse(stream: AudioStream) -> bool:
    """Whether stamps are too coarse to say which sample is meant: no sample lies at a whole number of ticks."""
    tick = (stream.time_base or 0) * stream.sample_rate
    return tick > _FINE and tick.numerator != 1


def _is_without_memory(codec: str) -> bool:
    return codec in _WITHOUT_MEMORY or codec.startswith("pcm_")


def _settles(codec: str) -> bool:
    """Whether decoding may begin anywhere, a little before what is wanted."""
    return codec in SETTLING or _is_without_memory(codec)


def _head(container: InputContainer, stream: AudioStream) -> Head | None:
    """The first frame, if the sound does not begin with damage."""
    try:
        with closing(_decoded(container, stream, None, None)) as frames:
            first = next(frames, None)
    except av.FFmpegError:
        return None
    return None if first is None else Head(pts(first), first.samples)


def _first(container: InputContainer, stream: AudioStream) -> Fraction:
    """When the sound begins: with the first frame that comes out, not with the first packet."""
    head, base = _head(container, stream), stream.time_base or Fraction(0)
    return (head.pts if head is not None else stream.start_time or 0) * base


def _frames(
    container: InputContainer,
    stream: AudioStream,
    info: AudioInfo,
    first: Fraction,
    start: Fraction,
    end: Fraction,
) -> Iterator[AudioFrame]:
    """Decoded frames that end after `start` and begin before `end`; the sound begins at `first`."""
    base = stream.time_base
    assert base is not None
    mark, seeks = None, start > first and _settles(info.codec)
    if container.format.name in _STAMPED_BY_SEEKING:
        mark = mark_before(info.marks, math.floor(start / base))
        seeks = seeks and (mark is not None or (info.start is None and info.codec != "flac"))
    if container.format.name == "wav":  # in which libav reckons where compressed sound is by its rate
        seeks = seeks and info.codec.startswith("pcm_")
    for guide in _guides(container, stream) if seeks else ():
        assert guide.time_base is not None
        _seek(container, guide, start if mark is None else mark.pts * base)
        frames = _decoded(container, stream, start, end, mark)
        frame = next(frames, None)
        if frame is not None and (guide is stream or pts(frame) * base <= start):
            yield frame
            yield from frames
            return
        frames.close()
        if mark is None and guide is stream:
            return
    if seeks:  # in vain
        _seek(container, stream, min(Fraction(0), first))
    yield from _decoded(
        container, stream, start, end, all_packets=not _settles(info.codec), counted=container.format.name == "wav"
    )


def _seek(container: InputContainer, guide: AudioStream | VideoStream, start: Fraction) -> None:
    """To `start`, or before it: near the end of FLAC libav finds no place, and says that it is not permitted."""
    assert guide.time_base is not None
    back = Fraction(0)
    while True:
        at = max(min(Fraction(0), start), start - back)
        try:
            return container.seek(math.floor(at / guide.time_base), stream=guide, backward=True)
        except PermissionError:
            if at <= 0:
                raise
            back = 2 * back + 1


def _guides(container: InputContainer, stream: AudioStream) -> Iterator[AudioStream | VideoStream]:
    """By which streams to look for an instant, one after the other. Matroska knows where pictures are; looking for sound, libav
    would read all that lies before it."""
    if "matroska" in container.format.name:
        yield from container.streams.video[:1]
    yield stream


def _decoded(
    container: InputContainer,
    stream: AudioStream,
    start: Fraction | None,
    end: Fraction | None,
    mark: SoundMark | None = None,
    *,
    all_packets: bool = False,
    counted: bool = False,
) -> Generator[AudioFrame]:
    """Frames that end after `start` and begin before `end`; from the marked packet on, and none if that is not where the index
    says. Where decoding depends on all that was before, `all_packets` are decoded. Of several frames in a packet only the first
    has a stamp; if none has any, they are `counted` from the first one on."""
    base = stream.time_base
    assert base is not None
    early = None if start is None else math.floor(start / base)  # whole numbers are quicker
    late = None if end is None else math.ceil(end / base)
    behind: int | None = 0
    left = None if start is None or end is None else 2 * int((end - start) * stream.sample_rate) + _MORE_PACKETS
    with demuxed(container, stream) as packets:
        for packet in packets if mark is None else _from_mark(packets, mark):
            over = early is not None and packet.pts is not None and packet.pts + (packet.duration or 0) <= early
            if over and packet.duration and not all_packets:
                continue
            if left is not None and not over:
                left -= 1
                if left < 0:
                    raise CorruptionError("it has far more packets of sound than its time stamps have room for")
            behind = behind if counted else None
            for frame in packet.decode():
                if frame.pts is None:
                    frame.pts = behind
                behind = pts(frame) + frame.samples * base.denominator // (frame.sample_rate * base.numerator)
                if late is not None and pts(frame) >= late:
                    return
                if early is None or behind > early:
                    yield frame


def _from_mark(packets: Iterator[Packet[AudioStream]], mark: SoundMark) -> Iterator[Packet[AudioStream]]:
    """The packets from the marked one on; none if it is stamped otherwise, or does not come."""
    for packet in packets:
        if packet.pos == mark.at:
            if packet.pts == mark.pts:
                yield packet
                yield from packets
            return
        if packet.pts is not None and packet.pts > mark.pts:
            return
