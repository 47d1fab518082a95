"""`VideoLoader` delivers one video of a sample. `pack`, `index` and the loader say which others it holds."""

from __future__ import annotations

import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import index, pack
from headrace.dataio.core import log
from headrace.dataio.shards.media.container import other_videos
from headrace.dataio.shards.media.messages import Recipe
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


VIDEOS = {"s1": ("mp4", ["cam1.mp4"]), "s2": ("mkv", ["mp4"]), "s3": ("cam0.mp4", ["cam1.mp4"]), "s4": ("mp4", [])}


@pytest.mark.parametrize("how", [pack, index])
def test_pack_and_index_describe_all_videos_and_name_the_further_ones(how: Any, tar: Path, tmp_path: Path) -> None:
    with how([str(tar)], tmp_path / "ds", workers=1) as dataset:
        assert not dataset.report.skipped
        report = "\n".join(dataset.report.notes)
        for key, ext in (("s1", "cam1.mp4"), ("s2", "mp4"), ("s3", "cam1.mp4")):
            assert f'{key}: its .{ext} file is a further video: Video(file="{ext}") delivers it' in report
        assert "s4" not in report
        found = {one.key: one for one in map(dataset.sample, range(len(dataset)))}
        assert {key: (one.video.ext, [other.ext for other in one.videos]) for key, one in found.items()} == VIDEOS
        assert {one.frames for sample in found.values() for one in (sample.video, *sample.videos)} == {8}
        assert found["s3"].video_of("cam1.mp4") == found["s3"].videos[0]
        assert found["s3"].video_of("cam0.mp4") == found["s3"].video_of(None) == found["s3"].video
        assert found["s3"].video_of("cam2.mp4") is None


def test_a_damaged_further_video_rejects_its_sample(tar: Path, tmp_path: Path) -> None:
    with tarfile.open(tar, "a") as file:
        (tmp_path / "damaged").write_bytes((tmp_path / "small.mp4").read_bytes()[:-200])
        file.add(tmp_path / "small.mp4", "s5.mp4")
        file.add(tmp_path / "damaged", "s5.cam1.mp4")
    with index([str(tar)], tmp_path / "ds", workers=1) as indexed:
        assert indexed.report is not None
        (skipped,) = indexed.report.skipped
        assert "s5.cam1.mp4" in skipped.path
        assert len(indexed) == 4


def test_a_sample_with_further_videos_is_not_split(tar: Path, tmp_path: Path) -> None:
    """The further videos of the clips would no longer show the same instants."""
    with pack([tar], tmp_path / "ds", recipe=Recipe(split=0.1), workers=1) as packed:
        assert packed.report is not None
        reasons = {Path(one.path).name: one.reason for one in packed.report.skipped}
        assert any("with several media files (mp4, cam1.mp4) cannot be split" in one for one in reasons.values()), (
            reasons
        )
        assert [key for key in packed.keys if key.startswith("s4")]


def test_the_loader_warns_once(tar: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log._logged.clear()
    with pack([tar], tmp_path / "packed", workers=1) as packed, caplog.at_level(logging.WARNING, logger="headrace"):
        with VideoLoader(packed, 1, clip=Clip(2), evaluate=True, num_threads=1, sidecar=None) as loader:
            assert len(list(loader)) == 4
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
