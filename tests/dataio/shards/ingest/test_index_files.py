"""Media files are indexed where they lie: their samples, groups, mounts, manifests, and what reads such datasets."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Columns, Dataset, index, pack, verify
from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    CorruptionError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.shards import export
from headrace.dataio.shards.ingest import file_units
from headrace.dataio.shards.tar import dali_index
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import MAX_MOUNTS, Mounts, url_of
from headrace.dataio.store.open import open_store
from tests.dataio.store.test_fsspec import _Ranged
from tests.support import headrace_command
from tests.support.written_media import write_clip, write_wav


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Two clips in two folders, one with JSON and text, and a sound."""
    folder = tmp_path / "clips"
    write_clip(folder / "a.mp4")
    (folder / "a.json").write_text('{"n": 7, "caption": "ignored"}')
    (folder / "a.txt").write_text("a moving square")
    write_clip(folder / "deep" / "b.mkv", frames=6)
    write_wav(folder / "deep" / "c.wav")
    (folder / "notes.md").write_text("no medium")
    return folder


def contents(dataset: Dataset) -> dict[str, bytes]:
    return {f"{s.key}.{m.ext}": dataset.read(s, m.ext) for s in dataset for m in s.members}


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".md"}


def test_files_are_read_where_they_lie(clips: Path, tmp_path: Path) -> None:
    with index(clips, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["a", "deep/b", "deep/c"]
        assert contents(dataset) == files_below(clips)
        first = dataset.find("a")
        assert (first.text, first.fields["n"]) == ("a moving square", 7)
        assert first.video is not None
        assert dataset.report is not None
        assert (dataset.report.files, dataset.report.samples, dataset.report.shards) == (5, 3, 1)
        assert dataset.report.ignored == (str(clips / "notes.md"),)
        assert [mount.url for mount in dataset.document.mounts] == ["joined:", f"file://{clips}"]
        assert dataset.document.lineage is None
    stored = {path.relative_to(tmp_path / "set").parts[0] for path in (tmp_path / "set").rglob("*") if path.is_file()}
    assert stored == {"dataset.json", "index", "joined", "versions"}
    with pytest.raises(UsageError, match="outside the dataset") as caught:
        Dataset(tmp_path / "set")
    assert "--trust-mounts" in caught.value.hint
    with Dataset(tmp_path / "set", trust_mounts=True) as again:
        assert contents(again) == files_below(clips)


def test_a_dataset_in_the_folder_of_its_files_needs_no_mount_and_moves_with_it(clips: Path, tmp_path: Path) -> None:
    with index(clips, clips, workers=1) as dataset:
        assert [mount.name for mount in dataset.document.mounts] == ["joined"]
        expected = contents(dataset)
    with index(clips, clips, follow=True, workers=1) as again:
        assert (again.version, again.report and again.report.samples) == (1, 0)
    shutil.move(clips, tmp_path / "moved")
    with Dataset(tmp_path / "moved") as moved:
        assert contents(moved) == expected


def test_files_on_an_object_store(clips: Path, s3_url: str, tmp_path: Path) -> None:
    with open_store(f"{s3_url}/media") as store:
        for name, data in files_below(clips).items():
            store.put(name, data)
    with index(f"{s3_url}/media/**/*.m*", f"{s3_url}/set", workers=1) as dataset:
        assert list(dataset.keys) == ["a", "deep/b"]
    with Dataset(f"{s3_url}/set") as dataset:  # the same endpoint: no trust is needed
        assert contents(dataset) == {n: d for n, d in files_below(clips).items() if n in ("a.mp4", "deep/b.mkv")}
        assert url_of(dataset.store, dataset.sample(1).shard, dataset.sample(1).members[0].offset).endswith(
            "/media/deep/b.mkv"
        )
    with index([f"{s3_url}/media", str(clips / "a.mp4")], tmp_path / "both", workers=1, group="folder") as dataset:
        assert len(dataset.document.mounts) == 3
        assert list(dataset.keys) == ["clips", "deep", "media"]


def test_units_are_joined_shards_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        write_wav(tmp_path / "wavs" / f"{number}.wav", seconds=0.1 + number / 10)
    monkeypatch.setattr(file_units, "UNIT_OBJECTS", 4)
    monkeypatch.setattr(file_units, "UNIT_BYTES", 9000)
    with index(tmp_path / "wavs", tmp_path / "set", workers=1) as dataset:
        assert [shard.samples for shard in dataset.document.shards] == [2, 1, 1, 1, 1, 1]
        assert [shard.key[len("mounts/joined/") :][:8] for shard in dataset.document.shards] == [
            f"{number:08}" for number in range(6)
        ]
        assert contents(dataset) == files_below(tmp_path / "wavs")


def test_names_group_by_their_first_dot(tmp_path: Path) -> None:
    for name in ("ep1.front.mp4", "ep1.left.MP4", "ep2.front.mp4"):
        write_clip(tmp_path / "eps" / name.lower()).rename(tmp_path / "eps" / name)
    (tmp_path / "eps" / "ep1.state.npy").write_bytes(b"state")
    for make in (index, pack):
        with make(tmp_path / "eps", tmp_path / make.__name__, group="dot", workers=1) as dataset:
            assert list(dataset.keys) == ["ep1", "ep2"]
            assert {m.ext for m in dataset.find("ep1").members} == {"front.mp4", "left.mp4", "state.npy"}


def test_a_folder_is_a_sample(tmp_path: Path) -> None:
    for name in ("ep.1/cam0.mp4", "ep.1/cam1.mp4", "deep/ep2/cam0.mp4", "top.mp4"):
        write_clip(tmp_path / "eps" / name)
    (tmp_path / "eps" / "ep.1" / "state.npy").write_bytes(b"state")
    (tmp_path / "eps" / "empty").mkdir()
    for make in (index, pack):
        with make(tmp_path / "eps", tmp_path / make.__name__, group="folder", workers=1) as dataset:
            assert list(dataset.keys) == ["deep/ep2", "ep_1", "eps"]
            assert {m.ext for m in dataset.find("ep_1").members} == {"cam0.mp4", "cam1.mp4", "state.npy"}
            assert dataset.read(dataset.find("ep_1"), "state.npy") == b"state"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_manifest_names_files_fields_and_captions(clips: Path, tmp_path: Path, kind: str) -> None:
    write_clip(tmp_path / "left.mp4", frames=3)
    rows: list[dict[str, Any]] = [
        {"path": str(clips / "a.mp4"), "key": "one", "caption": "first", "n": 1, "left": str(tmp_path / "left.mp4")},
        {"path": str(clips / "deep/b.mkv"), "key": "two", "caption": None, "n": 2, "left": None},
    ]
    manifest = tmp_path / f"rows.{kind}"
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join("" if v is None else str(v) for v in row.values()) for row in rows)]
        manifest.write_text("\n".join(lines))
    elif kind == "jsonl":
        manifest.write_text("\n".join(json.dumps(row) for row in rows))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), manifest)
    columns = Columns(files={"cam1.mp4": "left"})
    with index(manifest, tmp_path / "set", columns=columns, workers=1) as dataset:
        one, two = dataset.find("one"), dataset.find("two")
        assert {m.ext for m in one.members} == {"cam1.mp4", "json", "mp4", "txt"}
        assert dataset.read(one, "cam1.mp4") == (tmp_path / "left.mp4").read_bytes()
        # the file lies beside a .txt and a .json, which belong to it
        assert (one.text, one.fields) == ("a moving square", {"n": 1, "caption": "ignored"})
        assert {m.ext for m in two.members} == {"json", "mkv"}
        assert json.loads(dataset.read(two, "json")) == {"n": 2}
        made = [info.key for info in dataset.store.list("files/")]
        assert len(made) == 1
        with pack(manifest, tmp_path / "packed", columns=columns, workers=1) as packed:
            assert contents(packed) == contents(dataset)


