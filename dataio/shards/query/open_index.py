"""The index of an open version: it maps sample numbers to rows and keeps little in memory.

Purpose: opening reads only the version document. Rows and columns are read on demand, so opening costs the same for
10^7 samples as for 10. Removals and saved views do not rewrite index parts. Instead, a bitmap gives the rows of a part
that remain in the version.
Invariants:

* Number i is the i-th remaining row, in the order of the document's parts.
* Samples are looked up in the pages of their parts (`page_reader`), without Arrow. Parts without pages are looked up in
  their row groups (`tables`). Queries for columns always read row groups.
* Up to `READERS` part readers stay open. The least recently used one is closed first.
* The remaining rows of a part are kept as a compressed bitmap: at most one bit a row. Up to `READERS` are unpacked.
* All data is checked when it is read.
* If some of the parts are in a remote store, up to `_CONCURRENT_PARTS` parts are read concurrently.
* Bit i of a bitmap (least significant first) stands for row i of its part. Bitmaps are compressed with zlib. One object
  holds the bitmaps of all parts that a version changed. The version document gives the range, the digest and the row
  count of each.

Failure behaviour: any method that reads may raise `CorruptionError`, which names the part, or one of the store's
errors. A bitmap is never unpacked further than the size that its part needs. Threads can share an `OpenIndex`.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.index.pages import digest, without_page_fields
from headrace.dataio.shards.query.page_reader import PAGE_CACHE_BYTES, PageCache, PageReader, name_of
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions.documents import IndexPart, RowBitmap, VersionDocument
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

if TYPE_CHECKING:
    from headrace.dataio.shards.query.tables import Tables

READERS = 256
_CONCURRENT_PARTS = 16

I64 = npt.NDArray[np.int64]
RowNumbers = npt.NDArray[np.uint32]
"""Row numbers of one part, in ascending order."""
Position = tuple[int, int]
"""The position of a row in the order of a version: the position of its shard, and the offset of its first member."""
T = TypeVar("T")


class CheckedRows(NamedTuple):
    """The result of checking a part: the positions of its first and last row, if it has rows.

    `wrong_pages` describes the first problem of its pages, which are unreadable or differ from its tables.
    """

    first: Position | None
    last: Position | None
    wrong_pages: str


class OpenIndex:
    """The samples of `document`, looked up by number.

    `chosen` restricts them to these rows of each part.
    """

    def __init__(self, store: Store, document: VersionDocument, chosen: RowSelection | None = None) -> None:
        self._store, self._document = store, document
        left: Sequence[int]
        if chosen is None:
            left = document.summary().part_samples
        else:
            left = chosen.counts
        self.ends: I64 = np.cumsum(left, dtype=np.int64)
        """For each part, the number after its last sample."""
        cache, shards = PageCache(PAGE_CACHE_BYTES), document.shard_sizes()
        self._page_reader = lru_cache(READERS)(
            lambda part: PageReader(store, document.index[part], part, shards, cache)
        )
        stored = dict[int, bytes]()
        self._remaining_rows = lru_cache(READERS)(
            lambda part: _stored_rows(store, document.index[part], stored, part) if chosen is None else chosen[part]
        )
        self._remote: dict[str, bool] = {}
        """For each mount whose parts were read, whether its store is remote. "" is the dataset's own store."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def samples(self, numbers: Sequence[int]) -> list[Sample]:
        """Return the samples with these numbers, in this order. The caller checks that the numbers are in range."""

        def read(part: int, rows: I64, own: list[int]) -> list[Sample]:
            pages = self._reader(part)
            return self._tables.samples(part, rows, own) if pages is None else pages.samples(rows, own)

        return self._found(numbers, read)

    def files(self, numbers: Sequence[int]) -> list[Files]:
        """Return the positions of these samples' files, in this order. The caller checks the numbers."""

        def read(part: int, rows: I64, own: list[int]) -> list[Files]:
            pages = self._reader(part)
            return self._tables.files(part, rows) if pages is None else pages.files(rows)

        return self._found(numbers, read)

    def tables(self, columns: Sequence[str] | None = None, parts: range | None = None) -> Iterator[Any]:
        """Yield one table of these columns (None: all) for each of these parts (None: all), in order.

        A few parts are read ahead.
        """
        return self._tables.tables(columns, parts)

    def close_tables(self) -> None:
        """Release the memory that reading tables took. Later reads read the footers of the parts again."""
        self.__dict__.pop("_tables", None)

    def columns(self, columns: Sequence[str] | None = None) -> Any:
        """Return these columns (None: all) of all samples, ordered by number."""
        return self._tables.columns(columns)

    def part_table(self, part: int, columns: Sequence[str] | None = None) -> Any:
        """Return these columns of the samples in one part."""
        return self._tables.part_table(part, columns)

    def first_row(self, part: int) -> Sample:
        """Return the first row of a part, as sample number 0. The row may have been removed from the version."""
        pages, row = self._reader(part), np.zeros(1, np.int64)
        return (self._tables.samples(part, row, [0]) if pages is None else pages.samples(row, [0]))[0]

    def check(self) -> None:
        """Read and check the whole index.

        This checks all rows of all tables, their order, that keys are unique, and the digests of all pages.
        """
        for _ in self._tables.checked():
            pass
        for part in range(len(self._document.index)):
            if (pages := self._reader(part)) is not None:
                pages.check()

    def check_part(self, part: int) -> CheckedRows:
        """Check the rows of one part, and compare its pages with its tables.

        Values that tables do not hold (`without_page_fields`) are not compared. The caller compares the positions of
        adjacent parts (`check_follows`).
        """
        from headrace.dataio.shards.index.rows import samples_of  # imports Arrow

        first: Position | None = None
        last: Position | None = None
        wrong = ""
        for start, table, bounds in self._tables.checked_part(part):
            if bounds is None:
                continue
            self._tables.check_follows(last, bounds[0])
            first, last = first or bounds[0], bounds[1]
            if not wrong and self._document.index[part].pages is not None:
                rows = np.arange(start, start + table.num_rows)
                wrong = self._compare(part, rows, samples_of(table, rows.tolist()))
        return CheckedRows(first, last, wrong)

    def _compare(self, part: int, rows: I64, samples: Iterable[Sample]) -> str:
        """Return the first problem of these rows' pages, or "" if they hold `samples`."""
        try:
            reader = self._reader(part)
            found = reader.samples(rows, rows.tolist()) if reader is not None else []
        except CorruptionError as error:
            return error.message
        for one, other in zip(found, samples, strict=True):
            if without_page_fields(one) != other:
                return f"row {one.id}: its page holds another sample than its table"
        return ""

    def check_follows(self, last: Position | None, first: Position) -> None:
        """Raise `CorruptionError` unless the position `first` comes after `last`."""
        self._tables.check_follows(last, first)

    def check_keys(self) -> None:
        """Raise `CorruptionError` if two samples have the same key."""
        self._tables.check_keys()

    def shard_runs(self, part: int) -> list[tuple[int, int]]:
        """Return the samples of a part as runs of adjacent samples of one shard: (position of the shard, samples)."""
        return self._tables.shard_runs(part)

    def constant_value(self, column: str) -> str | None:
        """Return the value that all samples have in this column, if the version document records one.

        None means that the column has to be read.
        """
        return self._document.summary().constant_values.get(column)

    @property
    def files_of_all(self) -> frozenset[str]:
        """The extensions for which each sample has a file, as far as the version document records them."""
        return frozenset(self._document.summary().files)

    def remaining_rows(self, part: int) -> RowNumbers | None:
        """Return the rows of a part that are samples. None means all rows."""
        return self._remaining_rows(part)

    def part_rows(self, part: int) -> int:
        """Return the number of rows of a part, including removed ones."""
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
                chosen = self.remaining_rows(part)
            return read(part, rows if chosen is None else chosen[rows].astype(np.int64), own.tolist())

        found = dict[int, T]()
        for at, values in zip(places.values(), self._each(in_part, list(places)), strict=True):
            found.update(zip(at.tolist(), values, strict=True))
        return [found[place] for place in range(len(numbers))]

    def _each(self, read: Callable[[int], list[T]], parts: Sequence[int]) -> Iterator[list[T]]:
        """Call `read` for each part. Calls run concurrently if one of the parts is remote."""
        if len(parts) < 2 or not any(map(self._is_remote, parts)):
            yield from map(read, parts)
            return
        pool = ThreadPoolExecutor(min(_CONCURRENT_PARTS, len(parts)), "headrace-index")
        try:
            yield from [future.result() for future in [pool.submit(read, part) for part in parts]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _is_remote(self, part: int) -> bool:
        """Return whether a part is not a local file. All parts of a mount are in one store, so only one is opened."""
        key = self._document.index[part].key
        mount = key.removeprefix(PREFIX).partition("/")[0] if key.startswith(PREFIX) else ""
        if mount not in self._remote:
            try:
                file = self._store.open_file(key)
            except NotFoundError:  # the following read reports it
                return False
            if file is not None:
                os.close(file)
            self._remote[mount] = file is None
        return self._remote[mount]

    def _reader(self, part: int) -> PageReader | None:
        """Return the reader of a part's pages, or None if the part has no pages."""
        return None if self._document.index[part].pages is None else self._page_reader(part)

    @cached_property
    def _tables(self) -> Tables:
        from headrace.dataio.shards.query.tables import Tables  # imports Arrow, which sample lookup does not need

        return Tables(self._store, self._document, remaining_rows=self.remaining_rows, samples=len(self))


# --- bitmaps of remaining rows


class RowSelection(Sequence[RowNumbers]):
    """Rows of each part of a version. They are kept as compressed bitmaps, and unpacked when they are asked for."""

    def __init__(self) -> None:
        self._bitmaps, self._rows = list[bytes](), list[int]()
        self.counts: list[int] = []
        """The number of selected rows of each part."""

    def add(self, rows: RowNumbers, of: int) -> None:
        """Add the selected rows of the next part, which has `of` rows."""
        self._bitmaps.append(encode_bitmap(rows, of) if 0 < len(rows) < of else b"")
        self._rows.append(of)
        self.counts.append(len(rows))

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, part: int) -> RowNumbers: ...
    @overload
    def __getitem__(self, part: slice) -> list[RowNumbers]: ...
    def __getitem__(self, part: int | slice) -> RowNumbers | list[RowNumbers]:
        if isinstance(part, slice):
            return [self[one] for one in range(*part.indices(len(self)))]
        if self._bitmaps[part]:
            return decode_bitmap(self._bitmaps[part], self._rows[part], self.counts[part], "a selection")
        return np.arange(self.counts[part], dtype=np.uint32)

    @property
    def nbytes(self) -> int:
        """The memory of the bitmaps in bytes."""
        return sum(map(len, self._bitmaps))


