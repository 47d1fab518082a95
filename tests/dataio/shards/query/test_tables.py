"""Reading parts of index parts: every byte is checked against a digest before it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards import dataset as dataset_module
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.query import conditions, part_writer
from headrace.dataio.shards.query.page_reader import PageCache, PageReader
from headrace.dataio.shards.query.tables import PartReader, repeated_keys
from headrace.dataio.shards.sample import KeyFrame, Pieces, Sample
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.indexed_datasets import make, sample, video

ROWS = 5000


OLD_GROUP_ROWS = 1024
Made = tuple[Store, versions.VersionDocument, list[Sample]]


def make_set(folder: Path, group_rows: int) -> Made:
    store = open_store(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writer, "GROUP_ROWS", group_rows)
        rows = make(store, range(ROWS), per_shard=500, per_part=ROWS)
    return store, history.load(store)[0], rows


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One part with several row groups, as older parts have."""
    return make_set(tmp_path_factory.mktemp("groups"), OLD_GROUP_ROWS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One part as it is written now."""
    return make_set(tmp_path_factory.mktemp("whole"), part_writer.GROUP_ROWS)


def test_row_groups_and_columns_are_read_alone(made: Made) -> None:
    store, document, rows = made
    reader = PartReader(store, document.index[0], document.shard_sizes())
    assert reader.ends.tolist() == [1024, 2048, 3072, 4096, ROWS]
    table = reader.read(["duration", "key"], [1])
    assert table.column_names == ["duration", "key"]
    assert table["key"].to_pylist() == [s.key for s in rows[1024:2048]]
    assert [index.from_row(row, n) for n, row in enumerate(reader.read().to_pylist())] == rows
    assert reader.read(["key"], []).num_rows == 0


def test_a_value_that_all_samples_have_is_known_without_reading_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {
        "video": [n for n in range(100) if n % 5],
        "sound": range(0, 100, 5),
        "both": range(60),
        "first-part": [*(n for n in range(32) if n % 5), 35],
    }
    for name, numbers in kinds.items():
        make(open_store(tmp_path / name), list(numbers))
    with monkeypatch.context() as patch:
        patch.setattr(PartReader, "__init__", lambda *_: pytest.fail("a part was read"))
        patch.setattr(dataset_module, "CHECKED_AT_OPEN", 0)
        found = {
            name: (
                Dataset(tmp_path / name).constant_value("video_ext"),
                Dataset(tmp_path / name).constant_value("audio_codec"),
            )
            for name in kinds
        }
    ext = Dataset(tmp_path / "video").table["video_ext"][0].as_py()
    assert found == {
        "video": (ext, None), "sound": (None, "pcm_s16le"), "both": (None, None), "first-part": (None, None),
    }  # fmt: skip
    assert Dataset(tmp_path / "video").constant_value("height") is None  # of which versions say nothing


def test_one_of_many_films_costs_a_page_and_not_the_part(tmp_path: Path) -> None:
    """So that one sample of a dataset of films costs no more than one of clips."""
    store = open_store(tmp_path)
    film = tuple(KeyFrame(1000 * n, 24 * n) for n in range(3000))
    rows = [
        sample(n, "shards/a.tar", n, video=replace(video(n), frames=72_001, key_frames=film), audio=None)
        for n in range(300)
    ]
    (part,) = part_writer.store_parts(store, rows, 0)
    assert PartReader(store, part, {"shards/a.tar": 1 << 40}).ends.tolist() == [300]
    counting = Counting(store)
    reader = PageReader(counting, part, 0, {"shards/a.tar": 1 << 40}, PageCache(1))  # type: ignore[arg-type]
    before = counting.bytes
    assert reader.samples(np.array([129]), [129]) == [rows[129]]
    assert 0 < counting.bytes - before < part.size / 50


def test_films_make_smaller_parts_than_clips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part must not be larger than readers accept, nor need more memory to write."""
    monkeypatch.setattr(part_writer, "PART_WEIGHT", 1 << 20)
    store = open_store(tmp_path)
    film = tuple(KeyFrame(1000 * n, 24 * n) for n in range(3000))
    clips = [sample(n, "shards/a.tar", n) for n in range(2000)]
    films = [replace(one, video=replace(video(1), frames=72_001, key_frames=film)) for one in clips[:70]]
    (member,) = clips[0].members
    pieces = Pieces(1 << 20, bytes(8 * 2048))
    long = [replace(one, members=(replace(member, length=1 << 31, pieces=pieces),)) for one in clips[:70]]
    texts = [replace(clips[0], text="x" * (1 << 19))] * 5
    sizes = {
        name: [part.rows for part in part_writer.store_parts(store, rows, 0)]
        for name, rows in (("clips", clips), ("films", films), ("long", long), ("texts", texts))
    }
    assert sizes == {"clips": [2000], "films": [15, 15, 15, 15, 10], "long": [63, 7], "texts": [2, 2, 1]}


def test_a_bad_row_is_named_by_its_number_in_the_part_whatever_was_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_writer, "GROUP_ROWS", OLD_GROUP_ROWS)
    store = open_store(tmp_path)
    rows = [sample(n, "shards/a.tar", n) for n in range(3000)]
    rows[2500] = replace(rows[2500], duration=-1.0)
    (part,) = part_writer.store_parts(store, rows, 0)
    reader = PartReader(store, part, {"shards/a.tar": 1 << 40})
    assert reader.ends.tolist() == [1024, 2048, 3000]
    assert reader.read(None, [0, 1]).num_rows == 2048
    with pytest.raises(CorruptionError, match="row 2500: duration is negative"):
        reader.read(None, [0, 2])


