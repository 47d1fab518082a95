"""The rows of the sample index: their schema, the conversion from and to samples, and the checks of stored rows.

Purpose: the index tells readers the position and the contents of each sample, so that they need not open a shard. An
index part is a Parquet file with one row for each sample.
Invariants:

* `SCHEMA` defines all columns. If a sample does not have a stream, all columns of that stream are null.
* The footer of a part holds the digest of each block of `BLOCK_BYTES` before it, under `BLOCKS`. So any range of a part
  can be checked without the rest.
* The footer also holds the digest of each column chunk, under `CHUNKS`. So a column can be read and checked without the
  bytes of its neighbours. Older parts lack this entry.
* Readers use rows only after `check`: members lie inside their shards, sizes are positive, and streams are complete.
  Members do not overlap, but two samples may have members with the same range, such as two parts of a long video. The
  first members of samples differ, since their offsets are the order of the samples.
  `check` works on whole columns, because reading one sample checks its whole row group. Most checks take little time
  when the rows are valid. A check is skipped if its columns were not read.

Failure behaviour: `CorruptionError` names the index part, the first invalid row and the column. A table with an invalid
row is never returned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import arrow as pc
from headrace.dataio.shards.index.pages import SHORT_DIGEST, digest, short_digest
from headrace.dataio.shards.index.row_codec import parse_fields
from headrace.dataio.shards.sample import AudioInfo, Color, Files, KeyFrame, Member, Sample, VideoInfo

BLOCK_BYTES = 64 * limits.KIB
BLOCKS_SUFFIX = b".blocks"
BLOCKS = b"headrace" + BLOCKS_SUFFIX
"""The key of the footer entry with the blocks' BLAKE3 digests: `BLOCK_DIGEST` bytes of each, in base64.

Readers accept any name before the suffix, because Headrace had another name when it wrote the oldest indexes.
"""
CHUNKS = b"headrace.chunks"
"""The key of the footer entry with the column chunks' BLAKE3 digests: `BLOCK_DIGEST` bytes of each, in base64.

The chunks are in the order of their row groups, and within a row group in the order of the leaf columns.
"""
BLOCK_DIGEST = SHORT_DIGEST

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
}
_COLOR: dict[str, Any] = dict.fromkeys(("color_space", "color_range", "color_primaries", "color_transfer"), pa.string())
_AUDIO: dict[str, Any] = {
    "audio_ext": pa.string(),
    "audio_stream": pa.int32(),
    "audio_codec": pa.string(),
    "sample_rate": pa.int32(),
    "channels": pa.int16(),
    "samples": pa.int64(),
}

# columns that are often read together are adjacent; long columns come last
SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),  # of all members
        pa.field("duration", pa.float64(), nullable=False),
        *(pa.field(name, kind) for name, kind in (_VIDEO | _COLOR | _AUDIO).items()),
        pa.field("text", pa.string()),
        pa.field("fields", pa.string()),  # a JSON object: the promoted fields of the sample's JSON
        pa.field("members", pa.list_(pa.field("item", _MEMBER, nullable=False)), nullable=False),
        pa.field("key_frames", pa.list_(pa.field("item", _KEY_FRAME, nullable=False))),
    ]
)
_EMPTY = dict[str, Any].fromkeys(SCHEMA.names)
_PLAIN = frozenset(["key", "shard", "bytes", "duration", "members"])
_REQUIRED = tuple(field.name for field in SCHEMA if not field.nullable)
_STREAMS = {"video_codec": (*_VIDEO, "key_frames"), "audio_codec": tuple(_AUDIO), "color_space": tuple(_COLOR)}
"""A column of each stream, and the columns that must be null in exactly the same rows."""
_POSITIVE = (
    *("width", "height", "fps_numerator", "fps_denominator", "frames", "time_base_numerator"),
    *("time_base_denominator", "sample_rate", "channels", "samples"),
)
_NOT_NEGATIVE = ("bytes", "duration", "video_stream", "duration_pts", "audio_stream")

I64 = npt.NDArray[np.int64]
RowNumbers = I64 | range | None
"""The row numbers that errors give. None means the positions in the table."""


# --- Sample -> row -> Sample


def to_row(sample: Sample) -> dict[str, Any]:
    """Convert a sample to a row of `SCHEMA`. The position of the row is the sample's number, so it is not stored."""
    row: dict[str, Any] = {
        "key": sample.key,
        "shard": sample.shard,
        "members": [{"ext": m.ext, "offset": m.offset, "length": m.length, "xxh3": m.xxh3} for m in sample.members],
        "bytes": sum(m.length for m in sample.members),
        "duration": sample.duration,
        "text": sample.text,
        "fields": json.dumps(dict(sample.fields), sort_keys=True, ensure_ascii=False) if sample.fields else None,
    }
    return row | _video_columns(sample.video) | _audio_columns(sample.audio)


