"""Reads the files of one sample and collects everything that its index row holds.

Purpose: `describe` hashes each file, probes the media files, and reads text and fields. `with_head` finds the pieces of
a long file that a decoder always reads, wherever decoding begins: the header, tables and index. Loaders can fetch these
pieces together with the pieces of a clip in one request, before they open the file.

Invariants:

* The loaders' video stream is the largest in the files that are called `<key>.<format>`. Without such a file, it is the
  one in the first of the files that have a name before the format (`<key>.cam1.mp4`). All other videos are the sample's
  further videos, in the order of their extensions.
* The audio comes from the file of the video if that has any, and otherwise from the first file `<key>.<format>` that
  has.
* Images are probed only if there is no media file `<key>.<format>`. The largest is then the sample's one frame.
* `<key>.txt` is the text. Without it, the text comes from a field of `<key>.json` (`text_members.text_of`), and without
  that from `<key>.vtt`. If the field cannot be a text, a note says so.
* The fields are the top-level values of `<key>.json` that are floats, 64-bit integers, booleans, null or short strings.
  All other values stay only in the JSON member.
* Only files with pieces have a head. The head is a hint, and samples do not depend on it.
* To find the head, `with_head` opens the file as loaders do: trusting the container's description of its streams for
  video for which `has_decode_order` is true, and not trusting it for other video and for files without video. Each
  time, it seeks to a key frame (or a time) in the middle, and to one at the end. The head is the pieces that both seeks
  read.
* If a seek reads all data before its target, the head is half of the file or more. Loaders then know that partial reads
  do not pay off.
* An MP3 has no index from time to position, so libav would read all data before a time. The index therefore records
  the positions of some frames of an MP3 (marks). Its head is the pieces that opening reads.

Failure behaviour: `describe` returns a `Failure`, which names the file and the reason. One bad member, such as a further
video that is damaged, rejects the whole sample. If `with_head` cannot find the head, it leaves it out.
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
    DEMUXER_OF,
    DEMUXERS,
    IMAGE_EXTENSIONS,
    MEDIA_EXTENSIONS,
    check_complete,
    demuxed,
    has_decode_order,
    is_named_video,
    unsupported_media,
    unused_media,
)
from headrace.dataio.shards.media.messages import (
    TEXT_BYTES,
    TEXT_FIELD,
    DescribeResult,
    Description,
    Failure,
    FileInfo,
    MemberFiles,
)
from headrace.dataio.shards.media.probe import Probe, probe
from headrace.dataio.shards.media.streams import LIGHT_DECODING
from headrace.dataio.shards.pieces import Hasher, piece_size, runs
from headrace.dataio.shards.sample import AudioInfo, VideoInfo

PROMOTED_STRING = 1024
"""A string in a sample's JSON becomes a field of the index if it has at most this many characters."""
_INT64_LIMIT = 1 << 63
_HASH_BYTES = 1 * limits.MIB


def describe(files: MemberFiles, text_field: str | None = None) -> DescribeResult:
    """Read the files of one sample and describe it.

    `text_field` is the field of the JSON that holds the text. None means `TEXT_FIELD`.
    """
    path = ""
    file_infos, probes, named = [], list[Probe](), list[Probe]()
    text, json_text, subtitles, fields, text_notes = None, None, None, dict[str, Any](), list[str]()
    extensions = [ext for ext, _ in files]
    unsupported = unsupported_media(extensions)
    if unsupported is not None:
        return Failure(dict(files)[unsupported[0]], UnsupportedError.code, unsupported[1])
    try:
        for ext, path in files:
            file_infos.append(_file_info(ext, path))
            if ext in MEDIA_EXTENSIONS or is_named_video(ext):
                found = probes if ext in MEDIA_EXTENSIONS else named
                found.append(probe(path, ext=ext))
                file_infos[-1] = with_head(file_infos[-1], found[-1])
            elif ext == "txt":
                text = _text(path)
            elif ext == "vtt":
                subtitles = text_members.words(text_members.read(path)) or None
            elif ext == "json":
                document = _read_object(path)
                fields = _promoted(document)
                if "txt" not in extensions:
                    json_text, text_notes = _text_in(document, text_field or TEXT_FIELD)
        for ext, path in files if not probes else ():
            if ext in IMAGE_EXTENSIONS:
                probes.append(Probe("image", 0.0, images.probe(_bytes(path, images.IMAGE_BYTES), ext), None))
    except HeadraceError as error:
        return Failure(path, error.code, error.message)
    except OSError as error:
        return Failure(path, CorruptionError.code, f"cannot be read: {error.strerror or error}")
    except MemoryError:
        limit = limits.format_bytes(limits.PROBE_MEMORY_BYTES)
        return Failure(path, CapacityError.code, f"reading it takes more than {limit} of memory")
    video, audio, duration = _choose_streams(probes, named)
    videos = [p.video for p in (*probes, *named) if p.video is not None and p.video is not video]
    return Description(
        files=tuple(file_infos),
        duration=duration,
        video=video,
        videos=tuple(sorted(videos, key=lambda one: one.ext)),
        audio=audio,
        text=next((one for one in (text, json_text, subtitles) if one is not None), None),
        fields=json.dumps(fields, ensure_ascii=False),
        notes=(
            *(note for p in (*probes, *named) for note in p.notes),
            *(f"its .{ext} file is kept but not read as media" for ext in unused_media(extensions)),
            *(f'its .{one.ext} file is a further video: Video(file="{one.ext}") delivers it' for one in videos),
            *text_notes,
        ),
    )


