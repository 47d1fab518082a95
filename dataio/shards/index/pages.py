"""Row pages: a second copy of an index part's rows, for looking up samples by number.

Purpose: a batch of a shuffled epoch needs rows from all over the index. To read one row from the Parquet columns, a
reader reads a row group of about a thousand rows, column by column. To read it from the pages, a reader reads one page
of a few dozen rows, without Arrow.

```
page       one msgpack array of rows, compressed with zstd                  `PAGE_ROWS`, or fewer if rows are long
…
directory  for each page: rows, stored bytes, unpacked bytes (u32 each), 16 bytes of the BLAKE3 of the stored bytes
```

This section of the part is between the row groups and the footer. Parquet readers do not read this range. The version
document gives the position of the section and the digest of the directory.

Invariants:

* For its rows, a page holds the same values as the row groups (`headrace verify` compares them). Pages also hold values
  that row groups do not have: pieces, key-frame positions, audio start times and audio marks (`without_page_fields`).
* The same samples give the same bytes.
* A page is never unpacked beyond the size in the directory, or beyond `MAX_UNPACKED_BYTES`.
* A row is checked like the rows of tables (`rows.check`) before the caller gets it.

Failure behaviour: invalid data raise `CorruptionError`, which names the part and the page or row, and gives the reason.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards import pieces as cut
from headrace.dataio.shards.sample import (
    AudioInfo,
    AudioMark,
    Color,
    Files,
    KeyFrame,
    Member,
    Pieces,
    Sample,
    VideoInfo,
)

SHORT_DIGEST = 16
"""The length in bytes of the digest of one page or block. It is short because an object has many of them."""
PAGE_ROWS = 64
PAGE_BYTES = 64 * limits.KIB
"""A page is full when it has `PAGE_ROWS` rows, or at least `PAGE_BYTES` bytes before compression."""
MAX_UNPACKED_BYTES = 128 * limits.MIB
"""The largest unpacked size that a page may declare.

It has room for a full page and the longest row, which has 2,000,000 key frames. The digests of a file's pieces take at
most 16 KiB.
"""
_DIRECTORY_ENTRY = np.dtype([("rows", "<u4"), ("stored", "<u4"), ("unpacked", "<u4"), ("digest", f"V{SHORT_DIGEST}")])
I64 = npt.NDArray[np.int64]

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Position = Annotated[int, msgspec.Meta(ge=-1)]
_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The position of the pages in a part: `pages` bytes from `offset`, followed by the directory.

    The directory has `directory` bytes, and its BLAKE3 is `digest`.
    """

    offset: int
    pages: int
    directory: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.pages + self.directory

    @property
    def is_consistent(self) -> bool:
        """Whether the numbers agree with each other."""
        return min(self.offset, self.pages, self.directory) >= 0 and self.directory % _DIRECTORY_ENTRY.itemsize == 0


class _Video(msgspec.Struct, array_like=True, gc=False):
    ext: str
    stream: _Natural
    codec: str
    width: _Positive
    height: _Positive
    fps_numerator: _Positive
    fps_denominator: _Positive
    frames: _Positive
    time_base_numerator: _Positive
    time_base_denominator: _Positive
    start_pts: int
    duration_pts: _Natural
    pixel_format: str
    rotation: int
    color: tuple[str, str, str, str] | None
    key_pts: list[int]
    key_index: list[_Natural]


class _VideoWithPositions(_Video, array_like=True, gc=False):
    key_at: list[_Position] | None = None  # missing in older pages, and for files without pieces


class _Audio(msgspec.Struct, array_like=True, gc=False):
    ext: str
    stream: _Natural
    codec: str
    sample_rate: _Positive
    channels: _Positive
    samples: _Positive


class _AudioWithMarks(_Audio, array_like=True, gc=False):
    # older pages lack these fields
    time_base_numerator: _Positive | None = None
    time_base_denominator: _Positive = 1
    start_pts: int = 0
    mark_at: list[_Natural] = []
    mark_pts: list[int] = []


class _Files(msgspec.Struct, array_like=True, gc=False):
    """The first fields of a row. A reader that needs only the bytes of files decodes only these."""

    shard: str
    members: list[tuple[str, _Natural, _Natural, _Natural]]


