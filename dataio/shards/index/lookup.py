"""The rows of an index part once more, page by page: what a sample is found in by its number.

Purpose: a batch of a shuffled epoch takes rows from all over the index. From Parquet each costs a row group of a thousand, column
by column; from here a page of some tens, and neither Arrow nor its memory.

```
page       rows in msgpack, one array of them, in zstd                      `PAGE_ROWS`, or fewer where they are long
…
directory  of each page: rows, bytes stored, bytes unpacked (u32 each), 16 bytes of the BLAKE3 of what is stored
```
This section lies in the part between the row groups and the footer, where a Parquet reader has nothing to look for. The version's
document says where, and gives the digest of the directory.

Invariants: a page holds what the row groups hold of the same rows (`headrace verify` compares them); the same samples give the
same bytes. Nothing is unpacked beyond what the directory says, nor above `UNPACKED`. A row is checked as those of tables are
(`checks`) before anybody gets it.
Failure behaviour: `CorruptionError` naming the part, the page or the row, and what is wrong with it.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards import pieces as cut
from headrace.dataio.shards.contract import (
    AudioInfo,
    Color,
    Files,
    KeyFrame,
    Member,
    Pieces,
    Sample,
    SoundMark,
    VideoInfo,
)
from headrace.dataio.shards.index.digests import SHORT, digest, short

PAGE_ROWS = 64
PAGE_BYTES = 64 * limits.KIB
"""A page is full with so many rows, or with so many bytes before they are packed."""
UNPACKED = 128 * limits.MIB
"""The most that a page may say to hold unpacked: as much as a full one and a row as long as any, of 2,000,000 key frames.
Pieces of a file take 16 KiB at most."""
ENTRY = np.dtype([("rows", "<u4"), ("stored", "<u4"), ("unpacked", "<u4"), ("digest", f"V{SHORT}")])
I64 = npt.NDArray[np.int64]

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Place = Annotated[int, msgspec.Meta(ge=-1)]
_Word = Annotated[str, msgspec.Meta(min_length=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Where a part has its pages: `pages` bytes from `offset` on, then `directory` bytes, whose BLAKE3 is `digest`."""

    offset: int
    pages: int
    directory: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.pages + self.directory

    @property
    def sound(self) -> bool:
        """Whether the numbers agree with each other."""
        return min(self.offset, self.pages, self.directory) >= 0 and self.directory % ENTRY.itemsize == 0


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


class _PlacedVideo(_Video, array_like=True, gc=False):
    key_at: list[_Place] | None = None  # none in pages from before, and of files without pieces


class _Audio(msgspec.Struct, array_like=True, gc=False):
    ext: str
    stream: _Natural
    codec: str
    sample_rate: _Positive
    channels: _Positive
    samples: _Positive


class _MarkedAudio(_Audio, array_like=True, gc=False):
    # none in pages from before
    time_base_numerator: _Positive | None = None
    time_base_denominator: _Positive = 1
    start_pts: int = 0
    mark_at: list[_Natural] = []
    mark_pts: list[int] = []


class _Files(msgspec.Struct, array_like=True, gc=False):
    """A row as far as those read it who want nothing but bytes."""

    shard: str
    members: list[tuple[str, _Natural, _Natural, _Natural]]


class _Row(_Files, array_like=True, gc=False):
    key: _Word
    duration: Annotated[float, msgspec.Meta(ge=0)]
    video: _PlacedVideo | None
    audio: _MarkedAudio | None
    text: str | None
    fields: str | None  # a JSON object: its numbers may be larger than msgpack's


class _Pieces(msgspec.Struct, array_like=True, gc=False):
    member: _Natural
    size: _Positive
    digests: bytes
    head: list[tuple[_Natural, _Positive]]


class _MarkedPieces(_Pieces, array_like=True, gc=False):
    marks: list[tuple[_Natural, _Natural]] = []  # none in pages from before, and of files that say where things are


class _LongRow(_Row, array_like=True, gc=False):
    """A row with files that have pieces. A row without is written as before there were any."""

    pieces: list[_MarkedPieces] | None = None


_encode = msgspec.msgpack.Encoder().encode
_as_page = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_as_files = msgspec.msgpack.Decoder(_Files).decode
_as_row = msgspec.msgpack.Decoder(_LongRow).decode


# --- writing


def write(samples: Iterable[Sample]) -> tuple[bytes, bytes]:
    """The pages of these samples, and their directory."""
    pages, entries, packer = list[bytes](), list[tuple[int, int, int, bytes]](), zstandard.ZstdCompressor(level=6)
    for rows in _paged(samples):
        data = _array_of(rows)
        pages.append(packer.compress(data))
        entries.append((len(rows), len(pages[-1]), len(data), short(pages[-1])))
    return b"".join(pages), np.array(entries, ENTRY).tobytes()


def section_at(offset: int, pages: bytes, directory: bytes) -> Section:
    """How a document names what `write` made and was stored at `offset`."""
    return Section(offset=offset, pages=len(pages), directory=len(directory), digest=digest(directory))


