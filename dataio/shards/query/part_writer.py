"""Stores samples as index parts.

Purpose: `pack` and `index` add samples in the order of their numbers, and get the parts' entries for the version
document.
Invariants:

* A part has at most `PART_ROWS` rows, and is stored once the weight of its rows reaches `PART_WEIGHT`. This bounds the
  memory for writing a part, and keeps every part below the size that readers accept (`documents.PART_BYTES`).
* A part is one row group, so each of its columns is one range of the file. The footer holds a digest of each of these
  ranges. So a reader of one column reads only the footer and the bytes of this column.
* A second copy of the rows, in pages (`headrace.dataio.shards.index.pages`), lies between the row groups and the
  footer. Readers look up samples by number there.
* The same samples give the same bytes. The key of a part holds a digest of its bytes. So equal rows give equal objects,
  and a part never overwrites a different part.

Failure behaviour: the store's errors are passed on. No version document names the parts that were stored before the
error.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from headrace.dataio.core import limits
from headrace.dataio.shards.index import arrow as pc
from headrace.dataio.shards.index import pages
from headrace.dataio.shards.index.pages import digest, short_digest
from headrace.dataio.shards.index.rows import BLOCKS, CHUNKS, SCHEMA, block_digests, has_file, samples_of, to_row
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.shards.versions.paging import join_types
from headrace.dataio.store.base import Store

PART_ROWS = 50_000
PART_WEIGHT = 32 * limits.MIB
"""The approximate size in bytes at which a part is stored, before compression.

50,000 short clips have fewer bytes, and 1,000 long videos have more.
"""
FIELD_NAMES = 256
"""The most promoted fields that are recorded for a part. The first ones in order of their names are recorded."""
GROUP_ROWS = PART_ROWS
"""The most rows of a row group: a whole part. Older parts have row groups of 1,024 rows."""
_ROWS_AT_ONCE = 1024
"""The number of rows that are converted to samples together."""
STATISTICS = ("video_ext", "audio_codec")
"""The columns, in addition to the key, with statistics (minimum, maximum, null count) in the footer.

All rows of a part often have the same value in these columns.
"""
_LONG = ("key", "text", "fields", "members", "key_frames")
"""The columns with long Parquet pages, which are compressed with zstd.

Decompressing zstd takes a fixed time for each page, which does not pay off for short pages.
"""


class PartWriter:
    """Stores samples as parts, numbered from `first`. The caller adds the samples in the order of their numbers."""

    def __init__(self, store: Store, first: int) -> None:
        self._store, self._first = store, first
        self._rows, self._weight = list[Sample](), 0
        self._stored = list[IndexPart]()

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples, and store each part that becomes full."""
        for sample in samples:
            self._rows.append(sample)
            self._weight += _weight(sample)
            if len(self._rows) >= PART_ROWS or self._weight >= PART_WEIGHT:
                self._store_part()

    def close(self) -> list[IndexPart]:
        """Store the remaining samples and return all parts. Without samples, there are no parts."""
        if self._rows:
            self._store_part()
        return self._stored

    def _store_part(self) -> None:
        rows, self._rows, self._weight = self._rows, [], 0
        size = sum(member.length for sample in rows for member in sample.members)
        number = self._first + len(self._stored)
        self._stored.append(store_part(self._store, number, write_part(rows), len(rows), size, field_types(rows)))


def store_parts(store: Store, samples: Iterable[Sample], first: int) -> list[IndexPart]:
    """Store `samples` as parts, numbered from `first`, and return the parts."""
    writer = PartWriter(store, first)
    writer.add(samples)
    return writer.close()


def _weight(sample: Sample) -> int:
    videos = sample.videos if sample.video is None else (sample.video, *sample.videos)
    key_frames = sum([len(video.key_frames) for video in videos])
    pieces = sum(len(m.pieces.digests) + 16 * len(m.pieces.marks) for m in sample.members if m.pieces is not None)
    fields = sum(len(name) + len(str(value)) for name, value in sample.fields.items())
    return 256 + 24 * key_frames + 64 * len(sample.members) + pieces + len(sample.text or "") + fields


def store_part(store: Store, number: int, part: EncodedPart, rows: int, size: int, fields: dict[str, str]) -> IndexPart:
    """Store a part and return its entry for the version document. `size` is the total bytes of its samples' members."""
    part_digest = digest(part.data)
    key = f"index/{number:08}-{part_digest[:16]}.parquet"
    store.put(key, part.data)
    return IndexPart(
        key=key,
        size=len(part.data),
        rows=rows,
        bytes=size,
        digest=part_digest,
        footer=part.footer,
        footer_digest=digest(part.data[-part.footer :]),
        pages=part.section,
        fields=fields,
        constant_values=constant_values(part.data),
        files=part.files,
    )


