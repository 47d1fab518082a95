"""The sample index: one Parquet row per sample, and the conversion of rows back to `Sample`.

Purpose: readers learn from the index where each sample lies and what it holds, without opening a shard.
Invariants:

* `SCHEMA` defines all columns. The columns of a stream are null together if a sample does not have that stream.
* A part is written in row groups of `group_rows` rows, so reading one sample costs one small read.
* The footer holds the digest of each block of `BLOCK_BYTES` before it, under `BLOCKS`. So any range of a part can be
  checked without the rest.
* A second copy of the rows, in pages (`lookup`), lies between the row groups and the footer.
* The same samples give the same bytes.

Failure behaviour: `CorruptionError` names the index part, the row and the column; nothing of a bad part is returned.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import checks as index_checks
from headrace.dataio.shards.index import kernels as pc
from headrace.dataio.shards.index import lookup, parquet
from headrace.dataio.shards.index.digests import SHORT, digest, short
from headrace.dataio.shards.sample import AudioInfo, Color, Files, KeyFrame, Member, Sample, VideoInfo

GROUP_ROWS = 1024
GROUP_BYTES = limits.MIB
MIN_GROUP_ROWS = 64
"""A row group has `GROUP_ROWS` rows. It has fewer if rows are long (a film has thousands of key frames), so that it
takes about `GROUP_BYTES`. It has at least `MIN_GROUP_ROWS`."""
BLOCK_BYTES = 64 * limits.KIB
BLOCKS_SUFFIX = b".blocks"
BLOCKS = b"headrace" + BLOCKS_SUFFIX
"""The key of the footer entry with the blocks' BLAKE3 digests: `BLOCK_DIGEST` bytes of each, in base64. Readers accept
any name before the suffix, because the software had another name when it wrote the oldest indexes."""
BLOCK_DIGEST = SHORT

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
ALIKE = ("video_ext", "audio_codec")
"""The columns with statistics (minimum, maximum, null count) in the footer, in addition to the key. All rows of a part
often have the same value in these columns."""
_LONG = ("key", "text", "fields", "members", "key_frames")
"""The columns with long pages, which are compressed with zstd. Unpacking zstd costs each page a fixed time, which does
not pay off for short pages."""
_RULES = index_checks.Rules(
    required=tuple(field.name for field in SCHEMA if not field.nullable),
    together={"video_codec": (*_VIDEO, "key_frames"), "audio_codec": tuple(_AUDIO), "color_space": tuple(_COLOR)},
    positive=(
        *("width", "height", "fps_numerator", "fps_denominator", "frames", "time_base_numerator"),
        *("time_base_denominator", "sample_rate", "channels", "samples"),
    ),
    not_negative=("bytes", "duration", "video_stream", "duration_pts", "audio_stream"),
)


# --- Sample -> row -> Sample


def to_row(sample: Sample) -> dict[str, Any]:
    """One row of `SCHEMA`. The sample's number is the position of the row, so the row does not store it."""
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
        fields=lookup.parsed(row["fields"], row["key"]),
    )


def samples_of(table: Any, numbers: Sequence[int]) -> Iterator[Sample]:
    """Convert checked rows to samples, like `from_row`, but faster because it converts whole columns at a time.

    There must be at least one row. `table` may lack columns in which no row has a value.
    """
    ends, members = _members(table)
    names = [name for name in table.column_names if name not in _PLAIN]
    rows = [_EMPTY | row for row in table.select(names).to_pylist()] if names else [_EMPTY] * len(numbers)
    keys, shards, durations = (table[name].to_pylist() for name in ("key", "shard", "duration"))
    for number, key, shard, duration, (first, end), row in zip(
        numbers, keys, shards, durations, pairwise(ends), rows, strict=True
    ):
        video = None if row["video_codec"] is None else _video(row)
        audio = None if row["audio_codec"] is None else AudioInfo(*(row[name] for name in _AUDIO))
        own = tuple(members[first:end])
        yield Sample(number, key, shard, own, duration, video, audio, row["text"], lookup.parsed(row["fields"], key))


def files_of(table: Any) -> Iterator[Files]:
    """The positions of the files of each checked row, converted whole columns at a time. There must be at least one
    row."""
    ends, members = _members(table)
    for shard, (first, end) in zip(table["shard"].to_pylist(), pairwise(ends), strict=True):
        yield Files(shard, members[first:end])


def _members(table: Any) -> tuple[list[int], list[Member]]:
    """The boundaries of each row in the list of all members (starting with 0), and that list."""
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


# --- Parquet


class Part(NamedTuple):
    """The bytes of an index part. The last `footer` bytes are its footer, and `section` is the position of its pages.

    `files` are the extensions for which each sample has a file.
    """

    data: bytes
    footer: int
    section: lookup.Section
    files: tuple[str, ...]