def row(sample: Sample) -> bytes:
    """A sample as its page holds it."""
    members = [(m.ext, m.offset, m.length, m.xxh3) for m in sample.members]
    fields = json.dumps(dict(sample.fields), sort_keys=True, ensure_ascii=False) if sample.fields else None
    video, audio = _of_video(sample.video), _of_audio(sample.audio)
    values = (sample.shard, members, sample.key, sample.duration, video, audio, sample.text, fields)
    pieces = [_of_pieces(n, m.pieces) for n, m in enumerate(sample.members) if m.pieces is not None]
    return _encode(_LongRow(*values, pieces) if pieces else _Row(*values))


def _of_pieces(number: int, pieces: Pieces) -> Any:
    """Pieces without marks are written as before there were any."""
    values = (number, pieces.size, pieces.digests, list(pieces.head))
    return _MarkedPieces(*values, list(pieces.marks)) if pieces.marks else _Pieces(*values)


def _of_video(v: VideoInfo | None) -> _PlacedVideo | None:
    if v is None:
        return None
    c = v.color
    places = ([k.at for k in v.key_frames],) if any(k.at >= 0 for k in v.key_frames) else ()
    kind: Any = _PlacedVideo if places else _Video  # which ends as it did before there were places
    made: _PlacedVideo | None = kind(
        *(v.ext, v.stream, v.codec, v.width, v.height, v.fps.numerator, v.fps.denominator, v.frames),
        *(v.time_base.numerator, v.time_base.denominator, v.start_pts, v.duration_pts, v.pixel_format, v.rotation),
        None if c is None else (c.space, c.range, c.primaries, c.transfer),
        [k.pts for k in v.key_frames],
        [k.index for k in v.key_frames],
        *places,
    )
    return made


def _of_audio(a: AudioInfo | None) -> Any:
    if a is None:
        return None
    values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
    if a.time_base is None:
        return _Audio(*values)  # as it was written before starts were recorded
    base = a.time_base
    marks = [mark.at for mark in a.marks], [mark.pts for mark in a.marks]
    return _MarkedAudio(*values, base.numerator, base.denominator, a.start_pts, *marks)


def _paged(samples: Iterable[Sample]) -> Iterator[list[bytes]]:
    rows, size = list[bytes](), 0
    for sample in samples:
        rows.append(row(sample))
        size += len(rows[-1])
        if len(rows) == PAGE_ROWS or size >= PAGE_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _array_of(rows: Sequence[bytes]) -> bytes:
    return _encode([msgspec.Raw(one) for one in rows])


# --- reading


class _Own(threading.local):
    """A thread's own: threads cannot share it, and to make one takes as long as all else that a page takes."""

    def __init__(self) -> None:
        self.unpacker = zstandard.ZstdDecompressor()


_own = _Own()


