"""The audio of a clip or a window: the requested time span, resampled, with an exact length.

Purpose: turn compressed bytes, the index entry and a start time into float32 samples.

Invariants: the result has exactly the requested number of samples per channel. Its first sample is the one that plays
at `start`, by time stamps (`headrace.loaders.audio.frames`), rounded to the nearest sample of the source. Samples that
the file does not contain (before its first, after its last, or in a gap) are zero. Packets of Matroska that begin before
time zero are decoded, since later packets depend on them, but they are no part of the audio, whatever the index lists.
Equal arguments give equal samples.
Failure behaviour: `CorruptionError` for data inside the window that cannot be demuxed or decoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from fractions import Fraction
from typing import NamedTuple, TypeVar

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.media.container import (
    EBML,
    STORED_STAMPS,
    block_time,
    demuxed,
    first_stamped,
    lies_before,
)
from headrace.dataio.shards.media.streams import AUDIO_DECODE_OPTIONS
from headrace.dataio.shards.sample import AudioInfo, AudioMark
from headrace.loaders.audio.excerpts import ogg
from headrace.loaders.audio.excerpts.base import Excerpt, mark_before
from headrace.loaders.audio.excerpts.decode import SETTLING, WARM_UP, decode_excerpt, excerpt_of
from headrace.loaders.audio.frames import F32 as F32
from headrace.loaders.audio.frames import FrameCollector, Head, collect_frames, pts
from headrace.loaders.audio.resample import resampled
from headrace.loaders.audio.spec import AudioSpec
from headrace.loaders.decode.trim import open_media
from headrace.loaders.fetch.partial_file import Media

T = TypeVar("T")
DecodedAudio = tuple[F32, Fraction]
"""(channels, samples) in the requested format, and the second up to which there is audio."""
AudioDecoder = Callable[[Media, AudioInfo, Fraction, AudioSpec, int, bool], tuple[F32, int]]
"""`decode_audio`, in this process or in another one."""

_EDGE = Fraction(1, 25)
"""Seconds around the window that the resampler's filter reads. It is a whole number of samples at every usual rate, so
no sample is shifted."""
_FINE = Fraction(1, 4)
"""Samples. Time stamps with a smaller rounding error still identify one sample."""
_WITHOUT_MEMORY = frozenset(["flac", "alac", "wavpack", "adpcm_ima_wav", "adpcm_ms"])
"""Codecs whose packets decode independently of each other, like those of PCM."""
_WITHOUT_GAPS = frozenset(["wav", "mp3", "flac"])
_MORE_PACKETS = 1 << 12
"""Packets that may be decoded for a window in addition to two for each of its samples."""
_STAMPED_BY_SEEKING = frozenset(["ogg", "mp3", "flac"])
"""Containers for which libav computes the time stamps of packets after a seek. The computed values are sometimes wrong.
"""


class _File(NamedTuple):
    """An open file. Audio packets before the offset `zero` begin before time zero."""

    container: InputContainer
    stream: AudioStream
    zero: int


def decode_audio(
    data: Media, info: AudioInfo, start: Fraction, spec: AudioSpec, samples: int, from_first: bool = False
) -> tuple[F32, int]:
    """float32 (channels, samples) from `start` seconds, and how many of the samples are real audio.

    `start` is on the file's own time line. With `from_first` it counts from the first sample of the audio.
    """
    window = _decode_window(data, info, start, Fraction(samples, spec.sample_rate), spec, from_first)
    if window is None:
        return np.zeros((spec.channels, samples), np.float32), 0
    (audio, covered), edge = window, round(_EDGE * spec.sample_rate)
    real = min(samples, max(0, round((covered - _EDGE) * spec.sample_rate)))
    part = audio[:, edge : edge + real]
    if part.shape[1] < samples:
        part = np.pad(part, ((0, 0), (0, samples - part.shape[1])))
    return part, real


def _decode_window(
    data: Media, info: AudioInfo, start: Fraction, seconds: Fraction, spec: AudioSpec, from_first: bool
) -> DecodedAudio | None:
    """The window with `_EDGE` on both sides. None if all of it is silence."""
    # an older index does not list the start
    audio_start = _with_file(data, info, _first_time) if info.start is None else info.start
    start += audio_start if from_first else 0
    excerpt = excerpt_of(data, info, start - _EDGE, start + seconds + _EDGE)
    audio = None if excerpt is None else _decode_from_excerpt(excerpt, info, start - _EDGE, seconds, spec)
    return audio or _with_file(
        data, info, lambda file: _decode_from_file(data, file, info, audio_start, start, seconds, spec)
    )


def _with_file(data: Media, info: AudioInfo, use: Callable[[_File], T]) -> T:
    """Open the file and return what `use` returns for its audio stream."""
    zero = _zero_offset(data, info)
    with open_media(data) as container:
        stream = _stream(container, info)
        stream.codec_context.options = AUDIO_DECODE_OPTIONS
        return use(_File(container, stream, zero))


def _zero_offset(data: Media, info: AudioInfo) -> int:
    """The offset of the first audio packet that does not begin before time zero. 0 if this is not Matroska.

    This is the first marked packet, unless the index is of an older version or its marks were left out.
    """
    if bytes(data[: len(EBML)]) != EBML:
        return 0
    at = info.marks[0].at if info.marks else len(data)
    if at < len(data) and block_time(bytes(data[at : at + 12])) >= 0:  # it has a time, whatever that of its cluster
        return at
    with open_media(data, extra_options=STORED_STAMPS) as container:
        return first_stamped(container, _stream(container, info))


def _stream(container: InputContainer, info: AudioInfo) -> AudioStream:
    stream = container.streams[info.stream] if info.stream < len(container.streams) else None
    if not isinstance(stream, AudioStream) or stream.codec_context is None:
        raise CorruptionError(f"stream {info.stream} is not the audio stream that the index lists")
    return stream


def _decode_from_excerpt(
    excerpt: Excerpt, info: AudioInfo, begin: Fraction, seconds: Fraction, spec: AudioSpec
) -> DecodedAudio | None:
    """Decode an excerpt's audio from `begin` on."""
    first, count = -round(-begin * info.sample_rate), round((seconds + 2 * _EDGE) * info.sample_rate)
    audio = decode_excerpt(excerpt, info, first, count, spec)
    return None if audio is None else (audio[0], Fraction(audio[1], info.sample_rate))