def _video_columns(v: VideoInfo | None) -> dict[str, Any]:
    if v is None:
        return dict.fromkeys((*_VIDEO, *_COLOR, "key_frames"))
    values = (
        *(v.ext, v.stream, v.codec, v.width, v.height, v.fps.numerator, v.fps.denominator, v.frames),
        *(v.time_base.numerator, v.time_base.denominator, v.start_pts, v.duration_pts, v.pixel_format, v.rotation),
    )
    key_frames = [{"pts": k.pts, "index": k.index} for k in v.key_frames]
    return {**dict(zip(_VIDEO, values, strict=True)), **_color_columns(v.color), "key_frames": key_frames}


def _color_columns(c: Color | None) -> dict[str, Any]:
    if c is None:
        return dict.fromkeys(_COLOR)
    return dict(zip(_COLOR, (c.space, c.range, c.primaries, c.transfer), strict=True))


def _audio_columns(a: AudioInfo | None) -> dict[str, Any]:
    if a is None:
        return dict.fromkeys(_AUDIO)
    return dict(zip(_AUDIO, (a.ext, a.stream, a.codec, a.sample_rate, a.channels, a.samples), strict=True))


def from_row(row: Mapping[str, Any], number: int) -> Sample:
    """Convert a checked row to a sample."""
    return Sample(
        id=number,
        key=row["key"],
        shard=row["shard"],
        members=tuple(Member(m["ext"], m["offset"], m["length"], m["xxh3"]) for m in row["members"]),
        duration=row["duration"],
        video=None if row["video_codec"] is None else _video(row),
        audio=None if row["audio_codec"] is None else AudioInfo(*(row[name] for name in _AUDIO)),
        text=row["text"],
        fields=parse_fields(row["fields"], row["key"]),
    )


def samples_of(table: Any, numbers: Sequence[int]) -> Iterator[Sample]:
    """Convert checked rows to samples, like `from_row`, but faster because it converts whole columns at a time.

    There must be at least one row. `table` may lack columns in which no row has a value.
    """
    ends, members = _members(table)
    names = [name for name in table.column_names if name not in _PLAIN]
    rows = [_EMPTY | row for row in table.select(names).to_pylist()] if names else [_EMPTY] * len(numbers)
    keys, shards, durations = (table[name].to_pylist() for name in ("key", "shard", "duration"))
    for number, key, shard, duration, (start, end), row in zip(
        numbers, keys, shards, durations, pairwise(ends), rows, strict=True
    ):
        video = None if row["video_codec"] is None else _video(row)
        audio = None if row["audio_codec"] is None else AudioInfo(*(row[name] for name in _AUDIO))
        row_members = tuple(members[start:end])
        yield Sample(
            number, key, shard, row_members, duration, video, audio, row["text"], parse_fields(row["fields"], key)
        )


def files_of(table: Any) -> Iterator[Files]:
    """Convert checked rows to the positions of their files, whole columns at a time. There must be at least one row."""
    ends, members = _members(table)
    for shard, (start, end) in zip(table["shard"].to_pylist(), pairwise(ends), strict=True):
        yield Files(shard, members[start:end])


