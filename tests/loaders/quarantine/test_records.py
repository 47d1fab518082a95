"""The list of skipped samples: written by loaders, read by `headrace quarantine`, bounded, and never in the dataset."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import pack
from headrace.dataio.cli import main
from headrace.loaders import Clip, VideoLoader
from headrace.loaders.quarantine import records
from headrace.loaders.quarantine.records import SkippedSample
from tests.support import video_corpus


def refusal(number: int = 1, dataset: str = "s3://bucket/clips", *, permanent: bool = False) -> SkippedSample:
    return SkippedSample(
        id=number,
        key=f"key{number}",
        shard="shards/0.tar",
        offset=512,
        code="corruption",
        reason="it is bad",
        permanent=permanent,
        dataset=dataset,
    )


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A dataset of six generated clips. One of them was damaged after it was packed."""
    folder = tmp_path / "in"
    folder.mkdir()
    for one in video_corpus.ALL[:6]:
        (folder / one.name).write_bytes(video_corpus.make(one))
    with pack([folder], tmp_path / "the sét", workers=1) as packed:
        sample = packed.find("h264-late")
    with (tmp_path / "the sét" / sample.shard).open("r+b") as shard:
        shard.seek(sample.member("mkv").offset + 3000)
        shard.write(bytes(64))
    return tmp_path / "the sét"


