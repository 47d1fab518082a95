"""Parquet files that hold their media: every row is a sample, or is named with the reason why it is none."""

from __future__ import annotations

import decimal
import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio import Columns, Dataset, Recipe, append, index, pack
from headrace.dataio.core.errors import ConflictError, NotFoundError, TransientError, UsageError
from headrace.dataio.shards.ingest import pack as packing
from headrace.dataio.shards.ingest import plan, row_pool, source_stores, tables
from headrace.dataio.shards.ingest.embedded import embedded_columns
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.store.open import open_store
from headrace.loaders import FileLoader
from tests.support import audio_corpus, headrace_command
from tests.support.embedded_media import EMBEDDED, cell, write_embedded
from tests.support.pictures import picture
from tests.support.written_media import MakeWav


def pictures(count: int) -> list[dict[str, Any]]:
    """Different pictures, as cells."""
    kinds = ["jpg", "png", "webp"]
    return [
        {"bytes": picture(kinds[i % 3], 32 + 2 * (i // 3), 24), "path": f"in/{i}.{kinds[i % 3]}"} for i in range(count)
    ]


def skipped(dataset: Dataset) -> dict[str, str]:
    assert dataset.report is not None
    return {item.path: item.reason for item in dataset.report.skipped}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "snappy", "use_dictionary": True},
        {"compression": "zstd", "data_page_size": 64, "write_batch_size": 1, "data_page_version": "2.0"},
        {"row_group_size": 2, "write_page_index": True},
    ],
)
def test_every_row_is_a_sample_with_its_bytes_caption_and_fields(tmp_path: Path, options: dict[str, Any]) -> None:
    cells = pictures(5)
    others: dict[str, Any] = {
        "caption": ["one", None, "", "four", "five"],
        "label": list(range(5)),
        "tags": [["a"], [], None, [], []],
    }
    table = write_embedded(tmp_path / "train.parquet", {"image": cells}, others, **options)
    with pack(table, tmp_path / "ds", workers=1) as dataset:
        assert [sample.key for sample in dataset] == [f"train/{i:08}" for i in range(5)]
        for i, sample in enumerate(dataset):
            assert dataset.read(sample, ("jpg", "png", "webp")[i % 3]) == cells[i]["bytes"]
            assert json.loads(dataset.read(sample, "json")) == {"label": i, "tags": others["tags"][i]}
            assert dict(sample.fields) == {"label": i} | ({"tags": None} if i == 2 else {})
        assert [sample.text for sample in dataset] == ["one", None, None, "four", "five"]
        assert skipped(dataset) == {}


def test_real_videos_and_sounds_are_packed_as_if_from_files(media: Path, make_wav: MakeWav, tmp_path: Path) -> None:
    flac = tmp_path / "t.flac"
    flac.write_bytes(audio_corpus.made(audio_corpus.Kind("t", "flac", "flac", "flac", seconds=1)))
    sounds = [make_wav(tmp_path / "s.wav"), flac, media / "nasa_speech_44100.mp3"]
    videos = [media / name for name in ("h265.mp4", "testsrc2_vp9.webm", "rotated_90.mov", "corrupted.mp4")]
    write_embedded(tmp_path / "a.parquet", {"audio": [cell(path) for path in sounds]})
    write_embedded(tmp_path / "v.parquet", {"video": [cell(path) for path in videos]}, row_group_size=1)
    for n, path in enumerate([*sounds, *videos]):
        target = tmp_path / "files" / ("a" if n < 3 else "v") / f"{n if n < 3 else n - 3:08}{path.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    with (
        pack([tmp_path / "a.parquet", tmp_path / "v.parquet"], tmp_path / "ds") as dataset,
        pack(tmp_path / "files", tmp_path / "same") as same,
    ):
        assert dataset.document.shards == same.document.shards
        assert dataset.document.index == same.document.index
        assert len(dataset) == 7


