"""The index of an open version as Arrow tables, with little in memory.

Purpose: operations on many samples (conditions, plans by length or shape, checks) read columns of the Parquet files.
Samples of parts without pages (`row_pages`) are looked up in row groups.
Invariants:

* Row numbers are those of the parts. `kept` returns the rows of a part that are samples.
* Row groups that a caller needs at the same time are read together, up to `TOGETHER`. This takes less time and only one
  round trip.
* Row groups that were read together are also cached together, decoded. The cache is an LRU cache of `CACHE_BYTES`.
* Up to `READERS` part readers stay open.
* Results do not depend on the cache.
* All data is checked when it is read (`part_reader`). `checked` reads and checks everything, including the order of the
  samples across parts and unique keys.

Failure behaviour: any method that reads may raise `CorruptionError` naming the part, or one of the store's errors.
`Tables` is safe to share between threads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.index import kernels as pc
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query.kept import Rows
from headrace.dataio.shards.query.part_reader import PartReader
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.store.base import Store

CACHE_BYTES = 256 * limits.MIB
READERS = 256
TOGETHER = 8
_FEW = 1_000_000
_THREADS = min(8, 2 * (os.cpu_count() or 1))

I64 = npt.NDArray[np.int64]
Together = tuple[int, tuple[int, ...]]
"""A part, and the row groups of it that were read together."""


class Tables:
    """The tables of `document`'s parts. `kept` returns the rows of a part that are samples (None: all rows).

    There are `samples` samples in total.
    """

    def __init__(
        self, store: Store, document: VersionDocument, kept: Callable[[int], Rows | None], samples: int
    ) -> None:
        self._store, self._document, self._rows_kept, self._samples = store, document, kept, samples
        self._shards = document.shard_sizes()
        self._readers: OrderedDict[int, PartReader] = OrderedDict()
        self._tables: OrderedDict[Together, Any] = OrderedDict()
        self._holding: dict[tuple[int, int], Together] = {}
        self._held = 0
        self._lock = threading.RLock()

    def samples(self, part: int, rows: I64, numbers: Sequence[int]) -> list[Sample]:
        """Read the samples of these rows of a part, and give them these numbers."""
        found = dict[int, Sample]()
        for table, places, inside in self._found(part, rows):
            there = pc.rows(table, pa.array(inside, pa.int64()))
            found.update(zip(places, index.samples_of(there, [numbers[place] for place in places]), strict=True))
        return [found[place] for place in range(len(numbers))]

    def files(self, part: int, rows: I64) -> list[Files]:
        """The positions of the files of these rows of a part."""
        found = dict[int, Files]()
        for table, places, inside in self._found(part, rows):
            there = pc.rows(table.select(["shard", "members"]), pa.array(inside, pa.int64()))
            found.update(zip(places, index.files_of(there), strict=True))
        return [found[place] for place in range(len(rows))]

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield one table of these columns (None: all) for each part, in order. A few parts are read ahead."""
        with ThreadPoolExecutor(_THREADS, "headrace-index") as pool:
            ahead = list[Future[Any]]()
            try:
                for part in range(len(self._document.index)):
                    ahead.append(pool.submit(self.part_table, part, columns))
                    if len(ahead) > _THREADS:
                        yield ahead.pop(0).result()
                while ahead:
                    yield ahead.pop(0).result()
            finally:
                for future in ahead:
                    future.cancel()

    def columns(self, columns: Sequence[str] | None = None) -> Any:
        """These columns (None: all) of all samples, ordered by number."""
        tables = list(self.tables(columns))
        empty = index.SCHEMA.empty_table().select(index.SCHEMA.names if columns is None else list(columns))
        return pa.concat_tables([empty, *tables])

    def part_table(self, part: int, columns: Sequence[str] | None = None) -> Any:
        """These columns of the samples in one part."""
        table, rows = self._reader(part).read(columns), self._rows_kept(part)
        return table if rows is None else pc.rows(table, pa.array(rows))

    def checked(self) -> Iterator[tuple[int, int, Any]]:
        """Yield each row group as (part, first row in the part, table). The table includes rows that are not samples.

        A caller that consumes the whole iterator has checked every row, the order of the rows, and that keys are
        unique. The row groups enter the cache.
        """
        last: tuple[int, int] | None = None
        places = {shard.key: place for place, shard in enumerate(self._document.shards)}
        for part in range(len(self._document.index)):
            self._rows_kept(part)
            groups = len(self._reader(part).ends)
            for group in range(groups):
                if group % TOGETHER == 0:
                    self._read(part, range(group, min(group + TOGETHER, groups)))
                table = self.group(part, group)
                last = self._check_order(table, places, last)
                yield part, int(self._reader(part).ends[group]) - table.num_rows, table
        if self._repeats_a_key():
            raise self._bad("two samples have the same key")

    def _repeats_a_key(self) -> bool:
        if self._samples > _FEW:
            from headrace.dataio.shards.query.repeats import repeated_keys

            return bool(repeated_keys(self.tables(["key"])))
        keys = [self.part_table(part, ["key"])["key"] for part in range(len(self._document.index))]
        chunks = [chunk for column in keys for chunk in column.iterchunks()]
        return bool(pc.count_distinct(pa.chunked_array(chunks, pa.string())).as_py() != self._samples)

    def _check_order(
        self, table: Any, places: Mapping[str, int], last: tuple[int, int] | None
    ) -> tuple[int, int] | None:
        """Check that samples are in ascending order of (shard, offset). `last` is the position of the row before
        `table`."""
        if not table.num_rows:
            return last
        used = pc.unique(table["shard"])
        shard = pc.take(
            pa.array([places[key] for key in used.to_pylist()], pa.int64()),
            pc.index_in(table["shard"].combine_chunks(), used),
        )
        offset = pc.struct_field(pc.list_element(table["members"].combine_chunks(), 0), ["offset"])
        s, o = shard.to_numpy(), offset.to_numpy()
        rising = (s[1:] > s[:-1]) | ((s[1:] == s[:-1]) & (o[1:] > o[:-1]))
        if not rising.all() or (last is not None and last >= (s[0], o[0])):
            raise self._bad("the samples are not in the order of their shards and offsets")
        return int(s[-1]), int(o[-1])

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
        """All rows of a row group, including rows that are not samples. See `_read` for the columns."""
        table, held = self._read(part, [group])
        ends = [int(end) for end in self._reader(part).ends]
        sizes = {one: ends[one] - (ends[one - 1] if one else 0) for one in held}
        return table.slice(sum(sizes[one] for one in held if one < group), sizes[group])

    def _read(self, part: int, groups: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
        """Read the first of these row groups, and return its table and the row groups that the table holds, in
        ascending order.

        A cached table also holds the row groups that were read with the first one. Otherwise, other row groups of
        `groups` are read with it. The table leaves out columns without any value, because looking them up takes as long
        as the others.
        """
        with self._lock:
            which = self._holding.get((part, groups[0]))
            if which is None:
                which = part, tuple(one for one in groups if (part, one) not in self._holding)[:TOGETHER]
                table = self._reader(part).read(None, which[1])
                self._keep(
                    which,
                    table.select(
                        [name for name in table.column_names if table[name].null_count < max(1, table.num_rows)]
                    ),
                )
            self._tables.move_to_end(which)
            return self._tables[which], which[1]

    def _keep(self, which: Together, table: Any) -> None:
        part, groups = which
        self._tables[which] = table
        self._holding.update(dict.fromkeys([(part, group) for group in groups], which))
        self._held += table.nbytes
        while self._held > CACHE_BYTES and len(self._tables) > 1:
            (gone, those), dropped = self._tables.popitem(last=False)
            self._held -= dropped.nbytes
            for group in those:
                del self._holding[gone, group]

    def _reader(self, part: int) -> PartReader:
        with self._lock:
            reader = self._readers.get(part)
        if reader is None:
            reader = PartReader(self._store, self._document.index[part], self._shards)
            with self._lock:
                self._readers[part] = reader
                if len(self._readers) > READERS:
                    self._readers.popitem(last=False)
        return reader

    def _bad(self, why: str) -> CorruptionError:
        return CorruptionError(f"{self._store.location.url}: version {self._document.version}: {why}")
