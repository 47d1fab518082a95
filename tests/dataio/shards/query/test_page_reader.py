"""Looking up samples in pages: the bytes that are read, the bound of the cache, and results equal to the tables'."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio import verify
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query import page_reader, part_writer
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.query.page_reader import PageCache, PageReader
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.indexed_datasets import SHARD_BYTES, make, sample

ROWS = 700
SHARDS = {"shards/a.tar": SHARD_BYTES}
Asked = list[tuple[int, int]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, versions.IndexPart, list[Sample]]:
    store = open_store(tmp_path_factory.mktemp("part"))
    rows = [sample(n, "shards/a.tar", n) for n in range(ROWS)]
    (part,) = part_writer.store_parts(store, rows, 0)
    return store, part, rows


class Asking:
    """Passes reads on, and says what was asked for: (offset, bytes)."""

    def __init__(self, store: Store) -> None:
        self._store, self.location, self.asked = store, store.location, list[Asked]()

    def get_ranges_into(self, key: str, ranges: list[tuple[int, memoryview]]) -> None:
        self.asked.append([(offset, len(view)) for offset, view in ranges])
        self._store.get_ranges_into(key, ranges)


def test_a_small_part_is_read_once_and_a_large_one_page_by_page(
    stored: tuple[Store, versions.IndexPart, list[Sample]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, part, rows = stored
    assert part.pages is not None
    asking = Asking(store)
    small = PageReader(asking, part, 0, SHARDS, PageCache(1))  # type: ignore[arg-type]
    assert small.samples(np.array([699, 0, 300]), [699, 0, 300]) == [rows[699], rows[0], rows[300]]
    assert asking.asked == [[(part.pages.offset, part.pages.end - part.pages.offset)]]
    monkeypatch.setattr(page_reader, "READ_WHOLE_BYTES", part.pages.pages - 1)
    asking = Asking(store)
    large = PageReader(asking, part, 0, SHARDS, PageCache(1 << 20))  # type: ignore[arg-type]
    assert asking.asked.pop() == [(part.pages.offset + part.pages.pages, part.pages.directory)]
    wanted = [5, 130, 64, 5, 699]  # pages 0 and 1 and 2, which are neighbours, and the last one
    assert large.samples(np.array(wanted), wanted) == [rows[n] for n in wanted]
    ((first, last),) = asking.asked
    assert first[0] == part.pages.offset
    assert last[0] + last[1] == part.pages.offset + part.pages.pages
    assert large.files(np.array([6]))[0].members == list(rows[6].members)
    assert len(asking.asked) == 1  # its page was kept
    large.check()


class Far(Wrapper):
    """A store that has to be waited for: a read goes on when another one, of another object, is on its way too."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.together = threading.Barrier(2, timeout=150)

    def open_file(self, key: str) -> int | None:
        return None

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.together.wait()
        self.inner.get_ranges_into(key, ranges)