def test_further_columns_are_members_and_one_may_be_named(tmp_path: Path) -> None:
    cells = pictures(2)
    depth = [{"bytes": picture("png", 16, 16), "path": None}, None]
    mask = [b"\x93NUMPY", None]
    table = write_embedded(tmp_path / "t.parquet", {"image": cells, "Depth Map": depth}, {"mask": mask, "n": [1, 2]})
    with pytest.raises(UsageError, match=r"t\.parquet: the column 'mask' holds bytes, which no field can"):
        pack(table, tmp_path / "ds")
    with pack(table, tmp_path / "ds", columns=Columns(bytes=("image", "mask"))) as dataset:
        first, second = dataset
        assert [member.ext for member in first.members] == ["depth_map.png", "jpg", "json", "mask.bin"]
        assert [member.ext for member in second.members] == ["json", "png"]
        assert dataset.read(first, "mask.bin") == mask[0]
        assert first.video is not None
        assert first.video.ext == "jpg"
    done = headrace_command.run("pack", "--bytes-column", "Depth Map", "--bytes-column", "mask", table, tmp_path / "d2")
    assert done.returncode == 1
    assert b"row 1: its 'Depth Map' is null, so it has no medium" in done.stdout
    with Dataset(tmp_path / "d2") as dataset:
        assert [member.ext for member in next(iter(dataset)).members] == ["image.jpg", "json", "mask.bin", "png"]


def test_a_plain_binary_column_is_media_if_it_is_named(tmp_path: Path) -> None:
    cells = [one["bytes"] for one in pictures(3)]
    table = pa.table({"image": pa.array(cells, pa.large_binary()), "path": ["a.jpg", "b.png", "c.webp"]})
    pq.write_table(table, tmp_path / "t.parquet")
    with pack(tmp_path / "t.parquet", tmp_path / "ds", columns=Columns(bytes=("image",))) as dataset:
        assert [sample.fields["path"] for sample in dataset] == ["a.jpg", "b.png", "c.webp"]
        assert len(dataset) == 3


def test_a_table_with_paths_and_media_is_refused_until_the_user_decides(make_wav: MakeWav, tmp_path: Path) -> None:
    wav = make_wav(tmp_path / "a.wav")
    paths = {"path": ["a.wav"], "sentence": ["hello"]}  # as Common Voice has them
    table = write_embedded(tmp_path / "t.parquet", {"audio": [cell(wav)]}, paths)
    with pytest.raises(UsageError, match="it has paths in 'path' and media in 'audio'") as caught:
        gather([table])
    assert "--bytes-column audio" in (caught.value.hint or "")
    with pack(table, tmp_path / "ds", columns=Columns(bytes=("audio",)), text_field="sentence") as dataset:
        assert [(sample.key, sample.text) for sample in dataset] == [("t/00000000", "hello")]
    write_embedded(tmp_path / "m.parquet", {"audio": [{"bytes": None, "path": "a.wav"}]}, paths)
    with pack(tmp_path / "m.parquet", tmp_path / "d2") as dataset:
        assert list(dataset.keys) == ["a"]


def test_keys_come_from_their_column_and_the_order_from_the_file(tmp_path: Path) -> None:
    write_embedded(
        tmp_path / "in/b.parquet", {"image": pictures(4)}, {"key": ["z", None, "a/b.c", "y"]}, row_group_size=3
    )
    write_embedded(tmp_path / "in/x/a.parquet", {"image": pictures(2)}, {"key": [7, 6]})
    with pack(f"{tmp_path}/in/**/*.parquet", tmp_path / "ds") as dataset:
        assert [sample.key for sample in dataset] == ["z", "b/00000001", "a/b_c", "y", "7", "6"]
    with pytest.raises(UsageError, match=r"there is no column 'id'"):
        gather([tmp_path / "in/b.parquet"], Columns(key="id"))
    write_embedded(tmp_path / "c.parquet", {"image": pictures(1)}, {"key": ["z"]})
    with pytest.raises(UsageError, match=r"b\.parquet, row 0 and .*c\.parquet, row 0 would both be the sample 'z'"):
        gather([tmp_path / "in/b.parquet", tmp_path / "c.parquet"])
    with pytest.raises(UsageError, match=r"row 0: '/a' cannot be a key"):
        gather([write_embedded(tmp_path / "d.parquet", {"image": pictures(1)}, {"key": ["/a"]})])
    with pytest.raises(ConflictError, match="already has the sample 'z'"):
        append(tmp_path / "c.parquet", tmp_path / "ds")


