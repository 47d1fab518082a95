"""Finds the pieces of a long file that a decoder always reads, wherever decoding begins: the header, tables and index.

Purpose: loaders can fetch these pieces together with the pieces of a clip in one request, before they open the file.

Method: the file is opened in the two ways in which loaders open it: trusting the container's description of its
streams, and not trusting it. Each time, a key frame (or a time) in the middle and one at the end are looked up. The
head is the pieces that both lookups read. An MP3 does not say where a time lies, so libav would read all data before
it. Frames of an MP3 are therefore marked, and its head is the pieces that opening reads.

Invariants: only files with pieces have a head. The head is a hint, and samples do not depend on it. If a lookup reads
all data before a place, the head is half of the file or more. Loaders then know that partial reads do not pay.
Failure behaviour: none; if the head cannot be found, the file has none. Like `probe`, this module trusts libav.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import av
import av.error
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.media.container import DEMUXERS, check_complete
from headrace.dataio.shards.media.facts import FileFact
from headrace.dataio.shards.media.probe import Probe
from headrace.dataio.shards.pieces import runs

_READ_BYTES = 1 << 16
_DEMUXER_OF = {"mp4": "mov", "m4v": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska"}
_OPTIONS = {"format_whitelist": DEMUXERS, "protocol_whitelist": "", "max_pixels": str(limits.FRAME_PIXELS)}
_TRUSTING = {**_OPTIONS, "codec_whitelist": "none"}

_Place = tuple[int, int]
"""A place to look up: a stream and a time stamp in it."""
_Marks = tuple[tuple[int, int], ...]
"""For each marked frame, its offset in bytes and the number of samples before it."""


def with_head(fact: FileFact, probe: Probe) -> FileFact:
    """Return the file's facts with its head, if it has pieces. `probe` describes its streams."""
    if fact.pieces is None:
        return fact
    marks: _Marks = ()
    try:
        if probe.container == "mp3" and probe.video is None:
            marks = _marks(fact, probe)
        if marks:
            found = _touched(fact, None)
        else:
            middle, end = _places(fact.path, probe)
            found = _touched(fact, middle) & _touched(fact, end)
    except (CorruptionError, av.error.FFmpegError, OSError, EOFError, LookupError, ValueError):
        return fact
    return replace(fact, pieces=replace(fact.pieces, head=runs(found), marks=marks))


def _marks(fact: FileFact, probe: Probe) -> _Marks:
    """Return the first frame that begins in each piece, and the samples before it.

    There are none unless all frames have the same length.
    """
    assert fact.pieces is not None
    assert probe.audio is not None
    found, piece, length = list[tuple[int, int]](), 0, 0
    with _named(fact.path) as container:
        stream: Any = container.streams[probe.audio.stream]
        tick = stream.time_base * probe.audio.sample_rate
        for packet in container.demux(stream):
            if not packet.size:
                break
            samples = (packet.pts or 0) * tick
            length = length or packet.duration
            if packet.pts is None or packet.pos is None or packet.duration != length or samples.denominator != 1:
                return ()
            if packet.pos >= piece * fact.pieces.size:
                found.append((packet.pos, int(samples)))
                piece = packet.pos // fact.pieces.size + 1
    return tuple(found)


def _places(path: str, probe: Probe) -> tuple[_Place, _Place]:
    if probe.video is not None:
        keys = probe.video.key_frames
        stream = probe.video.stream
        return (stream, keys[(len(keys) - 1) // 2].pts), (stream, keys[-1].pts)
    assert probe.audio is not None
    with _named(path) as container:
        sound: Any = container.streams[probe.audio.stream]
        base, start = sound.time_base, sound.start_time or 0
    length = int(probe.duration / base)
    return (probe.audio.stream, start + length // 2), (probe.audio.stream, start + length * 9 // 10)


def _touched(fact: FileFact, place: _Place | None) -> set[int]:
    """Return the pieces that libav reads up to the first packet at `place`, in both ways of opening.

    Without a place, they are those that opening reads.
    """
    assert fact.pieces is not None
    found = set[int]()
    for trusting in (True, False):
        with _opened(fact, trusting) as (container, file):
            if place is not None:
                stream = container.streams[place[0]]
                container.seek(place[1], stream=stream, backward=True)
                packets = container.demux(stream)
                next(packets, None)
                packets.close()
        found |= file.touched
    return found


def _named(path: str) -> Any:
    """Open the container at `path`. The container cannot open other files."""
    return av.open(f"file:{path}", metadata_errors="replace", options=_OPTIONS | {"protocol_whitelist": "file"})


@contextmanager
def _opened(fact: FileFact, trusting: bool) -> Iterator[tuple[Any, _Recording]]:
    """Open the container as loaders do."""
    assert fact.pieces is not None
    with open(fact.path, "rb", buffering=0) as real:
        file = _Recording(real, fact.pieces.size)
        check_complete(cast(BinaryIO, file), fact.size)
        demuxer = _DEMUXER_OF.get(fact.ext) if trusting else None
        options = _TRUSTING if trusting else _OPTIONS
        with av.open(
            file, "r", demuxer, metadata_errors="replace", buffer_size=_READ_BYTES, options=options
        ) as container:
            yield container, file


class _Recording:
    """A file that records which of its pieces were read."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.touched = set[int]()

    def read(self, size: int = -1) -> bytes:
        start = self._file.tell()
        data = self._file.read(size)
        if data:
            self.touched.update(range(start // self._size, (start + len(data) - 1) // self._size + 1))
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True
