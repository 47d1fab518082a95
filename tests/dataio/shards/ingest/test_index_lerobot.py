"""`headrace index` over LeRobot data sets: samples, skipped episodes, interrupted runs, and new episodes."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load

from headrace.dataio import Dataset, index
from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import ConflictError, CorruptionError, UnsupportedError, UsageError
from headrace.dataio.shards.ingest import lerobot_plan, lerobot_videos
from headrace.dataio.shards.ingest.index import FollowMemory
from headrace.dataio.shards.ingest.index_files import FileOptions
from headrace.dataio.shards.ingest.index_lerobot import LeRobotIndexer, is_lerobot_source
from headrace.dataio.shards.ingest.lerobot_episodes import read_episodes
from headrace.dataio.shards.ingest.lerobot_units import lerobot_task
from headrace.dataio.shards.ingest.report import PackReport
from headrace.dataio.shards.ingest.stored_copies import copy_object
from headrace.dataio.shards.pieces import Hasher
from headrace.dataio.shards.sample import Sample
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.store.open import open_store
from tests.support import headrace_command, lerobot_set
from tests.support.lerobot_set import FRONT, WRIST, LeRobotSet, action_of, state_of

H264 = {FRONT: "libx264", WRIST: "libx264"}
POINTS = [("lerobot.listed", 0), ("units.recorded#2", 2), ("lerobot.stored", 4), ("lerobot.version-stored", 4)]


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of five episodes. No test changes it."""
    folder = tmp_path_factory.mktemp("lerobot") / "set"
    lerobot_set.write(folder, LeRobotSet(codecs=H264))
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A data set that the test may change."""
    lerobot_set.write(tmp_path / "own", LeRobotSet(codecs=H264))
    return tmp_path / "own"


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit takes one video of each camera, so there are four."""
    monkeypatch.setattr(lerobot_plan, "UNIT_VIDEOS", 2)


def report_of(dataset: Dataset) -> PackReport:
    assert dataset.report is not None
    return dataset.report


