"""Paged version documents: they say the same as whole ones, and opening one reads no page."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.verify.dataset_check import verify
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history, paging
from headrace.dataio.shards.versions.documents import Shard, VersionDocument
from headrace.dataio.shards.versions.paging import PagedList, ShardSizes
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from tests.support.indexed_datasets import SHARD_BYTES, make, sample


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Every document is paged, in pages of three shards and of two parts."""
    with monkeypatch.context() as patch:
        patch.setattr(versions, "WHOLE_BYTES", 0)
        patch.setattr(paging, "PAGE_SHARDS", 3)
        patch.setattr(paging, "PAGE_PARTS", 2)
        yield patch


class Asked(Wrapper):
    """Notes the objects that are read as a whole, and those that are written."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read, self.written = list[str](), list[str]()

    def get(self, key: str, **options: Any) -> bytes:
        self.read.append(key)
        return self.inner.get(key, **options)

    def put(self, key: str, data: Any) -> None:
        self.written.append(key)
        self.inner.put(key, data)


def pages_of(document: VersionDocument) -> tuple[list[str], list[str]]:
    assert isinstance(document.shards, PagedList)
    assert isinstance(document.index, PagedList)
    return [page.key for page in document.shards.pages], [page.key for page in document.index.pages]


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 10))
def test_a_paged_document_says_what_a_whole_one_says(
    tmp_path_factory: pytest.TempPathFactory, samples: int, per_shard: int, per_part: int
) -> None:
    folder = tmp_path_factory.mktemp("sets")
    make(open_store(folder / "whole"), range(samples), per_shard=per_shard, per_part=per_part)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "WHOLE_BYTES", 0)
        patch.setattr(paging, "PAGE_SHARDS", 3)
        patch.setattr(paging, "PAGE_PARTS", 2)
        make(open_store(folder / "paged"), range(samples), per_shard=per_shard, per_part=per_part)
    whole, paged = Dataset(folder / "whole"), Dataset(folder / "paged")
    assert (whole.document.format, paged.document.format) == (1, 2)
    assert tuple(paged.document.shards) == whole.document.shards
    assert tuple(paged.document.index) == whole.document.index
    assert paged.document.index[-1] == whole.document.index[-1]
    assert paged.document.shards[1:5] == whole.document.shards[1:5]
    assert paged.document.summary() == whole.document.summary()
    assert dict(paged.document.shard_sizes()) == whole.document.shard_sizes()
    assert paged.document.shard_sizes().get("shards/none.tar") is None
    assert list(paged) == list(whole)
    assert paged.files(range(samples)) == whole.files(range(samples))
    assert paged.table.equals(whole.table)
    assert (paged.total_bytes, len(paged)) == (whole.total_bytes, len(whole))
    for condition in ("height >= 720", "score > 3 or label = 'odd'"):
        assert list(paged.where(condition).keys) == list(whole.where(condition).keys)
    with paged.diff(whole) as diff:
        assert not diff


def test_opening_reads_no_page_and_a_look_up_reads_one_of_each_kind(tmp_path: Path, pages: object) -> None:
    store = Asked(open_store(tmp_path))
    rows = make(store, range(200), per_part=20)
    shard_pages, part_pages = pages_of(history.load(store)[0])
    assert (len(shard_pages), len(part_pages)) == (7, 5)
    store.read.clear()
    dataset = Dataset.__new__(Dataset)
    dataset._open(store, None, None, False)
    assert len(dataset) == 200
    assert dataset.total_bytes == sum(m.length for row in rows for m in row.members)
    assert dataset.constant_value("video_ext") is None
    assert store.read == [versions.version_key(1)]
    assert dataset.sample(123) == rows[123]
    assert store.read[1:] == [part_pages[3], shard_pages[4]]
    assert dataset.sample(124) == rows[124]
    assert len(store.read) == 3


def test_an_append_keeps_the_full_pages(tmp_path: Path, pages: object) -> None:
    store = Asked(open_store(tmp_path))
    rows = make(store, range(100), per_part=20)
    before = pages_of(history.load(store)[0])
    store.written.clear()
    shard = Shard(key="shards/more.tar", size=SHARD_BYTES, samples=10)
    more = [sample(n, shard.key, n - 100) for n in range(100, 110)]

    def build(base: VersionDocument) -> VersionDocument:
        return versions.new_document(
            base.name,
            versions.joined(base.shards, (shard,)),
            versions.joined(base.index, tuple(part_writer.store_parts(store, more, len(base.index)))),
            version=2,
            parent=1,
            message="more",
        )

    history.commit(store, build)
    dataset = Dataset(store)
    assert list(dataset) == [*rows, *more]
    after = pages_of(dataset.document)
    assert [len(kind) for kind in after] == [4, 3]
    assert (after[0][:3], after[1][:2]) == (before[0][:3], before[1][:2])
    assert {key for key in store.written if key in after[0] or key in after[1]} == {after[0][3], after[1][2]}
    assert list(Dataset(store, 1)) == rows


def test_versions_of_paged_documents_can_be_changed(tmp_path: Path, pages: pytest.MonkeyPatch) -> None:
    rows = make(open_store(tmp_path / "a"), range(60), per_part=7)
    other = make(open_store(tmp_path / "b"), range(60, 90), name="other", per_part=7)
    dataset = Dataset(tmp_path / "a")
    left = dataset.remove(where="duration < 10")
    assert list(left.keys) == [row.key for row in rows if row.duration >= 10]
    view = left.where("height = 720").save()
    assert list(view.keys) == [row.key for row in rows if row.duration >= 10 and row.video and row.video.height == 720]
    assert pages_of(left.document)[0] == pages_of(view.document)[0] == pages_of(dataset.document)[0]
    whole = left.merge(Dataset(tmp_path / "b"))
    assert whole.document.format == 2
    assert list(whole.keys) == [*left.keys, *(row.key for row in other)]
    with whole.diff(dataset) as diff:
        assert (diff.added, diff.removed) == (len(rows) - len(left), len(other))
    pages.undo()
    assert [info.samples for info in versions_of(tmp_path / "a")] == [len(whole), len(view), len(left), len(rows)]


def versions_of(folder: Path) -> list[VersionDocument]:
    store = open_store(folder)
    return [history.load(store, number)[0] for number in reversed(history.list_versions(store))]


@pytest.mark.parametrize("kind", [0, 1], ids=["shards", "parts"])
@pytest.mark.parametrize("damage", ["missing", "changed", "another"])
def test_a_damaged_page_is_named_and_can_be_repaired(tmp_path: Path, pages: object, kind: int, damage: str) -> None:
    store = open_store(tmp_path / "set")
    history.claim(store, "set")
    make(store, range(100), per_part=20)
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    keys = pages_of(history.load(store)[0])[kind]
    data = store.get(keys[0])
    if damage == "missing":
        (tmp_path / "set" / keys[0]).unlink()
    else:
        store.put(keys[0], store.get(keys[1]) if damage == "another" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError, match=keys[0]):
        Dataset(store)
    with pytest.raises(CorruptionError, match=keys[0]):
        verify(store, workers=1)
    report = verify(store, workers=1, repair=tmp_path / "copy")
    assert [one.object for one in report.objects if one.repaired] == [keys[0]]
    assert store.get(keys[0]) == data
    assert not report.orphans


def test_a_document_that_contradicts_its_pages_is_refused(tmp_path: Path, pages: object) -> None:
    store = open_store(tmp_path)
    make(store, range(100), per_part=20)
    document = history.load(store)[0]
    assert isinstance(document.index, PagedList)
    first = document.index.pages[0]
    for change in ({"count": 1}, {"first": "a"}, {"last": "z"}):
        forged = PagedList(
            store,
            [msgspec.structs.replace(first, **change)],
            kind=versions.IndexPart,
            check=lambda *_: None,
            cached=1,
        )
        with pytest.raises(CorruptionError, match="holds other entries"):
            list(forged)


def test_an_entry_of_a_page_that_contradicts_itself_is_refused(tmp_path: Path, pages: object) -> None:
    store = open_store(tmp_path)
    make(store, range(100), per_part=20)
    shards = history.load(store)[0].shards
    for shard, words in (
        (Shard(key="shards/a.tar", size=-1, samples=1), "contradicts itself"),
        (Shard(key="mounts/unknown/a.tar", size=1, samples=1), "unknown mount"),
        (Shard(key="shards/../a.tar", size=1, samples=1), "is not an object's key"),
    ):
        document = msgspec.structs.replace(history.load(store)[0], version=2, trunk=2, shards=(*shards, shard))
        store.put(versions.version_key(2), versions.encode_version(store, document))
        with pytest.raises(CorruptionError, match=words):
            list(history.load(store, 2)[0].shards)


def test_an_older_headrace_refuses_a_paged_document_by_name(tmp_path: Path, pages: object) -> None:
    """Its reader of documents knows format 1 only, and this is its check."""
    store = open_store(tmp_path)
    make(store, range(10))
    key = versions.version_key(1)
    with pytest.raises(UnsupportedError, match=rf"{key} has format 2; this Headrace reads 1"):
        versions.check_bytes(store.get(key), key, 1)


def test_small_documents_stay_whole(tmp_path: Path) -> None:
    make(open_store(tmp_path), range(100))
    assert Dataset(tmp_path).document.format == 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=60, unique=True), st.integers(1, 9))
def test_sizes_of_shards_are_found_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, names: list[int], per_page: int
) -> None:
    store = open_store(tmp_path_factory.mktemp("sizes"))
    shards = tuple(Shard(key=f"shards/{n:03}.tar", size=n, samples=1) for n in names)
    empty = PagedList[Shard](store, (), kind=Shard, check=lambda *_: None, cached=1, tail=shards)
    stored = PagedList[Shard](
        store, empty.stored(store, per_page, "shards"), kind=Shard, check=lambda *_: None, cached=1
    )
    sizes = ShardSizes(stored)
    assert [sizes.get(f"shards/{n:03}.tar") for n in range(201)] == [n if n in names else None for n in range(201)]
    assert list(stored) == list(shards)