class Directory:
    """Where the pages of a part lie, and which rows they hold. `name` names the part in errors, `rows` is how many it has."""

    def __init__(self, section: Section, data: bytes | memoryview, rows: int, name: str) -> None:
        self._name = name
        if digest(data) != section.digest:
            raise CorruptionError(f"{name}: BLAKE3 of the directory of its pages is not what the dataset version says")
        self._entries = np.frombuffer(data, ENTRY)
        self._ends: I64 = np.cumsum(self._entries["rows"], dtype=np.int64)
        at = np.cumsum(self._entries["stored"], dtype=np.int64)
        self._offsets: I64 = np.concatenate([np.zeros(1, np.int64), at]) + section.offset
        if (self._ends[-1:].sum(), at[-1:].sum()) != (rows, section.pages) or not self._entries["rows"].all():
            raise CorruptionError(
                f"{name}: the directory of its pages names other rows or bytes than the dataset version"
            )

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, rows: I64) -> tuple[I64, I64]:
        """In which page each of these rows is, and where in it."""
        pages = np.searchsorted(self._ends, rows, side="right")
        return pages, rows - (self._ends[pages] - self._entries["rows"][pages])

    def range(self, page: int) -> tuple[int, int]:
        """Where a page begins and ends in the part."""
        return int(self._offsets[page]), int(self._offsets[page + 1])

    def unpack(self, page: int, stored: bytes | memoryview) -> list[msgspec.Raw]:
        """The rows of a page, not yet checked, from what is stored of it."""
        entry = self._entries[page]
        if short(stored) != entry["digest"].tobytes():
            raise self._bad(page, "its BLAKE3 is not what the directory says")
        size = int(entry["unpacked"])
        try:
            if size > UNPACKED or zstandard.frame_content_size(stored) != size:
                raise self._bad(page, "it is of another size than the directory says")
            rows = _as_page(_own.unpacker.decompress(stored, max_output_size=size))
        except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(page, f"it cannot be unpacked: {error}") from error
        if len(rows) != entry["rows"]:
            raise self._bad(page, f"it holds {len(rows)} rows, the directory says {entry['rows']}")
        return rows

    def unpacked(self, page: int) -> int:
        """Bytes of a page's rows."""
        return int(self._entries["unpacked"][page])

    def _bad(self, page: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: page {page} of its rows: {why}")


class Rows:
    """Makes samples of a part's rows. `shards` gives the sizes of all that they may lie in; `prefix` goes before their names, but
    for those that begin with `but`."""

    def __init__(self, name: str, shards: Mapping[str, int], prefix: str, but: str) -> None:
        self._name, self._shards, self._prefix, self._but = name, shards, prefix, but

    def sample(self, data: msgspec.Raw, at: int, number: int) -> Sample:
        """Row `at` of the part as sample `number`."""
        found = self._decoded(_as_row, data, at)
        shard, members = self._where(found, at)
        if found.pieces:
            self._add_pieces(members, found.pieces, at)
        if not math.isfinite(found.duration):
            raise self._bad(at, "duration is not finite")
        video = None if found.video is None else self._video(found.video, at)
        audio = None if found.audio is None else self._audio(found.audio, at)
        fields = parsed(found.fields, found.key)
        return Sample(number, found.key, shard, tuple(members), found.duration, video, audio, found.text, fields)

    def _add_pieces(self, members: list[Member], found: list[_MarkedPieces], at: int) -> None:
        for one in found:
            if one.member >= len(members):
                raise self._bad(at, "pieces are those of no member")
            whole = members[one.member]
            pieces = Pieces(one.size, one.digests, tuple(one.head), tuple(one.marks))
            fault = cut.fault(pieces, whole.length)
            if fault:
                raise self._bad(at, f"pieces of member {whole.ext!r}: {fault}")
            members[one.member] = Member(whole.ext, whole.offset, whole.length, whole.xxh3, pieces)

    def files(self, data: msgspec.Raw, at: int) -> Files:
        """Where the files of row `at` lie."""
        return Files(*self._where(self._decoded(_as_files, data, at), at))

    def _decoded(self, decode: Any, data: msgspec.Raw, at: int) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(at, f"is not a row: {error}") from error

    def _where(self, found: _Files, at: int) -> tuple[str, list[Member]]:
        name = found.shard
        shard = self._prefix + name if self._prefix and not name.startswith(self._but) else name
        size = self._shards.get(shard)
        if size is None:
            raise self._bad(at, "shard is not a shard of this dataset version")
        members = [Member(*one) for one in found.members]
        if not members:
            raise self._bad(at, "members is empty")
        start = end = 0  # of the one before
        for member in members:
            offset, after = member.offset, member.offset + member.length
            if after > size:
                raise self._bad(at, "members lies outside its shard")
            if start < after and offset < end:
                raise self._bad(at, "members overlaps the next member")
            start, end = offset, after
        return shard, members

    def _video(self, v: _PlacedVideo, at: int) -> VideoInfo:
        if not v.key_pts or len(v.key_pts) != len(v.key_index):
            raise self._bad(at, "key_frames is empty or incomplete")
        if max(v.key_index) > v.frames:
            raise self._bad(at, "key_frames lies outside the video")
        if v.key_at is None:
            key_frames = map(KeyFrame, v.key_pts, v.key_index)
        elif len(v.key_at) == len(v.key_pts):
            key_frames = map(KeyFrame, v.key_pts, v.key_index, v.key_at)
        else:
            raise self._bad(at, "key_frames does not lie at as many places")
        return VideoInfo(
            *(v.ext, v.stream, v.codec, v.width, v.height, _fraction(v.fps_numerator, v.fps_denominator), v.frames),
            *(_fraction(v.time_base_numerator, v.time_base_denominator), v.start_pts, v.duration_pts, v.pixel_format),
            v.rotation,
            tuple(key_frames),
            None if v.color is None else Color(*v.color),
        )

    def _audio(self, a: _MarkedAudio, at: int) -> AudioInfo:
        values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
        if a.time_base_numerator is None:
            return AudioInfo(*values)
        if len(a.mark_at) != len(a.mark_pts):
            raise self._bad(at, "its marks of sound do not lie at as many places")
        base = _fraction(a.time_base_numerator, a.time_base_denominator)
        return AudioInfo(*values, base, a.start_pts, tuple(map(SoundMark, a.mark_at, a.mark_pts)))

    def _bad(self, at: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: row {at}: {why}")


@lru_cache(256)
def _fraction(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator)


def without_parts(sample: Sample) -> Sample:
    """What tables hold of a sample: without the pieces of its files, the places of its key frames, and where its sound begins."""
    members = tuple(Member(m.ext, m.offset, m.length, m.xxh3) for m in sample.members)
    video = sample.video
    if video is not None:
        video = replace(video, key_frames=tuple(KeyFrame(k.pts, k.index) for k in video.key_frames))
    audio = sample.audio
    if audio is not None:
        audio = replace(audio, time_base=None, start_pts=0, marks=())
    return replace(sample, members=members, video=video, audio=audio)


# --- the promoted fields, as tables and pages hold them


def parsed(text: str | None, key: str) -> dict[str, Any]:
    """The promoted fields of the sample `key`."""
    if not text:
        return {}
    try:
        fields = _decode_json(text)
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"sample {key!r}: its fields in the index are not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptionError(f"sample {key!r}: its fields in the index are not a JSON object")
    return fields


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decode_json = json.JSONDecoder(parse_constant=_refuse_constant).decode  # `json.loads` would make one for each call
