"""A packer that is killed leaves no half dataset, and packing again succeeds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import headrace.dataio.shards.ingest.pack  # noqa: F401 - declares the crash points
from headrace.dataio import Dataset, pack
from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import ConflictError, NotFoundError
from tests.support import headrace_command
from tests.support.written_media import MakeClip

POINTS = [name for name in crashpoints.declared() if name.startswith(("pack.", "units."))]


@pytest.fixture
def clips(tmp_path: Path, make_clip: MakeClip) -> Path:
    for i in range(3):
        make_clip(tmp_path / "clips" / f"{i}.mp4", frames=4)
    return tmp_path / "clips"


def pack_until(point: str, clips: Path, url: str, mark: Path) -> None:
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = headrace_command.run("pack", "--shard-size", "4KiB", clips, url, **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert mark.read_text() == point.partition("#")[0] + "\n"


def test_the_points_are_those_that_the_tests_know() -> None:
    assert POINTS == ["units.recorded", "pack.shard-stored", "pack.index-stored", "pack.version-stored"]


@pytest.mark.parametrize("point", ["pack.shard-stored", "pack.shard-stored#2", "units.recorded#2", "pack.index-stored"])
def test_killed_before_the_version_nothing_is_visible_and_a_rerun_succeeds(
    clips: Path, store_url: str, tmp_path: Path, point: str
) -> None:
    pack_until(point, clips, store_url, tmp_path / "mark")
    with pytest.raises(NotFoundError, match="no dataset"):
        Dataset(store_url)
    with pack(clips, store_url, shard_bytes=4096) as again, pack(clips, tmp_path / "fresh", shard_bytes=4096) as fresh:
        assert again.document.shards == fresh.document.shards
        assert again.document.index == fresh.document.index
        kept = {info.key for info in again.store.list("shards/")}
        assert kept == {shard.key for shard in again.document.shards}  # what the dead one left was used again
        assert [again.read(s, "mp4") for s in again] == [p.read_bytes() for p in sorted(clips.iterdir())]
        assert again.report is not None
        assert again.report.samples == 3
        assert again.report.resumed == {"pack.shard-stored#2": 1, "units.recorded#2": 2, "pack.index-stored": 3}.get(
            point, 0
        )
        assert not list(again.store.list("packing/"))


def test_killed_after_the_version_the_dataset_is_whole(clips: Path, store_url: str, tmp_path: Path) -> None:
    pack_until("pack.version-stored", clips, store_url, tmp_path / "mark")
    with Dataset(store_url) as dataset:
        assert [dataset.read(s, "mp4") for s in dataset] == [p.read_bytes() for p in sorted(clips.iterdir())]
    with pytest.raises(ConflictError):
        pack(clips, store_url)  # not the same plan
    with pack(clips, store_url, shard_bytes=4096) as again:
        assert (again.version, len(again)) == (1, 3)
        assert not list(again.store.list("packing/"))