def test_parts_in_a_store_that_has_to_be_waited_for_are_asked_side_by_side(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rows = make(store, range(60), per_part=30)
    opened = OpenIndex(Far(store), history.load(store)[0])
    assert opened.samples([3, 40, 59]) == [rows[3], rows[40], rows[59]]
    assert [found.members for found in opened.files([41, 4])] == [list(rows[41].members), list(rows[4].members)]
    store.delete_many([history.load(store)[0].index[1].key])
    with pytest.raises(CorruptionError, match="is missing"):
        OpenIndex(Far(store), history.load(store)[0]).samples([3, 40])


@settings(deadline=None)
@given(st.lists(st.integers(0, ROWS - 1), max_size=40), st.integers(1, 200_000))
def test_results_do_not_depend_on_the_cache(
    stored: tuple[Store, versions.IndexPart, list[Sample]], wanted: list[int], most: int
) -> None:
    store, part, rows = stored
    cache = PageCache(most)
    reader = PageReader(store, part, 0, SHARDS, cache)
    for _ in range(2):
        assert reader.samples(np.array(wanted, np.int64), wanted) == [rows[n] for n in wanted]
        assert cache._cached_bytes == sum(size for _, size in cache._pages.values())
        assert cache._cached_bytes <= most or len(cache._pages) == 1


def test_the_least_recently_used_page_goes_first() -> None:
    cache, page = PageCache(30), list[msgspec.Raw]()
    for number in (1, 2, 3):
        cache.put(0, number, page, 10)
    assert cache.get(0, 1) is page
    cache.put(0, 4, page, 10)
    cache.put(0, 4, page, 10)  # by two threads at once
    assert [cache.get(0, number) for number in (1, 2, 3, 4)] == [page, None, page, page]
    cache.put(1, 1, page, 100)
    assert list(cache._pages) == [(1, 1)]


@pytest.mark.parametrize(("change", "words"), [({"key": "index/none"}, "is missing"), ({"size": 0}, "shorter")])
def test_a_missing_or_short_part_is_damage(
    stored: tuple[Store, versions.IndexPart, list[Sample]], change: dict[str, object], words: str, tmp_path: Path
) -> None:
    store, part, _ = stored
    if "size" in change:
        store = open_store(tmp_path)
        store.put(part.key, b"short")
    with pytest.raises(CorruptionError, match=words):
        PageReader(store, replace(part, **change), 0, SHARDS, PageCache(1))


def test_views_and_parts_without_pages_answer_alike(tmp_path: Path) -> None:
    """Parts of before there were pages are looked up as tables, also in one index with others."""
    store = open_store(tmp_path)
    rows = make(store, range(300), per_part=100)
    document = history.load(store)[0]
    mixed = tuple(replace(part, pages=None) if n == 1 else part for n, part in enumerate(document.index))
    wanted = [299, 0, 150, 101, 299, 42]
    for parts_of in (document.index, mixed):
        opened = OpenIndex(store, replace(document, index=parts_of))
        assert opened.samples(wanted) == [rows[n] for n in wanted]
        assert [found.members for found in opened.files(wanted)] == [list(rows[n].members) for n in wanted]
        assert opened.first_row(1).key == rows[100].key
        opened.check()
        opened.check_keys()
        ends = [opened.check_part(part) for part in range(3)]
        assert not any(found.wrong_pages for found in ends)
        runs = [run for part in range(3) for run in opened.shard_runs(part)]
        assert runs == [(shard, 10) for shard in range(30)]
        for one, other in itertools.pairwise(ends):
            assert other.first is not None
            opened.check_follows(one.last, other.first)
            with pytest.raises(CorruptionError, match="not in the order"):
                opened.check_follows(other.last, other.first)
    view = Dataset(store).where("duration > 20")
    assert [one.key for one in view.samples(range(len(view)))] == [one.key for one in rows if one.duration > 20]


def test_a_page_that_says_something_else_than_its_table_is_found_by_verify(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    rows = make(store, range(30), per_part=30)
    other = [*rows[:20], replace(rows[20], text="another"), *rows[21:]]
    table = pa.Table.from_pylist([index.to_row(one) for one in rows], schema=index.SCHEMA)
    document = history.load(store)[0]
    part = part_writer.store_part(store, 0, part_writer.write_table(table, other), 30, document.index[0].bytes, {})
    store.put(versions.version_key(1), versions.encode(replace(document, index=(part,))))
    opened = Dataset(store)
    assert opened.sample(20).text == "another"
    assert opened.index.check_part(0).wrong_pages == "row 20: its page holds another sample than its table"
    (found,) = [one for one in verify(store).objects if one.object == part.key]
    assert [(one.code, one.message) for one in found.findings] == [
        ("pages", "row 20: its page holds another sample than its table")
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": -1},
        {"pages": -1},
        {"directory": 27},
        {"pages": 1 << 40},
    ],
)
def test_a_document_whose_pages_cannot_be_is_refused(tmp_path: Path, changes: dict[str, int]) -> None:
    store = open_store(tmp_path)
    make(store, range(30), per_part=30)
    document = history.load(store)[0]
    (part,) = document.index
    assert part.pages is not None
    forged = replace(document, index=(replace(part, pages=replace(part.pages, **changes)),))
    store.put(versions.version_key(1), versions.encode(forged))
    with pytest.raises(CorruptionError, match="contradicts itself"):
        Dataset(store)


def test_the_extensions_that_all_samples_have_are_known_without_reading_anything(tmp_path: Path) -> None:
    make(open_store(tmp_path / "a"), range(60))
    assert Dataset.open_lazy(tmp_path / "a").index.files_of_all == {"mp4"}
    store = open_store(tmp_path / "b")
    both = sample(0, "shards/a.tar", 0)
    both = replace(both, members=(*both.members, replace(both.members[0], ext="txt", offset=2048)))
    (first,) = part_writer.store_parts(store, [both], 0)
    (second,) = part_writer.store_parts(store, [both, sample(1, "shards/a.tar", 3)], 1)
    assert (first.files, second.files) == (("mp4", "txt"), ("mp4",))
