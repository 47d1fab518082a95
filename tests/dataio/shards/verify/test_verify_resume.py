"""A `verify` run that is killed and started again with its journal gives the report of an undisturbed one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.dataio import Dataset, pack, verify
from headrace.dataio.shards.verify.report import VerifyReport
from tests.support import headrace_command
from tests.support.written_media import write_wav

_SHARDS = 6


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of six shards."""
    root = tmp_path_factory.mktemp("verify-resume")
    for i in range(_SHARDS):
        write_wav(root / "in" / f"{i}.wav", seconds=0.25)
    with pack(root / "in", root / "ds", shard_bytes=4096, workers=1) as dataset:
        assert len(dataset.document.shards) == _SHARDS
    return root / "ds"


@pytest.fixture
def ds(original: Path, tmp_path: Path) -> Path:
    """A copy of it, in which one shard is damaged."""
    shutil.copytree(original, tmp_path / "ds")
    damage(tmp_path / "ds", 1)
    return tmp_path / "ds"


def damage(root: Path, number: int) -> None:
    path = sorted((root / "shards").iterdir())[number]
    data = bytearray(path.read_bytes())
    data[1024] ^= 1
    path.write_bytes(data)


def killed(point: str, ds: Path, journal: Path, mark: Path, *more: object) -> None:
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = headrace_command.run("verify", ds, "--workers", 1, "--journal", journal, *more, **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert mark.exists()


def facts(report: VerifyReport) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(report)
    for changing in ("seconds", "resumed"):
        del found[changing]
    return found


@pytest.mark.parametrize(("after", "resumed"), [(1, 1), (2, 2), (6, 5)])
def test_killed_and_started_again_it_gives_the_same_report(ds: Path, tmp_path: Path, after: int, resumed: int) -> None:
    """Of seven units, the first is the index part, and the third is damaged, so it is checked again."""
    before = {path: path.read_bytes() for path in ds.rglob("*") if path.is_file()}
    killed(f"units.recorded#{after}", ds, tmp_path / "journal", tmp_path / "mark", "--decode", "100%")
    often = verify(ds, decode="100%", journal=tmp_path / "journal", workers=2)
    never = verify(ds, decode="100%", workers=2)
    assert facts(often) == facts(never)
    assert (often.resumed, never.resumed) == (resumed, 0)
    assert [found.findings[0].code for found in often.damaged] == ["checksum"]
    assert sum(found.decoded for found in often.objects) == _SHARDS - 1
    assert not [path for path in (tmp_path / "journal").rglob("*") if path.is_file()], "the journal is deleted"
    assert before == {path: path.read_bytes() for path in ds.rglob("*") if path.is_file()}, "nothing is written"


def test_a_shard_that_was_damaged_is_checked_again_and_one_that_was_right_is_not(
    original: Path, ds: Path, tmp_path: Path
) -> None:
    killed("units.recorded#6", ds, tmp_path / "journal", tmp_path / "mark")
    shutil.copytree(original / "shards", ds / "shards", dirs_exist_ok=True)
    damage(ds, 0)  # its unit is recorded as right
    assert not verify(ds, journal=tmp_path / "journal").damaged
    assert len(verify(ds, journal=tmp_path / "journal").damaged) == 1, "a finished run begins again"


def test_another_version_or_amount_does_not_use_the_records(ds: Path, tmp_path: Path) -> None:
    killed("units.recorded#4", ds, tmp_path / "journal", tmp_path / "mark")
    assert verify(ds, decode="1", journal=tmp_path / "journal").resumed == 0
    with Dataset(ds) as dataset:
        dataset.remove(["5"]).close()
    assert verify(ds, journal=tmp_path / "journal").resumed == 0
    assert verify(ds, 1, journal=tmp_path / "journal").resumed == 3


def test_a_damaged_record_is_checked_again(ds: Path, tmp_path: Path) -> None:
    killed("units.recorded#7", ds, tmp_path / "journal", tmp_path / "mark")
    record = sorted((tmp_path / "journal").rglob("*.unit"))[-1]
    record.write_bytes(record.read_bytes()[:-1])
    report = verify(ds, journal=tmp_path / "journal")
    assert (report.resumed, len(report.damaged)) == (5, 1)


def test_a_killed_repair_goes_on(original: Path, ds: Path, tmp_path: Path) -> None:
    damage(ds, 4)
    killed("units.recorded#4", ds, tmp_path / "journal", tmp_path / "mark", "--repair", original, "--apply")
    report = verify(ds, repair=original, journal=tmp_path / "journal", workers=1)
    assert not report.damaged
    assert len(report.repaired) == 2, "also the one that the killed run repaired and recorded"
    assert not verify(ds).damaged


def test_the_command_says_that_it_continued(ds: Path, tmp_path: Path) -> None:
    killed("units.recorded#4", ds, tmp_path / "journal", tmp_path / "mark")
    done = headrace_command.run("verify", ds, "--journal", tmp_path / "journal")
    assert done.returncode == 1
    assert b"continued an interrupted run: 3 units were already done" in done.stdout
    assert json.loads(headrace_command.run("verify", ds, "--json").stdout)["resumed"] == 0