class _Row(_Files, array_like=True, gc=False):
    key: _NonEmpty
    duration: Annotated[float, msgspec.Meta(ge=0)]
    video: _VideoWithPositions | None
    audio: _AudioWithMarks | None
    text: str | None
    fields: str | None  # a JSON object, because its integers may be too large for msgpack


class _Pieces(msgspec.Struct, array_like=True, gc=False):
    member: _Natural
    size: _Positive
    digests: bytes
    head: list[tuple[_Natural, _Positive]]


class _PiecesWithMarks(_Pieces, array_like=True, gc=False):
    # missing in older pages, and for formats that can be seeked without marks
    marks: list[tuple[_Natural, _Natural]] = []


class _RowWithPieces(_Row, array_like=True, gc=False):
    """A row with files that have pieces. A row without pieces is written as a `_Row`, the older format."""

    pieces: list[_PiecesWithMarks] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_page = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_files = msgspec.msgpack.Decoder(_Files).decode
_decode_row = msgspec.msgpack.Decoder(_RowWithPieces).decode


# --- writing


def write(samples: Iterable[Sample]) -> tuple[bytes, bytes]:
    """Encode samples as pages. Return the pages and their directory."""
    pages, entries, packer = list[bytes](), list[tuple[int, int, int, bytes]](), zstandard.ZstdCompressor(level=6)
    for rows in _group_into_pages(samples):
        data = _encode_page(rows)
        pages.append(packer.compress(data))
        entries.append((len(rows), len(pages[-1]), len(data), short_digest(pages[-1])))
    return b"".join(pages), np.array(entries, _DIRECTORY_ENTRY).tobytes()


def section_at(offset: int, pages: bytes, directory: bytes) -> Section:
    """Return the document entry for the output of `write`, stored at `offset`."""
    return Section(offset=offset, pages=len(pages), directory=len(directory), digest=digest(directory))


def encode_row(sample: Sample) -> bytes:
    """Encode a sample as a row."""
    members = [(m.ext, m.offset, m.length, m.xxh3) for m in sample.members]
    fields = json.dumps(dict(sample.fields), sort_keys=True, ensure_ascii=False) if sample.fields else None
    video, audio = _encode_video(sample.video), _encode_audio(sample.audio)
    values = (sample.shard, members, sample.key, sample.duration, video, audio, sample.text, fields)
    pieces = [_encode_pieces(n, m.pieces) for n, m in enumerate(sample.members) if m.pieces is not None]
    return _encode(_RowWithPieces(*values, pieces) if pieces else _Row(*values))


def _encode_pieces(number: int, pieces: Pieces) -> Any:
    """Encode pieces. Pieces without marks are written in the older format."""
    values = (number, pieces.size, pieces.digests, list(pieces.head))
    return _PiecesWithMarks(*values, list(pieces.marks)) if pieces.marks else _Pieces(*values)


def _encode_video(v: VideoInfo | None) -> _VideoWithPositions | None:
    if v is None:
        return None
    c = v.color
    positions = ([k.at for k in v.key_frames],) if any(k.at >= 0 for k in v.key_frames) else ()
    kind: Any = _VideoWithPositions if positions else _Video  # the older format, without positions
    encoded: _VideoWithPositions | None = kind(
        *(v.ext, v.stream, v.codec, v.width, v.height, v.fps.numerator, v.fps.denominator, v.frames),
        *(v.time_base.numerator, v.time_base.denominator, v.start_pts, v.duration_pts, v.pixel_format, v.rotation),
        None if c is None else (c.space, c.range, c.primaries, c.transfer),
        [k.pts for k in v.key_frames],
        [k.index for k in v.key_frames],
        *positions,
    )
    return encoded


def _encode_audio(a: AudioInfo | None) -> Any:
    if a is None:
        return None
    values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
    if a.time_base is None:
        return _Audio(*values)  # the older format, which does not record starts
    base = a.time_base
    marks = [mark.at for mark in a.marks], [mark.pts for mark in a.marks]
    return _AudioWithMarks(*values, base.numerator, base.denominator, a.start_pts, *marks)


def _group_into_pages(samples: Iterable[Sample]) -> Iterator[list[bytes]]:
    rows, size = list[bytes](), 0
    for sample in samples:
        rows.append(encode_row(sample))
        size += len(rows[-1])
        if len(rows) == PAGE_ROWS or size >= PAGE_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _encode_page(rows: Sequence[bytes]) -> bytes:
    return _encode([msgspec.Raw(one) for one in rows])