def _decode_from_file(
    data: Media,
    file: _File,
    info: AudioInfo,
    audio_start: Fraction,
    start: Fraction,
    seconds: Fraction,
    spec: AudioSpec,
) -> DecodedAudio | None:
    """Decode the packets that libav demuxes from the whole file. The audio begins at `audio_start`."""
    container, stream, _ = file
    coarse, head = _is_coarse(stream), None
    lead_in = _EDGE if _is_without_memory(info.codec) and not coarse else _EDGE + WARM_UP
    early, late = start - lead_in, start + seconds + _EDGE
    if coarse and early > audio_start:
        # a decoder whose state covers the whole stream must not get the first packet twice
        head = _first_frame(file) if _settles(info.codec) else _with_file(data, info, _first_frame)
    sound = collect_frames(_frames(file, info, audio_start, early, late), seconds + lead_in + _EDGE)
    if sound is None:
        _check_silence(container, info, start - audio_start, seconds)
        return None
    if early <= audio_start:  # the decoded frames begin with the file's first one
        head = Head(sound.stamps[0], sound.lengths[0])
    source, covered = sound.placed(start - _EDGE, seconds + 2 * _EDGE, head)
    _check(data, container, info, early, late, sound)
    return resampled(source, sound.rate, sound.layout, spec), covered


def _check(
    data: Media, container: InputContainer, info: AudioInfo, early: Fraction, late: Fraction, sound: FrameCollector
) -> None:
    """Raise `CorruptionError` for damage that libav ignores without an error."""
    if container.format.name == "ogg" and (sound.gaps or info.marks):  # checking a whole file takes long
        ogg.check(data, info, early, late)
    ends = [stamp + length for stamp, length in zip(sound.stamps, sound.lengths, strict=True)]
    if container.format.name == "flac" and sound.tick == 1 and ends[:-1] != sound.stamps[1:]:
        raise CorruptionError("frames of FLAC are missing, or damaged", hint="look at the file with flac --test")


def _check_silence(container: InputContainer, info: AudioInfo, start: Fraction, seconds: Fraction) -> None:
    """Raise `CorruptionError` if a window without decoded audio cannot be a gap.

    The window begins `start` seconds after the audio.
    """
    duration = Fraction(info.samples, info.sample_rate)
    if container.format.name in _WITHOUT_GAPS and start + seconds > _EDGE and start < duration - _EDGE:
        raise CorruptionError(f"no audio can be decoded at {float(start):.2f} s, although the index lists some")


def _is_coarse(stream: AudioStream) -> bool:
    """Whether time stamps are too coarse to identify a sample: no sample is at a whole number of ticks."""
    tick = (stream.time_base or 0) * stream.sample_rate
    return tick > _FINE and tick.numerator != 1


def _is_without_memory(codec: str) -> bool:
    return codec in _WITHOUT_MEMORY or codec.startswith("pcm_")


def _settles(codec: str) -> bool:
    """Whether decoding may begin anywhere, a little before the requested samples."""
    return codec in SETTLING or _is_without_memory(codec)