def field_types(samples: Iterable[Sample]) -> dict[str, str]:
    """Return the types of the promoted fields, by name. Fields that are always null are left out."""
    types = dict[str, str]()
    for sample in samples:
        for name, value in sample.fields.items():
            if value is not None:
                kind = _type_of(value)
                types[name] = join_types(types.get(name, kind), kind)
    return {name: types[name] for name in sorted(types)[:FIELD_NAMES]}


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**63 else "number"
    return "number" if isinstance(value, float) else "text"


# --- encoding


class EncodedPart(NamedTuple):
    """The bytes of an index part. The last `footer` bytes are its footer, and `section` is the position of its pages.

    `files` are the extensions for which each sample has a file.
    """

    data: bytes
    footer: int
    section: pages.Section
    files: tuple[str, ...]


def write_part(samples: Sequence[Sample]) -> EncodedPart:
    """Encode samples as an index part. The same samples give the same bytes."""
    return write_table(pa.Table.from_pylist([to_row(s) for s in samples], schema=SCHEMA), samples)


def write_table(table: Any, samples: Iterable[Sample] | None = None) -> EncodedPart:
    """Encode a table with `SCHEMA` as an index part.

    `samples` are the same rows as `Sample` objects, if the caller has them.
    """
    import pyarrow.parquet as pq  # imports Arrow's file systems, which readers do not need

    codecs = {path: "zstd" if path.partition(".")[0] in _LONG else "lz4" for path in pc.leaf_paths(SCHEMA)}
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink,
        SCHEMA,
        compression=codecs,
        compression_level={path: 6 for path, codec in codecs.items() if codec == "zstd"},
        use_dictionary=False,  # a dictionary adds one page to decompress for each column, and saves no bytes
        # no other statistics are used, and those of long texts would make every footer long
        write_statistics=["key", *STATISTICS],
        store_schema=True,
    ) as writer:
        writer.write_table(table, row_group_size=GROUP_ROWS)
        stored, directory = pages.write(_samples_of(table) if samples is None else samples)
        section = pages.section_at(sink.tell(), stored, directory)
        sink.write(stored)
        sink.write(directory)
        digests = block_digests(sink.getbuffer())
        chunks = -(-table.num_rows // GROUP_ROWS) * len(codecs)
        placeholder = _to_text([b"chunk of column "] * chunks)
        writer.add_key_value_metadata({BLOCKS: _to_text(digests), CHUNKS: placeholder})
    data = _with_chunk_digests(sink.getvalue(), placeholder)
    return EncodedPart(data, footer_bytes(data), section, _common_files(table))


def _to_text(digests: Sequence[bytes]) -> bytes:
    return base64.b64encode(b"".join(digests))


def _with_chunk_digests(data: bytes, placeholder: bytes) -> bytes:
    """Replace `placeholder` in the footer by the digests of the column chunks, which have the same length.

    The positions of the chunks are known only after the footer is written.
    """
    if not placeholder:
        return data
    metadata, footer = pc.ParquetReader(data).metadata, len(data) - footer_bytes(data)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    ranges = [pc.chunk_range(group.column(leaf)) for group in groups for leaf in range(metadata.num_columns)]
    digests = _to_text([short_digest(data[start:end]) for start, end in ranges])
    at = data.index(placeholder, footer)
    return data[:at] + digests + data[at + len(digests) :]


def _common_files(table: Any) -> tuple[str, ...]:
    lists = table["members"].combine_chunks()
    extensions = sorted({member["ext"] for member in lists[0].as_py()}) if len(lists) else []
    return tuple(ext for ext in extensions if has_file(lists, ext).all())


def _samples_of(table: Any) -> Iterator[Sample]:
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        rows = table.slice(start, _ROWS_AT_ONCE).combine_chunks()
        yield from samples_of(rows, range(rows.num_rows))


def constant_values(data: bytes) -> dict[str, str]:
    """Return the columns of `STATISTICS` in which all rows of a part have the same value, and that value.

    They come from the statistics in the footer.
    """
    metadata, constants = pc.ParquetReader(data).metadata, dict[str, str]()
    for name in STATISTICS:
        # this is also the number of the leaf column, because columns with several leaf columns come last
        number = SCHEMA.get_field_index(name)
        statistics = [metadata.row_group(group).column(number).statistics for group in range(metadata.num_row_groups)]
        if statistics and all(one is not None and one.has_min_max and not one.null_count for one in statistics):
            values = {value for one in statistics for value in (one.min, one.max)}
            if len(values) == 1:
                constants[name] = str(values.pop())
    return constants


def footer_bytes(data: bytes) -> int:
    """Return the size of the footer at the end of a Parquet file, in bytes."""
    return int.from_bytes(data[-8:-4], "little") + 8
