"""Reads the index of an open version as Arrow tables, and keeps little in memory.

Purpose: operations on many samples (conditions, plans by length or shape, checks) read columns of the index parts.
Samples of parts without pages (`page_reader`) are looked up in row groups. `PartReader` reads as little of a part as
possible: the footer once, and then the column chunks that a caller needs. If there is only one block before the footer,
every read needs it, so the reader reads both together. Of older parts, it reads the blocks that hold these chunks.
Invariants:

* Row numbers count the rows of a part, including removed rows. `remaining_rows` returns the rows that are samples.
* Row groups that a caller needs at the same time are read together, up to `GROUPS_PER_READ`, in one round trip.
* Row groups that were read together are also cached together, decoded. The cache is an LRU cache of `CACHE_BYTES`.
* Up to `READERS` part readers stay open. The least recently used one is closed first.
* Results do not depend on the cache.
* Every byte is checked against a digest before the Parquet reader gets it. The version document holds the digest of the
  footer. The footer holds the digests of the column chunks, and of the blocks before it. Ranges lie inside the file.
  `rows.check` checks the rows as far as the columns that were read allow. `checked` reads and checks everything,
  including the order of the samples across parts and unique keys.
* Only the ranges that were read take memory. Keys of large indexes are streamed to DuckDB to find repeated ones. DuckDB
  uses at most `conditions.SPILL_MEMORY`, and a temporary folder beyond.

Failure behaviour: any method that reads may raise `CorruptionError`, which names the part, or one of the store's
errors. A missing part is also corruption, because the version document names it. Threads can share a `Tables` object.
"""

from __future__ import annotations

import base64
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import arrow as pc
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.pages import digest, short_digest
from headrace.dataio.shards.query.page_reader import name_of, read_ranges
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions.documents import IndexPart, VersionDocument
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

if TYPE_CHECKING:
    from headrace.dataio.shards.query.open_index import Position, RowNumbers


CACHE_BYTES = 256 * limits.MIB
READERS = 256
GROUPS_PER_READ = 8
GROUP_BYTES = 1 << 30
"""The largest unpacked size that a row group may declare."""
_MAX_KEYS_IN_ARROW = 1_000_000
"""With more samples, DuckDB finds repeated keys, because Arrow would hold all keys in memory."""
_GAP_BLOCKS = 4
"""The largest gap between two needed blocks, in blocks, that is read with them in one request."""
_THREADS = min(8, 2 * (os.cpu_count() or 1))

I64 = npt.NDArray[np.int64]
GroupRun = tuple[int, tuple[int, ...]]
"""A part, and the row groups of it that were read together."""


