"""A sample has one video. `pack`, `index` and the loader say which others it holds."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path

import pytest

from headrace.dataio import index, pack
from headrace.dataio.core import log
from headrace.dataio.shards.media.container import other_videos
from headrace.loaders import Clip, VideoLoader
from headrace.loaders.processors import video
from tests.support import video_corpus


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    """Samples of two videos: the second has another name or another container, or both have other names than the sample."""
    small = tmp_path / "small.mp4"
    small.write_bytes(video_corpus.make(video_corpus.Made("", "libx264", "mp4", frames=8)))
    large = tmp_path / "large.mkv"
    large.write_bytes(video_corpus.make(video_corpus.Made("", "libx264", "matroska", width=80, frames=8)))
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "shard.tar", "w") as file:
        for name in (
            "s1.mp4",
            "s1.cam1.mp4",
            "s2.mkv",
            "s2.mp4",
            "s3.cam0.mp4",
            "s3.cam1.mp4",
            "s3.txt",
            "s4.mp4",
            "s4.txt",
        ):
            path = large if name.endswith("mkv") else tmp_path / "txt" if name.endswith("txt") else small
            (tmp_path / "txt").write_text("words")
            file.add(path, name)
    return tmp_path / "tars" / "shard.tar"


def test_pack_and_index_name_videos_that_are_not_used(tar: Path, tmp_path: Path) -> None:
    with pack([tar], tmp_path / "packed", workers=1) as packed:
        assert packed.report is not None
        report = "\n".join(packed.report.notes)
        assert "s1: its .cam1.mp4 file is kept but not read as media" in report
        assert "s2: its .mp4 file is kept, and not used" in report
        assert "s4" not in report
        (skipped,) = packed.report.skipped
        assert "s3" in skipped.path
        assert ".cam0.mp4, .cam1.mp4" in skipped.reason
    with index(str(tar), tmp_path / "indexed", workers=1) as indexed:
        assert indexed.report is not None
        report = "\n".join(indexed.report.notes)
        for sample, ext in (("s1", "cam1.mp4"), ("s3", "cam0.mp4"), ("s3", "cam1.mp4")):
            assert f"{sample}: its .{ext} file is kept but not read as media" in report
        assert "s2: its .mp4 file is kept, and not used" in report
        assert "s4" not in report


def test_the_loader_warns_once(tar: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log._logged.clear()
    with pack([tar], tmp_path / "packed", workers=1) as packed, caplog.at_level(logging.WARNING, logger="headrace"):
        with VideoLoader(packed, 1, clip=Clip(2), evaluate=True, num_threads=1, sidecar=None) as loader:
            assert len(list(loader)) == 3
        warnings = [record.message for record in caplog.records if "more than one video" in record.message]
        assert len(warnings) == 1
        assert "'s1' .mp4, and not .cam1.mp4" in warnings[0]


def test_samples_with_the_same_side_files_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = video_corpus.make(video_corpus.Made("", "libx264", "mp4", frames=8))
    (tmp_path / "files").mkdir()
    for number in range(4):
        (tmp_path / "files" / f"{number}.mp4").write_bytes(film)
        (tmp_path / "files" / f"{number}.txt").write_text("words")
    looked, real = list[str](), other_videos
    monkeypatch.setattr(video, "other_videos", lambda names, used: looked.append(used) or real(names, used))
    with pack([tmp_path / "files"], tmp_path / "packed", workers=1) as packed:
        assert [len(sample.members) for sample in map(packed.sample, range(4))] == [2] * 4
        for most in (video._MOST_SEEN, 0):
            monkeypatch.setattr(video, "_MOST_SEEN", most)
            looked.clear()
            with VideoLoader(packed, 1, clip=Clip(2), evaluate=True, num_threads=1, sidecar=None) as loader:
                assert len(list(loader)) == 4
            assert len(looked) == 1 if most else len(looked) >= 4
