"""The sample index: one Parquet row per sample, and the way back to `Sample`.

Purpose: readers learn from it where every sample lies and what it holds, without opening a shard.
Invariants: `SCHEMA` is the whole format; media columns are null together where a sample has no such stream. A table that
`read_part` returned has been checked: digest, columns and types, row count, and that every member lies inside its shard.
Failure behaviour: `CorruptionError` names the index part, the row and the column; nothing of a bad part is returned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import blake3
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataio.core.errors import CorruptionError
from dataio.shards.contract import AudioInfo, KeyFrame, Member, Sample, VideoInfo

_MEMBER = pa.struct(
    [
        pa.field("ext", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("xxh3", pa.uint64(), nullable=False),
    ]
)
_KEY_FRAME = pa.struct([pa.field("pts", pa.int64(), nullable=False), pa.field("index", pa.int32(), nullable=False)])

_VIDEO: dict[str, Any] = {
    "video_ext": pa.string(),
    "video_stream": pa.int32(),
    "video_codec": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "fps_numerator": pa.int64(),
    "fps_denominator": pa.int64(),
    "frames": pa.int32(),
    "time_base_numerator": pa.int64(),
    "time_base_denominator": pa.int64(),
    "start_pts": pa.int64(),
    "duration_pts": pa.int64(),
    "pixel_format": pa.string(),
    "rotation": pa.int16(),
    "key_frames": pa.list_(pa.field("item", _KEY_FRAME, nullable=False)),
}
_AUDIO: dict[str, Any] = {
    "audio_ext": pa.string(),
    "audio_stream": pa.int32(),
    "audio_codec": pa.string(),
    "sample_rate": pa.int32(),
    "channels": pa.int16(),
    "samples": pa.int64(),
}

SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("members", pa.list_(pa.field("item", _MEMBER, nullable=False)), nullable=False),
        pa.field("duration", pa.float64(), nullable=False),
        *(pa.field(name, kind) for name, kind in (_VIDEO | _AUDIO).items()),
        pa.field("text", pa.string()),
        pa.field("fields", pa.string()),  # a JSON object: the promoted fields of the sample's JSON
    ]
)

_POSITIVE = (
    *("width", "height", "fps_numerator", "fps_denominator", "frames", "time_base_numerator", "time_base_denominator"),
    *("sample_rate", "channels", "samples"),
)
_NOT_NEGATIVE = ("duration", "video_stream", "duration_pts", "audio_stream")


# --- Sample -> row -> Sample


def to_row(sample: Sample) -> dict[str, Any]:
    """One row of `SCHEMA`; the sample's number is its place, so it is not stored."""
    row: dict[str, Any] = {
        "key": sample.key,
        "shard": sample.shard,
        "members": [{"ext": m.ext, "offset": m.offset, "length": m.length, "xxh3": m.xxh3} for m in sample.members],
        "duration": sample.duration,
        "text": sample.text,
        "fields": json.dumps(dict(sample.fields), sort_keys=True, ensure_ascii=False) if sample.fields else None,
    }
    return row | _video_columns(sample.video) | _audio_columns(sample.audio)


def _video_columns(v: VideoInfo | None) -> dict[str, Any]:
    if v is None:
        return dict.fromkeys(_VIDEO)
    values = (
        *(v.ext, v.stream, v.codec, v.width, v.height, v.fps.numerator, v.fps.denominator, v.frames),
        *(v.time_base.numerator, v.time_base.denominator, v.start_pts, v.duration_pts, v.pixel_format, v.rotation),
        [{"pts": k.pts, "index": k.index} for k in v.key_frames],
    )
    return dict(zip(_VIDEO, values, strict=True))


def _audio_columns(a: AudioInfo | None) -> dict[str, Any]:
    if a is None:
        return dict.fromkeys(_AUDIO)
    return dict(zip(_AUDIO, (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples), strict=True))


def from_row(row: Mapping[str, Any], number: int) -> Sample:
    """The sample of a checked row."""
    return Sample(
        id=number,
        key=row["key"],
        shard=row["shard"],
        members=tuple(Member(m["ext"], m["offset"], m["length"], m["xxh3"]) for m in row["members"]),
        duration=row["duration"],
        video=None if row["video_codec"] is None else _video(row),
        audio=None if row["audio_codec"] is None else AudioInfo(*(row[name] for name in _AUDIO)),
        text=row["text"],
        fields=_fields(row["fields"], row["key"]),
    )


