"""The index of an open version: bitmaps of remaining rows, the cache of part readers, and concurrent reads."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query import open_index, tables
from headrace.dataio.shards.query.open_index import OpenIndex, RowSelection, decode_bitmap, encode_bitmap
from headrace.dataio.shards.query.page_reader import PageReader
from headrace.dataio.shards.query.tables import PartReader
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.indexed_datasets import make


@given(st.integers(1, 3000).flatmap(lambda of: st.tuples(st.just(of), st.sets(st.integers(0, of - 1)))))
def test_a_bitmap_decodes_to_the_rows_that_were_encoded(given: tuple[int, set[int]]) -> None:
    of, chosen = given
    rows = np.array(sorted(chosen), np.uint32)
    assert decode_bitmap(encode_bitmap(rows, of), of, len(rows), "x").tolist() == rows.tolist()


@given(st.lists(st.integers(1, 3000).flatmap(lambda of: st.tuples(st.just(of), st.sets(st.integers(0, of - 1))))))
def test_a_selection_holds_the_rows_that_were_added(given: list[tuple[int, set[int]]]) -> None:
    selection = RowSelection()
    for of, chosen in given:
        selection.add(np.array(sorted(chosen), np.uint32), of)
    assert [rows.tolist() for rows in selection] == [sorted(chosen) for _, chosen in given]
    assert selection.counts == [len(chosen) for _, chosen in given]
    assert len(selection) == len(given)
    assert selection.nbytes <= sum(of / 8 + 30 for of, chosen in given if 0 < len(chosen) < of)


def test_a_selection_of_whole_parts_takes_no_memory() -> None:
    selection = RowSelection()
    for _ in range(100):
        selection.add(np.arange(50_000, dtype=np.uint32), 50_000)
        selection.add(np.empty(0, np.uint32), 50_000)
    assert selection.nbytes == 0
    assert (len(selection[0]), len(selection[1])) == (50_000, 0)


class _CountedRanges(Wrapper):
    """Counts reads of bitmaps."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.bitmaps = 0

    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.bitmaps += key.endswith(".kept")
        self.inner.get_into(key, offset, buffer)


def test_a_bitmap_is_read_once_even_if_its_rows_are_unpacked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make(open_store(tmp_path), range(60), per_part=20)
    left = Dataset(tmp_path).remove(where="duration < 3")
    monkeypatch.setattr(open_index, "READERS", 1)
    store = _CountedRanges(open_store(tmp_path))
    index = OpenIndex(store, left.document)
    wanted = [row for row in rows if row.duration >= 3]
    for number in (0, 20, 40, 1, 21, 41):
        assert index.samples([number])[0].key == wanted[number].key
    assert store.bitmaps == len([part for part in left.document.index if part.bitmap]) > 1


def zeros_compressed(size: int, block: int = 1 << 24) -> bytes:
    """What zlib makes of `size` zero bytes. Compresses one block and repeats it, since a gigabyte takes seconds."""
    compressor = zlib.compressobj(wbits=-15)
    piece = compressor.compress(bytes(block)) + compressor.flush(zlib.Z_FULL_FLUSH)
    checksum = (size % 65521) << 16 | 1
    return b"\x78\x9c" + piece * (size // block) + compressor.flush() + checksum.to_bytes(4, "big")


def test_zeros_compressed_by_block_are_what_zlib_unpacks() -> None:
    assert zlib.decompress(zeros_compressed(1 << 20, 1 << 18)) == bytes(1 << 20)


@pytest.mark.parametrize(
    "data",
    [b"", b"junk", encode_bitmap(np.array([1], np.uint32), 8), zlib.compress(bytes(3)), zeros_compressed(1 << 30)],
    ids=["empty", "junk", "another count", "another size", "a bomb"],
)
def test_an_invalid_bitmap_is_refused_without_unpacking_it(data: bytes) -> None:
    with pytest.raises(CorruptionError, match="bitmap of its rows"):
        decode_bitmap(data, 16, 2, "x")


@pytest.mark.parametrize("with_pages", [True, False], ids=["pages", "row groups"])
def test_the_reader_that_was_used_last_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_pages: bool
) -> None:
    store = open_store(tmp_path)
    rows = make(store, range(60), per_part=20)
    document, _ = history.load(store)
    if not with_pages:
        document = replace(document, index=tuple(replace(part, pages=None) for part in document.index))
    opened = list[str]()
    kind: Any = PageReader if with_pages else PartReader
    original = kind.__init__

    def counted(self: Any, store: Store, part: versions.IndexPart, *more: Any) -> None:
        opened.append(part.key)
        original(self, store, part, *more)

    monkeypatch.setattr(kind, "__init__", counted)
    monkeypatch.setattr(open_index, "READERS", 2)
    monkeypatch.setattr(tables, "READERS", 2)
    monkeypatch.setattr(tables, "CACHE_BYTES", 1)
    index = OpenIndex(store, document)
    for number in (0, 20, 1, 40, 2):  # parts 0, 1, 0, 2, 0: part 1 is the one that was used least recently
        assert index.samples([number]) == [rows[number]]
    assert opened == [part.key for part in document.index]


class _Remote(Wrapper):
    """A store in which only parts below `local` are local files. It counts concurrent reads."""

    def __init__(self, inner: Store, local: str) -> None:
        super().__init__(inner)
        self._local, self._reading, self._lock = local, 0, threading.Lock()
        self.both = threading.Barrier(2)

    def open_file(self, key: str) -> int | None:
        return super().open_file(key) if key.startswith(self._local) else None

    def get_ranges_into(self, key: str, ranges: Any) -> None:
        self.both.wait(10)
        super().get_ranges_into(key, ranges)


def test_parts_are_read_concurrently_if_any_of_them_is_remote(tmp_path: Path) -> None:
    inner = open_store(tmp_path)
    rows = make(inner, range(40), per_part=20)
    document, _ = history.load(inner)
    first, second = document.index
    inner.put("mounts/far/index/second", inner.get(second.key))
    document = replace(document, index=(first, replace(second, key="mounts/far/index/second")))
    index = OpenIndex(_Remote(inner, local="index/"), document)
    assert index.samples([0, 20]) == [rows[0], rows[20]]  # each read waits for the other one
