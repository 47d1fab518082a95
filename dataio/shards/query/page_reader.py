"""Looks up rows of an index part in its pages.

Purpose: the rows of a batch are spread over the whole index. To read one row, the reader reads one page of a few dozen
rows. The directory of a part is read once. If the pages are small in total (`READ_WHOLE_BYTES`), all of them are read
with the directory.

Invariants: every byte is checked against a digest before it is used. The version document holds the digest of the
directory, and the directory holds the digests of the pages. `PageCache` is an LRU cache for the pages of all parts, and
its size is bounded. Results do not depend on the cache.

Failure behaviour: invalid data raise `CorruptionError`, which names the part. A missing part is also corruption,
because the version document names it. Threads can share a `PageReader`. Two threads may then read the same page twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.index.pages import Directory, Section
from headrace.dataio.shards.index.row_codec import RowDecoder
from headrace.dataio.shards.sample import Files, Sample
from headrace.dataio.shards.versions.documents import IndexPart
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

PAGE_CACHE_BYTES = 64 * limits.MIB
READ_WHOLE_BYTES = 256 * limits.KIB
"""The size up to which all pages of a part are read together with the directory, in one request."""
_CHECKED_PAGES = 128
"""The number of pages that `check` reads at a time."""
I64 = npt.NDArray[np.int64]
Page = list[msgspec.Raw]


def name_of(store: Store, part: IndexPart) -> str:
    """Return the name of a part for error messages."""
    return f"{store.location.url}: {part.key}"


def read_ranges(store: Store, part: IndexPart, ranges: Sequence[tuple[int, memoryview]]) -> None:
    """Read from the part into each (offset, buffer)."""
    try:
        store.get_ranges_into(part.key, ranges)
    except NotFoundError as error:
        raise CorruptionError(f"{name_of(store, part)} is missing, though the dataset version names it") from error
    except RangeError as error:
        why = f"shorter than the dataset version says: {error.message}"
        raise CorruptionError(f"{name_of(store, part)}: {why}") from error


class PageCache:
    """An LRU cache of the pages of all parts.

    It holds up to `max_bytes` unpacked bytes, and always at least the newest page.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._cached_bytes = max_bytes, 0
        self._pages = OrderedDict[tuple[int, int], tuple[Page, int]]()
        self._lock = threading.Lock()

    def get(self, part: int, page: int) -> Page | None:
        with self._lock:
            cached = self._pages.get((part, page))
            if cached is not None:
                self._pages.move_to_end((part, page))
                return cached[0]
        return None

    def put(self, part: int, page: int, rows: Page, size: int) -> None:
        with self._lock:
            if (part, page) in self._pages:
                return
            self._pages[part, page] = rows, size
            self._cached_bytes += size
            while self._cached_bytes > self._max_bytes and len(self._pages) > 1:
                self._cached_bytes -= self._pages.popitem(last=False)[1][1]


class PageReader:
    """Reads the rows of part `number`, which must have pages. `shards` gives the size of every shard of the version."""

    def __init__(self, store: Store, part: IndexPart, number: int, shards: Mapping[str, int], cache: PageCache) -> None:
        assert part.pages is not None
        self._store, self._part, self._number, self._cache = store, part, number, cache
        self._name = name_of(store, part)
        self._rows = RowDecoder(self._name, shards, prefix=part.prefix, unprefixed=PREFIX)
        self._data, self._first = memoryview(b""), 0
        self._directory = self._open(part.pages)

    def samples(self, rows: I64, numbers: Sequence[int]) -> list[Sample]:
        """Read the samples of these rows of the part, and give them these numbers."""
        raw_rows = zip(self._raw_rows(rows), rows.tolist(), numbers, strict=True)
        return [self._rows.sample(raw, row, number) for raw, row, number in raw_rows]

    def files(self, rows: I64) -> list[Files]:
        """Return the positions of the files of these rows."""
        return [self._rows.files(raw, row) for raw, row in zip(self._raw_rows(rows), rows.tolist(), strict=True)]

    def check(self) -> None:
        """Read, check and unpack all pages, `_CHECKED_PAGES` at a time, without caching them."""
        for start in range(0, len(self._directory), _CHECKED_PAGES):
            pages = range(start, min(start + _CHECKED_PAGES, len(self._directory)))
            for page, stored in zip(pages, self._stored(pages), strict=True):
                self._directory.unpack(page, stored)

    def _open(self, section: Section) -> Directory:
        read_whole = section.pages <= READ_WHOLE_BYTES
        start = section.offset if read_whole else section.offset + section.pages
        data = memoryview(bytearray(section.end - start))
        read_ranges(self._store, self._part, [(start, data)])
        if read_whole:
            self._data, self._first = data[: section.pages], section.offset
        return Directory(section, data[len(data) - section.directory :], self._part.rows, self._name)

    def _raw_rows(self, rows: I64) -> list[msgspec.Raw]:
        pages, inside = self._directory.find(rows)
        page_numbers = pages.tolist()
        unpacked = self._pages(sorted(set(page_numbers)))
        return [unpacked[page][at] for page, at in zip(page_numbers, inside.tolist(), strict=True)]

    def _pages(self, numbers: Sequence[int]) -> dict[int, Page]:
        pages = {page: rows for page in numbers if (rows := self._cache.get(self._number, page)) is not None}
        missing = [page for page in numbers if page not in pages]
        for page, stored in zip(missing, self._stored(missing), strict=True):
            pages[page] = self._directory.unpack(page, stored)
            self._cache.put(self._number, page, pages[page], self._directory.unpacked(page))
        return pages

    def _stored(self, pages: Sequence[int]) -> list[memoryview]:
        """Return the stored bytes of these pages. Adjacent pages are read as one range."""
        ranges = [self._directory.range(page) for page in pages]
        if self._data:
            return [self._data[start - self._first : end - self._first] for start, end in ranges]
        runs = list[tuple[int, int]]()
        for start, end in ranges:
            if runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        data = memoryview(bytearray(sum(end - start for start, end in ranges)))
        at, requests, views = 0, list[tuple[int, memoryview]](), list[memoryview]()
        for start, end in runs:
            requests.append((start, data[at : at + end - start]))
            at += end - start
        if requests:
            read_ranges(self._store, self._part, requests)
        at = 0
        for start, end in ranges:
            views.append(data[at : at + end - start])
            at += end - start
        return views
