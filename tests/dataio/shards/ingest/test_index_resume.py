"""An `index` run that is killed and started again ends equal to one that was never disturbed."""

from __future__ import annotations

import hashlib
import io
import signal
import tarfile
from pathlib import Path

import pytest

import headrace.dataio.shards.ingest.index_tars  # noqa: F401 - declares the crash points
from headrace.dataio import Dataset, index
from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.shards.ingest import index_units
from headrace.dataio.shards.ingest.report import PackReport
from tests.support import headrace_command
from tests.support.written_media import write_wav

_SHARDS = 3 * index_units.UNIT_SHARDS
"""Three units of small tars."""


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars of three units: one with a sound, one that is damaged, and one with a bad sample."""
    folder = tmp_path_factory.mktemp("tars")
    sound = write_wav(folder / "base.wav", seconds=0.02).read_bytes()
    (folder / "base.wav").unlink()
    for number in range(_SHARDS):
        members = {f"{number:03}.bin": b"x" * number, f"{number:03}b.json": b"no" if number == 5 else b'{"a": 1}'}
        if number == 20:
            members["020.wav"] = sound
        with tarfile.open(folder / f"{number:03}.tar", "w") as archive:
            for name, data in sorted(members.items()):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    (folder / "030.tar").write_bytes((folder / "030.tar").read_bytes()[:600])
    return folder


def objects(root: Path) -> dict[str, str]:
    """Every object of a dataset but the documents, which carry nonces, and what a killed store was writing."""
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if ".headrace-tmp" not in path.parts
    }


def index_until(point: str, tars: Path, root: Path, mark: Path) -> None:
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = headrace_command.run("index", tars, root, **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert mark.read_text() == point.partition("#")[0] + "\n"


def facts(report: PackReport | None) -> tuple[object, ...]:
    assert report is not None
    return (report.files, report.samples, report.shards, report.bytes, report.skipped, report.ignored, report.notes)


def test_the_points_are_those_that_the_tests_know() -> None:
    assert [name for name in crashpoints.declared() if name.startswith(("index.", "units."))] == [
        "units.recorded",
        "index.stored",
        "index.version-stored",
    ]


@pytest.mark.parametrize(
    ("point", "resumed"),
    [("units.recorded", 1), ("units.recorded#2", 2), ("index.stored", 3), ("index.version-stored", 3)],
)
def test_killed_and_started_again_it_is_equal(tars: Path, tmp_path: Path, point: str, resumed: int) -> None:
    index_until(point, tars, tmp_path / "often", tmp_path / "mark")
    if point != "index.version-stored":
        with pytest.raises(NotFoundError, match="no dataset"):
            Dataset(tmp_path / "often")
    with index(tars, tmp_path / "often") as often, index(tars, tmp_path / "never") as never:
        assert objects(tmp_path / "often") == objects(tmp_path / "never")
        assert (often.document.shards, often.document.index) == (never.document.shards, never.document.index)
        assert facts(often.report) == facts(never.report)
        assert often.report is not None
        assert never.report is not None
        assert (often.report.resumed, never.report.resumed) == (resumed, 0)
        assert len(never.report.skipped) == 2
        assert len(never) == 2 * _SHARDS - 3
        assert not list(often.store.list("packing/"))
    with pytest.raises(ConflictError):
        index(tars, tmp_path / "often")  # which is over, so this is another call


def test_a_shard_that_changed_in_between_makes_another_plan(tars: Path, tmp_path: Path) -> None:
    index_until("units.recorded#2", tars, tmp_path / "set", tmp_path / "mark")
    with index(tars, tmp_path / "set", keys="shard") as dataset:
        assert dataset.report is not None
        assert dataset.report.resumed == 0


def test_a_run_that_fails_for_its_input_leaves_no_journal(tars: Path, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.tar").write_bytes((tars / "000.tar").read_bytes())
    with pytest.raises(UsageError, match="samples of the same key"):
        index(str(tmp_path / "{a,b}" / "*.tar"), tmp_path / "set", workers=1)
    assert not (tmp_path / "set" / "packing").exists()
