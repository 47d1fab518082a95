"""Reads the files of one sample and collects all facts for its index row.

Purpose: the work of a probe worker. It hashes each file, probes the media files, and takes text and fields.

Invariants:

* The loaders' video stream is the largest in the sample's media files. The audio comes from the same file if that has
  any, and otherwise from the first other member that has.
* Images are probed only if there is no media file. The largest is then the sample's one frame.
* `<key>.txt` is the text. Without it, the text comes from `<key>.vtt`.
* The fields are the top-level values of `<key>.json` that are floats, 64-bit integers, booleans, null or short strings.
  All other values stay only in the JSON member.

Failure behaviour: `Failure` names the file and the reason. One bad member rejects the whole sample.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import av
import av.error
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, UnsupportedError
from headrace.dataio.core.json import parse_json
from headrace.dataio.shards.media import images, text_members
from headrace.dataio.shards.media.container import (
    DEMUXERS,
    IMAGE_EXTENSIONS,
    MEDIA_EXTENSIONS,
    check_complete,
    not_read,
    passed_over,
)
from headrace.dataio.shards.media.messages import TEXT_BYTES, Answer, Description, Failure, FileInfo, Request
from headrace.dataio.shards.media.probe import Probe, probe
from headrace.dataio.shards.pieces import Hasher, runs, size_for
from headrace.dataio.shards.sample import AudioInfo, VideoInfo

PROMOTED_STRING = 1024
"""A string in a sample's JSON becomes a field of the index if it has at most this many characters."""
_INTEGERS = 1 << 63
_READ = 1 * limits.MIB


def describe(files: Request) -> Answer:
    """Read the files of one sample and describe it."""
    at = ""
    facts, probes = [], list[Probe]()
    text, said, fields = None, None, dict[str, Any]()
    extensions = [ext for ext, _ in files]
    refused = not_read(extensions)
    if refused is not None:
        return Failure(dict(files)[refused[0]], UnsupportedError.code, refused[1])
    try:
        for ext, at in files:
            facts.append(_fact(ext, at))
            if ext in MEDIA_EXTENSIONS:
                probes.append(probe(at, ext=ext))
                facts[-1] = with_head(facts[-1], probes[-1])
            elif ext == "txt":
                text = _text(at)
            elif ext == "vtt":
                said = text_members.words(text_members.read(at)) or None
            elif ext == "json":
                fields = _fields(at)
        for ext, at in files if not probes else ():
            if ext in IMAGE_EXTENSIONS:
                probes.append(Probe("image", 0.0, images.probe(_bytes(at, images.IMAGE_BYTES), ext), None))
    except HeadraceError as error:
        return Failure(at, error.code, error.message)
    except OSError as error:
        return Failure(at, CorruptionError.code, f"cannot be read: {error.strerror or error}")
    except MemoryError:
        most = limits.format_bytes(limits.PROBE_MEMORY_BYTES)
        return Failure(at, CapacityError.code, f"reading it takes more than {most} of memory")
    video, audio, duration = _choose(probes)
    return Description(
        files=tuple(facts),
        duration=duration,
        video=video,
        audio=audio,
        text=text if text is not None else said,
        fields=json.dumps(fields, ensure_ascii=False),
        notes=(
            *(note for p in probes for note in p.notes),
            *(f"its .{ext} file is kept, and not read as media" for ext in passed_over(extensions)),
            *_not_chosen(files, probes, video),
        ),
    )


def _not_chosen(files: Request, probes: list[Probe], chosen: VideoInfo | None) -> list[str]:
    """Return a note for each further video of a sample. A sample has one video, and the others are not used."""
    media = [ext for ext, _ in files if ext in MEDIA_EXTENSIONS]
    others = [ext for ext, p in zip(media, probes, strict=False) if p.video is not None and p.video is not chosen]
    return [f"its .{ext} file is kept, and not used: a sample has one video, the largest" for ext in others]


def _choose(probes: list[Probe]) -> tuple[VideoInfo | None, AudioInfo | None, float]:
    def area(p: Probe) -> int:
        return p.video.width * p.video.height if p.video else 0

    if not probes:  # only in an indexed shard; `pack` requires media
        return None, None, 0.0
    best = max(probes, key=area)
    audio = best.audio or next((p.audio for p in probes if p.audio), None)
    return best.video, audio, best.duration


def _fact(ext: str, path: str) -> FileInfo:
    with open(path, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        hasher = Hasher(size_for(info.st_size))
        while chunk := file.read(_READ):
            hasher.update(chunk)
    return FileInfo(ext, path, info.st_size, info.st_mtime_ns, hasher.whole(), hasher.pieces())


def _bytes(path: str, most: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UnsupportedError(f"larger than {limits.format_bytes(most)}")
    return data


def _text(path: str) -> str:
    try:
        return _bytes(path, TEXT_BYTES).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"not UTF-8 text, at offset {error.start}") from error


def _fields(path: str) -> dict[str, Any]:
    data = _bytes(path, limits.SAMPLE_JSON_BYTES)
    try:
        found = parse_json(data)
        promoted = {name: v for name, v in found.items() if _is_promoted(v)} if isinstance(found, dict) else None
        json.dumps(promoted, ensure_ascii=False).encode()
    except ValueError as error:
        raise CorruptionError(f"not JSON: {error}") from error
    if promoted is None:
        raise UnsupportedError("the JSON of a sample must be an object")
    return promoted


def _is_promoted(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= PROMOTED_STRING
    if isinstance(value, int):
        return -_INTEGERS <= value < _INTEGERS  # Parquet and SQL can hold these
    return value is None or isinstance(value, float)


# --- the header pieces of a file

_READ_BYTES = 1 << 16
_DEMUXER_OF = {"mp4": "mov", "m4v": "mov", "mov": "mov", "mkv": "matroska", "webm": "matroska"}
_OPTIONS = {"format_whitelist": DEMUXERS, "protocol_whitelist": "", "max_pixels": str(limits.FRAME_PIXELS)}
_TRUSTING = {**_OPTIONS, "codec_whitelist": "none"}

_Place = tuple[int, int]
"""A place to look up: a stream and a time stamp in it."""
_Marks = tuple[tuple[int, int], ...]
"""For each marked frame, its offset in bytes and the number of samples before it."""


def with_head(fact: FileInfo, probe: Probe) -> FileInfo:
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


def _marks(fact: FileInfo, probe: Probe) -> _Marks:
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


def _touched(fact: FileInfo, place: _Place | None) -> set[int]:
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
def _opened(fact: FileInfo, trusting: bool) -> Iterator[tuple[Any, _Recording]]:
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
