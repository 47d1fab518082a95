"""`index` with `follow` adds what is new, rewrites nothing, and works beside another follower."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.dataio import Dataset, index, pack
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.shards.ingest import file_units
from headrace.dataio.shards.ingest.index import FollowMemory
from tests.support import headrace_command, nursery
from tests.support.waiting import wait_for
from tests.support.written_media import write_clip, write_wav


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        write_wav(tmp_path / "sounds" / f"{name}.wav")
    return tmp_path / "sounds"


def follow(sources: object, url: object, **options: object) -> tuple[int, list[str], int]:
    """The version, its keys, and the number of samples that this call added."""
    with index(sources, url, follow=True, workers=1, **options) as dataset:  # type: ignore[arg-type]
        assert dataset.report is not None
        return dataset.version, list(dataset.keys), dataset.report.samples


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_new_files_are_the_next_version(sounds: Path, tmp_path: Path) -> None:
    url = tmp_path / "set"
    assert follow(sounds, url) == (1, ["a", "b"], 2)  # the first call makes the dataset
    assert follow(sounds, url) == (1, ["a", "b"], 0)
    before = stored(url)
    write_wav(sounds / "0.wav")
    write_clip(sounds / "deep" / "c.mp4")
    assert follow(sounds, url) == (2, ["a", "b", "0", "deep/c"], 2)
    assert before.items() <= stored(url).items()
    with Dataset(url, trust_mounts=True) as dataset:
        assert dataset.read(dataset.find("deep/c"), "mp4") == (sounds / "deep/c.mp4").read_bytes()
        assert dataset.lineage.operation == "append"
        assert len(dataset.document.mounts) == 2
    with Dataset(url, 1, trust_mounts=True) as dataset:
        assert list(dataset.keys) == ["a", "b"]
    assert not (url / "packing").exists() or not list((url / "packing").iterdir())


def test_a_dataset_that_was_packed_is_followed_too(sounds: Path, tmp_path: Path) -> None:
    pack(sounds, tmp_path / "set", workers=1).close()
    write_wav(sounds / "c.wav")
    assert follow(sounds, tmp_path / "set") == (2, ["a", "b", "c"], 1)


def test_mounts_are_used_again(sounds: Path, tmp_path: Path) -> None:
    for name in "xyz":
        folder = tmp_path / "sounds" / "deep" / name
        write_wav(folder / "1.wav")
        version, _, _ = follow(f"{sounds}/deep/*", tmp_path / "set")
        write_wav(folder / "2.wav")
        assert follow(f"{sounds}/deep/*", tmp_path / "set")[0] == version + 1
    with Dataset(tmp_path / "set", trust_mounts=True) as dataset:
        assert [mount.url for mount in dataset.document.mounts if mount.url != "joined:"] == [
            f"file://{sounds}/deep/x",
            f"file://{sounds}/deep",
        ] or len(dataset.document.mounts) == 3
        assert all(dataset.read(sample, "wav") for sample in dataset)


def test_removed_samples_do_not_come_back(sounds: Path, tmp_path: Path) -> None:
    url = tmp_path / "set"
    follow(sounds, url)
    with Dataset(url, trust_mounts=True) as dataset:
        dataset.remove(["a"]).close()
    assert follow(sounds, url) == (2, ["b"], 0)
    write_wav(sounds / "c.wav")
    assert follow(sounds, url) == (3, ["b", "c"], 1)
    with Dataset(url, trust_mounts=True) as dataset:
        dataset.remove(["c"]).close()  # which leaves nothing of its index part
    assert follow(sounds, url) == (4, ["b"], 0)


def test_files_that_changed_are_reported_and_stay(sounds: Path, tmp_path: Path) -> None:
    follow(sounds, tmp_path / "set")
    write_wav(sounds / "a.wav", seconds=0.7)
    os.utime(sounds / "b.wav", (1e9, 1e9))
    (sounds / "b.txt").write_text("a caption that came later")
    with index(sounds, tmp_path / "set", follow=True, workers=1) as dataset:
        assert dataset.version == 1
        assert dataset.report is not None
        assert len(dataset.report.changed) == 3
        assert "a.wav: it changed after it was indexed" in dataset.report.changed[0]
        assert "b.txt: a new file of the sample 'b'" in dataset.report.changed[1]
    done = headrace_command.run("index", "--follow", sounds, tmp_path / "set")
    assert done.returncode == 1
    assert b"changed since they were indexed" in done.stdout


def test_files_that_cannot_be_used_are_read_again_only_after_they_changed(sounds: Path, tmp_path: Path) -> None:
    follow(sounds, tmp_path / "set")
    whole = (sounds / "a.wav").read_bytes()
    (sounds / "c.wav").write_bytes(whole[:30])
    memory = FollowMemory()
    for expected in (1, 0):
        with index(sounds, tmp_path / "set", follow=True, memory=memory, workers=1) as dataset:
            assert dataset.report is not None
            assert (dataset.version, len(dataset.report.skipped)) == (1, expected)
    (sounds / "c.wav").write_bytes(whole)
    with index(sounds, tmp_path / "set", follow=True, memory=memory, workers=1) as dataset:
        assert list(dataset.keys) == ["a", "b", "c"]


def test_two_followers_add_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_units, "UNIT_OBJECTS", 3)
    folder, url = tmp_path / "sounds", tmp_path / "set"
    write_wav(folder / "first.wav")
    follow(folder, url)
    for number in range(6):
        write_wav(folder / f"{number}.wav", seconds=0.05)
    with ThreadPoolExecutor(3) as threads:
        # two of the same files, and one of some of them
        results = list(threads.map(lambda source: follow(source, url), [folder, folder, folder / "[012].wav"]))
    with Dataset(url, trust_mounts=True) as dataset:
        assert sorted(dataset.keys) == ["0", "1", "2", "3", "4", "5", "first"]
        assert all(dataset.read(sample, "wav") for sample in dataset)
    assert sum(added for _, _, added in results) in (6, 12)  # both may say that they made the same version
    assert follow(folder, url)[2] == 0


def test_a_follower_that_was_killed_continues(tmp_path: Path) -> None:
    folder, url = tmp_path / "sounds", tmp_path / "set"
    write_wav(folder / "first.wav")
    follow(folder, url)
    for number in range(3):
        write_wav(folder / f"{number}.wav", seconds=0.05)
    shutil.copytree(url, tmp_path / "fresh")
    for point in ("files.list-stored", "units.recorded", "files.index-stored", "files.version-stored"):
        mark = tmp_path / point
        crash = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
        done = headrace_command.run("index", "--follow", folder, url, **crash)
        assert done.returncode == -signal.SIGKILL, (point, done.stderr)
    assert follow(folder, url) == (2, ["first", "0", "1", "2"], 0)
    assert follow(folder, tmp_path / "fresh") == (2, ["first", "0", "1", "2"], 3)
    with Dataset(url, trust_mounts=True) as killed, Dataset(tmp_path / "fresh", trust_mounts=True) as fresh:
        assert killed.document.shards == fresh.document.shards
        assert killed.document.index == fresh.document.index


# tars


def test_new_tars_are_the_next_version(sounds: Path, tmp_path: Path) -> None:
    tars, url = tmp_path / "tars", tmp_path / "set"
    for name in ("a", "b"):
        pack(sounds / f"{name}.wav", tmp_path / name, workers=1).close()
        tars.mkdir(exist_ok=True)
        (tmp_path / f"{name}.tar").write_bytes(next((tmp_path / name / "shards").iterdir()).read_bytes())
    shutil.copy(tmp_path / "a.tar", tars / "1.tar")
    assert follow(tars, url) == (1, ["a"], 1)
    assert follow(tars, url) == (1, ["a"], 0)
    before = stored(url)
    shutil.copy(tmp_path / "b.tar", tars / "0.tar")
    (tars / "2.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:700])
    memory = FollowMemory()
    with index(tars, url, follow=True, memory=memory, workers=1) as dataset:
        assert (dataset.version, list(dataset.keys)) == (2, ["a", "b"])
        assert dataset.report is not None
        assert [item.path.rpartition("/")[2] for item in dataset.report.skipped] == ["2.tar"]
        assert dataset.read(dataset.find("b"), "wav") == (sounds / "b.wav").read_bytes()
    with index(tars, url, follow=True, memory=memory, workers=1) as dataset:
        assert dataset.report is not None
        assert (dataset.version, dataset.report.skipped) == (2, ())
    assert before.items() <= stored(url).items()
    with (tars / "1.tar").open("ab") as file:
        file.write(bytes(10240))
    with index(tars, url, follow=True, memory=memory, workers=1) as dataset:
        assert dataset.report is not None
        assert "1.tar: it had" in dataset.report.changed[0]
    shutil.copy(tmp_path / "a.tar", tars / "3.tar")
    with pytest.raises(ConflictError, match="already has the sample 'a'"):
        follow(tars, url)


def test_two_followers_of_tars(sounds: Path, tmp_path: Path) -> None:
    tars, url = tmp_path / "tars", tmp_path / "set"
    tars.mkdir()
    for number in range(4):
        write_wav(tmp_path / "more" / f"{number}.wav", seconds=0.05)
        pack(tmp_path / "more" / f"{number}.wav", tmp_path / str(number), workers=1).close()
    shutil.copy(next((tmp_path / "0" / "shards").iterdir()), tars / "0.tar")
    follow(tars, url)
    for number in range(1, 4):
        shutil.copy(next((tmp_path / str(number) / "shards").iterdir()), tars / f"{number}.tar")
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(lambda _: follow(tars, url), range(2)))
    assert [keys for _, keys, _ in results] == [["0", "1", "2", "3"]] * 2


# the command


def test_the_command_follows_until_it_is_interrupted(sounds: Path, tmp_path: Path) -> None:
    url, log = tmp_path / "set", tmp_path / "log"
    command = nursery.start_with_log(
        log, "tests.support.headrace_command", "index", str(sounds), str(url), "--every", "1s", "--workers", "1"
    )
    try:
        wait_for(lambda: (url / "versions" / "00000001.json").exists())
        write_wav(sounds / "later.wav")
        wait_for(lambda: (url / "versions" / "00000002.json").exists())
        wait_for(lambda: "version 2" in log.read_text())
        time.sleep(1.5)  # another pass, which finds nothing
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 0, log.read_text()
    finally:
        if command.poll() is None:
            command.kill()
            command.wait(60)
    assert not (url / "versions" / "00000003.json").exists()
    assert log.read_text().count("version 2") == 1