def _members(table: Any) -> tuple[list[int], list[Member]]:
    """Return the boundaries of the rows in the list of all members (starting with 0), and that list."""
    column = table["members"]
    members = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    ends = [0, *accumulate(pc.list_value_length(members).to_pylist())]
    fields = (field.to_pylist() for field in pc.list_flatten(members).flatten())
    return ends, [Member(*one) for one in zip(*fields, strict=True)]


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
        color=None if row["color_space"] is None else Color(*(row[name] for name in _COLOR)),
    )


def has_file(lists: Any, ext: str) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows in a column of members that have a file with this extension."""
    has = np.zeros(len(lists), np.bool_)
    extensions = pc.struct_field(pc.list_flatten(lists), ["ext"])
    has[pc.list_parent_indices(lists).to_numpy()[pc.equal(extensions, ext).to_numpy(zero_copy_only=False)]] = True
    return has


def block_digests(data: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the digest of each block of `BLOCK_BYTES` of `data`. The last block may be shorter."""
    view = memoryview(data)
    blocks = (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))
    return [short_digest(block) for block in blocks]


# --- checks


def read_part(data: bytes, *, name: str, expected_digest: str, rows: int, shards: Mapping[str, int]) -> Any:
    """Check a whole index part and return its Arrow table.

    `shards` gives the size of every shard that rows may name.
    """
    actual_digest = digest(data)
    if actual_digest != expected_digest:
        raise CorruptionError(f"{name}: BLAKE3 is {actual_digest}, the dataset version says {expected_digest}")
    try:
        table = pc.ParquetReader(data).read()
        table.validate(full=True)
        fits = table.schema.equals(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"{name}: not a readable Parquet file: {error}") from error
    if not fits:
        raise CorruptionError(
            f"{name}: its columns are not those of a sample index",
            hint="was it written by this version of Headrace? If not, pack or index the data again",
        )
    if table.num_rows != rows:
        raise CorruptionError(f"{name}: holds {table.num_rows} rows, the dataset version says {rows}")
    check(table, name, shards)
    return table


def check(table: Any, name: str, shards: Mapping[str, int], numbers: RowNumbers = None) -> None:
    """Raise `CorruptionError` for the first invalid value. Only the columns of `SCHEMA` that `table` has are checked.

    `shards` maps each shard to its size.
    """
    columns = _Columns(table, name, range(table.num_rows) if numbers is None else numbers)
    for column in columns.present(_REQUIRED):
        if columns[column].null_count:
            columns.fail_where(pc.is_null(columns[column]), column, "is missing")
    for codec, stream_columns in _STREAMS.items():
        for column in columns.present(stream_columns) if codec in columns else ():
            nulls = {columns[codec].null_count, columns[column].null_count}
            if nulls != {0} and nulls != {len(columns[codec])}:
                differ = pc.xor(pc.is_null(columns[column]), pc.is_null(columns[codec]))
                columns.fail_where(differ, column, "is present without its stream, or missing")
    for column in columns.present(_POSITIVE):
        if (least := _minimum(columns[column])) is not None and least <= 0:
            columns.fail_where(pc.less_equal(columns[column], 0), column, "is not positive")
    for column in columns.present(_NOT_NEGATIVE):
        if (least := _minimum(columns[column])) is not None and least < 0:
            columns.fail_where(pc.less(columns[column], 0), column, "is negative")
    if "duration" in columns:
        columns.fail_where(~np.isfinite(columns["duration"].to_numpy()), "duration", "is not finite")
    if "key" in columns:
        columns.fail_where(pc.binary_length(columns["key"]).to_numpy() == 0, "key", "is empty")
    if "shard" in columns:
        shard_numbers, sizes = _shard_sizes(columns, shards)
        if "members" in columns:
            _check_members(columns, shard_numbers, sizes)
    if "key_frames" in columns and "frames" in columns:
        _check_key_frames(columns)