def test_rows_that_are_no_samples_are_skipped_with_the_reason(tmp_path: Path) -> None:
    jpg, png = picture("jpg"), picture("png")
    cells = [
        {"bytes": jpg, "path": "a.jpg"},
        {"bytes": png, "path": "a.jpg"},
        None,
        {"bytes": None, "path": "a.jpg"},
        {"bytes": b"", "path": "a.jpg"},
        {"bytes": b"plain words", "path": None},
        {"bytes": jpg[:-200], "path": "a.jpg"},
        {"bytes": b"GIF89a" + bytes(99), "path": None},
        {"bytes": png, "path": None},
    ]
    table = write_embedded(tmp_path / "t.parquet", {"image": cells}, row_group_size=4)
    with pack(table, tmp_path / "ds", workers=1) as dataset:
        assert list(dataset.keys) == ["t/00000000", "t/00000008"]
        reasons = {int(path.rpartition(" ")[2]): reason for path, reason in skipped(dataset).items()}
    expected = {
        1: "its 'image': its name ends in .jpg, and its bytes are those of a .png file; correct the table",
        2: "its 'image' is null, so it has no medium",
        3: "its 'image' has a path and no bytes: embed the files",
        4: "its 'image' is empty",
        5: "its 'image': its bytes have no known format",
        6: "truncated: the JPEG has no end",
        7: "GIF is not read as it is",
    }
    assert {row: reason[: len(expected[row])] for row, reason in reasons.items()} == expected


def test_captions_that_are_no_text_are_fields_and_values_that_json_lacks_skip_the_row(tmp_path: Path) -> None:
    table = write_embedded(tmp_path / "t.parquet", {"image": pictures(1)}, {"caption": [["first", "second"]]})
    with pack(table, tmp_path / "ds") as dataset:
        (sample,) = dataset
        assert sample.text == "first"
    table = write_embedded(tmp_path / "u.parquet", {"image": pictures(1)}, {"price": [decimal.Decimal("1.5")]})
    with pytest.raises(UsageError, match="row 0: Object of type Decimal is not JSON serializable"):
        pack(table, tmp_path / "d2")


def test_schemas_that_cannot_become_samples_are_refused(tmp_path: Path) -> None:
    lists = pa.table({"images": pa.array([[{"bytes": b"x", "path": "a.jpg"}]], pa.list_(EMBEDDED))})
    pq.write_table(lists, tmp_path / "l.parquet")
    with pytest.raises(UsageError, match="'images' holds lists of media, and a sample has one"):
        gather([tmp_path / "l.parquet"])
    with pytest.raises(UsageError, match="there is no column 'picture'"):
        gather([tmp_path / "l.parquet"], Columns(bytes=("picture",)))
    with pytest.raises(UsageError, match="'images' holds no bytes"):
        gather([tmp_path / "l.parquet"], Columns(bytes=("images",)))
    both = write_embedded(tmp_path / "m.parquet", dict.fromkeys(("x", "a b", "a_b"), pictures(1)))
    with pytest.raises(UsageError, match="two columns would be the same member"):
        gather([both])
    pq.write_table(pa.table({"caption": ["no media"]}), tmp_path / "n.parquet")
    with pytest.raises(UsageError, match="there is no column 'path'"):
        gather([tmp_path / "n.parquet"])
    with pytest.raises(UsageError, match=r"z\.parquet: it has no rows"):
        pack(write_embedded(tmp_path / "z.parquet", {"image": []}), tmp_path / "ds")
    with pytest.raises(UsageError, match="there is nothing to pack") as caught:
        (tmp_path / "folder").mkdir()
        shutil.copy(both, tmp_path / "folder")
        pack(tmp_path / "folder", tmp_path / "ds")
    assert "folder/*.parquet" in (caught.value.hint or "")