class Counting:
    """Passes reads on and counts their bytes."""

    def __init__(self, store: Store) -> None:
        self.store, self.location, self.bytes = store, store.location, 0

    def get_ranges_into(self, key: str, ranges: list[tuple[int, memoryview]]) -> None:
        self.bytes += sum(len(view) for _, view in ranges)
        self.store.get_ranges_into(key, ranges)


def test_one_group_costs_less_than_the_part(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    store, document, rows = made
    monkeypatch.setattr(part_writer, "GROUP_ROWS", OLD_GROUP_ROWS)
    monkeypatch.setattr(index, "BLOCK_BYTES", 4096)  # more of them than a megabyte of rows would have
    counting, part = Counting(store), part_writer.store_parts(store, rows, 1)[0]
    reader = PartReader(counting, part, document.shard_sizes())  # type: ignore[arg-type]
    assert counting.bytes == part.footer < part.size / 4
    reader.read(None, [2])
    assert counting.bytes < part.size * 0.8


def without_chunk_digests(store: Store, part: versions.IndexPart) -> versions.IndexPart:
    """The part as an older release wrote it: its footer has digests of blocks only."""
    data = store.get(part.key).replace(index.CHUNKS, b"headrace.other!")
    store.put("index/older.parquet", data)
    footer = digest(data[-part.footer :])
    return replace(part, key="index/older.parquet", digest=digest(data), footer_digest=footer)


columns = st.sets(st.sampled_from(index.SCHEMA.names), min_size=1).map(sorted)


@settings(deadline=None, max_examples=15)
@given(columns)
def test_columns_cost_their_own_bytes(made: Made, whole: Made, columns: list[str]) -> None:
    for store, document, rows in (made, whole):
        counting, part = Counting(store), document.index[0]
        reader = PartReader(counting, part, document.shard_sizes())  # type: ignore[arg-type]
        assert counting.bytes == part.footer
        table = reader.read(columns)
        assert counting.bytes - part.footer == stored_bytes(store.get(part.key), columns)
        plain = pa.Table.from_pylist([index.to_row(one) for one in rows], schema=index.SCHEMA).select(columns)
        assert table.equals(plain)
        assert PartReader(store, without_chunk_digests(store, part), document.shard_sizes()).read(columns).equals(plain)


def stored_bytes(data: bytes, columns: list[str]) -> int:
    """The bytes of these columns in a Parquet file."""
    metadata = pq.ParquetFile(pa.BufferReader(data)).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(leaf) for group in groups for leaf in range(metadata.num_columns)]
    return sum(one.total_compressed_size for one in chunks if one.path_in_schema.partition(".")[0] in columns)


