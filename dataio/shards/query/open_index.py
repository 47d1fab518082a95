"""The index of an open version: it maps sample numbers to rows and keeps little in memory.

Purpose: opening reads only the version document. Rows and columns are read on demand, so opening costs the same for
10^7 samples as for 10.
Invariants:

* Number i is the i-th remaining row, in the order of the document's parts.
* Samples are looked up in the pages of their parts (`row_pages`), without Arrow. Parts without pages are looked up in
  their row groups (`tables`). Queries for columns always read row groups.
* Up to `READERS` part readers stay open.
* All data is checked when it is read.
* In a remote store, up to `_SIDE_BY_SIDE` parts are read concurrently.

Failure behaviour: any method that reads may raise `CorruptionError` naming the part, or one of the store's errors.
An `OpenIndex` is safe to share between threads.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.shards.index.lookup import without_parts
from headrace.dataio.shards.query import kept, row_pages
from headrace.dataio.shards.query.kept import Rows
from headrace.dataio.shards.query.part_bytes import name_of
from headrace.dataio.shards.query.row_pages import RowPages
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.store.base import Store

if TYPE_CHECKING:
    from headrace.dataio.shards.query.tables import Tables

READERS = 256
_SIDE_BY_SIDE = 16

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


class OpenIndex:
    """The samples of `document`. `chosen` restricts them to these rows of each part (None: all rows of that part)."""

    def __init__(self, store: Store, document: VersionDocument, chosen: Sequence[Rows | None] | None = None) -> None:
        self._store, self._document = store, document
        self._shards = document.shard_sizes()
        self._kept: dict[int, Rows | None] = dict(enumerate(chosen)) if chosen is not None else {}
        left = [p.left for p in document.index]
        if chosen is not None:
            left = [p.rows if c is None else len(c) for p, c in zip(document.index, chosen, strict=True)]
        self.ends: I64 = np.cumsum(left, dtype=np.int64)
        """For each part, the number after its last sample."""
        self._readers: OrderedDict[int, RowPages] = OrderedDict()
        self._pages = row_pages.Kept(row_pages.KEPT_BYTES)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, numbers: Sequence[int]) -> list[Sample]:
        """The samples with these numbers, in this order. The caller checks that the numbers are in range."""

        def read(part: int, rows: I64, own: list[int]) -> list[Sample]:
            pages = self._reader(part)
            return self._tables.samples(part, rows, own) if pages is None else pages.samples(rows, own)

        return self._found(numbers, read)

    def files(self, numbers: Sequence[int]) -> list[Files]:
        """The positions of these samples' files, in this order. The caller checks that the numbers are in range."""

        def read(part: int, rows: I64, own: list[int]) -> list[Files]:
            pages = self._reader(part)
            return self._tables.files(part, rows) if pages is None else pages.files(rows)

        return self._found(numbers, read)

    def tables(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Yield one table of these columns (None: all) for each part, in order. A few parts are read ahead."""
        return self._tables.tables(columns)

    def columns(self, columns: Sequence[str] | None = None) -> Any:
        """These columns (None: all) of all samples, ordered by number."""
        return self._tables.columns(columns)

    def part_table(self, part: int, columns: Sequence[str] | None = None) -> Any:
        """These columns of the samples in one part."""
        return self._tables.part_table(part, columns)

    def first_row(self, part: int) -> Sample:
        """The first row of a part, as sample number 0. The row may have been removed from the version."""
        pages, row = self._reader(part), np.zeros(1, np.int64)
        return (self._tables.samples(part, row, [0]) if pages is None else pages.samples(row, [0]))[0]

    def check(self) -> None:
        """Read and check the whole index: all rows of all tables, their order, unique keys, and the digests of all
        pages."""
        for _ in self._tables.checked():
            pass
        for part in range(len(self._document.index)):
            if (pages := self._reader(part)) is not None:
                pages.check()

    def compare(self) -> dict[int, str]:
        """Check the tables as `check` does, and compare each part's pages with its tables.

        Returns a description of the first problem for each part whose pages are unreadable or differ from its tables.
        Values that tables do not hold (`without_parts`) are not compared.
        """
        from headrace.dataio.shards.index.rows import samples_of  # imports Arrow

        wrong = dict[int, str]()
        for part, first, table in self._tables.checked():
            if part in wrong or self._document.index[part].pages is None or not table.num_rows:
                continue
            rows = np.arange(first, first + table.num_rows)
            try:
                reader = self._reader(part)
                found = reader.samples(rows, rows.tolist()) if reader is not None else []
            except CorruptionError as error:
                wrong[part] = error.message
                continue
            for one, other in zip(found, samples_of(table, rows.tolist()), strict=True):
                if without_parts(one) != other:
                    wrong[part] = f"row {one.id}: its page holds another sample than its table"
                    break
        return wrong

    def only(self, column: str) -> str | None:
        """The value that all samples have in this column, if the version document records one.

        None means that the column has to be read.
        """
        values = {part.only.get(column) for part in self._document.index}
        return values.pop() if len(values) == 1 else None

    @property
    def files_of_all(self) -> frozenset[str]:
        """The extensions for which each sample has a file, as far as the version document records them."""
        each = [frozenset(part.files) for part in self._document.index]
        return frozenset.intersection(*each) if each else frozenset()

    def kept(self, part: int) -> Rows | None:
        """The rows of a part that are samples. None means all rows."""
        if part not in self._kept:
            described = self._document.index[part]
            self._kept[part] = kept.load(self._store, described, name_of(self._store, described))
        return self._kept[part]

    def part_rows(self, part: int) -> int:
        """The number of rows of a part, including removed ones."""
        return self._document.index[part].rows

    def _found(self, numbers: Sequence[int], read: Callable[[int, I64, list[int]], list[T]]) -> list[T]:
        """Call `read` for each part that holds some of these numbers. The results are in the order of `numbers`."""
        wanted = np.asarray(numbers, np.int64)
        parts = np.searchsorted(self.ends, wanted, side="right")
        places = {part: np.flatnonzero(parts == part) for part in np.flatnonzero(np.bincount(parts)).tolist()}

        def in_part(part: int) -> list[T]:
            own = wanted[places[part]]
            rows = own - (self.ends[part - 1] if part else 0)
            with self._lock:
                chosen = self.kept(part)
            return read(part, rows if chosen is None else chosen[rows].astype(np.int64), own.tolist())

        found = dict[int, T]()
        for at, values in zip(places.values(), self._each(in_part, list(places)), strict=True):
            found.update(zip(at.tolist(), values, strict=True))
        return [found[place] for place in range(len(numbers))]

    def _each(self, read: Callable[[int], list[T]], parts: Sequence[int]) -> Iterator[list[T]]:
        """Call `read` for each part. Calls run concurrently if the store is remote."""
        if len(parts) < 2 or not self._is_far:
            yield from map(read, parts)
            return
        pool = ThreadPoolExecutor(min(_SIDE_BY_SIDE, len(parts)), "headrace-index")
        try:
            yield from [future.result() for future in [pool.submit(read, part) for part in parts]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _is_far(self) -> bool:
        """Whether the index is not a local file."""
        try:
            file = self._store.open_file(self._document.index[0].key)
        except NotFoundError:  # the read that follows reports it
            return False
        if file is not None:
            os.close(file)
        return file is None

    def _reader(self, part: int) -> RowPages | None:
        """The reader of a part's pages. None if the part has no pages."""
        described = self._document.index[part]
        if described.pages is None:
            return None
        with self._lock:
            reader = self._readers.get(part)
        if reader is None:
            reader = RowPages(self._store, described, part, self._shards, self._pages)
            with self._lock:
                self._readers[part] = reader
                if len(self._readers) > READERS:
                    self._readers.popitem(last=False)
        return reader

    @cached_property
    def _tables(self) -> Tables:
        from headrace.dataio.shards.query.tables import Tables  # imports Arrow, which sample lookup does not need

        return Tables(self._store, self._document, self.kept, len(self))