def files(folder: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


def test_a_refused_sample_is_listed_by_the_command_and_the_dataset_is_not_touched(
    damaged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(damaged)
    with VideoLoader(damaged, 2, clip=Clip(2, per_video=2), size=(24, 32), sidecar=None, max_bad_samples=3) as loader:
        list(loader)
        list(loader)
        assert [one.key for one in loader.quarantine] == ["h264-late"]
    assert files(damaged) == before
    assert main(["quarantine", str(damaged), "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()  # once, although it was refused in every epoch
    found = json.loads(line)
    assert (found["key"], found["for_good"], found["version"], found["code"]) == ("h264-late", True, 1, "corruption")
    assert main(["quarantine"]) == 1
    assert "h264-late  wrong bytes: " in capsys.readouterr().out
    assert main(["quarantine", str(damaged), "--clear", "--apply"]) == 0
    assert main(["quarantine", str(damaged)]) == 0
    assert "0 skipped samples" in capsys.readouterr().out


def test_on_bad_shorter_leaves_the_sample_out_and_lists_it(damaged: Path) -> None:
    options = {"clip": Clip(2), "size": (24, 32), "sidecar": None, "max_bad_samples": 3, "shuffle": False}
    with VideoLoader(damaged, 6, **options, on_error="skip") as loader:  # type: ignore[arg-type]
        (batch,) = loader
        assert len(batch["key"]) == len(batch["id"]) == len(batch["clip"]) == batch["video"].shape[0] == 5
        assert "h264-late" not in batch["key"]
        assert [one.key for one in loader.quarantine] == ["h264-late"]
    with VideoLoader(damaged, 6, **options) as loader:  # type: ignore[arg-type]
        (whole,) = loader
    others = [slot for slot in range(6) if slot != loader.quarantine[0].id]
    assert (whole["video"][others] == batch["video"]).all()


def test_an_evaluation_counts_no_sample_twice_in_place_of_a_damaged_one(damaged: Path) -> None:
    options: dict[str, Any] = {
        "clip": Clip(2),
        "size": (24, 32),
        "sidecar": None,
        "max_bad_samples": 3,
        "evaluate": True,
    }
    with VideoLoader(damaged, 2, **options) as loader:
        batches = list(loader)
        assert [one.key for one in loader.quarantine] == ["h264-late"]
    assert sorted(n for batch in batches for n in batch["id"].tolist()) == sorted(
        {*range(6)} - {loader.quarantine[0].id}
    )
    assert [sum(batch["samples_per_rank"]) for batch in batches] == [
        2,
        2,
        2,
    ]  # as planned: no rank knows what the others found
    with VideoLoader(damaged, 2, **options, on_error="replace") as loader:
        assert [len(batch["id"]) for batch in loader] == [2, 2, 2]


def test_a_list_that_cannot_be_written_does_not_stop_the_loader(
    damaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(tmp_path / "file" / "x"))
    (tmp_path / "file").write_text("not a directory")
    with VideoLoader(damaged, 6, clip=Clip(2), size=(24, 32), sidecar=None, max_bad_samples=3) as loader:
        assert len(list(loader)) == 1
    assert "cannot be recorded" in caplog.text
    monkeypatch.setenv("HEADRACE_QUARANTINE", "off")
    assert main(["quarantine"]) == 2


def test_without_a_home_directory_no_list_is_kept_and_training_works(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_STATE_HOME", "HEADRACE_QUARANTINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: (1 << 31) - 9)  # no user has this number here
    with VideoLoader(damaged, 4, clip=Clip(2), size=(16, 16), sidecar=None, max_bad_samples=4) as loader:
        for _ in loader:
            pass
        assert loader.quarantine
    assert main(["quarantine"]) == 2


def test_records_of_several_processes_are_whole_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "list"
    code = (
        "import sys; from pathlib import Path; from headrace.loaders.quarantine.records import SkippedSample, write\n"
        "for n in range(int(sys.argv[1]), int(sys.argv[1]) + 200):\n"
        "    one = SkippedSample(id=n, key=f'key{n}', shard='shards/0.tar', offset=512, code='corruption',"
        " reason='it is bad', permanent=False, dataset='s3://bucket/clips')\n"
        "    write(one, 3, Path(sys.argv[2]))"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(n * 1000), str(folder)]) for n in range(3)]
    assert [rank.wait(150) for rank in ranks] == [0, 0, 0]
    found, unreadable = records.distinct(folder, "s3://bucket/clips/")
    assert (len(found), unreadable) == (600, 0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_full_list_takes_no_more_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(records, "FILE_BYTES", 1000)
    for number in range(50):
        records.write(refusal(number), 1, tmp_path / "list")
    found, _ = records.distinct(tmp_path / "list")
    assert 0 < len(found) < 10
    assert "is full" in caplog.text


def test_the_beginning_of_a_list_that_is_too_large_is_read(tmp_path: Path) -> None:
    records.write(refusal(), 1, tmp_path / "list")
    (file,) = (tmp_path / "list").iterdir()
    os.truncate(file, 1 << 40)
    found, unreadable = records.distinct(tmp_path / "list")
    assert (len(found), unreadable) == (1, 1)


def test_lines_that_are_no_records_are_counted_and_control_characters_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "list"
    monkeypatch.setenv("HEADRACE_QUARANTINE", str(folder))
    records.write(refusal(), 1, folder)
    (file,) = folder.iterdir()
    evil = {**json.loads(file.read_text()), "key": "a\x1b[2J", "version": 2}
    with file.open("a") as out:
        out.write(f'{json.dumps(evil)}\n{{"version": 1}}\n[1]\nnot json\n{{"version": "x"}}\n')
    assert main(["quarantine"]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "2 skipped samples, 4 unreadable lines" in printed


def test_the_command_starts_without_torch() -> None:
    code = "import sys; from headrace.dataio.cli import main; main(['quarantine', '--json']); sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=150, env=os.environ | {"XDG_STATE_HOME": "/nonexistent"}
    )


def test_a_copied_dataset_has_a_list_of_its_own(damaged: Path, tmp_path: Path) -> None:
    folder = records.directory()
    assert folder is not None
    shutil.copytree(damaged, tmp_path / "copy")
    with VideoLoader(tmp_path / "copy", 6, clip=Clip(2), size=(24, 32), sidecar=None, max_bad_samples=3) as loader:
        list(loader)
        assert len(records.distinct(folder, loader.dataset.url)[0]) == 1
    assert records.distinct(folder, f"file://{damaged}") == ([], 0)
