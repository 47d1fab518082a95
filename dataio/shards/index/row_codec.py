"""Encodes samples as the rows of pages, and decodes and checks these rows.

Purpose: a row is one msgpack array. A reader that needs only the positions of files decodes only its first fields.

Invariants:
* The same sample gives the same bytes. A sample without the newer fields gets the older format.
* A row is checked like the rows of tables (`rows.check`) before the caller gets it.

Failure behaviour: an invalid row raises `CorruptionError`, which names the part and the row, and gives the reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import msgspec

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

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_Position = Annotated[int, msgspec.Meta(ge=-1)]
_NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


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


class _VideoWithOrigin(_VideoWithPositions, array_like=True, gc=False):
    origin_pts: int = 0  # missing in older pages, and for files whose clock is their own time line


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
    video: _VideoWithOrigin | None
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


class _RowWithVideos(_RowWithPieces, array_like=True, gc=False):
    """A row with further videos. A row without them is written in the older formats."""

    videos: list[_VideoWithOrigin] = []


_encode = msgspec.msgpack.Encoder().encode
_decode_files = msgspec.msgpack.Decoder(_Files).decode
_decode_row = msgspec.msgpack.Decoder(_RowWithVideos).decode


def encode_row(sample: Sample) -> bytes:
    """Encode a sample as a row."""
    members = [(m.ext, m.offset, m.length, m.xxh3) for m in sample.members]
    fields = json.dumps(dict(sample.fields), sort_keys=True, ensure_ascii=False) if sample.fields else None
    video, audio = _encode_video(sample.video), _encode_audio(sample.audio)
    values = (sample.shard, members, sample.key, sample.duration, video, audio, sample.text, fields)
    pieces = [_encode_pieces(n, m.pieces) for n, m in enumerate(sample.members) if m.pieces is not None]
    if sample.videos:
        return _encode(_RowWithVideos(*values, pieces or None, [_encode_stream(one) for one in sample.videos]))
    return _encode(_RowWithPieces(*values, pieces) if pieces else _Row(*values))


def _encode_pieces(number: int, pieces: Pieces) -> Any:
    """Encode pieces. Pieces without marks are written in the older format."""
    values = (number, pieces.size, pieces.digests, list(pieces.head))
    return _PiecesWithMarks(*values, list(pieces.marks)) if pieces.marks else _Pieces(*values)


def _encode_video(v: VideoInfo | None) -> Any:
    return None if v is None else _encode_stream(v)


def _encode_stream(v: VideoInfo) -> Any:
    """Encode a video in the oldest format that has its values."""
    c = v.color
    positions = [k.at for k in v.key_frames] if any(k.at >= 0 for k in v.key_frames) else None
    kind: Any = _Video if positions is None else _VideoWithPositions
    newer: tuple[Any, ...] = () if positions is None else (positions,)
    if v.origin_pts:
        kind, newer = _VideoWithOrigin, (positions, v.origin_pts)
    return kind(
        *(v.ext, v.stream, v.codec, v.width, v.height, v.fps.numerator, v.fps.denominator, v.frames),
        *(v.time_base.numerator, v.time_base.denominator, v.start_pts, v.duration_pts, v.pixel_format, v.rotation),
        None if c is None else (c.space, c.range, c.primaries, c.transfer),
        [k.pts for k in v.key_frames],
        [k.index for k in v.key_frames],
        *newer,
    )


def _encode_audio(a: AudioInfo | None) -> Any:
    if a is None:
        return None
    values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
    if a.time_base is None:
        return _Audio(*values)  # the older format, which does not record starts
    base = a.time_base
    marks = [mark.at for mark in a.marks], [mark.pts for mark in a.marks]
    return _AudioWithMarks(*values, base.numerator, base.denominator, a.start_pts, *marks)


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
            raise self._row_error(at, "duration is not finite")
        video = None if row.video is None else self._video(row.video, at)
        audio = None if row.audio is None else self._audio(row.audio, at)
        fields = parse_fields(row.fields, row.key)
        videos = self._videos(row.videos, members, at) if row.videos else ()
        return Sample(number, row.key, shard, tuple(members), row.duration, video, audio, row.text, fields, videos)

    def _attach_pieces(self, members: list[Member], encoded: list[_PiecesWithMarks], at: int) -> None:
        for entry in encoded:
            if entry.member >= len(members):
                raise self._row_error(at, "pieces belong to no member")
            member = members[entry.member]
            pieces = Pieces(entry.size, entry.digests, tuple(entry.head), tuple(entry.marks))
            fault = cut.find_fault(pieces, member.length)
            if fault:
                raise self._row_error(at, f"pieces of member {member.ext!r}: {fault}")
            members[entry.member] = Member(member.ext, member.offset, member.length, member.xxh3, pieces)

    def files(self, data: msgspec.Raw, at: int) -> Files:
        """Return the positions of the files of row `at`."""
        return Files(*self._locate(self._decoded(_decode_files, data, at), at))

    def _decoded(self, decode: Any, data: msgspec.Raw, at: int) -> Any:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._row_error(at, f"is not a row: {error}") from error

    def _locate(self, row: _Files, at: int) -> tuple[str, list[Member]]:
        name = row.shard
        shard = self._prefix + name if self._prefix and not name.startswith(self._unprefixed) else name
        size = self._shards.get(shard)
        if size is None:
            raise self._row_error(at, "shard is not a shard of this dataset version")
        members = [Member(*one) for one in row.members]
        if not members:
            raise self._row_error(at, "members is empty")
        start = end = 0  # of the previous member
        for member in members:
            offset, member_end = member.offset, member.offset + member.length
            if member_end > size:
                raise self._row_error(at, "members lies outside its shard")
            if start < member_end and offset < end:
                raise self._row_error(at, "members overlaps the next member")
            start, end = offset, member_end
        return shard, members

    def _video(self, v: _VideoWithOrigin, at: int) -> VideoInfo:
        if not v.key_pts or len(v.key_pts) != len(v.key_index):
            raise self._row_error(at, "key_frames is empty or incomplete")
        if max(v.key_index) > v.frames:
            raise self._row_error(at, "key_frames lies outside the video")
        if v.key_at is None:
            key_frames = map(KeyFrame, v.key_pts, v.key_index)
        elif len(v.key_at) == len(v.key_pts):
            key_frames = map(KeyFrame, v.key_pts, v.key_index, v.key_at)
        else:
            raise self._row_error(at, "key_frames has another number of positions")
        return VideoInfo(
            *(v.ext, v.stream, v.codec, v.width, v.height, _fraction(v.fps_numerator, v.fps_denominator), v.frames),
            *(_fraction(v.time_base_numerator, v.time_base_denominator), v.start_pts, v.duration_pts, v.pixel_format),
            v.rotation,
            tuple(key_frames),
            None if v.color is None else Color(*v.color),
            v.origin_pts,
        )

    def _videos(self, encoded: list[_VideoWithOrigin], members: list[Member], at: int) -> tuple[VideoInfo, ...]:
        extensions = {member.ext for member in members}
        if not all(one.ext in extensions for one in encoded):
            raise self._row_error(at, "a further video belongs to no member")
        return tuple([self._video(one, at) for one in encoded])

    def _audio(self, a: _AudioWithMarks, at: int) -> AudioInfo:
        values = (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples)
        if a.time_base_numerator is None:
            return AudioInfo(*values)
        if len(a.mark_at) != len(a.mark_pts):
            raise self._row_error(at, "its audio marks have another number of positions")
        base = _fraction(a.time_base_numerator, a.time_base_denominator)
        return AudioInfo(*values, base, a.start_pts, tuple(map(AudioMark, a.mark_at, a.mark_pts)))

    def _row_error(self, at: int, why: str) -> CorruptionError:
        return CorruptionError(f"{self._name}: row {at}: {why}")


@lru_cache(256)
def _fraction(numerator: int, denominator: int) -> Fraction:
    return Fraction(numerator, denominator)


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