def test_an_episode_is_a_sample(robot: Path, tmp_path: Path) -> None:
    what = LeRobotSet(codecs=H264)
    with index(robot, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == [f"episode_{number:08d}" for number in range(5)]
        assert (report_of(dataset).files, report_of(dataset).skipped, report_of(dataset).notes) == (7, (), ())
        for episode, sample in enumerate(dataset):
            assert sample.text == what.task(episode)
            assert sample.fields["episode_index"] == episode
            assert sample.duration == pytest.approx(what.lengths[episode] / 30)
            assert [video.ext for video in (sample.video, *sample.videos) if video] == ["front.mp4", "wrist.mp4"]
            assert {video.frames for video in (sample.video, *sample.videos) if video} == {what.lengths[episode]}
            video = dataset.read(sample, "wrist.mp4")
            assert video == (robot / what.path_of(WRIST, what.file_of(WRIST, episode))).read_bytes()
            rows = load(dataset.read(sample, "rows.safetensors"))
            np.testing.assert_array_equal(rows["observation.state"], state_of(what, episode))
            np.testing.assert_array_equal(rows["action"], action_of(what, episode))
            np.testing.assert_array_equal(rows["frame_index"], np.arange(what.lengths[episode]))
            assert set(rows) >= {"timestamp", "next.done", "index", "task_index"}
            assert json.loads(dataset.read(sample, "json")) == {
                "caption": what.task(episode),
                "episode_index": episode,
                "fps": 30.0,
                "frames": what.lengths[episode],
                "robot_type": "so101",
                "tasks": [what.task(episode)],
            }


def test_every_command_reads_such_a_dataset(robot: Path, tmp_path: Path) -> None:
    done = headrace_command.run("index", robot, tmp_path / "set")
    assert done.returncode == 0, done.stderr
    assert b"5 samples from 7 files" in done.stdout
    assert f"files stay in file://{robot}".encode() in done.stdout
    done = headrace_command.run("verify", tmp_path / "set", "--trust-mounts")
    assert done.returncode == 0, done.stdout + done.stderr
    done = headrace_command.run("cat", tmp_path / "set", "episode_00000003", "--ext", "json", "--trust-mounts")
    assert json.loads(done.stdout)["episode_index"] == 3
    done = headrace_command.run("index", robot, tmp_path / "files", "--layout", "files")
    assert done.returncode == 0, done.stderr
    assert b"5 samples" in done.stdout, "the five video files"


@pytest.mark.usefixtures("small_units")
def test_a_video_that_two_shards_share_is_read_once(
    robot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()

    def recorded(store: Store, info: ObjectInfo, path: Path) -> Hasher:
        read.append(info.key)
        return copy_object(store, info, path)

    monkeypatch.setattr(lerobot_videos, "copy_object", recorded)
    with index(robot, tmp_path / "set", workers=1) as dataset:
        assert len(dataset.document.shards) == 4
        assert len(read) == len(set(read)) == 5
        for episode, sample in enumerate(dataset):
            assert load(dataset.read(sample, "rows.safetensors"))["episode_index"][0] == episode


@pytest.mark.usefixtures("small_units")
def test_a_machine_that_opens_the_task_makes_the_same_records(robot: Path, tmp_path: Path) -> None:
    records = []
    for name in "ab":
        with open_store(str(tmp_path / name)) as store:
            indexer = LeRobotIndexer(str(robot), store, FileOptions())
            with indexer:
                plan = indexer._plan(read_episodes(indexer._source, indexer._info), follow=False)
                task = lerobot_task(indexer._source, store, indexer._settings(0))
                opened = task.opener(1)
                if name == "b":
                    remote = task.remote()
                    opened = remote.opener(remote.settings)
                with opened as runner:
                    records.append(list(runner.run(iter(plan.units), lambda _: None)))
    assert records[0] == records[1]
    assert objects(tmp_path / "a") == objects(tmp_path / "b")


# --- episodes that cannot be used


def _longer(row: dict[str, object]) -> None:
    """The list says that the video of episode 1 ends one frame later than it does."""
    if row["episode_index"] == 1:
        row[f"videos/{FRONT}/from_timestamp"] = 21 / 30
    if row["episode_index"] == 2:
        row["tasks"] = []


def change_episodes(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    for row in rows:
        change(row)
    pq.write_table(type(table).from_pylist(rows, schema=table.schema), path)


def test_an_episode_whose_window_is_wrong_is_skipped(own: Path, tmp_path: Path) -> None:
    change_episodes(own, _longer)
    with index(own, tmp_path / "set", workers=1) as dataset:
        assert list(dataset.keys) == [f"episode_{number:08d}" for number in (0, 2, 3, 4)]
        (skipped,) = report_of(dataset).skipped
        assert skipped.path == f"file://{own}: episode_00000001"
        assert skipped.reason == "its video cannot be decoded from 0.700 s, because no key frame is there"
        assert [sample.text is None for sample in dataset] == [False, True, False, False]
    with pytest.raises(UnsupportedError, match=r"episode_00000001: its video cannot be decoded"):
        index(own, tmp_path / "strict", workers=1, strict=True)


def test_an_episode_with_fewer_frames_than_rows_is_skipped(own: Path, tmp_path: Path) -> None:
    lerobot_set.write(tmp_path / "other", LeRobotSet(codecs=H264, lengths=(20, 22, 7, 31, 12)))
    video = LeRobotSet().path_of(WRIST, 0)
    (own / video).write_bytes((tmp_path / "other" / video).read_bytes())
    with index(own, tmp_path / "set", workers=1) as dataset:
        (skipped,) = report_of(dataset).skipped
        assert skipped.path.endswith("episode_00000001")
        assert skipped.code == CorruptionError.code
        assert "it ends at 1.433 s, and the video at 1.400 s" in skipped.reason


def test_a_damaged_video_skips_its_episodes_and_is_not_in_the_shard(own: Path, tmp_path: Path) -> None:
    video = own / LeRobotSet().path_of(FRONT, 0)
    video.write_bytes(video.read_bytes()[:-100])
    done = headrace_command.run("index", own, tmp_path / "set", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["samples"] == 2
    assert ["truncated" in item["reason"] for item in report["skipped"]] == [True] * 3
    lists = [path.read_text() for path in (tmp_path / "set/joined").iterdir()]
    assert not any(f"{FRONT}/chunk-000/file-000.mp4" in text for text in lists)


def test_rows_that_are_missing_skip_their_episodes(own: Path, tmp_path: Path) -> None:
    path = own / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 45), path)
    with index(own, tmp_path / "set", workers=1) as dataset:
        reasons = [item.reason for item in report_of(dataset).skipped]
        assert reasons == [
            f"data/chunk-000/file-000.parquet has {found} rows of it, and its length is {length}"
            for found, length in ((2, 7), (0, 31))
        ]
        assert len(dataset) == 3


def test_a_data_set_that_is_there_in_part_gives_what_is_there(own: Path, tmp_path: Path) -> None:
    (own / LeRobotSet().path_of(WRIST, 1)).unlink()
    with index(own, tmp_path / "set", workers=1) as dataset:
        (missing,) = report_of(dataset).skipped
        assert missing.reason == "no such file; its episodes are left out"
        assert list(dataset.keys) == [f"episode_{number:08d}" for number in (0, 1, 4)]
    for path in (own / "videos").rglob("*.mp4"):
        path.unlink()
    with pytest.raises(UsageError, match=r"nothing to index: .*no such file"):
        index(own, tmp_path / "none", workers=1)


def test_other_data_and_options_are_refused(own: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one LeRobot data set can be indexed, not 2"):
        index([own, own], tmp_path / "set", layout="lerobot")
    with pytest.raises(UsageError, match="group and columns are for files"):
        index(own, tmp_path / "set", group="dot")
    with pytest.raises(UsageError, match=r"meta/info\.json"):
        index(tmp_path, tmp_path / "set", layout="lerobot")
    info = json.loads((own / "meta/info.json").read_text())
    (own / "meta/info.json").write_text(json.dumps({**info, "total_episodes": 9}))
    with pytest.raises(CorruptionError, match=r"5 episodes are listed, but meta/info\.json counts 9"):
        index(own, tmp_path / "set")
    assert not list((tmp_path / "set").rglob("*.unit"))


# --- interrupted runs


def objects(root: Path) -> dict[str, str]:
    """Every object of a dataset but the documents, which carry nonces."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and ".headrace-tmp" not in path.parts
        if path.suffix != ".json" or path.parent.name == "joined"
    }


def test_the_points_are_those_that_the_tests_know() -> None:
    assert [name for name in crashpoints.declared() if name.startswith("lerobot.")] == [
        "lerobot.listed",
        "lerobot.stored",
        "lerobot.version-stored",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "resumed"), POINTS)
def test_killed_and_started_again_it_is_equal(tmp_path: Path, point: str, resumed: int) -> None:
    lengths = (9,) * 4
    per_file = {FRONT: 1, WRIST: 1, "data": 3}
    lerobot_set.write(tmp_path / "robot", LeRobotSet(codecs=H264, lengths=lengths, per_file=per_file))
    info = json.loads((tmp_path / "robot/meta/info.json").read_text())
    info["features"]["large"] = {"dtype": "float64", "shape": [1 << 20, 8]}  # so that each episode fills a unit
    (tmp_path / "robot/meta/info.json").write_text(json.dumps(info))
    crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(tmp_path / "mark")}
    done = headrace_command.run("index", tmp_path / "robot", tmp_path / "often", **crash)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with index(tmp_path / "robot", tmp_path / "often") as often, index(tmp_path / "robot", tmp_path / "never") as never:
        assert objects(tmp_path / "often") == objects(tmp_path / "never")
        assert (often.document.shards, often.document.index) == (never.document.shards, never.document.index)
        assert dataclasses.replace(report_of(often), seconds=0, resumed=0, workers=()) == dataclasses.replace(
            report_of(never), seconds=0, workers=()
        )
        assert report_of(often).resumed == resumed
        assert len(often) == 4
    with pytest.raises(ConflictError):
        index(tmp_path / "robot", tmp_path / "often")


# --- new episodes


def test_new_episodes_become_the_next_version(tmp_path: Path) -> None:
    per_file = {FRONT: 2, WRIST: 2, "data": 2}
    first = LeRobotSet(codecs=H264, lengths=(9, 8), per_file=per_file)
    lerobot_set.write(tmp_path / "robot", first)
    with index(tmp_path / "robot", tmp_path / "set", follow=True, workers=1) as dataset:
        assert (dataset.version, len(dataset)) == (1, 2)
    with index(tmp_path / "robot", tmp_path / "set", follow=True, workers=1, trust_mounts=True) as dataset:
        assert (dataset.version, report_of(dataset).samples) == (1, 0)
    before = objects(tmp_path / "set")
    lerobot_set.write(tmp_path / "more", dataclasses.replace(first, lengths=(9, 8, 7)))
    for path in (tmp_path / "more").rglob("*"):
        new = tmp_path / "robot" / path.relative_to(tmp_path / "more")
        if path.is_file() and (not new.exists() or "meta" in path.parts):
            new.write_bytes(path.read_bytes())
    with index(tmp_path / "robot", tmp_path / "set", follow=True, workers=1, trust_mounts=True) as dataset:
        assert (dataset.version, report_of(dataset).samples, len(dataset)) == (2, 1, 3)
        assert list(dataset.keys)[2] == "episode_00000002"
        assert load(dataset.read(dataset.sample(2), "rows.safetensors"))["episode_index"].tolist() == [2] * 7
    assert before.items() <= objects(tmp_path / "set").items()
    with pytest.raises(ConflictError, match="--follow"):
        index(tmp_path / "robot", tmp_path / "set", workers=1)


def linked(own: Path) -> Path:
    """The data set as the cache of the Hub has it: a snapshot of links to files that are named by their digests."""
    hub = own.parent / "hub" / "datasets--me--robot"
    for path in own.rglob("*"):
        if path.is_file():
            blob = hub / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            link = hub / "snapshots" / "main" / path.relative_to(own)
            blob.parent.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(path.read_bytes())
            link.symlink_to(os.path.relpath(blob, link.parent))
    return hub / "snapshots" / "main"


def test_the_links_of_a_data_set_are_followed(own: Path, tmp_path: Path) -> None:
    with index(own, tmp_path / "set", workers=1) as plain, index(linked(own), tmp_path / "linked", workers=1) as found:
        assert [mount.url for mount in found.document.mounts] == [
            "joined:",
            f"file://{own.parent}/hub/datasets--me--robot",
        ]
        for one, other in zip(plain, found, strict=True):
            assert described(one) == described(other)
            assert all(plain.read(one, m.ext) == found.read(other, m.ext) for m in one.members)
    (own.parent / "hub/datasets--me--robot/snapshots/main" / LeRobotSet().path_of(FRONT, 1)).unlink()
    with index(own.parent / "hub/datasets--me--robot/snapshots/main", tmp_path / "part", workers=1) as part:
        assert len(part) == 3
        (missing,) = report_of(part).skipped
        assert missing.path.endswith(f"snapshots/main/{LeRobotSet().path_of(FRONT, 1)}")


def described(sample: Sample) -> object:
    """The sample without its place."""
    return sample.key, sample.video, sample.videos, sample.text, sample.fields, sample.duration


def test_two_cameras_that_are_one_file_skip_the_episode(own: Path, tmp_path: Path) -> None:
    folder = linked(own)
    (folder / LeRobotSet().path_of(WRIST, 2)).unlink()
    (folder / LeRobotSet().path_of(WRIST, 2)).symlink_to(os.path.realpath(folder / LeRobotSet().path_of(FRONT, 1)))
    with index(folder, tmp_path / "set", workers=1) as dataset:
        (skipped,) = report_of(dataset).skipped
        assert skipped.path.endswith("episode_00000004")
        assert skipped.reason == "the videos of two of its cameras are one file"


@pytest.mark.parametrize("name", ["", "*", "{own,b}", "clip.mp4", "set.tar", "clips.csv"])
def test_only_one_folder_can_be_taken_for_a_data_set(own: Path, name: str) -> None:
    for root in (str(own.parent), f"file://{own.parent}", "memory://elsewhere"):
        assert not is_lerobot_source([f"{root}/{name}"])
    assert is_lerobot_source([str(own)])
    assert is_lerobot_source([f"file://{own}"])
    assert not is_lerobot_source([str(own), str(own)])


def test_an_episode_that_cannot_be_used_is_read_again_only_after_its_files_changed(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = own / LeRobotSet().path_of(FRONT, 1)
    whole = video.read_bytes()
    with index(own, tmp_path / "set", workers=1) as dataset:
        assert len(dataset) == 5
    video.write_bytes(whole[:-100])
    follow = functools.partial(
        index, own, tmp_path / "other", follow=True, workers=1, memory=FollowMemory(), trust_mounts=True
    )
    with follow() as dataset:
        assert (dataset.version, len(dataset)) == (1, 3)
    reads, copy = list[str](), copy_object

    def recorded(store: Store, info: ObjectInfo, path: Path) -> Hasher:
        reads.append(info.key)
        return copy(store, info, path)

    monkeypatch.setattr(lerobot_videos, "copy_object", recorded)
    with follow() as dataset:
        assert (dataset.version, report_of(dataset).skipped) == (1, ())
    assert not reads
    video.write_bytes(whole)
    with follow() as dataset:
        assert (dataset.version, report_of(dataset).samples, len(dataset)) == (2, 2, 5)
