"""Manifests and tars as sources: every row and sample counted for, every mistake named with its row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.dataio import Columns, pack
from headrace.dataio.core.errors import NotFoundError, UsageError
from headrace.dataio.shards.ingest.manifests import rows
from tests.support.written_media import MakeWav


@pytest.fixture
def sounds(tmp_path: Path, make_wav: MakeWav) -> Path:
    for name in ("a", "b", "c"):
        make_wav(tmp_path / "media" / f"{name}.wav", seconds=0.02)
    return tmp_path / "media"


ROWS: list[dict[str, Any]] = [
    {"path": "media/a.wav", "caption": "one", "key": "x/first", "label": 3, "good": True, "note": None},
    {"path": "media/b.wav", "caption": None, "key": None, "label": -1, "good": False, "note": "tail 007"},
]


def write(path: Path, table: Sequence[Mapping[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        cells = [[json.dumps(v) if isinstance(v, bool | int) else v or "" for v in row.values()] for row in table]
        mark = "\t" if path.suffix == ".tsv" else ","
        path.write_text("\n".join(mark.join(map(str, line)) for line in [list(table[0]), *cells]) + "\n")
    return path


@pytest.mark.parametrize("name", ["m.csv", "m.tsv", "m.jsonl", "m.parquet"])
def test_every_format_gives_paths_keys_captions_and_fields(sounds: Path, tmp_path: Path, name: str) -> None:
    (sounds / "b.txt").write_text("beside it")
    with pack(write(tmp_path / name, ROWS), tmp_path / "ds", workers=1) as dataset:
        assert list(dataset.keys) == ["media/b", "x/first"]
        second, first = list(dataset)
        assert (first.text, second.text) == ("one", "beside it")
        assert dict(first.fields) == {"label": 3, "good": True, "note": None}
        assert dict(second.fields) == {"label": -1, "good": False, "note": "tail 007"}
        assert [m.ext for m in first.members] == ["json", "txt", "wav"]
        assert dataset.read(first, "wav") == (sounds / "a.wav").read_bytes()


def test_a_file_that_lies_elsewhere_is_keyed_by_its_whole_path(sounds: Path, tmp_path: Path) -> None:
    (tmp_path / "lists").mkdir()
    table = [{"path": "../media/a.wav"}, {"path": str(sounds / "b.wav")}]
    with pack(write(tmp_path / "lists" / "m.csv", table), tmp_path / "ds", workers=1) as dataset:
        folder = "/".join(part.replace(".", "_") for part in sounds.parts[1:])
        assert list(dataset.keys) == [f"{folder}/a", f"{folder}/b"]


def test_columns_can_have_other_names(sounds: Path, tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.jsonl", [{"file": "media/a.wav", "said": "hello", "id": 7}])
    with pack(manifest, tmp_path / "ds", columns=Columns("file", "id", "said"), workers=1) as dataset:
        assert [(s.key, s.text) for s in dataset] == [("7", "hello")]


def test_a_row_whose_file_is_missing_is_skipped_and_named(sounds: Path, tmp_path: Path) -> None:
    manifest = write(tmp_path / "m.csv", [{"path": "media/a.wav"}, {"path": "media/zzz.wav"}])
    with pack(manifest, tmp_path / "ds", workers=1) as dataset:
        assert dataset.report is not None
        (skipped,) = dataset.report.skipped
    assert "m.csv, line 3" in skipped.path
    assert "No such file" in skipped.reason


def test_fields_are_added_to_those_of_the_json_beside_the_file(sounds: Path, tmp_path: Path) -> None:
    (sounds / "a.json").write_text('{"label": 1, "kept": [1]}')
    manifest = write(tmp_path / "m.jsonl", [{"path": "media/a.wav", "label": 2}])
    with pack(manifest, tmp_path / "ds", workers=1) as dataset:
        (sample,) = dataset
        assert dict(sample.fields) == {"label": 2}
        assert json.loads(dataset.read(sample, "json")) == {"label": 2, "kept": [1]}


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("m.csv", "file,caption\na.wav,x\n", r"m\.csv, line 2: there is no column 'path'"),
        ("m.csv", "path,caption\na.wav\n", r"m\.csv, line 2: 1 cells in a table of 2 columns"),
        ("m.csv", "path,path\na.wav,b.wav\n", "its first line must name the columns, each once"),
        ("m.csv", "", "its first line must name the columns"),
        ("m.csv", "path\nmemory:///a.wav\n", "line 2: 'memory:///' names no bucket"),
        ("m.csv", "path\na.txt\n", r"line 2: .*a\.txt is not a media file"),
        ("m.jsonl", '{"path": "a.wav"}\n{"path": 3}\n', "line 2: the column 'path' must hold a path, not 3"),
        ("m.jsonl", "\n[1]\n", "line 2: a row must be a JSON object"),
        ("m.jsonl", '{"path": "a.wav", "x": NaN}\n', "line 1: not JSON: NaN"),
        ("m.jsonl", '{"path": "a.wav", "caption": 3}\n', "line 1: the column 'caption' must hold text"),
        ("m.parquet", "no", "not a readable Parquet file"),
    ],
)
def test_a_mistake_in_a_manifest_is_named_with_its_row(
    sounds: Path, tmp_path: Path, name: str, text: str, reason: str
) -> None:
    (sounds / name).write_text(text)
    with pytest.raises(UsageError, match=reason):
        pack(sounds / name, tmp_path / "ds", workers=1)


@pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.jsonl"])
def test_a_line_without_an_end_is_not_read_whole(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("path,\t" * (1 << 19))
    with pytest.raises(UsageError, match=f"{name}, line 1: longer than 1.0 MiB"):
        list(rows(tmp_path / name, Columns()))


def test_two_rows_of_one_key_are_refused(sounds: Path, tmp_path: Path) -> None:
    table = [{"path": "media/a.wav", "key": "k"}, {"path": "media/b.wav", "key": "k"}]
    with pytest.raises(UsageError, match="would both be the sample 'k'"):
        pack(write(tmp_path / "m.csv", table), tmp_path / "ds")


def test_a_manifest_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        list(rows(tmp_path / "m.csv"))


def test_shards_are_packed_again_with_equal_members(sounds: Path, tmp_path: Path) -> None:
    (sounds / "a.txt").write_text("words")
    (sounds / "a.seg.png").write_bytes(b"not looked at")
    with pack(sounds, tmp_path / "one", workers=1) as one:
        shards = tmp_path / "one" / "shards"
        with pack(shards, tmp_path / "two", workers=1) as two:
            assert two.document.shards == one.document.shards
            assert two.document.index == one.document.index
            assert len(two) == 3


def test_a_damaged_tar_and_samples_without_media_are_skipped(sounds: Path, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "good.tar", "w") as file:
        file.add(sounds / "a.wav", "k.wav")
        file.add(sounds / "a.wav", "other.bin")
    (tmp_path / "bad.tar").write_bytes((tmp_path / "good.tar").read_bytes()[:700])
    sources = [tmp_path / "good.tar", tmp_path / "bad.tar"]
    with pack(sources, tmp_path / "ds", workers=1) as dataset:
        assert list(dataset.keys) == ["k"]
        assert dataset.report is not None
        reasons = [item.reason for item in dataset.report.skipped]
    assert "truncated" in reasons[0]
    assert reasons[1].startswith("it has no media file")
