"""Which way an excerpt is cut, by the kind of file.

Purpose: the one place that knows them all: some containers tell by themselves where an instant is, some are asked through libav.
Invariants: those of `loaders.sound.excerpts.contract`. An excerpt begins as much before what is wanted as its codec needs.
Failure behaviour: None where nobody can cut; `CorruptionError` for an MP4 that is not all there.
"""

from __future__ import annotations

from fractions import Fraction
from typing import BinaryIO, cast

from av.audio.stream import AudioStream
from av.container import InputContainer

from dataio.shards.contract import AudioInfo
from dataio.shards.media.container import check_complete
from loaders.decode.trim import ViewFile, demuxed
from loaders.partial.file import Media
from loaders.sound.excerpts import flac, mp3, mp4, ogg, wav
from loaders.sound.excerpts.contract import Excerpt
from loaders.sound.excerpts.seek import Mark

WARM_UP = Fraction(23, 50)
"""Seconds decoded before what is wanted: codecs need some sound before what they say is right (Opus and MP3 a few packets)."""


def closed(
    data: Media, info: AudioInfo, start: Fraction, end: Fraction, from_first: bool
) -> tuple[Excerpt, Fraction] | None:
    """What is cut without opening the file, and where `start` is on the file's own time line; `from_first`: it counts from the
    sound's first sample."""
    found, at = None, start
    if info.ext in flac.EXTENSIONS:
        found = flac.excerpt(data, info, start, end)
    elif info.ext in wav.EXTENSIONS:
        found = wav.excerpt(data, info, start, end)
    elif info.ext in mp4.EXTENSIONS:
        check_complete(cast(BinaryIO, ViewFile(data)), len(data))
        track = mp4.track(data, info)
        if track is not None:
            at = start + track.start if from_first else start
            found = mp4.excerpt(data, track, at - WARM_UP, at + end - start)
    return None if found is None else (found, at)


def opened(
    data: Media, info: AudioInfo, file: tuple[InputContainer, AudioStream], start: Fraction, end: Fraction
) -> Excerpt | None:
    """What is cut of an open file. It is to be sought in afterwards."""
    container, stream = file
    if info.ext in ogg.EXTENSIONS:
        return ogg.excerpt(data, info, start - WARM_UP, end)
    if info.ext in mp3.EXTENSIONS and stream.time_base is not None and start > WARM_UP:
        begin, marks = (stream.start_time or 0) * stream.time_base, mp3.marks(data) or _first(container, stream)
        return mp3.excerpt(data, info, marks, begin, start, end)
    return None


def _first(container: InputContainer, stream: AudioStream) -> list[Mark]:
    """Where the first packet begins, if it says so."""
    assert stream.time_base is not None
    with demuxed(container, stream) as packets:
        packet = next(packets, None)
    if packet is None or packet.pos is None or packet.pts is None:
        return []
    return [(packet.pos, int(packet.pts * stream.time_base * stream.sample_rate))]
