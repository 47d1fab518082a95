"""The statistics of `headrace info`: part by part, resumable, and equal whatever the engine and the number of workers."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio import Dataset, index, pack
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards import statistics
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.statistics import summary
from tests.support import headrace_command, lerobot_set
from tests.support.lerobot_set import FRONT, WRIST, LeRobotSet
from tests.support.written_media import write_clip, write_wav

_WAVS = 10


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sounds and two videos, in an index of twelve parts."""
    root = tmp_path_factory.mktemp("statistics")
    for i in range(_WAVS):
        write_wav(root / "in" / f"{i}.wav", seconds=0.125 * (i + 1))
    for i in range(2):
        write_clip(root / "in" / f"v{i}.mp4")
    (root / "in" / "0.txt").write_text("a tone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_writer, "PART_ROWS", 1)
        pack(root / "in", root / "ds", workers=2).close()
    return root / "ds"


def test_the_counts_are_those_of_the_samples(ds: Path) -> None:
    with Dataset(ds) as dataset:
        assert len(dataset.document.index) == _WAVS + 2
        found, samples = summary(dataset), list(dataset)
    assert found["samples"] == len(samples)
    assert found["seconds"] == pytest.approx(sum(one.duration for one in samples))
    videos = [one.video for one in samples if one.video is not None]
    assert found["video_frames"] == sum(video.frames for video in videos)
    assert found["video_codecs"] == {videos[0].codec: 2}
    assert found["sizes"] == {"64x48": 2}
    assert (found["with_text"], found["sample_rates"]) == (1, {"8000": _WAVS})


def test_one_worker_many_workers_and_larger_units_give_the_same(ds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Dataset(ds) as dataset:
        for chosen in (dataset, dataset.where("duration > 0.5")):
            one = summary(chosen, workers=1)
            assert summary(chosen, workers=4) == one
            monkeypatch.setattr(statistics, "_UNIT_PARTS", 100)
            assert summary(chosen) == one
            monkeypatch.undo()


def test_a_view_and_a_version_with_removed_samples_are_counted_without_them(ds: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(ds, tmp_path / "ds")
    with Dataset(tmp_path / "ds") as dataset:
        view = summary(dataset.where("duration > 0.5"))
        assert 0 < view["samples"] < len(dataset)
        assert view["samples"] == sum(view["sample_rates"].values()) + sum(view["sizes"].values())
        removed = dataset.remove(where="duration <= 0.5")
        assert facts(summary(removed)) == facts(view)


def facts(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in (*statistics._COUNTED, "samples", "seconds", "video_frames", "with_text")}


def test_progress_ends_at_all_parts(ds: Path) -> None:
    seen = list[tuple[int, int]]()
    with Dataset(ds) as dataset:
        summary(dataset, workers=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (_WAVS + 2, _WAVS + 2)


def test_killed_and_started_again_it_gives_the_same(ds: Path, tmp_path: Path) -> None:
    crash = {"HEADRACE_CRASH": "units.recorded", "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    arguments = ("info", ds, "--json", "--workers", 1, "--journal", tmp_path / "journal")
    assert headrace_command.run(*arguments, **crash).returncode == -signal.SIGKILL
    (record,) = (tmp_path / "journal").rglob("*.unit")
    written = record.stat().st_mtime_ns
    again = headrace_command.run(*arguments, **(crash | {"HEADRACE_CRASH": "units.recorded#2"}))
    assert again.returncode == 0, "only one of the two units was left"
    assert written
    assert json.loads(again.stdout) == json.loads(headrace_command.run("info", ds, "--json").stdout)
    assert not list((tmp_path / "journal").rglob("*.unit"))


def test_wrong_arguments_are_errors(ds: Path) -> None:
    with Dataset(ds) as dataset:
        with pytest.raises(UsageError, match="no engine 'slurm'"):
            summary(dataset, engine="slurm")
        with pytest.raises(UsageError, match="workers=0"):
            summary(dataset, workers=0)
        with pytest.raises(UsageError, match="needs a journal"):
            pytest.importorskip("ray", reason="ray is not installed (pip install 'headrace[ray]')")
            summary(dataset, engine="ray", workers=1)


def test_a_video_that_several_episodes_share_counts_once(tmp_path: Path) -> None:
    lerobot_set.write(tmp_path / "robot", LeRobotSet(codecs={FRONT: "libx264", WRIST: "libx264"}))
    with index(tmp_path / "robot", tmp_path / "set", workers=1) as dataset:
        found, places = summary(dataset, workers=1), dict[tuple[str, int], int]()
        for sample in dataset:
            places.update({(sample.shard, member.offset): member.length for member in sample.members})
        assert found["member_bytes"] == sum(places.values()) < dataset.total_bytes