def test_index_says_to_pack_tables_with_media(make_wav: MakeWav, tmp_path: Path) -> None:
    table, both = tmp_path / "t.parquet", tmp_path / "both.parquet"
    write_embedded(table, {"image": pictures(2)}, {"key": ["a", "b"]})
    for follow in (False, True):
        with pytest.raises(UsageError, match=r"t\.parquet: it holds media itself, in 'image', .* in place") as caught:
            index(f"{tmp_path}/*.parquet", tmp_path / "ds", follow=follow)
        assert caught.value.hint == f"pack it: `headrace pack {table} DST`"
    done = headrace_command.run("index", table, tmp_path / "ds")
    assert done.returncode == 2
    assert b"pack it: `headrace pack" in done.stderr
    done = headrace_command.run("index", table, tmp_path / "ds", "--bytes-column", "image")
    assert done.returncode == 2
    assert b"pack them: `headrace pack --bytes-column NAME`" in done.stderr
    make_wav(tmp_path / "a.wav")
    write_embedded(both, {"audio": [cell(tmp_path / "a.wav")]}, {"path": ["a.wav"]})
    pq.write_table(pa.table({"jpg": [picture("jpg")]}), tmp_path / "plain.parquet")
    for path, column in ((both, "audio"), (tmp_path / "plain.parquet", "jpg")):
        with pytest.raises(UsageError, match="it holds media itself") as caught:
            index(path, tmp_path / "ds")
        assert caught.value.hint == f"pack it: `headrace pack {path} DST --bytes-column {column}`"
    with pytest.raises(UsageError, match=r"none of 1 file is media") as caught:
        (tmp_path / "folder").mkdir()
        shutil.copy(table, tmp_path / "folder")
        index(tmp_path / "folder", tmp_path / "ds")
    assert "`headrace pack` takes tables with embedded media" in (caught.value.hint or "")
    write_embedded(both, {"audio": [{"bytes": None, "path": "a.wav"}]}, {"path": ["a.wav"]})
    with index(both, tmp_path / "ds") as dataset:
        assert list(dataset.keys) == ["a"]


def test_further_files_are_for_manifests(make_wav: MakeWav, tmp_path: Path) -> None:
    table, columns = tmp_path / "t.parquet", Columns(files={"left.wav": "left"})
    make_wav(tmp_path / "a.wav")
    write_embedded(table, {"audio": [{"bytes": None, "path": "b.wav"}]}, {"left": ["a.wav"], "key": ["k"]})
    (group,) = gather([table], columns).groups
    assert (group.key, group.row, group.files) == ("k", None, (("left.wav", str(tmp_path / "a.wav")),))
    write_embedded(table, {"audio": [cell(tmp_path / "a.wav")]}, {"left": ["a.wav"]})
    with pytest.raises(UsageError, match="it has paths in 'left' and media in 'audio'"):
        gather([table], columns)
    write_embedded(table, {"audio": [cell(tmp_path / "a.wav")]})
    with pytest.raises(UsageError, match="it holds its media itself, so its samples have no further files"):
        gather([table], columns)


def test_embedded_columns_names_them(tmp_path: Path) -> None:
    table = write_embedded(
        tmp_path / "t.parquet", {"image": pictures(1), "depth": pictures(1)}, {"n": [1], "b": [b"x"]}
    )
    assert embedded_columns(table) == embedded_columns(str(table)) == ("image", "depth")
    with table.open("rb") as file, pq.ParquetFile(table) as opened:
        assert embedded_columns(file) == embedded_columns(opened) == ("image", "depth")
    pq.write_table(pa.table({"path": ["a"]}), tmp_path / "m.parquet")
    assert embedded_columns(tmp_path / "m.parquet") == ()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(UsageError, match="not a readable Parquet file"):
        embedded_columns(tmp_path / "bad.parquet")
    with pytest.raises(NotFoundError):
        embedded_columns(tmp_path / "none.parquet")


