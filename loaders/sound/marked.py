"""Sound from a frame on that the index marked, in files that do not say where in them an instant is (MP3).

Purpose: libav would read all that lies before it, to count the frames.
Invariants: the samples are those of decoding the file from its first frame on: decoding begins some frames before those that are
wanted, since a frame needs the bytes of some before it and what they left behind, and ends where the index says that the sound
does, since what fills the last frame is no sound. What is at the mark must look like a frame.
Failure behaviour: None for files without marks, for what lies near the beginning, and where no frame begins at the mark: libav
reads the file then as it does others. libav's errors for what is wanted and cannot be decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import av
import av.error
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.packet import Packet

from dataio.core import limits
from dataio.shards.contract import AudioInfo
from loaders.partial.file import GivenFile, Media, PartialFile
from loaders.partial.needed import mark_before

_CHUNK = 16 * limits.KIB


def frames(
    data: Media, info: AudioInfo, stream: AudioStream, start: Fraction, end: Fraction
) -> Iterator[AudioFrame] | None:
    """Decoded frames that end after `start` and begin before `end`, seconds of the file's time line."""
    marks = data.marks if isinstance(data, PartialFile | GivenFile) else ()
    number = mark_before(marks, int(start * info.sample_rate)) if marks else 0
    if not number:
        return None
    at, before = marks[number]
    context: Any = av.CodecContext.create(stream.codec_context.name, "r")
    packets = _packets(context, data, at)
    first, header = next(packets, None), bytes(data[at : at + 4])
    if first is None or not _is_frame(header) or bytes(memoryview(first)[:4]) != header:
        return None
    length = 1152 if header[1] & 0x08 else 576
    ends = (stream.start_time or 0) * _tick(stream) * info.sample_rate + info.samples
    return _decoded(
        context,
        itertools.chain([first], packets),
        itertools.count(before, length),
        length,
        (start * info.sample_rate, min(end * info.sample_rate, ends)),
        stream,
        int(ends),
    )


def _is_frame(header: bytes) -> bool:
    """Whether these may be a frame's first bytes: all that is the same in every frame of layer III is there."""
    return header[:1] == b"\xff" and header[1] & 0xE6 == 0xE2


def _packets(context: Any, data: Media, at: int) -> Iterator[Packet[AudioStream]]:
    while at < len(data):
        chunk = data[at : at + _CHUNK]
        at += len(chunk)
        yield from context.parse(bytes(chunk))
    yield from context.parse(None)


def _decoded(
    context: Any,
    packets: Iterator[Packet[AudioStream]],
    places: Iterator[int],
    length: int,
    wanted: tuple[Fraction, Fraction],
    stream: AudioStream,
    ends: int,
) -> Iterator[AudioFrame]:
    """`places` are the samples before each packet, of `length` each; the sound `ends` with that sample."""
    for packet, place in zip(packets, places, strict=False):
        if place >= wanted[1]:
            return
        early = place + length <= wanted[0]
        try:
            found = context.decode(packet)
        except av.error.FFmpegError:
            if early:
                continue
            raise
        for frame in () if early else found:
            cut = frame if place + frame.samples <= ends else _shortened(frame, ends - place)
            cut.time_base = _tick(stream)
            cut.pts = int(place / (cut.time_base * cut.sample_rate))
            yield cut


def _shortened(frame: AudioFrame, samples: int) -> AudioFrame:
    cut = AudioFrame.from_ndarray(frame.to_ndarray()[:, :samples], format=frame.format.name, layout=frame.layout.name)
    cut.sample_rate = frame.sample_rate
    return cut


def _tick(stream: AudioStream) -> Fraction:
    assert stream.time_base is not None
    return stream.time_base
