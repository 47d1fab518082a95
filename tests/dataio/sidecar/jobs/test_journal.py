"""Entries that are whole, torn, foreign, newer, too large; plans that changed; files that belong to no job."""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import uuid
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import AccessDeniedError, CorruptionError
from headrace.dataio.sidecar.jobs import journal as j
from headrace.dataio.sidecar.jobs.journal import Entry, Journal


def entry(plan: bytes = b"plan", **more: object) -> Entry:
    made = Entry(
        token=uuid.uuid4().hex,
        kind="test",
        about="run, step 1",
        urgent=False,
        size=10,
        plan_bytes=len(plan),
        plan_digest=j.digest(plan),
        accepted=1.0,
    )
    return msgspec.structs.replace(made, **more)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "jobs")


def test_what_was_recorded_is_found_again_oldest_first(journal: Journal) -> None:
    late, early = entry(accepted=2.0), entry(accepted=1.0)
    for one in (late, early):
        journal.record(one, b"plan")
    assert Journal(journal.folder).load() == [early, late]
    fd = journal.plan(late)
    assert os.read(fd, 100) == b"plan"
    os.close(fd)
    journal.update(changed := msgspec.structs.replace(late, pid=7, tries=1))
    journal.remove(early.token)
    assert journal.load() == [changed]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in journal.folder.iterdir())
    assert stat.S_IMODE(journal.folder.stat().st_mode) == 0o700


def test_plan_and_entry_are_synced_before_their_names_and_the_folder_last(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        order.append("sync " + os.readlink(f"/proc/self/fd/{fd}").rpartition(".")[2])
        real_sync(fd)

    def rename(old: Path, new: Path) -> None:
        order.append("name " + str(new).rpartition(".")[2])
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    journal.record(entry(), b"plan")
    assert [step.split(" ")[0] for step in order] == ["sync", "name", "sync", "name", "sync"]
    assert order[1:4] == ["name plan", "sync new", "name job"]


def spoil(journal: Journal, how: str) -> str:
    one = entry()
    journal.record(one, b"plan")
    path = journal.folder / f"{one.token}.job"
    data = path.read_bytes()
    if how == "torn":
        path.write_bytes(data[:-3])
    elif how == "newer":
        payload = msgspec.msgpack.encode({"version": 2, "token": one.token})
        path.write_bytes(_framed(payload))
    elif how == "newer frame":
        path.write_bytes(data[:7] + b"\2" + data[8:])
        path.write_bytes(_framed(data[12:-8], magic=b"MLRJOB\0\2"))
    elif how == "too large":
        path.write_bytes(data + bytes(j.ENTRY_BYTES))
    elif how == "of another job":
        path.rename(journal.folder / f"{uuid.uuid4().hex}.job")
        return "belongs to another job"
    elif how == "a link":
        path.rename(journal.folder / "elsewhere")
        path.symlink_to(journal.folder / "elsewhere")
    elif how == "garbage":
        path.write_bytes(os.urandom(200))
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    return path.name


def _framed(payload: bytes, magic: bytes = j.MAGIC) -> bytes:
    import xxhash

    data = j._HEAD.pack(magic, len(payload)) + payload
    return data + j._SUM.pack(xxhash.xxh3_64_intdigest(data))


KINDS = ["torn", "newer", "newer frame", "too large", "of another job", "a link", "garbage", "a pipe"]


@pytest.mark.parametrize("how", KINDS)
def test_an_entry_that_is_not_sound_is_named_and_set_aside(
    journal: Journal, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    sound = entry()
    journal.record(sound, b"plan")
    name = spoil(journal, how)
    with caplog.at_level(logging.ERROR, logger="headrace"):
        assert journal.load() == [sound]
    assert "is invalid and was moved to refused" in caplog.text
    assert name in caplog.text
    assert len(list((journal.folder / "refused").iterdir())) == 1
    caplog.clear()
    assert journal.load() == [sound]
    assert not caplog.records


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_set_aside(journal: Journal) -> None:
    one = entry()
    journal.record(one, b"plan")
    os.chown(journal.folder / f"{one.token}.job", 65534, 65534)
    assert journal.load() == []


def test_what_is_set_aside_is_bounded(journal: Journal) -> None:
    for _ in range(j.REFUSED + 5):
        spoil(journal, "torn")
    assert journal.load() == []
    assert len(list((journal.folder / "refused").iterdir())) == j.REFUSED


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_an_entry_by_mistake(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = Journal(Path(folder) / "jobs")
        (made.folder / f"{'0' * 32}.job").write_bytes(data)
        assert made.load() == []


def test_files_of_no_entry_are_removed_and_strangers_are_left(journal: Journal) -> None:
    one = entry()
    journal.record(one, b"plan")
    for kind in j.KINDS[1:]:
        (journal.folder / f"{uuid.uuid4().hex}.{kind}").touch()
    (journal.folder / f"{one.token}.job.new").touch()
    (journal.folder / "notes.txt").touch()
    assert journal.load() == [one]
    left = {path.name for path in journal.folder.iterdir()}
    assert left == {f"{one.token}.job", f"{one.token}.plan", "notes.txt"}


@pytest.mark.parametrize("change", [b"plam", b"pla", b"plan and more"])
def test_a_plan_that_changed_is_not_carried_out(journal: Journal, change: bytes) -> None:
    one = entry()
    journal.record(one, b"plan")
    (journal.folder / f"{one.token}.plan").write_bytes(change)
    with pytest.raises(CorruptionError, match="differs from the one that was recorded"):
        journal.plan(one)


def test_a_worker_lives_as_long_as_its_file_is_locked_whatever_its_number(journal: Journal) -> None:
    ours, peer = journal.open("0" * 32, "events"), journal.open("0" * 32, "events")
    assert not j.is_locked(ours)
    fcntl.flock(peer, fcntl.LOCK_EX)
    assert j.is_locked(ours)
    os.close(peer)
    assert not j.is_locked(ours)
    os.close(ours)


def test_a_folder_that_others_may_enter_is_no_place_for_a_journal(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir(mode=0o755)
    with pytest.raises(AccessDeniedError):
        Journal(tmp_path / "jobs")