# --- reading


class _ThreadDecompressor(threading.local):
    """One decompressor for each thread.

    Threads cannot share a decompressor, and creating one takes as long as the rest of unpacking a page.
    """

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_thread_decompressor = _ThreadDecompressor()


class Directory:
    """The positions of a part's pages, and the rows that they hold.

    The part has `rows` rows. Errors call it `name`.
    """

    def __init__(self, section: Section, data: bytes | memoryview, rows: int, name: str) -> None:
        self._name = name
        if digest(data) != section.digest:
            raise CorruptionError(
                f"{name}: the BLAKE3 digest of the directory of its pages does not match the dataset version"
            )
        self._entries = np.frombuffer(data, _DIRECTORY_ENTRY)
        self._ends: I64 = np.cumsum(self._entries["rows"], dtype=np.int64)
        stored_ends = np.cumsum(self._entries["stored"], dtype=np.int64)
        self._offsets: I64 = np.concatenate([np.zeros(1, np.int64), stored_ends]) + section.offset
        if (self._ends[-1:].sum(), stored_ends[-1:].sum()) != (rows, section.pages) or not self._entries["rows"].all():
            raise CorruptionError(
                f"{name}: the directory of its pages does not match the rows and bytes in the dataset version"
            )

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, rows: I64) -> tuple[I64, I64]:
        """Return for each row the number of its page and its position in that page."""
        pages = np.searchsorted(self._ends, rows, side="right")
        return pages, rows - (self._ends[pages] - self._entries["rows"][pages])

    def range(self, page: int) -> tuple[int, int]:
        """Return the start and the end of a page in the part."""
        return int(self._offsets[page]), int(self._offsets[page + 1])

    def unpack(self, page: int, stored: bytes | memoryview) -> list[msgspec.Raw]:
        """Unpack the rows of a page from its stored bytes. The page is checked; its rows are not."""
        entry = self._entries[page]
        if short_digest(stored) != entry["digest"].tobytes():
            raise self._bad(page, "its BLAKE3 digest does not match the directory")
        size = int(entry["unpacked"])
        try:
            if size > MAX_UNPACKED_BYTES or zstandard.frame_content_size(stored) != size:
                raise self._bad(page, "it is of another size than the directory says")
            rows = _decode_page(_thread_decompressor.decompressor.decompress(stored, max_output_size=size))
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(page, f"it cannot be unpacked: {error}") from error
        if len(rows) != entry["rows"]:
            raise self._bad(page, f"it holds {len(rows)} rows, the directory says {entry['rows']}")
        return rows

    def unpacked(self, page: int) -> int:
        """Return the unpacked size of a page in bytes."""
        return int(self._entries["unpacked"][page])

    def _bad(self, page: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: page {page} of its rows: {why}")


class RowDecoder:
    """Decodes and checks the rows of a part. `shards` gives the size of every shard that rows may name.

    `prefix` is put before each shard name, except names that begin with `unprefixed`.
    """

    def __init__(self, name: str, shards: Mapping[str, int], *, prefix: str, unprefixed: str) -> None:
        self._name, self._shards, self._prefix, self._unprefixed = name, shards, prefix, unprefixed

    def sample(self, data: msgspec.Raw, at: int, number: int) -> Sample:
        """Decode row `at` of the part as sample `number`."""
        row = self._decoded(_decode_row, data, at)
        shard, members = self._locate(row, at)
        if row.pieces:
            self._attach_pieces(members, row.pieces, at)
        if not math.isfinite(row.duration):
            raise self._bad(at, "duration is not finite")
        video = None if row.video is None else self._video(row.video, at)
        audio = None if row.audio is None else self._audio(row.audio, at)
        fields = parse_fields(row.fields, row.key)
        return Sample(number, row.key, shard, tuple(members), row.duration, video, audio, row.text, fields)

    def _attach_pieces(self, members: list[Member], encoded: list[_PiecesWithMarks], at: int) -> None:
        for entry in encoded:
            if entry.member >= len(members):
                raise self._bad(at, "pieces belong to no member")
            member = members[entry.member]
            pieces = Pieces(entry.size, entry.digests, tuple(entry.head), tuple(entry.marks))
            fault = cut.find_fault(pieces, member.length)
            if fault:
                raise self._bad(at, f"pieces of member {member.ext!r}: {fault}")
            members[entry.member] = Member(member.ext, member.offset, member.length, member.xxh3, pieces)

    def files(self, data: msgspec.Raw, at: int) -> Files:
        """Return the positions of the files of row `at`."""
        return Files(*self._locate(self._decoded(_decode_files, data, at), at))

    def _decoded(self, decode: Any, data: msgspec.Raw, at: int) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(at, f"is not a row: {error}") from error

    def _locate(self, row: _Files, at: int) -> tuple[str, list[Member]]:
        name = row.shard
        shard = self._prefix + name if self._prefix and not name.startswith(self._unprefixed) else name
        size = self._shards.get(shard)
        if size is None:
            raise self._bad(at, "shard is not a shard of this dataset version")
        members = [Member(*one) for one in row.members]
        if not members:
            raise self._bad(at, "members is empty")
        start = end = 0  # of the previous member
        for member in members:
            offset, member_end = member.offset, member.offset + member.length
            if member_end > size:
                raise self._bad(at, "members lies outside its shard")
            if start < member_end and offset < end:
                raise self._bad(at, "members overlaps the next member")
            start, end = offset, member_end
        return shard, members

    def _video(self, v: _VideoWithPositions, at: int) -> VideoInfo:
        if not v.key_pts or len(v.key_pts) != len(v.key_index):
            raise self._bad(at, "key_frames is empty or incomplete")
        if max(v.key_index) > v.frames:
            raise self._bad(at, "key_frames lies outside the video")
        if v.key_at is None:
            key_frames = map(KeyFrame, v.key_pts, v.key_index)
        elif len(v.key_at) == len(v.key_pts):
            key_frames = map(KeyFrame, v.key_pts, v.key_index, v.key_at)
        else:
            raise self._bad(at, "key_frames has another number of positions")
        return VideoInfo(
            *(v.ext, v.stream, v.codec, v.width, v.height, _fraction(v.fps_numerator, v.fps_denominator), v.frames),
            *(_fraction(v.time_base_numerator, v.time_base_denominator), v.start_pts, v.duration_pts, v.pixel_format),
            v.rotation,
            tuple(key_frames),
            None if v.color is None else Color(*v.color),
        )

    def _audio(self, a: _AudioWithMarks, at: int) -> AudioInfo:
        values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
        if a.time_base_numerator is None:
            return AudioInfo(*values)
        if len(a.mark_at) != len(a.mark_pts):
            raise self._bad(at, "its audio marks have another number of positions")
        base = _fraction(a.time_base_numerator, a.time_base_denominator)
        return AudioInfo(*values, base, a.start_pts, tuple(map(AudioMark, a.mark_at, a.mark_pts)))

    def _bad(self, at: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: row {at}: {why}")


@lru_cache(256)
def _fraction(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator)


def without_page_fields(sample: Sample) -> Sample:
    """Return the sample without the values that tables do not hold.

    These are the pieces of its files, the positions of its key frames, and the start and the marks of its audio.
    """
    members = tuple(Member(m.ext, m.offset, m.length, m.xxh3) for m in sample.members)
    video = sample.video
    if video is not None:
        video = replace(video, key_frames=tuple(KeyFrame(k.pts, k.index) for k in video.key_frames))
    audio = sample.audio
    if audio is not None:
        audio = replace(audio, time_base=None, start_pts=0, marks=())
    return replace(sample, members=members, video=video, audio=audio)


# --- promoted fields, which tables and pages store alike


def parse_fields(text: str | None, key: str) -> dict[str, Any]:
    """Parse the promoted fields of the sample `key`."""
    if not text:
        return {}
    try:
        fields = _decode_json(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"sample {key!r}: its fields in the index are not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptionError(f"sample {key!r}: its fields in the index are not a JSON object")
    return fields


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# `json.loads` would create a decoder for each call
_decode_json = json.JSONDecoder(parse_constant=_reject_constant).decode


# --- digests of pages, index parts and documents


def digest(data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 of `data` in hexadecimal."""
    return str(blake3.blake3(data).hexdigest())


def short_digest(data: bytes | bytearray | memoryview) -> bytes:
    """Return the first `SHORT_DIGEST` bytes of the BLAKE3 of `data`."""
    return blake3.blake3(data).digest(SHORT_DIGEST)
