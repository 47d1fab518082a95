"""Which way an excerpt is cut, by the kind of file.

Purpose: the one place that knows them all.
Invariants: those of `headrace.loaders.sound.excerpts.contract`. An excerpt begins as much before what is wanted as its
codec needs.
Files are cut only where the index marks some of their packets, which have to be where the cutter finds them. An older index is
enough for WAV, which says all in its header.
Failure behaviour: None where libav has to read the file; `CorruptionError` for an MP4 that is not all there.
"""

from __future__ import annotations

from fractions import Fraction
from typing import BinaryIO, cast

from headrace.dataio.shards.contract import AudioInfo
from headrace.dataio.shards.media.container import check_complete
from headrace.loaders.decode.trim import ViewFile
from headrace.loaders.partial.file import Media
from headrace.loaders.sound.excerpts import flac, mp3, mp4, ogg, wav
from headrace.loaders.sound.excerpts.contract import Excerpt

WARM_UP = Fraction(23, 50)
"""Seconds decoded before what is wanted: codecs need some sound before what they say is right (Opus and MP3 a few packets)."""
SETTLING = frozenset(["aac", "ac3", "eac3", "mp1", "mp2", "mp3", "opus", "vorbis"])
"""Codecs that are right after so much; those that are not, and have a memory, are decoded from the file's beginning."""
_IN_MP4 = SETTLING | {"alac", "flac"}


def excerpt(data: Media, info: AudioInfo, start: Fraction, end: Fraction) -> Excerpt | None:
    """What `start` to `end`, seconds of the file's own time line, are decoded from."""
    if info.ext in wav.EXTENSIONS:
        return wav.excerpt(data, info, start, end)
    if not info.marks:
        return None
    if info.ext in flac.EXTENSIONS:
        return flac.excerpt(data, info, start, end)
    if info.ext in mp4.EXTENSIONS and info.codec in _IN_MP4:
        check_complete(cast(BinaryIO, ViewFile(data)), len(data))
        return mp4.excerpt(data, info, start - WARM_UP, end)
    if info.ext in ogg.EXTENSIONS:
        return ogg.excerpt(data, info, start - WARM_UP, end)
    if info.ext in mp3.EXTENSIONS:
        return mp3.excerpt(data, info, start, end)
    return None