class _Columns:
    """The columns of a table as arrays. Errors name the part `name` and the rows `numbers`."""

    def __init__(self, table: Any, name: str, numbers: I64 | range) -> None:
        self._columns = {
            column: chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()  # combine_chunks copies
            for column, chunked in zip(table.column_names, table.columns, strict=True)
        }
        self._name, self._numbers = name, numbers

    def __contains__(self, column: str) -> bool:
        return column in self._columns

    def __getitem__(self, column: str) -> Any:
        return self._columns[column]

    def present(self, columns: Sequence[str]) -> list[str]:
        return [column for column in columns if column in self._columns]

    def fail_where(self, bad: Any, column: str, why: str, rows: Any = None) -> None:
        """Raise `CorruptionError` for the first true value of `bad`, if any.

        `rows` maps positions in `bad` to rows if they differ.
        """
        first = pc.index(bad, True).as_py() if not isinstance(bad, np.ndarray) else _first_true(bad)
        if first >= 0:
            row = first if rows is None else int(rows[first])
            raise CorruptionError(f"{self._name}: row {self._numbers[row]}: {column} {why}")


def _minimum(column: Any) -> Any:
    """Return the smallest value, or None if all values are null."""
    if column.null_count == len(column):
        return None
    return pc.min_max(column)["min"].as_py() if column.null_count else column.to_numpy().min()


def _first_true(bad: npt.NDArray[np.bool_]) -> int:
    """Return the position of the first true value, or -1."""
    first = int(bad.argmax()) if len(bad) else 0
    return first if len(bad) and bad[first] else -1


def _shard_sizes(columns: _Columns, shards: Mapping[str, int]) -> tuple[I64, I64]:
    """Return for each row the number of its shard (from 0) and the size of that shard."""
    used = pc.unique(columns["shard"])
    positions = pc.index_in(columns["shard"], used)
    sizes = pa.array([shards.get(key) for key in used.to_pylist()], pa.int64())
    if sizes.null_count:
        columns.fail_where(pc.is_null(pc.take(sizes, positions)), "shard", "is not a shard of this dataset version")
    numbers = np.asarray(positions.to_numpy(), np.int64)
    return numbers, sizes.to_numpy()[numbers] if len(numbers) else numbers


def _check_members(columns: _Columns, shard_numbers: I64, sizes: I64) -> None:
    lists = columns["members"]
    counts = pc.list_value_length(lists).to_numpy()
    columns.fail_where(counts < 1, "members", "is empty")
    if not len(counts):
        return
    owners, flat = np.repeat(np.arange(len(counts)), counts), pc.list_flatten(lists)
    offset, length = flat.field("offset").to_numpy(), flat.field("length").to_numpy()
    size = sizes[owners]
    # compared by subtraction, since offset + length may overflow
    outside = (offset < 0) | (length < 0) | (offset > size) | (length > size - np.maximum(offset, 0))
    columns.fail_where(outside, "members", "lies outside its shard", owners)
    end, shard = offset + length, shard_numbers[owners]  # at most the shard's size, so the sum does not overflow
    overlap = (shard[1:] == shard[:-1]) & (offset[1:] < end[:-1]) & (offset[:-1] < end[1:])
    overlap &= (owners[1:] == owners[:-1]) | (offset[1:] != offset[:-1]) | (length[1:] != length[:-1])
    columns.fail_where(overlap, "members", "overlaps the next member", owners)
    if "bytes" in columns:
        sums = np.add.reduceat(length, np.cumsum(counts) - counts)
        columns.fail_where(sums != columns["bytes"].to_numpy(), "bytes", "is not the sum of the members")


def _check_key_frames(columns: _Columns) -> None:
    lists = columns["key_frames"]
    counts = pc.list_value_length(lists)
    if counts.null_count:
        columns.fail_where(pc.less(counts, 1), "key_frames", "is empty")
        owners = pc.list_parent_indices(lists)
        frames = pc.take(columns["frames"], owners).to_numpy()
        owners = owners.to_numpy()
    else:
        lengths = counts.to_numpy()
        columns.fail_where(lengths < 1, "key_frames", "is empty")
        owners = np.repeat(np.arange(len(lengths)), lengths)
        frames = columns["frames"].to_numpy()[owners]
    number = pc.list_flatten(lists).field("index").to_numpy()
    columns.fail_where((number < 0) | (number > frames), "key_frames", "lies outside the video", owners)