def _choose_streams(probes: list[Probe], named: list[Probe]) -> tuple[VideoInfo | None, AudioInfo | None, float]:
    """Return the video, the audio and the duration of a sample.

    `probes` are its files `<key>.<format>`, and `named` those with a name before the format.
    """
    best = max(probes, key=_area, default=None)
    if (best is None or best.video is None) and named:
        best = next((p for p in named if p.video is not None), best)
    if best is None:  # only in an indexed shard; `pack` requires media
        return None, None, 0.0
    audio = best.audio or next((p.audio for p in probes if p.audio), None)
    return best.video, audio, best.duration


def _area(p: Probe) -> int:
    return p.video.width * p.video.height if p.video else 0


def _file_info(ext: str, path: str) -> FileInfo:
    with open(path, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        hasher = Hasher(piece_size(info.st_size))
        chunk_bytes, read = min(_HASH_BYTES, info.st_size + 1), 0
        # a file that another process still extends is not followed to its end: it will be found to have changed
        while read <= info.st_size and (chunk := file.read(chunk_bytes)):
            hasher.update(chunk)
            read += len(chunk)
    return FileInfo(ext, path, info.st_size, info.st_mtime_ns, hasher.whole(), hasher.pieces())


def _bytes(path: str, max_bytes: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UnsupportedError(f"larger than {limits.format_bytes(max_bytes)}")
    return data


def _text(path: str) -> str:
    try:
        return _bytes(path, TEXT_BYTES).decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise CorruptionError(f"not UTF-8 text, at offset {error.start}") from error


def _read_object(path: str) -> dict[str, Any]:
    data = _bytes(path, limits.SAMPLE_JSON_BYTES)
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CorruptionError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UnsupportedError("the JSON of a sample must be an object")
    return document


def _promoted(document: dict[str, Any]) -> dict[str, Any]:
    """Return the values that become fields of the index."""
    promoted = {name: value for name, value in document.items() if _is_promoted(value)}
    try:
        json.dumps(promoted, ensure_ascii=False).encode()
    except ValueError as error:
        raise CorruptionError(f"not JSON: {error}") from error
    return promoted


def _text_in(document: dict[str, Any], field: str) -> tuple[str | None, list[str]]:
    """Return the text in a sample's JSON, if it has one, and the notes about it."""
    try:
        return text_members.text_of(document, field), []
    except UnsupportedError as error:
        return None, [f"its text is not taken from the .json: {error.message}"]


def _is_promoted(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= PROMOTED_STRING
    if isinstance(value, int):
        return -_INT64_LIMIT <= value < _INT64_LIMIT  # Parquet and SQL can hold these
    return value is None or isinstance(value, float)


# --- the head of a file

_READ_BYTES = 1 << 16
_OPTIONS = {
    "format_whitelist": DEMUXERS,
    "protocol_whitelist": "",
    "max_pixels": str(limits.FRAME_PIXELS),
    **LIGHT_DECODING,
}
_TRUST_OPTIONS = {**_OPTIONS, "codec_whitelist": "none"}

_LookupPoint = tuple[int, int]
"""The target of a seek: the number of a stream, and a timestamp in it."""
_Marks = tuple[tuple[int, int], ...]
"""For each marked frame, its offset in bytes and the number of samples before it."""


def with_head(file_info: FileInfo, probe: Probe) -> FileInfo:
    """Return `file_info` with the file's head and marks, if it has pieces. `probe` describes its streams."""
    if file_info.pieces is None:
        return file_info
    marks: _Marks = ()
    try:
        if probe.container == "mp3" and probe.video is None:
            marks = _find_marks(file_info, probe)
        trusting = _is_trusted(probe)
        if marks:
            head = _pieces_read(file_info, None, trusting)
        else:
            middle, end = _lookup_points(file_info.path, probe)
            head = _pieces_read(file_info, middle, trusting) & _pieces_read(file_info, end, trusting)
    except (CorruptionError, av.error.FFmpegError, OSError, EOFError, LookupError, ValueError):
        return file_info
    return replace(file_info, pieces=replace(file_info.pieces, head=runs(head), marks=marks))


def _is_trusted(probe: Probe) -> bool:
    """Return whether loaders trust the container's description of the streams when they open it for its video.

    To open it for its audio, libav reads the same pieces, but it also decodes frames, which takes much longer.
    """
    return probe.video is not None and has_decode_order(probe.video.format, probe.video.codec)


def _find_marks(file_info: FileInfo, probe: Probe) -> _Marks:
    """Return one mark for each piece: the first frame that begins in it.

    Return no marks if the frames have different lengths.
    """
    assert file_info.pieces is not None
    assert probe.audio is not None
    marks, piece = list[tuple[int, int]](), 0
    length: int | None = 0
    with _open_path(file_info.path) as container:
        stream: Any = container.streams[probe.audio.stream]
        tick = stream.time_base * probe.audio.sample_rate
        with demuxed(container, stream) as packets:
            for packet in packets:
                if not packet.size:
                    break
                samples = (packet.pts or 0) * tick
                length = length or packet.duration
                if packet.pts is None or packet.pos is None or packet.duration != length or samples.denominator != 1:
                    return ()
                if packet.pos >= piece * file_info.pieces.size:
                    marks.append((packet.pos, int(samples)))
                    piece = packet.pos // file_info.pieces.size + 1
    return tuple(marks)


def _lookup_points(path: str, probe: Probe) -> tuple[_LookupPoint, _LookupPoint]:
    if probe.video is not None:
        keys = probe.video.key_frames
        number = probe.video.stream
        return (number, keys[(len(keys) - 1) // 2].pts), (number, keys[-1].pts)
    assert probe.audio is not None
    with _open_path(path) as container:
        stream: Any = container.streams[probe.audio.stream]
        base, start = stream.time_base, stream.start_time or 0
    length = int(probe.duration / base)
    return (probe.audio.stream, start + length // 2), (probe.audio.stream, start + length * 9 // 10)


def _pieces_read(file_info: FileInfo, point: _LookupPoint | None, trust_container: bool) -> set[int]:
    """Return the pieces that libav reads up to the first packet at `point`. Without a point, those that opening reads."""
    with _open_like_loaders(file_info, trust_container) as (container, file):
        if point is not None:
            stream = container.streams[point[0]]
            container.seek(point[1], stream=stream, backward=True)
            with demuxed(container, stream) as packets:
                next(packets, None)
    return file.pieces_read


def _open_path(path: str) -> Any:
    """Open the container at `path`. The container cannot open other files."""
    return av.open(f"file:{path}", metadata_errors="replace", options=_OPTIONS | {"protocol_whitelist": "file"})


@contextmanager
def _open_like_loaders(file_info: FileInfo, trust_container: bool) -> Iterator[tuple[Any, _RecordingFile]]:
    """Open the container as loaders do, with a file that records which pieces are read."""
    assert file_info.pieces is not None
    with open(file_info.path, "rb", buffering=0) as real:
        file = _RecordingFile(real, file_info.pieces.size)
        check_complete(cast(BinaryIO, file), file_info.size)
        demuxer = DEMUXER_OF.get(file_info.ext.rpartition(".")[2]) if trust_container else None
        options = _TRUST_OPTIONS if trust_container else _OPTIONS
        with av.open(
            file, "r", demuxer, metadata_errors="replace", buffer_size=_READ_BYTES, options=options
        ) as container:
            yield container, file


class _RecordingFile:
    """A file that records which of its pieces were read. One call reads from one piece, since libav asks for too much."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self.pieces_read = set[int]()

    def read(self, size: int = -1) -> bytes:
        start = self._file.tell()
        data = self._file.read(size if size < 0 else min(size, self._size - start % self._size))
        if data:
            self.pieces_read.update(range(start // self._size, (start + len(data) - 1) // self._size + 1))
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True