# --- damage and hostile files


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"\xff\xff\xff\x7fPAR1", "its footer is larger than 64.0 MiB"),
        (b"\x00\x00\x10\x00PAR1", "its footer is longer than the file"),
        (b"\x10\x00\x00\x00PAR1", ""),
        (b"\x10\x00\x00\x00PARE", "its footer is encrypted"),
        (b"\x10\x00\x00\x00nope", "it does not end in PAR1"),
    ],
)
def test_a_footer_that_lies_is_refused(tmp_path: Path, tail: bytes, reason: str) -> None:
    table = write_embedded(tmp_path / "t.parquet", {"image": pictures(1)})
    table.write_bytes(table.read_bytes()[:-8] + tail)
    with pytest.raises(UsageError, match=f"not a readable Parquet file: {reason}"):
        gather([table])
    for size in (0, 3, 8, 11):
        table.write_bytes(b"PAR1"[: size % 5] + bytes(max(0, size - 4)))
        with pytest.raises(UsageError, match="not a readable Parquet file"):
            gather([table])


def test_a_footer_that_aborts_the_process_that_parses_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = (
        "import os\n"
        "from headrace.dataio.shards.ingest import row_reader\n"
        "row_reader.answer = lambda task: os.abort()\n"
        "row_reader.serve_rows()\n"
    )
    monkeypatch.setattr(tables.Tables.__init__, "__defaults__", ((sys.executable, "-c", stub),))
    with pytest.raises(UsageError, match=r"t\.parquet: not a readable Parquet file: .*SIGABRT"):
        gather([make_table(tmp_path)])


def test_a_footer_with_more_rows_than_the_file_can_hold_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": pa.nulls(200_000, EMBEDDED)}), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    with pytest.raises(UsageError, match="its footer claims 200000 rows"):
        gather([tmp_path / "t.parquet"])


def test_a_damaged_row_group_costs_its_rows_and_no_others(tmp_path: Path) -> None:
    table = write_embedded(tmp_path / "t.parquet", {"image": pictures(6)}, row_group_size=2, compression="zstd")
    middle = pq.ParquetFile(table).metadata.row_group(1).column(0)
    data = bytearray(table.read_bytes())
    start = middle.data_page_offset
    data[start : start + middle.total_compressed_size] = bytes(middle.total_compressed_size)
    table.write_bytes(data)
    with pack(table, tmp_path / "ds", workers=2) as dataset:
        assert list(dataset.keys) == [f"t/{i:08}" for i in (0, 1, 4, 5)]
        reasons = skipped(dataset)
        assert list(reasons) == [f"{table}, row 2", f"{table}, row 3"]
        assert all("its row group is damaged" in reason for reason in reasons.values())


# --- kills, stores, loaders


def make_table(tmp_path: Path) -> Path:
    cells = pictures(30)
    return write_embedded(
        tmp_path / "t.parquet", {"image": cells}, {"caption": [f"c{i}" for i in range(30)]}, row_group_size=7
    )