class Tables:
    """Tables of the index parts of `document`, which has `samples` samples.

    `remaining_rows` returns the rows of a part that are samples (None: all rows).
    """

    def __init__(
        self,
        store: Store,
        document: VersionDocument,
        *,
        remaining_rows: Callable[[int], RowNumbers | None],
        samples: int,
    ) -> None:
        self._store, self._document, self._remaining_rows, self._samples = store, document, remaining_rows, samples
        shards = document.shard_sizes()
        self._reader = lru_cache(READERS)(lambda part: PartReader(store, document.index[part], shards))
        self._tables: OrderedDict[GroupRun, Any] = OrderedDict()
        self._holding: dict[tuple[int, int], GroupRun] = {}
        self._held = 0
        self._lock = threading.RLock()

    def samples(self, part: int, rows: I64, numbers: Sequence[int]) -> list[Sample]:
        """Read the samples of these rows of a part, and give them these numbers."""
        found = dict[int, Sample]()
        for table, places, inside in self._found(part, rows):
            found_rows = pc.rows(table, pa.array(inside, pa.int64()))
            found.update(zip(places, index.samples_of(found_rows, [numbers[place] for place in places]), strict=True))
        return [found[place] for place in range(len(numbers))]

    def files(self, part: int, rows: I64) -> list[Files]:
        """Return the positions of the files of these rows of a part."""
        found = dict[int, Files]()
        for table, places, inside in self._found(part, rows):
            found_rows = pc.rows(table.select(["shard", "members"]), pa.array(inside, pa.int64()))
            found.update(zip(places, index.files_of(found_rows), strict=True))
        return [found[place] for place in range(len(rows))]

    def tables(self, columns: Sequence[str] | None = None, parts: range | None = None) -> Iterator[Any]:
        """Yield one table of these columns (None: all) for each of these parts (None: all), in order.

        A few parts are read ahead.
        """
        with ThreadPoolExecutor(_THREADS, "headrace-index") as pool:
            ahead = list[Future[Any]]()
            try:
                for part in range(len(self._document.index)) if parts is None else parts:
                    ahead.append(pool.submit(self.part_table, part, columns))
                    if len(ahead) > _THREADS:
                        yield ahead.pop(0).result()
                while ahead:
                    yield ahead.pop(0).result()
            finally:
                for future in ahead:
                    future.cancel()

    def columns(self, columns: Sequence[str] | None = None) -> Any:
        """Return these columns (None: all) of all samples, ordered by number."""
        tables = list(self.tables(columns))
        empty = index.SCHEMA.empty_table().select(index.SCHEMA.names if columns is None else list(columns))
        return pa.concat_tables([empty, *tables])

    def part_table(self, part: int, columns: Sequence[str] | None = None) -> Any:
        """Return these columns of the samples in one part."""
        table, rows = self._reader(part).read(columns), self._remaining_rows(part)
        return table if rows is None else pc.rows(table, pa.array(rows))

    def checked(self) -> Iterator[tuple[int, int, Any]]:
        """Yield each row group as (part, first row in the part, table). The table includes rows that are not samples.

        A caller that consumes the whole iterator has checked every row, the order of the rows, and that keys are
        unique. The row groups enter the cache.
        """
        last: Position | None = None
        for part in range(len(self._document.index)):
            for first, table, bounds in self.checked_part(part):
                if bounds is not None:
                    self.check_follows(last, bounds[0])
                    last = bounds[1]
                yield part, first, table
        self.check_keys()

    def checked_part(self, part: int) -> Iterator[tuple[int, Any, tuple[Position, Position] | None]]:
        """Yield each row group of a part as (first row in the part, table, its first and last position).

        The rows within a row group are in order. The caller compares the positions of row groups (`check_follows`).
        """
        self._remaining_rows(part)
        groups = len(self._reader(part).ends)
        for group in range(groups):
            if group % GROUPS_PER_READ == 0:
                self._read(part, range(group, min(group + GROUPS_PER_READ, groups)))
            table = self.group(part, group)
            yield int(self._reader(part).ends[group]) - table.num_rows, table, self._check_order(table)

    def check_keys(self) -> None:
        """Raise `CorruptionError` if two samples have the same key."""
        if self._has_repeated_keys():
            raise self._bad("two samples have the same key")

    def check_follows(self, last: Position | None, first: Position) -> None:
        """Raise `CorruptionError` unless the position `first` comes after `last`."""
        if last is not None and last >= first:
            raise self._bad("the samples are not in the order of their shards and offsets")

    def _has_repeated_keys(self) -> bool:
        if self._samples > _MAX_KEYS_IN_ARROW:
            return bool(repeated_keys(self.tables(["key"])))
        keys = [self.part_table(part, ["key"])["key"] for part in range(len(self._document.index))]
        chunks = [chunk for column in keys for chunk in column.iterchunks()]
        return bool(pc.count_distinct(pa.chunked_array(chunks, pa.string())).as_py() != self._samples)

    def _check_order(self, table: Any) -> tuple[Position, Position] | None:
        """Check that samples are in ascending order of (shard, offset).

        Return the positions of the first and the last row. None means that the table has no rows.
        """
        if not table.num_rows:
            return None
        used = pc.unique(table["shard"])
        shard = pc.take(
            pa.array([self._places[key] for key in used.to_pylist()], pa.int64()),
            pc.index_in(table["shard"].combine_chunks(), used),
        )
        offset = pc.struct_field(pc.list_element(table["members"].combine_chunks(), 0), ["offset"])
        s, o = shard.to_numpy(), offset.to_numpy()
        rising = (s[1:] > s[:-1]) | ((s[1:] == s[:-1]) & (o[1:] > o[:-1]))
        if not rising.all():
            raise self._bad("the samples are not in the order of their shards and offsets")
        return (int(s[0]), int(o[0])), (int(s[-1]), int(o[-1]))

    @cached_property
    def _places(self) -> Mapping[str, int]:
        places = {shard.key: place for place, shard in enumerate(self._document.shards)}
        if len(places) < len(self._document.shards):
            raise self._bad("a shard is listed twice")
        return places

    def shard_runs(self, part: int) -> list[tuple[int, int]]:
        """Return the samples of a part as runs of adjacent samples of one shard: (position of the shard, samples)."""
        table = self.part_table(part, ["shard"])
        if not table.num_rows:
            return []
        used = pc.unique(table["shard"])
        numbers = pc.index_in(table["shard"].combine_chunks(), used).to_numpy()
        starts = np.concatenate([[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1])
        names = used.to_pylist()
        counts = np.diff([*starts.tolist(), len(numbers)]).tolist()
        return [(self._places[names[numbers[s]]], count) for s, count in zip(starts.tolist(), counts, strict=True)]

    # -- finding and keeping

    def _found(self, part: int, rows: I64) -> Iterator[tuple[Any, list[int], list[int]]]:
        """Yield tables that hold these rows, each with positions in `rows` and the matching rows of the table."""
        ends = self._reader(part).ends
        groups = np.searchsorted(ends, rows, side="right")
        left = np.flatnonzero(np.bincount(groups)).tolist()  # np.unique would import masked arrays
        while left:
            table, held = self._read(part, left)
            begin, places, inside = 0, list[int](), list[int]()
            for group in held:
                start = int(ends[group - 1]) if group else 0
                here = np.flatnonzero(groups == group)
                places += here.tolist()
                inside += (rows[here] + (begin - start)).tolist()
                begin += int(ends[group]) - start
            left = [group for group in left if group not in held]
            yield table, places, inside

    def group(self, part: int, group: int) -> Any:
        """Return all rows of a row group, including rows that are not samples. See `_read` for the columns."""
        table, held = self._read(part, [group])
        ends = [int(end) for end in self._reader(part).ends]
        sizes = {one: ends[one] - (ends[one - 1] if one else 0) for one in held}
        return table.slice(sum(sizes[one] for one in held if one < group), sizes[group])

    def _read(self, part: int, groups: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
        """Read the first of these row groups, and return its table and the numbers of the row groups in that table.

        The numbers are in ascending order.
        If the first one is cached, its table also holds the row groups that were read with it. Otherwise, up to
        `GROUPS_PER_READ` of `groups` are read together. The table leaves out columns without any value, because a
        lookup takes as long in an empty column as in any other.
        """
        with self._lock:
            which = self._holding.get((part, groups[0]))
            if which is None:
                which = part, tuple(one for one in groups if (part, one) not in self._holding)[:GROUPS_PER_READ]
                table = self._reader(part).read(None, which[1])
                self._keep(
                    which,
                    table.select(
                        [name for name in table.column_names if table[name].null_count < max(1, table.num_rows)]
                    ),
                )
            self._tables.move_to_end(which)
            return self._tables[which], which[1]

    def _keep(self, which: GroupRun, table: Any) -> None:
        part, groups = which
        self._tables[which] = table
        self._holding.update(dict.fromkeys([(part, group) for group in groups], which))
        self._held += table.nbytes
        while self._held > CACHE_BYTES and len(self._tables) > 1:
            (old_part, old_groups), dropped = self._tables.popitem(last=False)
            self._held -= dropped.nbytes
            for group in old_groups:
                del self._holding[old_part, group]

    def _bad(self, why: str) -> CorruptionError:
        return CorruptionError(f"{self._store.location.url}: version {self._document.version}: {why}")


def repeated_keys(tables: Iterable[Any]) -> list[str]:
    """Return up to three keys that occur more than once in the column `key` of `tables`."""
    from headrace.dataio.shards.query.conditions import connect_with_disk  # imports DuckDB

    with connect_with_disk() as connection:
        schema = pa.schema([index.SCHEMA.field("key")])
        batches = (batch for table in tables for batch in table.select(["key"]).to_batches())
        connection.register("part", pa.RecordBatchReader.from_batches(schema, batches))
        found = connection.execute("SELECT key FROM part GROUP BY key HAVING count(*) > 1 ORDER BY key LIMIT 3")
        return [row[0] for row in found.fetchall()]


# --- reading one part


class _Chunk(NamedTuple):
    """A column chunk: its range in the file, the number of its leaf column, and its digest if the footer holds one."""

    start: int
    end: int
    leaf: int
    digest: bytes | None


class PartReader:
    """Reads one index part. `shards` gives the size of every shard of the version.

    The constructor reads and checks the footer.
    """

    def __init__(self, store: Store, part: IndexPart, shards: Mapping[str, int]) -> None:
        self._store, self._part, self._shards = store, part, shards
        self._name = name_of(store, part)
        footer = self._footer()
        try:
            self._metadata = pc.ParquetReader(footer).metadata
            schema = self._metadata.schema.to_arrow_schema()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self._bad(f"not a readable Parquet file: {error}") from error
        if not schema.equals(index.SCHEMA):
            raise self._bad("its columns are not those of a sample index", hint="was it written by Headrace?")
        if self._metadata.num_rows != part.rows:
            raise self._bad(f"holds {self._metadata.num_rows} rows, the dataset version says {part.rows}")
        self._digests = self._block_digests()
        self._chunk_digests = self._read_chunk_digests()
        groups = [self._metadata.row_group(g) for g in range(self._metadata.num_row_groups)]
        if any(g.num_rows < 0 or g.total_byte_size > GROUP_BYTES for g in groups):
            raise self._bad("a row group is larger than any that Headrace writes")
        self.ends = np.cumsum([g.num_rows for g in groups], dtype=np.int64)
        """For each row group, the number of the row after its last row."""

    def read(self, columns: Sequence[str] | None = None, groups: Sequence[int] | None = None) -> Any:
        """Read and check a table of these columns (None: all), in this order, of these row groups (None: all)."""
        chosen = range(self._metadata.num_row_groups) if groups is None else groups
        names = index.SCHEMA.names if columns is None else list(columns)
        if not len(chosen):
            return index.SCHEMA.empty_table().select(names)
        data = self._fetch(self._chunks(chosen, set(names)))
        try:
            file = pc.ParquetReader(data, self._metadata)
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
        """Return the row numbers, within the part, of the rows in these row groups."""
        starts = [int(self.ends[group - 1]) if group else 0 for group in groups]
        return np.concatenate([np.arange(start, self.ends[group]) for start, group in zip(starts, groups, strict=True)])

    def _footer(self) -> bytes:
        one_block = self._part.size - self._part.footer <= index.BLOCK_BYTES
        wanted = self._part.size if one_block else self._part.footer
        data = bytearray(wanted)
        read_ranges(self._store, self._part, [(self._part.size - wanted, memoryview(data))])
        footer = bytes(data[wanted - self._part.footer :])
        if digest(footer) != self._part.footer_digest:
            raise self._bad("the BLAKE3 digest of its footer does not match the dataset version")
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

    def _read_chunk_digests(self) -> bytes | None:
        """Return the digests of all column chunks. None means that the part is older and has none."""
        try:
            stored = (self._metadata.metadata or {}).get(index.CHUNKS)
            found = None if stored is None else base64.b64decode(stored, validate=True)
        except ValueError as error:
            raise self._bad("the digests of its column chunks are not base64") from error
        if found is not None and len(found) != index.BLOCK_DIGEST * (
            self._metadata.num_row_groups * self._metadata.num_columns
        ):
            raise self._bad("its footer does not hold as many digests as it has column chunks")
        return found

    def _chunks(self, groups: Sequence[int], columns: set[str]) -> list[_Chunk]:
        chunks, limit = list[_Chunk](), self._part.size - self._part.footer
        wanted, digests, size = pc.leaf_columns(self._metadata, columns), self._chunk_digests, index.BLOCK_DIGEST
        for number in groups:
            group, first = self._metadata.row_group(number), number * self._metadata.num_columns
            for leaf in wanted:
                start, end = pc.chunk_range(group.column(leaf))
                if not 0 <= start <= end <= limit:
                    raise self._bad(f"column {group.column(leaf).path_in_schema} lies outside the file")
                at = size * (first + leaf)
                chunks.append(_Chunk(start, end, leaf, None if digests is None else digests[at : at + size]))
        return chunks

    def _fetch(self, chunks: Sequence[_Chunk]) -> mmap.mmap:
        """Return a memory map of the file's size in which these chunks are read and checked.

        The other bytes are zero and take no memory.
        """
        data = mmap.mmap(-1, self._part.size)
        if self._block is not None or self._chunk_digests is None:
            self._fetch_blocks(memoryview(data), chunks)
        else:
            self._fetch_chunks(memoryview(data), chunks)
        return data

    def _fetch_chunks(self, view: memoryview, chunks: Sequence[_Chunk]) -> None:
        """Read exactly these chunks into `view`. Chunks that lie next to each other are one range."""
        ranges = list[tuple[int, int]]()
        for chunk in sorted(chunks):
            if ranges and ranges[-1][1] == chunk.start:
                ranges[-1] = (ranges[-1][0], chunk.end)
            else:
                ranges.append((chunk.start, chunk.end))
        read_ranges(self._store, self._part, [(start, view[start:end]) for start, end in ranges])
        for chunk in chunks:
            if short_digest(view[chunk.start : chunk.end]) != chunk.digest:
                path = self._metadata.schema.column(chunk.leaf).path
                raise self._bad(f"BLAKE3 of column {path} between {chunk.start} and {chunk.end} does not match")

    def _fetch_blocks(self, view: memoryview, chunks: Sequence[_Chunk]) -> None:
        """Read the blocks that hold these chunks into `view`."""
        limit = self._part.size - self._part.footer
        runs = _runs({block for chunk in chunks for block in _blocks_of(chunk.start, chunk.end)})
        at = [(first * index.BLOCK_BYTES, min(last * index.BLOCK_BYTES, limit)) for first, last in runs]
        if self._block is None:
            read_ranges(self._store, self._part, [(start, view[start:end]) for start, end in at])
        elif runs:
            view[:limit] = self._block
        for (first, last), (start, end) in zip(runs, at, strict=True):
            if index.block_digests(view[start:end]) != self._digests[first:last]:
                raise self._bad(f"BLAKE3 of a block between {start} and {end} does not match")

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
    """Put `prefix` before the names of shards, except shards in a mount of the part's original dataset."""
    if not prefix or "shard" not in table.column_names:
        return table
    import pyarrow.compute as full_pc  # slow to import, and only merged datasets need it

    shard = table["shard"]
    whole = full_pc.if_else(
        full_pc.starts_with(shard, PREFIX), shard, full_pc.binary_join_element_wise(prefix, shard, "")
    )
    return table.set_column(table.column_names.index("shard"), index.SCHEMA.field("shard"), whole)
