"""`where`: the meaning of conditions, the texts that are refused, and the properties of views."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.dataio.core import log
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query import conditions, open_index, part_writer, tables
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.documents import Shard, new_document
from headrace.dataio.store.open import open_store
from tests.attacks import forge
from tests.support.indexed_datasets import SHARD_BYTES, make, sample
from tests.support.written_media import MakeClip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    store = open_store(tmp_path_factory.mktemp("set"))
    make(store, range(100))
    return Dataset(store)


CONDITIONS: dict[str, Callable[[Sample], object]] = {
    "duration between 2 and 20 and height >= 720 and caption ilike '%dog%'": lambda s: (
        2 <= s.duration <= 20 and s.video and s.video.height >= 720 and s.text and "dog" in s.text.lower()
    ),
    "codec = 'h264' and WIDTH > 1000": lambda s: s.video and s.video.width > 1000,
    "audio_codec is not null and sample_rate = 16000 and channels = 1": lambda s: s.audio,
    "has_audio or not has_text": lambda s: s.audio or s.text is None,
    "round(fps, 2) = 29.97 and frames = 90": lambda s: s.video,
    "key in ('k00001', 'k00002', 'absent')": lambda s: s.key in ("k00001", "k00002"),
    "bytes < 110": lambda s: s.members[0].length < 110,
    "score < 1.5 and label = 'odd'": lambda s: s.fields["score"] < 1.5 and s.fields["label"] == "odd",  # type: ignore[operator]
    "fields.number % 10 = 3": lambda s: s.fields["number"] % 10 == 3,  # type: ignore[operator]
    '"odd name" and number > 90': lambda s: s.fields["Odd Name"] and s.fields["number"] > 90,  # type: ignore[operator]
    "case when height > 700 then duration > 10 else false end": lambda s: (
        s.video and s.video.height > 700 and s.duration > 10
    ),
    "regexp_matches(caption, 'cat 1[0-9]$') -- a remark": lambda s: s.text and "cat 1" in s.text and len(s.text) == 8,
    "shard like '%00000003%'": lambda s: "00000003" in s.shard,
    "caption = ''' or 1=1 --'": lambda s: False,
    "true": lambda s: True,
    "replace(key, '0000', '-----') || '!' = 'k-----1!'": lambda s: s.key == "k00001",
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_chooses_the_samples_that_meet_it_and_numbers_them_anew(opened: Dataset, condition: str) -> None:
    expected = [s for s in opened if CONDITIONS[condition](s)]
    view = opened.where(condition)
    assert [s.key for s in view] == [s.key for s in expected] == list(view.keys)
    assert [s.id for s in view] == list(range(len(view)))
    assert view.total_bytes == sum(m.length for s in expected for m in s.members)
    assert view.columns(["duration"])["duration"].to_pylist() == [s.duration for s in expected]
    assert view.samples(list(range(len(view)))[::-3]) == [view.sample(i) for i in list(range(len(view)))[::-3]]


REFUSED = {
    "heigth > 3": "names the column 'heigth'.*did you mean height",
    "fields.scor > 3": r"names the column 'fields\.scor'",
    "nothing_like_it = 1": "there are audio_codec.*JSON Odd Name, label",
    "duration": "is not a condition: its value is of type DOUBLE",
    "duration > 'long'": "fails: Conversion Error",
    "key::int > 3": "fails: Conversion Error",
    "": "the condition is empty",
    "duration > ": "cannot be read: syntax error",
    "duration > 2; drop table part": "cannot be read: syntax error",
    "duration > 2) union select (1": "more than one boolean expression|cannot be read",
    "duration > (select 1)": "a sub-query",
    "exists (from part)": "a sub-query",
    "key in (select key from part)": "a sub-query",
    "(from read_csv('/etc/passwd')) is null": "a sub-query",
    "read_text('/etc/passwd') is null": "the function read_text",
    "getenv('HOME') = 'x'": "the function getenv",
    "current_setting('threads') = '1'": "the function current_setting",
    "random() > 0.5": "the function random",
    "main.lower(key) = 'a'": "the function lower",
    "count(*) > 1": "the function count",
    "sum(duration) over () > 1": "a window function",
    "duration > ?": "parameter",
    "columns('d.*') > 1": "a star",
    "* is null": "a star",
    "list_filter([1], lambda x: x > 0) is null": "the function list_filter|lambda",
    "key = key collate nocase": "collate",
    "[duration][1] > 2": "array_extract|list_value",
    "duration::struct(a int) is null": "such a cast",
    "__row > 3": "names the column '__row'",
    "part.key = 'x'": r"names the column 'part\.key'",
    "(" * 3000 + "true" + ")" * 3000: "cannot be read",
    "not " * 3000 + "true": "cannot be read",
    "key = '" + "x" * 20_000 + "'": "longer than",
    "key = '\ud800'": "cannot be read|fails",
    f"replace(replace(key, 'k', '{'k' * 9}'), 'k', '{'k' * 9}') = 'x'": "64 times as long",
    "replace(key, 'k', caption) = 'x'": "64 times as long",
    f"concat({', '.join(['caption'] * 65)}) = 'x'": "64 times as long",
    f"{' || '.join(['caption'] * 65)} = 'x'": "64 times as long",
}


def test_a_distant_name_is_not_suggested_and_an_index_without_json_is_named() -> None:
    with conditions.connect() as connection, pytest.raises(UsageError, match=r"there are audio_codec, ") as caught:
        conditions.parse(connection, "score > 0.5", {})
    assert "the index has no entries of the samples' JSON" in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("condition", REFUSED, ids=lambda c: c[:30].encode("ascii", "replace").decode())
def test_a_text_that_is_not_a_single_condition_is_refused(opened: Dataset, condition: str) -> None:
    with pytest.raises(UsageError, match=REFUSED[condition]):
        opened.where(condition)


WORDS = [
    *("duration", "height", "key", "caption", "(", ")", "and", "or", "not", "between", "in", "like", "is", "null", ";"),
    *(",", ".", "*", "+", "-", "1", "'x'", '"', "--", "/*", "*/", "select", "from", "where", "case", "when", "then"),
    *("end", "::", "int", "lower", "exists", "set", "attach", "copy", "pragma", "$1", "[", "]", "{", "}", "lambda"),
]


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join))
def test_no_text_does_anything_but_choose_or_be_refused(opened: Dataset, text: str) -> None:
    try:
        view = opened.where(text)
    except UsageError:
        return
    assert {s.key for s in view} <= set(opened.keys)


def test_duckdb_itself_can_reach_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("a\n1\n")
    connection = conditions.connect()
    import duckdb

    for statement in (
        f"SELECT * FROM read_csv('{tmp_path}/secret.csv')",
        f"COPY (SELECT 1) TO '{tmp_path}/out.csv'",
        f"ATTACH '{tmp_path}/x.db'",
        "SET enable_external_access = true",
        "SET memory_limit = '100GB'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SELECT * FROM tmp_path",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(statement).fetchall()
    connection.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["secret.csv"]


def test_views_of_views_are_narrower_and_name_all_their_conditions(opened: Dataset) -> None:
    both = opened.where("duration > 5").where("height > 700")
    assert list(both.keys) == list(opened.where("duration > 5 and height > 700").keys)
    assert both.lineage.where == ("duration > 5", "height > 700")
    assert both.lineage.sources[0].digest == opened.digest
    assert json.loads(json.dumps(both.fingerprint))["where"] == ["duration > 5", "height > 700"]
    assert repr(both) == (
        f"Dataset({opened.url!r}, version=1, where='duration > 5 and height > 700', samples={len(both)})"
    )


def test_a_views_digest_is_that_of_its_version_its_conditions_and_its_samples(opened: Dataset, tmp_path: Path) -> None:
    digest = opened.where("duration > 5").digest
    assert digest == opened.where("duration > 5").digest
    assert len({digest, opened.digest, opened.where("duration > 6").digest, opened.where("duration > 5.0").digest}) == 4
    other = open_store(tmp_path)
    make(other, range(100))
    assert Dataset(other).where("duration > 5").digest != digest  # another document


def test_a_view_may_be_empty_and_keys_outside_it_are_not_found(opened: Dataset) -> None:
    nothing = opened.where("duration < 0")
    assert (len(nothing), list(nothing), nothing.total_bytes) == (0, [], 0)
    view = opened.where("key = 'k00007'")
    assert view.find("k00007").id == 0
    with pytest.raises(NotFoundError):
        view.find("k00008")
    with pytest.raises(UsageError, match="no sample 1"):
        view.sample(1)


def test_fields_of_several_types_are_compared_as_text(tmp_path: Path) -> None:
    store, shard = open_store(tmp_path), "shards/a.tar"
    values = [1, "x", 2.5, None, True, "a/b~c"]
    rows = [sample(n, shard, n, fields={"it": value, "a/b~'": n}) for n, value in enumerate(values)]
    stored = part_writer.store_parts(store, rows, 0)
    shards = (Shard(key=shard, size=SHARD_BYTES, samples=len(rows)),)
    history.publish(store, new_document("s", shards, tuple(stored), version=1, parent=None, message=""))
    dataset = Dataset(store)
    assert [s.id for s in dataset if s.fields["it"] == "x"] == [1]
    assert list(dataset.where("it = 'x'").keys) == ["k00001"]
    assert list(dataset.where("it is null").keys) == ["k00003"]
    assert list(dataset.where("it = '2.5'").keys) == ["k00002"]
    assert list(dataset.where('"a/b~\'" = 4').keys) == ["k00004"]


def test_a_field_with_the_name_of_a_column_has_a_name_of_its_own_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log._logged.clear()
    store = open_store(tmp_path)
    rows = [sample(n, "shards/a.tar", n, fields={"width": n, "Height": n, "caption": "x"}) for n in range(4)]
    stored = part_writer.store_parts(store, rows, 0)
    shards = (Shard(key="shards/a.tar", size=SHARD_BYTES, samples=len(rows)),)
    history.publish(store, new_document("s", shards, tuple(stored), version=1, parent=None, message=""))
    dataset = Dataset(store)
    assert list(dataset.where("fields.width > 2").keys) == ["k00003"]
    assert list(dataset.where("fields.height > 1 and caption is not null or true").keys)
    assert caplog.messages == []
    widths = [s.video.width for s in dataset if s.video]
    for _ in range(2):
        view = dataset.where(f"width >= {min(widths)} and HEIGHT > 0")
        assert [s.key for s in view] == [s.key for s in dataset if s.video]
    assert caplog.messages == [
        "a condition names 'height', which is the index's column; the field of the samples' JSON is 'fields.Height'",
        "a condition names 'width', which is the index's column; the field of the samples' JSON is 'fields.width'",
    ]


@pytest.mark.s3
def test_a_view_of_a_dataset_in_a_bucket(s3_url: str) -> None:
    with open_store(s3_url) as store:
        make(store, range(60))
        with Dataset(s3_url).where("duration >= 10 and has_video") as view:
            expected = [s.key for s in Dataset(store) if s.duration >= 10 and s.video]
            assert list(view.keys) == expected
            saved = view.save("long ones")
        with Dataset(s3_url, saved.version) as again:
            assert list(again.keys) == expected


def test_few_row_groups_are_held_and_the_answers_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CACHE_BYTES", 1)
    monkeypatch.setattr(tables, "READERS", 1)
    store = open_store(tmp_path)
    rows = make(store, range(60), per_part=7)
    dataset = without_pages(Dataset(store))
    assert dataset.samples([59, 0, 31, 59]) == [rows[59], rows[0], rows[31], rows[59]]
    assert len(dataset._tables._tables) == len(dataset._tables._holding) == 1
    assert dataset._tables._reader.cache_info().currsize == 1


def without_pages(dataset: Dataset) -> open_index.OpenIndex:
    """The index as of parts that were written before there were pages."""
    parts = tuple(replace(part, pages=None) for part in dataset.document.index)
    return open_index.OpenIndex(dataset.store, replace(dataset.document, index=parts))


def test_row_groups_that_are_wanted_at_once_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "GROUP_ROWS", 10)
    store = open_store(tmp_path)
    rows = make(store, range(200), per_part=150)  # 15 row groups, and 5
    dataset, asked = without_pages(Dataset.open_lazy(tmp_path)), list[object]()
    original = tables.PartReader.read
    monkeypatch.setattr(
        tables.PartReader,
        "read",
        lambda self, columns=None, groups=None: asked.append(groups) or original(self, columns, groups),
    )
    assert dataset.samples([41, 12, 199, 48, 0]) == [rows[n] for n in (41, 12, 199, 48, 0)]
    assert asked == [(0, 1, 4), (4,)]
    assert dataset.samples([140, 11, 77]) == [rows[n] for n in (140, 11, 77)]
    assert [files.members[0].offset for files in dataset.files([11, 141])] == [
        rows[n].members[0].offset for n in (11, 141)
    ]
    assert asked[2:] == [(7, 14)]
    everything = [row for row in range(200) if row % 3]
    assert dataset.samples(everything) == [rows[n] for n in everything]
    assert sorted(map(str, asked[3:])) == ["(0, 1, 2, 3)", "(12, 13)", "(2, 3, 5, 6, 8, 9, 10, 11)"]
    assert dataset._tables.group(0, 4)["key"].to_pylist() == [one.key for one in rows[40:50]]
    dataset.check()


def test_a_condition_reads_only_the_columns_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    make(store, range(50))
    dataset, asked = Dataset(store), list[object]()
    original = open_index.OpenIndex.tables
    monkeypatch.setattr(
        open_index.OpenIndex, "tables", lambda self, columns=None: asked.append(columns) or original(self, columns)
    )
    assert len(dataset.where("duration > 3 and fps > 1"))
    assert asked == [["duration", "fps_denominator", "fps_numerator", "bytes"]]


def test_a_loader_reads_a_view(tmp_path: Path, make_clip: MakeClip) -> None:
    video_loader = pytest.importorskip("headrace.loaders").VideoLoader
    from headrace.dataio import pack
    from headrace.loaders import Clip

    for n in range(4):
        make_clip(tmp_path / "clips" / f"c{n}.mp4", frames=6 + 4 * n)
    with pack(tmp_path / "clips", tmp_path / "ds") as dataset:
        view = dataset.where("frames >= 10")
        with video_loader(view, batch_size=3, clip=Clip(frames=4), sidecar=None) as loader:
            keys = [key for batch in loader for key in batch["key"]]
            assert view.digest[:10] in json.dumps(loader.state_dict())
        assert sorted(keys) == ["c1", "c2", "c3"]


def test_a_column_that_does_not_exist_is_named(opened: Dataset) -> None:
    with pytest.raises(UsageError, match="no column 'bogus'"):
        opened.columns(["bogus"])
    with pytest.raises(UsageError, match=r"no column 'heigth' \(did you mean height\?\)"):
        opened.columns(["heigth"])


def test_a_store_is_only_read_by_a_view(opened: Dataset) -> None:
    before = sorted(info.key for info in opened.store.list())
    opened.where("duration > 3")
    assert sorted(info.key for info in opened.store.list()) == before


def test_a_field_that_is_called_as_the_column_of_row_numbers_is_a_field(tmp_path: Path) -> None:
    folder = forge.good(tmp_path / "good")
    forge.change_document(folder, lambda found: found["index"][0]["fields"].update({"__row": "integer"}))
    dataset = Dataset(folder)
    with pytest.raises(UsageError, match="names the column '__row'"):
        dataset.where("__row is null")
    assert len(dataset.where('fields."__row" is null')) == 2
    assert len(dataset.where('fields."__row" = 3 or w = 3')) == 1
