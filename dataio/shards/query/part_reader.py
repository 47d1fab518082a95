"""Reading and checking some rows and columns of an index part.

Purpose: a part is read as little as possible. The reader reads the footer once, and then the column chunks that a
caller needs. If there is only one block before the footer, every read needs it, so the reader reads both together.
Invariants: every byte is checked against a digest before the Parquet reader gets it. The version document holds the
digest of the footer, and the footer holds the digests of the blocks before it. Ranges lie inside the file.
`index.check` checks the rows as far as the columns that were read allow. Only the ranges that were read take memory.
Failure behaviour: `CorruptionError` naming the part. A missing part is also corruption, because the version document
names it.
"""

from __future__ import annotations

import base64
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import parquet
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.digests import digest
from headrace.dataio.shards.query.part_bytes import fill, name_of
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

GROUP_BYTES = 1 << 30
"""The largest unpacked size that a row group may declare."""
I64 = npt.NDArray[np.int64]
_GAP_BLOCKS = 4
"""Largest gap between two needed blocks, in blocks, that is read with them in one request."""


class PartReader:
    """Reads one index part. The constructor reads and checks the footer. `shards` gives the size of every shard of the
    version."""

    def __init__(self, store: Store, part: IndexPart, shards: Mapping[str, int]) -> None:
        self._store, self._part, self._shards = store, part, shards
        self._name = name_of(store, part)
        footer = self._footer()
        try:
            self._metadata = parquet.Reader(footer).metadata
            schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._bad(f"not a readable Parquet file: {error}") from error
        if not schema.equals(index.SCHEMA):
            raise self._bad("its columns are not those of a sample index", hint="was it written by Headrace?")
        if self._metadata.num_rows != part.rows:
            raise self._bad(f"holds {self._metadata.num_rows} rows, the dataset version says {part.rows}")
        self._digests = self._block_digests()
        groups = [self._metadata.row_group(g) for g in range(self._metadata.num_row_groups)]
        if any(g.num_rows < 0 or g.total_byte_size > GROUP_BYTES for g in groups):
            raise self._bad("a row group is larger than any that Headrace writes")
        self.ends = np.cumsum([g.num_rows for g in groups], dtype=np.int64)
        """For each row group, the number of the row after its last row."""

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> Any:
        """A checked table of these columns (None: all) of these row groups (None: all), in the given order of
        columns."""
        chosen = range(self._metadata.num_row_groups) if groups is None else groups
        names = index.SCHEMA.names if columns is None else list(columns)
        if not len(chosen):
            return index.SCHEMA.empty_table().select(names)
        data = self._fetch(self._ranges(chosen, set(names)))
        try:
            file = parquet.Reader(data, self._metadata)
            table = file.read(chosen, columns and names).select(names)
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._bad(f"not a readable Parquet file: {error}") from error
        if table.num_rows != sum(self._metadata.row_group(g).num_rows for g in chosen):
            raise self._bad("holds another number of rows than its footer says")
        table = _prefixed(table, self._part.prefix)
        index.check(table, self._name, self._shards, self._numbers(chosen))
        return table

    def _numbers(self, groups: Sequence[int]) -> I64:
        """The row numbers, within the part, of the rows in these row groups."""
        starts = [int(self.ends[group - 1]) if group else 0 for group in groups]
        return np.concatenate([np.arange(start, self.ends[group]) for start, group in zip(starts, groups, strict=True)])

    def _footer(self) -> bytes:
        one_block = self._part.size - self._part.footer <= index.BLOCK_BYTES
        wanted = self._part.size if one_block else self._part.footer
        data = bytearray(wanted)
        fill(self._store, self._part, [(self._part.size - wanted, memoryview(data))])
        footer = bytes(data[wanted - self._part.footer :])
        if digest(footer) != self._part.footer_digest:
            raise self._bad("BLAKE3 of its footer is not what the dataset version says")
        self._block = memoryview(data)[: wanted - self._part.footer] if one_block else None
        return footer

    def _block_digests(self) -> list[bytes]:
        size, each = self._part.size - self._part.footer, index.BLOCK_DIGEST
        try:
            entries = self._metadata.metadata or {}
            (joined,) = (
                base64.b64decode(v, validate=True) for k, v in entries.items() if k.endswith(index.BLOCKS_SUFFIX)
            )
        except ValueError as error:  # none, several, or not base64
            raise self._bad("its footer does not hold the digests of its blocks") from error
        if len(joined) != each * -(-size // index.BLOCK_BYTES):
            raise self._bad("its footer does not hold as many digests as it has blocks")
        return [joined[start : start + each] for start in range(0, len(joined), each)]

    def _ranges(self, groups: Sequence[int], columns: set[str]) -> list[tuple[int, int]]:
        """The (start, end) of each column chunk in the file."""
        ranges, limit = list[tuple[int, int]](), self._part.size - self._part.footer
        wanted = parquet.leaves(self._metadata, columns)
        for group in (self._metadata.row_group(g) for g in groups):
            for chunk in map(group.column, wanted):
                start = chunk.data_page_offset
                if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                    start = chunk.dictionary_page_offset
                end = start + chunk.total_compressed_size
                if not 0 <= start <= end <= limit:
                    raise self._bad(f"column {chunk.path_in_schema} lies outside the file")
                ranges.append((start, end))
        return ranges

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> mmap.mmap:
        """Map a buffer of the file's size, and fill and check these ranges. The other bytes are zero and take no
        memory."""
        data = mmap.mmap(-1, self._part.size)
        limit, view = self._part.size - self._part.footer, memoryview(data)
        runs = _runs({b for start, end in ranges for b in _blocks_of(start, end)})
        at = [(first * index.BLOCK_BYTES, min(last * index.BLOCK_BYTES, limit)) for first, last in runs]
        if self._block is None:
            fill(self._store, self._part, [(start, view[start:end]) for start, end in at])
        elif runs:
            view[:limit] = self._block
        for (first, last), (start, end) in zip(runs, at, strict=True):
            if index.block_digests(view[start:end]) != self._digests[first:last]:
                raise self._bad(f"BLAKE3 of a block between {start} and {end} does not match")
        return data

    def _bad(self, why: str, hint: str = "") -> CorruptionError:
        return CorruptionError(f"{self._name}: {why}", hint=hint)


def _blocks_of(start: int, end: int) -> range:
    return range(start // index.BLOCK_BYTES, -(-end // index.BLOCK_BYTES))


def _runs(blocks: set[int]) -> list[tuple[int, int]]:
    """Merge blocks into runs of (first, after the last). A run may span gaps of up to `_GAP_BLOCKS` blocks."""
    runs = list[tuple[int, int]]()
    for block in sorted(blocks):
        if runs and block - runs[-1][1] <= _GAP_BLOCKS:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _prefixed(table: Any, prefix: str) -> Any:
    """Put `prefix` before the names of shards, except of shards that lie in a mount of the part's own dataset."""
    if not prefix or "shard" not in table.column_names:
        return table
    import pyarrow.compute as pc  # slow to import, and only merged datasets need it

    shard = table["shard"]
    whole = pc.if_else(pc.starts_with(shard, PREFIX), shard, pc.binary_join_element_wise(prefix, shard, ""))
    return table.set_column(table.column_names.index("shard"), index.SCHEMA.field("shard"), whole)
