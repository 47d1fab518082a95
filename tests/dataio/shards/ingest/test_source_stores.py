"""Inputs in a store are packed like local files: to the same shards, a few at a time, and on after a kill."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, append, pack
from headrace.dataio.core.errors import NotFoundError, TransientError, UsageError
from headrace.dataio.shards.ingest import source_stores
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.source_stores import SourceStores
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.media.messages import PrepareResult
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from tests.support.written_media import MakeClip


@pytest.fixture
def clips(tmp_path: Path, make_clip: MakeClip) -> Path:
    folder = tmp_path / "clips"
    for number in range(4):
        make_clip(folder / f"day{number % 2}" / f"c{number}.mp4", frames=4)
        (folder / f"day{number % 2}" / f"c{number}.txt").write_text(f"caption {number}")
    (folder / "notes.md").write_text("not a sample")
    (folder / ".hidden").write_text("not seen")
    return folder


def upload(store: Store, folder: Path, prefix: str) -> None:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        store.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())


def tar_of(folder: Path) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for path in sorted(folder.rglob("c*.*")):
            archive.add(path, f"in/{path.name}")
    return target.getvalue()


@pytest.mark.s3
def test_folders_globs_manifests_and_tars_in_a_bucket_become_the_shards_of_local_ones(
    clips: Path, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_stores, "_COPY_BYTES", 1000)  # so that every file is copied in several pieces
    (tmp_path / "t.tar").write_bytes(tar_of(clips))
    with open_store(s3_url) as store:
        upload(store, clips, "clips")
        store.put("t.tar", tar_of(clips))
        store.put("list.csv", b"path,label\nclips/day0/c0.mp4,1\nclips/day1/c9.mp4,2\n")
        store.put("all.jsonl", b'{"path": "%s/clips/day1/c3.mp4", "key": "k", "n": 3}\n' % s3_url.encode())
    with pack(clips, tmp_path / "here") as here, pack(f"{s3_url}/clips", f"{s3_url}/ds") as there:
        assert there.document.shards == here.document.shards
        assert [sample.text for sample in there] == [f"caption {n}" for n in (0, 2, 1, 3)]
        assert there.report is not None
        assert there.report.ignored == (f"{s3_url}/clips/notes.md",)
    with pack(f"{s3_url}/clips/*/c?.mp4", tmp_path / "globbed") as globbed:
        assert [sample.key for sample in globbed] == ["day0/c0", "day0/c2", "day1/c1", "day1/c3"]
    with pack(tmp_path / "t.tar", tmp_path / "t1") as here, pack(f"{s3_url}/t.tar", tmp_path / "t2") as there:
        assert there.document.shards == here.document.shards
        assert [sample.key for sample in there] == [f"in/c{n}" for n in range(4)]
    with pack([f"{s3_url}/list.csv", f"{s3_url}/all.jsonl"], tmp_path / "listed") as listed:
        assert {sample.key: (sample.text, sample.fields) for sample in listed} == {
            "clips/day0/c0": ("caption 0", {"label": 1}),
            "k": ("caption 3", {"n": 3}),
        }
        assert listed.report is not None
        (skipped,) = listed.report.skipped
        assert skipped.path == f"{s3_url}/list.csv, line 3: {s3_url}/clips/day1/c9.mp4"
    with append(f"{s3_url}/t.tar", f"{s3_url}/ds") as grown:
        assert (len(grown), grown.version) == (8, 2)


@pytest.mark.s3
def test_a_pack_of_a_bucket_that_is_killed_goes_on_where_it_was(clips: Path, s3_url: str, tmp_path: Path) -> None:
    with open_store(s3_url) as store:
        upload(store, clips, "clips")
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "pack",
        "--shard-size",
        "4KiB",
        f"{s3_url}/clips",
        f"{s3_url}/ds",
    ]
    environment = os.environ | {"HEADRACE_CRASH": "units.recorded#2", "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with pytest.raises(NotFoundError, match="no dataset"):
        Dataset(f"{s3_url}/ds")
    with (
        pack(f"{s3_url}/clips", f"{s3_url}/ds", shard_bytes=4096) as again,
        pack(clips, tmp_path / "ds", shard_bytes=4096) as fresh,
    ):
        assert again.report is not None
        assert again.report.resumed == 2
        assert again.document.shards == fresh.document.shards


def test_what_a_bucket_does_not_hold_and_what_changes_meanwhile_is_said(tmp_path: Path) -> None:
    with open_store("memory://inputs") as store, SourceStores() as remote:
        store.put("in/a.wav", bytes(3000))
        store.put("in/b..c/.x/d.wav", b"hidden")
        with pytest.raises(NotFoundError, match="no object and no folder memory://inputs/nowhere"):
            gather(["memory://inputs/nowhere"])
        with pytest.raises(NotFoundError, match="nothing matches"):
            gather(["memory://inputs/in/*.mp4"])
        with pytest.raises(UsageError, match="names no bucket"):
            gather(["s3:///x"])
        (group,) = gather(["memory://inputs"]).groups
        assert (group.key, group.files, group.bytes) == ("in/a", (("wav", "memory://inputs/in/a.wav"),), 3000)
        assert gather(["memory://inputs"], exclude="memory://inputs/in").groups == ()
        store.put("in/a.wav", bytes(2000))
        with pytest.raises(TransientError, match="changed while it was being packed"):
            remote.copy_whole("memory://inputs/in/a.wav", 3000, str(tmp_path / "a.wav"))
        stopped = SourceStores()
        stopped.stop()
        with pytest.raises(TransientError, match="cancelled"):
            stopped.copy("memory://inputs/in/a.wav", 0, 2000, str(tmp_path / "a.wav"))
        store.delete_many(["in/a.wav"])
        with pytest.raises(TransientError, match="changed while it was being packed"):
            remote.copy("memory://inputs/in/a.wav", 0, 3000, str(tmp_path / "a.wav"))


def test_the_dataset_that_is_made_is_no_input_of_itself_and_closed_folders_are_named(clips: Path) -> None:
    with pack(clips, clips / "ds") as first:
        assert len(first) == 4
    assert len(gather([clips], exclude=f"file://{clips}/ds").groups) == 4


def test_a_full_scratch_folder_stops_the_packing_and_skips_nothing(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.dataio.core.errors import CapacityError
    from headrace.dataio.shards.media.messages import Failure

    inside, failed = ProbePool.prepare, list[str]()

    def full(self: ProbePool, *arguments: Any) -> Iterator[tuple[Group, PrepareResult]]:
        for group, outcome in inside(self, *arguments):
            if group.key.endswith("c1"):
                failed.append(group.key)
                outcome = Failure(group.files[0][1], "capacity", "No space left on device", scratch_full=True)
            yield group, outcome

    monkeypatch.setattr(ProbePool, "prepare", full)
    with pytest.raises(CapacityError, match="is full"):
        pack(clips, tmp_path / "ds")
    assert failed == ["day1/c1"]
    monkeypatch.undo()
    with pack(clips, tmp_path / "ds") as dataset:
        assert len(dataset) == 4


def test_a_disk_that_becomes_full_never_leaves_a_shortened_copy(tmp_path: Path) -> None:
    program = (
        "import resource\n"
        "from headrace.dataio.shards.ingest.source_stores import SourceStores\n"
        "from headrace.dataio.store.open import open_store\n"
        "with open_store('memory://inputs') as store, SourceStores() as sources:\n"
        "    store.put('clip', bytes(2500))\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"    sources.copy('memory://inputs/clip', 0, 2500, {str(tmp_path / 'copy')!r})\n"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=100)
    assert "File too large" in done.stderr
    assert (tmp_path / "copy").stat().st_size == 1000, "the limit was met in the middle of the copy"