def encode_bitmap(rows: RowNumbers, of: int) -> bytes:
    """Encode `rows` as the compressed bitmap of a part with `of` rows."""
    bits = np.zeros(of, np.bool_)
    bits[rows] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes(), 6)


def decode_bitmap(data: bytes, of: int, count: int, name: str) -> RowNumbers:
    """Decode a bitmap from `encode_bitmap`, which must hold `count` rows. Errors name the part `name`."""
    size = (of + 7) // 8
    try:
        unpacked = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise CorruptionError(f"{name}: the bitmap of its rows cannot be unpacked: {error}") from error
    bits = np.unpackbits(np.frombuffer(unpacked, np.uint8), bitorder="little")
    rows = np.flatnonzero(bits).astype(np.uint32)
    if len(unpacked) != size or len(rows) != count or (count and rows[-1] >= of):
        raise CorruptionError(
            f"{name}: the bitmap of its rows does not hold the {count} of {of} rows that the version names"
        )
    return rows


def load_bitmap(store: Store, part: IndexPart, name: str) -> RowNumbers | None:
    """Read the rows of `part` that remain. None means all rows."""
    return _stored_rows(store, part, {}, 0, name)


def _stored_rows(
    store: Store, part: IndexPart, stored: dict[int, bytes], number: int, name: str = ""
) -> RowNumbers | None:
    """Return the rows of part `number` that remain. `stored` keeps its bitmap after the first read."""
    bitmap, name = part.bitmap, name or name_of(store, part)
    if bitmap is None:
        return None
    if number not in stored:
        stored[number] = _read_bitmap(store, bitmap, name)
    return decode_bitmap(stored[number], part.rows, bitmap.rows, name)