def _fields(text: str | None, key: str) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise CorruptionError(f"sample {key!r}: its fields in the index are not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CorruptionError(f"sample {key!r}: its fields in the index are not a JSON object")
    return fields


def _video(row: Mapping[str, Any]) -> VideoInfo:
    return VideoInfo(
        ext=row["video_ext"],
        stream=row["video_stream"],
        codec=row["video_codec"],
        width=row["width"],
        height=row["height"],
        fps=Fraction(row["fps_numerator"], row["fps_denominator"]),
        frames=row["frames"],
        time_base=Fraction(row["time_base_numerator"], row["time_base_denominator"]),
        start_pts=row["start_pts"],
        duration_pts=row["duration_pts"],
        pixel_format=row["pixel_format"],
        rotation=row["rotation"],
        key_frames=tuple(KeyFrame(k["pts"], k["index"]) for k in row["key_frames"]),
    )


# --- Parquet


def digest(data: bytes) -> str:
    """BLAKE3 of `data`, in hex."""
    return str(blake3.blake3(data).hexdigest())


def write_part(samples: Sequence[Sample]) -> bytes:
    """An index part as Parquet; the same samples give the same bytes."""
    table = pa.Table.from_pylist([to_row(s) for s in samples], schema=SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=9)
    return bytes(sink.getvalue().to_pybytes())


def read_part(data: bytes, *, name: str, expected_digest: str, rows: int, shards: Mapping[str, int]) -> Any:
    """The checked Arrow table of an index part. `shards` gives the size of every shard that it may refer to."""
    found = digest(data)
    if found != expected_digest:
        raise CorruptionError(f"{name}: BLAKE3 is {found}, the dataset version says {expected_digest}")
    try:
        # not pq.read_table: it starts Arrow's thread pool, whose tear-down sometimes aborts a process that ends at once
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)
        table.validate(full=True)
        fits = table.schema.equals(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"{name}: not a readable Parquet file: {error}") from error
    if not fits:
        raise CorruptionError(
            f"{name}: its columns are not those of a sample index", hint="was it written by Millrace?"
        )
    if table.num_rows != rows:
        raise CorruptionError(f"{name}: holds {table.num_rows} rows, the dataset version says {rows}")
    _check_values(table.combine_chunks(), name, shards)
    return table


def _check_values(table: Any, name: str, shards: Mapping[str, int]) -> None:
    for field in SCHEMA:
        if not field.nullable:
            _refuse(pc.is_null(table[field.name]), name, field.name, "is missing")
    for columns, codec in ((_VIDEO, "video_codec"), (_AUDIO, "audio_codec")):
        absent = pc.is_null(table[codec])
        for column in columns:
            _refuse(pc.xor(pc.is_null(table[column]), absent), name, column, "is there without its stream, or missing")
    for column in _POSITIVE:
        _refuse(pc.less_equal(table[column], 0), name, column, "is not positive")
    for column in _NOT_NEGATIVE:
        _refuse(pc.less(table[column], 0), name, column, "is negative")
    _refuse(pc.invert(pc.is_finite(table["duration"])), name, "duration", "is not finite")
    _refuse(pc.equal(table["key"], ""), name, "key", "is empty")
    known = pa.array(list(shards), pa.string())
    _refuse(pc.invert(pc.is_in(table["shard"], known)), name, "shard", "is not a shard of this dataset version")
    _check_members(table, name, shards, known)
    _check_key_frames(table, name)


def _check_members(table: Any, name: str, shards: Mapping[str, int], known: Any) -> None:
    lists = table["members"].combine_chunks()
    rows = pc.list_parent_indices(lists)
    _refuse(pc.less(pc.list_value_length(table["members"]), 1), name, "members", "is empty")
    flat = pc.list_flatten(lists)
    offset, length = flat.field("offset"), flat.field("length")
    sizes = pa.array(list(shards.values()), pa.int64()).take(
        pc.index_in(table["shard"].take(rows), known).combine_chunks()
    )
    # compared by subtraction, since offset + length may overflow
    outside = pc.or_(pc.greater(offset, sizes), pc.greater(length, pc.subtract(sizes, offset)))
    bad = pc.or_(pc.or_(pc.less(offset, 0), pc.less(length, 0)), outside)
    _refuse(bad, name, "members", "lies outside its shard", rows)


def _check_key_frames(table: Any, name: str) -> None:
    lists = table["key_frames"].combine_chunks()
    _refuse(pc.less(pc.list_value_length(table["key_frames"]), 1), name, "key_frames", "is empty")
    rows = pc.list_parent_indices(lists)
    index = pc.list_flatten(lists).field("index")
    bad = pc.or_(pc.less(index, 0), pc.greater(index, table["frames"].take(rows).combine_chunks()))
    _refuse(bad, name, "key_frames", "lies outside the video", rows)


def _refuse(bad: Any, name: str, column: str, why: str, rows: Any = None) -> None:
    """Raise for the first true value of `bad`; `rows` maps its places to rows where it is not one a row."""
    first = pc.index(bad, True).as_py()
    if first >= 0:
        row = first if rows is None else rows[first].as_py()
        raise CorruptionError(f"{name}: row {row}: {column} {why}")