def _first_frame(file: _File) -> Head | None:
    """The first frame; None if the audio begins with damage."""
    try:
        with closing(_decode_frames(file, None, None)) as frames:
            frame = next(frames, None)
    except av.FFmpegError:
        return None
    return None if frame is None else Head(pts(frame), frame.samples)


def _first_time(file: _File) -> Fraction:
    """The time at which the audio begins.

    This is the time stamp of the first decoded frame, which may differ from that of the first packet.
    """
    head, base = _first_frame(file), file.stream.time_base or Fraction(0)
    return (head.pts if head is not None else file.stream.start_time or 0) * base


def _frames(
    file: _File, info: AudioInfo, audio_start: Fraction, start: Fraction, end: Fraction
) -> Iterator[AudioFrame]:
    """Decoded frames that end after `start` and begin before `end`. The audio begins at `audio_start`."""
    container, stream, _ = file
    base = stream.time_base
    assert base is not None
    mark, seeks = None, start > audio_start and _settles(info.codec)
    if container.format.name in _STAMPED_BY_SEEKING:
        mark = mark_before(info.marks, math.floor(start / base))
        seeks = seeks and (mark is not None or (info.start is None and info.codec != "flac"))
    if container.format.name == "wav":  # libav seeks in compressed WAV by its bit rate, which is inexact
        seeks = seeks and info.codec.startswith("pcm_")
    for guide in _guides(container, stream) if seeks else ():
        assert guide.time_base is not None
        _seek(container, guide, start if mark is None else mark.pts * base)
        frames = _decode_frames(file, start, end, mark)
        frame = next(frames, None)
        if frame is not None and (guide is stream or pts(frame) * base <= start):
            yield frame
            yield from frames
            return
        frames.close()
        if mark is None and guide is stream:
            return
    if seeks:  # no seek led to the requested packet
        _seek(container, stream, min(Fraction(0), audio_start))
    yield from _decode_frames(
        file, start, end, all_packets=not _settles(info.codec), counted=container.format.name == "wav"
    )


def _seek(container: InputContainer, guide: AudioStream | VideoStream, start: Fraction) -> None:
    """Seek to `start` or before it.

    Near the end of a FLAC file libav finds no position and raises `PermissionError`, so this tries earlier times.
    """
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
    """Yield the streams to seek by, in order of preference.

    Matroska indexes the positions of video. To seek to an audio position, libav would read everything before it.
    """
    if "matroska" in container.format.name:
        yield from container.streams.video[:1]
    yield stream


def _decode_frames(
    file: _File,
    start: Fraction | None,
    end: Fraction | None,
    mark: AudioMark | None = None,
    *,
    all_packets: bool = False,
    counted: bool = False,
) -> Generator[AudioFrame]:
    """Yield frames that end after `start` and begin before `end`.

    With a `mark`, frames from the marked packet on are decoded; none if that packet is not where the index says. With
    `all_packets`, every packet is decoded, for codecs whose state covers the whole stream. If a packet contains several
    frames, only the first has a time stamp. If no frame has one, `counted` computes time stamps by counting from the
    first frame.
    """
    container, stream, zero = file
    base = stream.time_base
    assert base is not None
    early = None if start is None else math.floor(start / base)  # integers are faster than fractions
    late = None if end is None else math.ceil(end / base)
    next_pts: int | None = 0
    packets_left = None if start is None or end is None else 2 * int((end - start) * stream.sample_rate) + _MORE_PACKETS
    with demuxed(container, stream) as packets:
        for packet in packets if mark is None else _from_mark(packets, mark):
            stamp = None if lies_before(packet, zero) else packet.pts  # libav counts the times of those from zero
            over = early is not None and stamp is not None and stamp + (packet.duration or 0) <= early
            if over and packet.duration and not all_packets:
                continue
            if packets_left is not None and not over:
                packets_left -= 1
                if packets_left < 0:
                    raise CorruptionError("it has far more packets of sound than its time stamps have room for")
            if lies_before(packet, zero):
                packet.decode()
                continue
            next_pts = next_pts if counted else None
            for frame in packet.decode():
                if frame.pts is None:
                    frame.pts = next_pts
                next_pts = pts(frame) + frame.samples * base.denominator // (frame.sample_rate * base.numerator)
                if late is not None and pts(frame) >= late:
                    return
                if early is None or next_pts > early:
                    yield frame


def _from_mark(packets: Iterator[Packet[AudioStream]], mark: AudioMark) -> Iterator[Packet[AudioStream]]:
    """Yield the packets from the marked one on. None are yielded if its time stamp differs or it does not appear."""
    for packet in packets:
        if packet.pos == mark.at:
            if packet.pts == mark.pts:
                yield packet
                yield from packets
            return
        if packet.pts is not None and packet.pts > mark.pts:
            return