@pytest.mark.parametrize("point", ["pack.shard-stored", "units.recorded#2", "pack.index-stored"])
def test_a_killed_pack_goes_on_and_ends_equal(tmp_path: Path, store_url: str, point: str) -> None:
    table = make_table(tmp_path)
    source = str(table)
    if store_url.startswith("s3://"):
        with open_store(f"{store_url}-in") as store:
            store.put("t.parquet", table.read_bytes())
        source = f"{store_url}-in/t.parquet"
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    done = headrace_command.run("pack", "--shard-size", "20KiB", source, store_url, **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(NotFoundError, match="no dataset"):
        Dataset(store_url)
    with (
        pack(source, store_url, shard_bytes=20 << 10) as again,
        pack(table, tmp_path / "fresh", shard_bytes=20 << 10, workers=1) as fresh,
    ):
        assert len(fresh.document.shards) > 3
        assert again.document.shards == fresh.document.shards
        assert again.document.index == fresh.document.index
        assert again.report is not None
        assert again.report.resumed >= {"units.recorded#2": 2, "pack.index-stored": 3}.get(point, 0)


@pytest.mark.s3
def test_tables_in_a_bucket_become_the_shards_of_local_ones(
    tmp_path: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_stores, "_COPY_BYTES", 1000)
    table = make_table(tmp_path)
    keyed = write_embedded(tmp_path / "k.parquet", {"image": pictures(5)}, {"key": list("edcba")}, row_group_size=2)
    with open_store(s3_url) as store:
        store.put("in/t.parquet", table.read_bytes())
        store.put("in/k.parquet", keyed.read_bytes())
    with (
        pack([table, keyed], tmp_path / "here") as here,
        pack(f"{s3_url}/in/*.parquet", f"{s3_url}/ds") as there,
    ):
        assert there.document.shards == here.document.shards
        assert [sample.key for sample in there][:5] == list("edcba")
        assert len(there) == 35


def test_a_table_that_changes_meanwhile_ends_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(tmp_path)

    def gather_then_write(*arguments: Any) -> Any:
        found = gather(*arguments)
        table.write_bytes(table.read_bytes() + b"x")
        return found

    monkeypatch.setattr(packing, "gather", gather_then_write)
    with pytest.raises(TransientError, match=r"t\.parquet changed while it was being packed"):
        pack(table, tmp_path / "ds")


def test_a_reading_process_that_dies_costs_its_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = (
        "import os\n"
        "from headrace.dataio.shards.ingest import row_reader\n"
        "real = row_reader._files\n"
        "place = lambda task: (task.row.group.number, task.row.row)\n"
        "row_reader._files = lambda row, task: os._exit(3) if place(task) == (0, 1) else real(row, task)\n"
        "row_reader.serve_rows()\n"
    )
    monkeypatch.setattr(row_pool.RowPool.__init__, "__defaults__", ((sys.executable, "-c", stub),))
    table = write_embedded(tmp_path / "t.parquet", {"image": pictures(5)}, row_group_size=3)
    with pack(table, tmp_path / "ds") as dataset:
        assert list(dataset.keys) == ["t/00000000", "t/00000003", "t/00000004"]
        assert all("its row group: reading it crashed" in reason for reason in skipped(dataset).values())


def test_a_loader_reads_the_result(tmp_path: Path) -> None:
    cells = [{"bytes": picture("jpg", 32 + i, 24), "path": None} for i in range(6)]
    table = write_embedded(tmp_path / "t.parquet", {"image": cells}, {"label": list(range(6))})
    pack(table, tmp_path / "ds").close()
    with FileLoader(str(tmp_path / "ds"), 2, files=["jpg", "json"], sidecar=None) as loader:
        batches = list(loader)
    found = dict[int, bytes]()
    for batch in batches:
        files = [bytes(file.numpy()) for file in batch["bytes"].split(batch["sizes"].flatten().tolist())]
        found |= {json.loads(fields)["label"]: image for image, fields in zip(files[::2], files[1::2], strict=True)}
    assert found == {i: one["bytes"] for i, one in enumerate(cells)}


def test_rows_can_be_sent_to_other_machines(tmp_path: Path) -> None:
    (unit,) = plan.units(gather([make_table(tmp_path)]).groups, plan.Settings(shard_bytes=1 << 30))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(unit), type=plan.PackUnit) == unit


def test_a_recipe_changes_embedded_videos(media: Path, tmp_path: Path) -> None:
    table = write_embedded(tmp_path / "t.parquet", {"video": [cell(media / "h265.mp4")]}, {"n": [1]})
    with pack(table, tmp_path / "ds", recipe=Recipe(container="mkv"), captions={"t/00000000": "mine"}) as dataset:
        (sample,) = dataset
        assert [member.ext for member in sample.members] == ["json", "mkv", "txt"]
        assert sample.text == "mine"
