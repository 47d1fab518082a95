"""A pack that is killed at any moment and started again ends equal to one that was never disturbed."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import blake3
import msgspec
import pytest

from headrace.dataio import Dataset, Recipe, append, pack
from headrace.dataio.core.errors import ConflictError
from headrace.dataio.shards.ingest import plan
from headrace.dataio.shards.ingest.plan import journal_of
from headrace.dataio.shards.ingest.sources import gather
from headrace.dataio.shards.sample import Member
from headrace.dataio.store.open import open_store
from tests.support import headrace_command
from tests.support.written_media import MakeWav

_SHARD = 96 << 10


def make_many(make_wav: MakeWav, folder: Path, count: int) -> Path:
    """Tiny sounds, each different."""
    base = make_wav(folder / "base.wav", seconds=0.02).read_bytes()
    (folder / "base.wav").unlink()
    for i in range(count):
        clip = folder / f"{i % 7}" / f"{i:05}.wav"
        clip.parent.mkdir(exist_ok=True)
        clip.write_bytes(base[:-4] + i.to_bytes(4, "little"))
    return folder


def object_digests(root: Path) -> dict[str, str]:
    """Every object of a dataset but the documents, which carry nonces."""
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".json")
    files = (path for path in files if ".headrace-tmp" not in path.parts)  # what the killed store was writing
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def command(clips: Path, root: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "pack",
        "--workers",
        "2",
        "--shard-size",
        str(_SHARD),
        str(clips),
        str(root),
    ]


def kill_during(clips: Path, root: Path, chance: random.Random) -> bool:
    """Start packing and kill it after a random number of further objects; False when it ended before that."""
    more = chance.randint(1, 4)
    process = subprocess.Popen(command(clips, root), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    before = len(object_digests(root)) if root.exists() else 0
    deadline = time.monotonic() + 120
    while process.poll() is None and (not root.exists() or len(stored_names(root)) < before + more):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 0.05))  # not always right behind a write
    process.kill()
    return process.wait() == -signal.SIGKILL


def stored_names(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.suffix != ".json"]


def killed_often_is_equal(make_wav: MakeWav, tmp_path: Path, clips: int, kills: int) -> None:
    source = make_many(make_wav, tmp_path / "clips", clips)
    chance = random.Random(20)
    fired = sum(kill_during(source, tmp_path / "often", chance) for _ in range(kills))
    done = subprocess.run(command(source, tmp_path / "often"), capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert fired == kills  # every one of them was killed at work
    with pack(source, tmp_path / "never", shard_bytes=_SHARD) as calm, Dataset(tmp_path / "often") as often:
        assert object_digests(tmp_path / "often") == object_digests(tmp_path / "never")
        assert (often.document.shards, often.document.index) == (calm.document.shards, calm.document.index)
        assert len(often) == clips


def test_killed_four_times_it_ends_equal(make_wav: MakeWav, tmp_path: Path) -> None:
    killed_often_is_equal(make_wav, tmp_path, 200, 4)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_two_thousand_clips_killed_ten_times_end_equal(make_wav: MakeWav, tmp_path: Path) -> None:
    killed_often_is_equal(make_wav, tmp_path, 2000, 10)


def crash(point: str, arguments: list[str], mark: Path) -> None:
    environment = {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = headrace_command.run("pack", *arguments, **environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert mark.exists()


def test_what_was_stored_is_not_sent_or_written_again(make_wav: MakeWav, tmp_path: Path) -> None:
    source = make_many(make_wav, tmp_path / "clips", 60)
    crash("pack.shard-stored#2", ["--shard-size", "32KiB", str(source), str(tmp_path / "ds")], tmp_path / "mark")
    before = {path: path.stat().st_ino for path in (tmp_path / "ds" / "shards").iterdir()}
    assert len(before) == 2
    pack(source, tmp_path / "ds", shard_bytes=32 << 10).close()
    assert {path: path.stat().st_ino for path in before} == before


@pytest.mark.parametrize("point", ["units.recorded", "pack.version-stored"])
def test_an_append_that_is_killed_goes_on(make_wav: MakeWav, tmp_path: Path, point: str) -> None:
    first = make_many(make_wav, tmp_path / "first", 3)
    second = tmp_path / "second"
    for path in make_many(make_wav, tmp_path / "made", 40).rglob("*.wav"):
        second.mkdir(exist_ok=True)
        shutil.copy(path, second / f"n{path.name}")
    for name in ("often", "never"):
        pack(first, tmp_path / name).close()
    crash(point, ["--append", "--shard-size", "32KiB", str(second), str(tmp_path / "often")], tmp_path / "mark")
    with (
        append(second, tmp_path / "often", shard_bytes=32 << 10) as often,
        append(second, tmp_path / "never", shard_bytes=32 << 10) as never,
    ):
        assert often.version == never.version == 2
        assert list(often.keys) == list(never.keys)
        assert len(often) == 43
        assert often.report is not None
        assert often.report.samples == 40
    assert object_digests(tmp_path / "often") == object_digests(tmp_path / "never")


def test_a_damaged_record_is_packed_again(make_wav: MakeWav, tmp_path: Path) -> None:
    source = make_many(make_wav, tmp_path / "clips", 30)
    crash("pack.index-stored", [str(source), str(tmp_path / "ds")], tmp_path / "mark")
    (record,) = (tmp_path / "ds" / "packing").rglob("*.unit")
    data = bytearray(record.read_bytes())
    data[100] ^= 1
    record.write_bytes(data)
    with pack(source, tmp_path / "ds") as packed:
        assert packed.report is not None
        assert (packed.report.resumed, len(packed)) == (0, 30)


def test_input_that_changed_in_between_is_another_plan(make_wav: MakeWav, tmp_path: Path) -> None:
    source = make_many(make_wav, tmp_path / "clips", 10)
    crash("pack.index-stored", [str(source), str(tmp_path / "ds")], tmp_path / "mark")
    (source / "0" / "00000.wav").write_bytes((source / "1" / "00001.wav").read_bytes())
    with pack(source, tmp_path / "ds") as packed:
        assert packed.report is not None
        assert packed.report.resumed == 0
        assert packed.read(packed.find("0/00000"), "wav") == (source / "1" / "00001.wav").read_bytes()


def test_the_plan_depends_on_names_sizes_times_and_settings(make_wav: MakeWav, tmp_path: Path) -> None:
    source = make_many(make_wav, tmp_path / "clips", 5)
    groups = gather([source]).groups
    usual = plan.Settings(shard_bytes=1000)
    names = {
        plan.digest(groups, usual, append=False),
        plan.digest(groups, usual, append=True),
        plan.digest(groups[1:], usual, append=False),
        plan.digest(groups, plan.Settings(shard_bytes=1001), append=False),
        plan.digest(groups, plan.Settings(shard_bytes=1000, recipe=Recipe(split=2.0)), append=False),
    }
    os.utime(source / "0" / "00000.wav", (5, 5))
    names.add(plan.digest(gather([source]).groups, usual, append=False))
    assert len(names) == 6
    assert plan.digest(groups, usual, append=False) in names


def test_a_record_from_before_files_had_pieces_is_read(tmp_path: Path) -> None:
    member = {"ext": "mp4", "offset": 512, "length": 2 << 20, "xxh3": 7}
    sample = {"id": 0, "key": "a", "shard": "shards/a.tar", "members": [member], "duration": 1.0}
    lists = {"shards": [], "samples": [sample], "skipped": [], "notes": []}
    body = msgspec.msgpack.encode(lists | {"files": 1, "groups": 1, "bytes": 2 << 20})
    with open_store(tmp_path) as store:
        store.put("packing/p/00000000.unit", blake3.blake3(body).digest() + body)
        found = journal_of(store, "p").read(0)
    assert found is not None
    assert found.samples[0].members == (Member("mp4", 512, 2 << 20, 7),)


def test_appending_a_key_that_is_there_is_refused_before_anything_is_stored(make_wav: MakeWav, tmp_path: Path) -> None:
    source = make_many(make_wav, tmp_path / "clips", 3)
    pack(source, tmp_path / "ds").close()
    before = object_digests(tmp_path / "ds")
    with pytest.raises(ConflictError, match=r"already has the sample '0/00000' and 2 more"):
        append(source, tmp_path / "ds")
    assert object_digests(tmp_path / "ds") == before


def test_appenders_that_race_all_succeed(make_wav: MakeWav, tmp_path: Path) -> None:
    make_many(make_wav, tmp_path / "first", 2)
    pack(tmp_path / "first", tmp_path / "ds").close()
    for name in "abc":
        make_wav(tmp_path / name / f"{name}.wav")
    racers = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "headrace.dataio.cli",
                "pack",
                "--append",
                "--workers",
                "1",
                str(tmp_path / n),
                str(tmp_path / "ds"),
            ],
            stdout=subprocess.DEVNULL,
        )
        for n in "abc"
    ]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0, 0]
    with Dataset(tmp_path / "ds") as dataset:
        assert dataset.version == 4
        assert sorted(dataset.keys) == ["0/00000", "1/00001", "a", "b", "c"]
