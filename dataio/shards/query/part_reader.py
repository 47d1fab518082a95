"""Reading some rows and columns of an index part, checked.

Purpose: a part is read as little as possible: its footer once, then the column chunks that are asked for; together, where there
is but one block before the footer, which every read takes.
Invariants: no byte reaches the Parquet reader that a digest does not vouch for: the version names that of the footer, the footer
those of the blocks before it. Ranges lie inside the file. Rows were checked by `index.check` as far as their columns allow.
Memory is that of the ranges asked for.
Failure behaviour: `CorruptionError` naming the part; for a missing part too, since the version says that it is there.
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
"""The most that a row group may say to hold unpacked."""
I64 = npt.NDArray[np.int64]
_GAP_BLOCKS = 4
"""Blocks read though not needed, rather than with a request of their own."""


class PartReader:
    """Reads one index part; its footer is read and checked here. `shards` gives the size of every shard of the version."""

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
        """The row after the last one of every row group."""

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> Any:
        """A table of these columns (None: all) of these row groups (None: all), in the file's order."""
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
        """The numbers in the part of the rows of these row groups."""
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
        """Where the column chunks lie: (start, end)."""
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
        """The file with these ranges filled and checked; what was not read is zero and takes no memory."""
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
    """Neighbouring blocks as (first, after the last), over small gaps."""
    runs = list[tuple[int, int]]()
    for block in sorted(blocks):
        if runs and block - runs[-1][1] <= _GAP_BLOCKS:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _prefixed(table: Any, prefix: str) -> Any:
    """The table with `prefix` before the names of shards, but for those that lie in a mount of the part's own dataset."""
    if not prefix or "shard" not in table.column_names:
        return table
    import pyarrow.compute as pc  # only merged datasets wait for it

    shard = table["shard"]
    whole = pc.if_else(pc.starts_with(shard, PREFIX), shard, pc.binary_join_element_wise(prefix, shard, ""))
    return table.set_column(table.column_names.index("shard"), index.SCHEMA.field("shard"), whole)