def test_a_column_of_many_short_values_costs_a_tenth_more_than_its_bytes(tmp_path: Path) -> None:
    """With the footer, in a part of the usual number of rows."""
    frames = np.random.default_rng(0).integers(30, 600, part_writer.PART_ROWS).astype(np.int32)
    table = pa.table({"frames": frames, **dict.fromkeys(("key", "shard"), pa.array(["k"] * len(frames)))})
    empty = {
        field.name: pa.nulls(len(frames), field.type) if field.nullable else pa.array([[]] * len(frames), field.type)
        for field in index.SCHEMA
        if field.name not in table.column_names and field.name not in ("bytes", "duration")
    }
    for name, values in (empty | {name: np.zeros(len(frames)) for name in ("bytes", "duration")}).items():
        table = table.append_column(name, pa.array(values))
    made = part_writer.write_table(table.select(index.SCHEMA.names).cast(index.SCHEMA), [])
    assert made.footer + stored_bytes(made.data, ["frames"]) < 1.1 * stored_bytes(made.data, ["frames"])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_column_is_found_and_others_are_read(whole: Made, data: st.DataObject) -> None:
    store, document, rows = whole
    part, name = document.index[0], data.draw(st.sampled_from(["key", "frames", "members", "text"]))
    stored = bytearray(store.get(part.key))
    metadata = pq.ParquetFile(pa.BufferReader(bytes(stored))).metadata.row_group(0)
    leaves = [metadata.column(leaf) for leaf in range(metadata.num_columns)]
    leaf = data.draw(st.sampled_from([one for one in leaves if one.path_in_schema.partition(".")[0] == name]))
    at = leaf.data_page_offset + data.draw(st.integers(0, leaf.total_compressed_size - 1))
    stored[at] ^= data.draw(st.integers(1, 255))
    store.put("index/damaged.parquet", bytes(stored))
    reader = PartReader(store, replace(part, key="index/damaged.parquet"), document.shard_sizes())
    assert reader.read(["height"])["height"].to_pylist() == [s.video and s.video.height for s in rows]
    with pytest.raises(CorruptionError, match=rf"BLAKE3 of column {name}"):
        reader.read(["height", name])


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_every_damaged_byte_is_found_by_the_reader(made: Made, whole: Made, data: st.DataObject) -> None:
    store, document, _ = data.draw(st.sampled_from([made, whole]))
    part = document.index[0]
    damaged = bytearray(store.get(part.key))
    at = data.draw(st.integers(4, len(damaged) - 1))
    damaged[at] ^= data.draw(st.integers(1, 255))
    store.put("index/damaged.parquet", bytes(damaged))
    other = msgspec.structs.replace(part, key="index/damaged.parquet")
    assert part.pages is not None
    with pytest.raises(CorruptionError, match=r"index/damaged\.parquet: .*BLAKE3"):
        if part.pages.offset <= at < part.pages.end:
            PageReader(store, other, 0, document.shard_sizes(), PageCache(1)).check()
        else:
            PartReader(store, other, document.shard_sizes()).read()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": ROWS + 1}, "holds 5000 rows, the dataset version says 5001"),
        ({"footer_digest": "0" * 64}, "BLAKE3 digest of its footer"),
        ({"footer": 7}, "BLAKE3 digest of its footer"),
        ({"size": 1 << 27}, "shorter than the dataset version says"),
        ({"key": "index/none.parquet"}, "is missing, though"),
        ({"prefix": "mounts/m1/"}, "shard is not a shard of this dataset version"),
    ],
)
def test_a_part_that_differs_from_the_version_document_is_refused(
    made: Made, change: dict[str, object], words: str
) -> None:
    store, document, _ = made
    with pytest.raises(CorruptionError, match=words):
        PartReader(store, msgspec.structs.replace(document.index[0], **change), document.shard_sizes()).read()


def test_a_footer_without_digests_is_refused(made: Made) -> None:
    store, document, _ = made
    sink = pa.BufferOutputStream()
    pq.write_table(index.SCHEMA.empty_table(), sink)
    data = sink.getvalue().to_pybytes()
    store.put("index/plain.parquet", data)
    with pytest.raises(CorruptionError, match="does not hold the digests of its blocks"):
        footer = part_writer.footer_bytes(data)
        told = {"key": "index/plain.parquet", "size": len(data), "rows": 0, "footer": footer}
        part = replace(document.index[0], **told, footer_digest=digest(data[-footer:]))
        PartReader(store, part, document.shard_sizes())


def test_a_large_index_is_checked_as_it_is_read(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    rows = make(store, range(ROWS), per_part=3000)
    part = history.load(store)[0].index[1]
    assert part.pages is not None
    data = bytearray(store.get(part.key))
    data[100] ^= 1  # in the column of keys
    data[part.pages.offset] ^= 1
    store.put(part.key, bytes(data))
    with pytest.raises(CorruptionError):
        Dataset(store)
    monkeypatch.setattr(dataset_module, "CHECKED_AT_OPEN", 0)
    dataset = Dataset(store)
    assert len(dataset) == ROWS
    assert dataset.samples([5, 2999]) == [rows[5], rows[2999]]
    assert dataset.sample(3064) == rows[3064]
    with pytest.raises(CorruptionError, match="page 0 of its rows: its BLAKE3"):
        dataset.sample(3000)
    with pytest.raises(CorruptionError, match="does not match"):
        dataset.columns(["key"])
    with pytest.raises(CorruptionError, match="does not match"):
        dataset.check()


def test_repeated_keys_are_found_in_less_memory_than_the_keys_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB moves the rest to a folder, which is removed at the end."""
    keys, folders = 1_200_000, list[str]()
    original = conditions.connect

    def connect(spill_to: str = "") -> object:
        folders.append(spill_to)
        return original(spill_to)

    def batches(repeated: Sequence[int]) -> Iterator[pa.Table]:
        for start in range(0, keys, 100_000):
            yield pa.table({"key": [f"clips/of/some/longer/folder/{n:032}" for n in range(start, start + 100_000)]})
        yield pa.table({"key": pa.array([f"clips/of/some/longer/folder/{n:032}" for n in repeated], pa.string())})

    monkeypatch.setattr(conditions, "SPILL_MEMORY", "60MB")
    monkeypatch.setattr(conditions, "connect", connect)
    assert repeated_keys(batches([])) == []
    assert repeated_keys(batches([77_777, 1_100_000])) == [
        f"clips/of/some/longer/folder/{n:032}" for n in (77_777, 1_100_000)
    ]
    assert len(folders) == 2
    assert not any(map(os.path.exists, folders))