def write_part(samples: Sequence[Sample]) -> Part:
    """Encode samples as an index part. The same samples give the same bytes."""
    return write_table(pa.Table.from_pylist([to_row(s) for s in samples], schema=SCHEMA), samples)


def write_table(table: Any, samples: Iterable[Sample] | None = None) -> Part:
    """Encode rows with `SCHEMA` as an index part. `samples` are the same rows as samples, if the caller has them."""
    import pyarrow.parquet as pq  # imports Arrow's file systems, which readers do not need

    codecs = {path: "zstd" if path.partition(".")[0] in _LONG else "lz4" for path in parquet.paths(SCHEMA)}
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression=codecs,
        compression_level={path: 6 for path, codec in codecs.items() if codec == "zstd"},
        use_dictionary=False,  # a dictionary adds one page to unpack for each column, and saves no bytes
        # no other statistics are used, and those of long texts would make every footer long
        write_statistics=["key", *ALIKE],
        store_schema=True,
    ) as writer:
        writer.write_table(table, row_group_size=group_rows(table))
        pages, directory = lookup.write(_samples_of(table) if samples is None else samples)
        section = lookup.section_at(sink.tell(), pages, directory)
        sink.write(pages)
        sink.write(directory)
        digests = block_digests(sink.getbuffer())
        writer.add_key_value_metadata({BLOCKS: base64.b64encode(b"".join(digests))})
    data = sink.getvalue()
    return Part(data, footer_bytes(data), section, _files_of_all(table))


def holding(lists: Any, ext: str) -> npt.NDArray[np.bool_]:
    """A mask of the rows in a column of members that have a file with this extension."""
    has = np.zeros(len(lists), np.bool_)
    extensions = pc.struct_field(pc.list_flatten(lists), ["ext"])
    has[pc.list_parent_indices(lists).to_numpy()[pc.equal(extensions, ext).to_numpy(zero_copy_only=False)]] = True
    return has


def _files_of_all(table: Any) -> tuple[str, ...]:
    lists = table["members"].combine_chunks()
    first = sorted({member["ext"] for member in lists[0].as_py()}) if len(lists) else []
    return tuple(ext for ext in first if holding(lists, ext).all())


def _samples_of(table: Any) -> Iterator[Sample]:
    for start in range(0, table.num_rows, GROUP_ROWS):
        rows = table.slice(start, GROUP_ROWS).combine_chunks()
        yield from samples_of(rows, range(rows.num_rows))


def only(data: bytes) -> dict[str, str]:
    """The columns of `ALIKE` in which all rows of a part have the same value, and that value, from the footer's
    statistics."""
    metadata, found = parquet.Reader(data).metadata, dict[str, str]()
    for name in ALIKE:
        # also the number of the leaf column, because columns with lists come last
        number = SCHEMA.get_field_index(name)
        said = [metadata.row_group(group).column(number).statistics for group in range(metadata.num_row_groups)]
        if said and all(one is not None and one.has_min_max and not one.null_count for one in said):
            values = {value for one in said for value in (one.min, one.max)}
            if len(values) == 1:
                found[name] = str(values.pop())
    return found


def group_rows(table: Any) -> int:
    """The number of rows in a row group. Short columns count as 512 bytes a row, long columns by their lengths."""
    long = [pc.list_value_length(table["key_frames"]), pc.list_value_length(table["members"])]
    long += [pc.binary_length(table[name]) for name in ("text", "fields")]
    sums = [int(pc.sum_(lengths).as_py() or 0) for lengths in long]
    rows = int(table.num_rows)
    total = 512 * rows + sum(size * n for size, n in zip((12, 32, 1, 1), sums, strict=True))
    return max(MIN_GROUP_ROWS, min(GROUP_ROWS, GROUP_BYTES * rows // max(1, total)))


def block_digests(data: bytes | bytearray | memoryview) -> list[bytes]:
    """The digests of every `BLOCK_BYTES` of `data`; the last block may be short."""
    view = memoryview(data)
    blocks = (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))
    return [short(block) for block in blocks]


def footer_bytes(data: bytes) -> int:
    """The size of the footer at the end of a Parquet file, in bytes."""
    return int.from_bytes(data[-8:-4], "little") + 8


def read_part(data: bytes, *, name: str, expected_digest: str, rows: int, shards: Mapping[str, int]) -> Any:
    """Check a whole index part and return its Arrow table. `shards` gives the size of every shard that rows may
    name."""
    found = digest(data)
    if found != expected_digest:
        raise CorruptionError(f"{name}: BLAKE3 is {found}, the dataset version says {expected_digest}")
    try:
        table = parquet.Reader(data).read()
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


def check(table: Any, name: str, shards: Mapping[str, int], numbers: index_checks.Numbers = None) -> None:
    """Raise `CorruptionError` for the first invalid value. Only the columns of `SCHEMA` that `table` has are
    checked."""
    index_checks.check(table, _RULES, name, shards, numbers)