def _read_bitmap(store: Store, bitmap: RowBitmap, name: str) -> bytes:
    data = bytearray(bitmap.size)
    try:
        store.get_into(bitmap.key, bitmap.offset, memoryview(data))
    except (NotFoundError, RangeError) as error:
        raise CorruptionError(f"{name}: {bitmap.key} is missing or short: {error.message}") from error
    if digest(bytes(data)) != bitmap.digest:
        raise CorruptionError(f"{name}: the digest of the bitmap of its rows, in {bitmap.key}, does not match")
    return bytes(data)


def store_bitmaps(store: Store, changed: Iterable[tuple[IndexPart, RowNumbers, int]]) -> list[IndexPart]:
    """Store the bitmaps of changed parts in one new object, and return the parts that refer to it.

    Each item of `changed` is a part, the rows that remain, and the total bytes of their members. Only bitmaps are kept.
    """
    pieces = [(encode_bitmap(rows, part.rows), part, len(rows), size) for part, rows, size in changed]
    if not pieces:
        return []
    data = b"".join(piece for piece, *_ in pieces)
    key, offset, made = f"index/{digest(data)[:32]}.kept", 0, list[IndexPart]()
    store.put(key, data)
    for piece, part, count, size in pieces:
        bitmap = RowBitmap(key=key, offset=offset, size=len(piece), digest=digest(piece), rows=count, bytes=size)
        made.append(msgspec.structs.replace(part, bitmap=bitmap))
        offset += len(piece)
    return made