def test_a_caption_becomes_a_file_of_the_dataset(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"path,caption\n{clips / 'deep/b.mkv'},é words\n")
    with index(tmp_path / "rows.csv", tmp_path / "set", workers=1) as dataset:
        sample = dataset.sample(0)
        assert sample.text == "é words"
        assert dataset.read(sample, "txt") == "é words".encode()
        assert dataset.read(sample, "mkv") == (clips / "deep/b.mkv").read_bytes()


def test_samples_with_and_without_made_files_are_in_order(clips: Path, tmp_path: Path) -> None:
    rows = [f"{clips / 'a.mp4'},p,", f"{clips / 'deep/b.mkv'},q,words", f"{clips / 'deep/c.wav'},r,more"]
    (tmp_path / "rows.csv").write_text("path,key,caption\n" + "\n".join(rows))
    with index(tmp_path / "rows.csv", tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["q", "r", "p"]
        assert [s.text for s in dataset] == ["words", "more", "a moving square"]
        assert dataset.read(dataset.find("q"), "mkv") == (clips / "deep/b.mkv").read_bytes()


def test_a_row_may_have_only_named_files(tmp_path: Path) -> None:
    write_clip(tmp_path / "l.mp4")
    (tmp_path / "rows.jsonl").write_text('{"key": "e", "left": "l.mp4"}\n{"key": "f", "left": "none.mp4"}')
    with index(tmp_path / "rows.jsonl", tmp_path / "s", columns=Columns(files={"l.mp4": "left"}), workers=1) as dataset:
        assert [(s.key, s.members[0].ext) for s in dataset] == [("e", "l.mp4")]
        assert dataset.report is not None
        assert "none.mp4" in dataset.report.skipped[0].path
    for wrong in ("/a", "A.mp4", ""):
        with pytest.raises(UsageError, match="extension"):
            index(tmp_path / "rows.jsonl", tmp_path / "t", columns=Columns(files={wrong: "left"}), workers=1)


def test_an_object_may_belong_to_two_samples(clips: Path, tmp_path: Path) -> None:
    rows = [{"path": str(clips / "deep/c.wav"), "key": key} for key in "xy"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with index(tmp_path / "rows.jsonl", tmp_path / "set", workers=1) as dataset:
        (shard,) = dataset.document.shards
        assert shard.size == 2 * (clips / "deep/c.wav").stat().st_size
        assert len(set(contents(dataset).values())) == 1


def test_a_manifest_names_files_on_a_web_server(clips: Path, tmp_path: Path) -> None:
    (clips / "with space.wav").write_bytes((clips / "deep/c.wav").read_bytes())
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranged, directory=str(clips)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        names = ["with%20space.wav", "deep/c.wav", "nothing.wav"]
        (tmp_path / "rows.csv").write_text("path,key\n" + "\n".join(f"{url}/{one},k{n}" for n, one in enumerate(names)))
        with index(tmp_path / "rows.csv", tmp_path / "set", workers=1) as dataset:
            assert list(dataset.keys) == ["k0", "k1"]
            assert {dataset.read(s, "wav") for s in dataset} == {(clips / "deep/c.wav").read_bytes()}
            assert dataset.report is not None
            assert [item.code for item in dataset.report.skipped] == ["not_found"]
        with pytest.raises(AccessDeniedError, match="public"):  # a private address needs trust
            dataset = Dataset(tmp_path / "set")
            dataset.read(dataset.sample(0), "wav")
        with Dataset(tmp_path / "set", trust_mounts=True) as dataset:
            assert dataset.read(dataset.find("k0"), "wav") == (clips / "deep/c.wav").read_bytes()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# the layout


def test_auto_takes_tars_if_there_are_any(clips: Path, tmp_path: Path) -> None:
    pack(clips, tmp_path / "tars", workers=1).close()
    shutil.copytree(tmp_path / "tars" / "shards", clips / "tars")
    with index(clips, tmp_path / "t", workers=1) as dataset:
        assert [shard.key.rpartition(".")[2] for shard in dataset.document.shards] == ["tar"]
    with index(clips, tmp_path / "f", layout="files", workers=1) as dataset:
        assert list(dataset.keys) == ["a", "deep/b", "deep/c"]
        assert dataset.report is not None
        assert {item.reason for item in dataset.report.skipped} == {
            "it is a tar, and these are files: index tars by themselves (--layout tars)"
        }
    with index(clips / "*.mp4", tmp_path / "g", workers=1) as dataset:
        assert list(dataset.keys) == ["a"]
    with pytest.raises(NotFoundError, match="no tar"):
        index(clips / "deep", tmp_path / "n", layout="tars", workers=1)


def test_options_of_the_other_layout_are_refused(clips: Path, tmp_path: Path) -> None:
    pack(clips, tmp_path / "tars", workers=1).close()
    with pytest.raises(UsageError, match="for tars"):
        index(clips, tmp_path / "x", keys="shard", workers=1)
    with pytest.raises(UsageError, match="for files"):
        index(tmp_path / "tars" / "shards", tmp_path / "x", group="dot", workers=1)
    with pytest.raises(UsageError, match="layout"):
        index(clips, tmp_path / "x", layout="other", workers=1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="group"):
        index(clips, tmp_path / "x", group="other", workers=1)  # type: ignore[arg-type]


def test_braces_and_lists_name_files(clips: Path, tmp_path: Path) -> None:
    (clips / "{odd}.wav").write_bytes((clips / "deep/c.wav").read_bytes())
    patterns = [f"{clips}/{{a.mp4,deep/b.mkv}}::{clips}/deep/c.wav", str(clips / "{odd}.wav")]
    with index(patterns, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == ["a", "b", "c", "{odd}"]
    with pytest.raises(UnsupportedError, match="command"):
        index("pipe:cat x.mp4", tmp_path / "x", workers=1)
    with pytest.raises(NotFoundError):
        index(clips / "nothing" / "*.mp4", tmp_path / "x", workers=1)
    with pytest.raises(UsageError, match="nothing to index"):
        (tmp_path / "empty").mkdir()
        index(tmp_path / "empty", tmp_path / "x", workers=1)


def test_more_buckets_than_a_dataset_can_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = write_wav(tmp_path / "x.wav").read_bytes()
    urls = []
    for number in range(MAX_MOUNTS):
        with open_store(f"memory://many{number}") as store:
            store.put("x.wav", sound)
        urls.append(f"memory://many{number}/x.wav")
    (tmp_path / "rows.csv").write_text("path,key\n" + "\n".join(f"{url},k{n}" for n, url in enumerate(urls)))
    with pytest.raises(CapacityError, match="64 buckets"):
        index(tmp_path / "rows.csv", tmp_path / "set", workers=1)
    (tmp_path / "rows.csv").write_text("path,key\n" + "\n".join(f"{url},k{n}" for n, url in enumerate(urls[1:])))
    with index(tmp_path / "rows.csv", tmp_path / "set", workers=1) as dataset:
        assert len(dataset.document.mounts) == MAX_MOUNTS
        assert {dataset.read(sample, "wav") for sample in dataset} == {sound}


# what uses such datasets


def test_tools_work_on_files_in_place(clips: Path, tmp_path: Path) -> None:
    with index(clips, tmp_path / "set", workers=1) as dataset:
        assert [s.key for s in dataset.where("codec = 'h264' AND key = 'a'")] == ["a"]
        removed = dataset.remove(["deep/c"])
        assert list(removed.keys) == ["a", "deep/b"]
        assert dataset.diff(removed).keys("removed") == ["deep/c"]
        written = dict(export.export(removed, ["a"], tmp_path / "out"))
        assert written["a.mp4"].read_bytes() == (clips / "a.mp4").read_bytes()
        with pytest.raises(UnsupportedError, match="headrace pack"):
            dali_index(dataset, dataset.document.shards[0].key)
    report = verify(tmp_path / "set", decode="100%", workers=1, trust_mounts=True)
    assert not report.damaged
    assert not report.orphans_found
    for command in (["ls"], ["info"], ["cat", "deep/b"], ["verify"], ["log"]):
        arguments = [command[0], tmp_path / "set", *command[1:], *([] if command[0] == "log" else ["--trust-mounts"])]
        done = headrace_command.run(*arguments)
        assert done.returncode == 0, (command, done.stderr)
        if command[0] == "cat":
            assert done.stdout == (clips / "deep/b.mkv").read_bytes()


def test_datasets_in_place_merge(clips: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(f"path,key,caption,n\n{clips / 'deep/b.mkv'},row,words,5\n")
    with (
        index(clips, tmp_path / "one", workers=1) as one,
        index(tmp_path / "rows.csv", tmp_path / "two", workers=1) as two,
        one.merge(two) as both,
    ):
        expected = contents(one) | contents(two)
        assert contents(both) == expected
        assert both.find("row").fields == {"n": 5}
    with Dataset(tmp_path / "one", trust_mounts=True) as again:
        assert contents(again) == expected
    shutil.rmtree(tmp_path / "two" / "joined")
    shutil.rmtree(tmp_path / "two" / "files")
    with Dataset(tmp_path / "one", trust_mounts=True) as again:
        assert contents(again) == expected
    assert not verify(tmp_path / "one", workers=1, trust_mounts=True).damaged


def test_files_below_a_dataset_do_not_merge_into_another(clips: Path, tmp_path: Path) -> None:
    other = write_wav(tmp_path / "other" / "z.wav").parent
    with index(clips, clips, workers=1) as inner, index(other, tmp_path / "set", workers=1) as outer:
        with pytest.raises(UnsupportedError, match="cannot name it"):
            outer.merge(inner)
        with inner.merge(outer) as both:
            assert sorted(both.keys) == ["a", "deep/b", "deep/c", "z"]
            assert both.read(both.find("z"), "wav") == (other / "z.wav").read_bytes()


def test_a_forged_list_replaces_no_file_of_the_target(clips: Path, tmp_path: Path) -> None:
    from headrace.dataio.store.joined import JoinedObject, copy_files, write_files

    target: Store = open_store(tmp_path / "target")
    made = write_files(target, 0, b"right")
    source = open_store(tmp_path / "source")
    source.put(made.key, b"wrong")
    with pytest.raises(CorruptionError):
        copy_files(source, target, made)
    source.put("files/clip.mp4", b"x")
    with pytest.raises(CorruptionError):
        copy_files(source, target, JoinedObject(key="files/clip.mp4", size=1))
    assert target.get(made.key) == b"right"


def test_verify_names_damaged_objects(clips: Path, tmp_path: Path) -> None:
    index(clips, tmp_path / "set", workers=1).close()
    data = bytearray((clips / "a.mp4").read_bytes())
    data[len(data) // 2] ^= 1
    (clips / "a.mp4").write_bytes(data)
    (clips / "deep/b.mkv").unlink()
    (clips / "deep/c.wav").write_bytes(b"RIFF")
    (tmp_path / "set/joined/00000099-0.json").write_text("left behind")
    (tmp_path / "set/files").mkdir()
    (tmp_path / "set/files/00000099-0").write_text("left behind")
    report = verify(tmp_path / "set", workers=1, trust_mounts=True)
    (damaged,) = report.damaged
    messages = {finding.key: finding.message for finding in damaged.findings}
    assert set(messages) == {"a", "deep/b", "deep/c"}
    assert f"file://{clips}/a.mp4 (it was modified at " in messages["a"]
    assert "checksum does not match" in messages["a"]
    assert messages["deep/b"] == f"file://{clips}/deep/b.mkv (it does not exist any more): the object does not exist"
    assert "truncated: it has 4 bytes" in messages["deep/c"]
    assert list(report.orphans) == ["joined/00000099-0.json", "files/00000099-0"]
    (list_file,) = (tmp_path / "set/joined").glob("00000000-*.json")
    list_file.write_text(list_file.read_text().replace("a.mp4", "b.mp4"))
    assert verify(tmp_path / "set", workers=1, trust_mounts=True).damaged[0].findings[0].code == "digest"
    list_file.unlink()
    assert verify(tmp_path / "set", workers=1, trust_mounts=True).damaged[0].findings[0].code == "missing"


def test_the_command_line_indexes_files(clips: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text(f"clip,key,left\n{clips / 'a.mp4'},k,{clips / 'deep/b.mkv'}\n")
    done = headrace_command.run(
        "index", rows, tmp_path / "set", "--path-column", "clip", "--file-column", "cam1.mkv=left", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["samples"], report["version"]) == (1, 1)
    assert list(report["mounts"].values()) == [f"file://{clips}"]
    done = headrace_command.run("index", clips, tmp_path / "other", "--group", "folder", "--layout", "files")
    assert done.returncode == 0, done.stderr
    assert b"files stay in file://" in done.stdout
    assert b"--trust-mounts" in done.stdout
    for wrong in (["--file-column", "x"], ["--every", "0s"], ["--group", "x"]):
        assert headrace_command.run("index", clips, tmp_path / "x", *wrong).returncode == 2


def test_a_reader_sees_joined_shards_only_if_the_version_has_them(clips: Path, tmp_path: Path) -> None:
    with pack(clips, tmp_path / "packed", workers=1) as dataset:
        assert not isinstance(dataset.store, Mounts)
