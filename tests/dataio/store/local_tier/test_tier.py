"""The tier's directory: private, bounded, and honest about what it does not have."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import AccessDeniedError, CapacityError, CorruptionError, UnsupportedError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.local_tier import objects
from headrace.dataio.store.local_tier import records as documents
from headrace.dataio.store.local_tier import tier as shelves
from headrace.dataio.store.local_tier.records import TierLimits
from headrace.dataio.store.local_tier.tier import LocalTier
from headrace.dataio.testing.system import clock_jump
from tests.support.local_tier import local_tier, record


def read(where: LocalTier, key: str, source: str = "s") -> bytes | None:
    held = where.open(source, key)
    return None if held is None else b"".join(held.pieces())


def test_what_was_kept_is_read_back_and_names_are_no_paths(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    for key in ("packs/a", "../../evil", "/etc/passwd", "x" * 1000):
        tier.keep("s3://bucket", key, key.encode() * 100_000)
        assert read(tier, key, "s3://bucket") == key.encode() * 100_000
        assert read(tier, key, "s3://another") is None
    assert {p.parent for p in (tier.root / "objects").iterdir()} == {tier.root / "objects"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tier"]
    tier.drop("s3://bucket", "packs/a")
    tier.drop("s3://bucket", "packs/a")
    assert read(tier, "packs/a", "s3://bucket") is None


def test_a_lock_that_somebody_keeps_is_an_error_of_the_disk_and_waited_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelves, "LOCK_SECONDS", 0.05)
    tier = local_tier(tmp_path)
    with (tier.root / "lock").open("w") as kept_open:
        fcntl.flock(kept_open, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process held this lock"):
            tier.used()
    assert tier.used() == 0


def test_the_lock_is_given_back_although_a_fork_has_it_open(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    with tier.locked():
        links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
        (own,) = [
            fd for fd, link in links.items() if os.path.lexists(link) and os.readlink(link) == str(tier.root / "lock")
        ]
        forked = os.dup(own)
    try:
        with (tier.root / "lock").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(forked)


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o755)
    with pytest.raises(AccessDeniedError, match="not a private directory"):
        local_tier(tmp_path)


@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_torn_or_foreign_file_is_no_object(tmp_path_factory: pytest.TempPathFactory, junk: bytes, cut: int) -> None:
    tier = local_tier(tmp_path_factory.mktemp("t"))
    tier.keep("s", "k", b"x" * 200)
    path = tier.path_of("s", "k")
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole) - 1)])
    assert tier.open("s", "k") is None
    path.write_bytes(junk)
    assert tier.open("s", "k") is None
    path.write_bytes(junk + whole[200:])
    assert (tier.open("s", "k") is None) == (len(junk) != 200)


def test_a_link_or_a_fifo_in_the_place_of_an_object_is_not_followed(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    tier.keep("s", "k", b"x")
    path = tier.path_of("s", "k")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert tier.open("s", "k") is None
    path.unlink()
    os.mkfifo(path)
    assert tier.open("s", "k") is None


def test_the_oldest_step_makes_room_whole_and_what_a_newer_one_needs_stays(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, 200 * MIB, steps=9)
    for step in (1, 2, 3):
        for part in ("a", "b"):
            tier.keep("s", f"{step}/{part}", bytes(20 * MIB))
        tier.put_record(record("s", step, [f"{step}/a", f"{step}/b"], references=["1/a"] if step == 3 else []))
    assert tier.used() // MIB == 120
    tier.make_room(79 * MIB)
    assert [r.step for r in tier.records()] == [3, 2, 1]
    tier.make_room(90 * MIB)
    assert [r.step for r in tier.records()] == [3, 2]
    assert [tier.has("s", key) for key in ("1/a", "1/b", "2/a", "3/b")] == [True, False, True, True]
    with pytest.raises(CapacityError, match="no room for 201 MiB"):
        tier.make_room(201 * MIB)


def test_what_has_no_other_copy_is_not_evicted_for_room(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, 100 * MIB)
    tier.keep("s", "a", bytes(60 * MIB))
    tier.put_record(record("s", 1, ["a"], committed=0.0))
    with pytest.raises(CapacityError, match="no other copy"), tier.reserve() as reservation:
        reservation.writer("s", "b").write(bytes(70 * MIB))
    assert tier.has("s", "a")
    tier.forget(tier.records())  # a person said so
    assert tier.used() == 0


def test_the_budget_holds_whatever_becomes_an_object_while_another_asks_for_room(tmp_path: Path) -> None:
    """An object that is renamed while the room is counted was in neither count; and its label was in no claim."""
    size, limit = 4096, 20 * 4096
    refused = 0

    def fill(tier: LocalTier, name: int) -> int:
        refused = 0
        for n in range(40):
            try:
                tier.keep("s", f"{name}/{n}", bytes(size))
            except CapacityError:
                refused += 1
        return refused

    with ThreadPoolExecutor(4) as pool:
        for round_ in range(4):
            tier = local_tier(tmp_path / str(round_), limit)
            refused += sum(pool.map(lambda name, tier=tier: fill(tier, name), range(4)))
            assert sum(p.stat().st_size for p in (tier.root / "objects").iterdir()) <= limit
            assert tier.used() <= limit
    assert refused >= 4 * (4 * 40 - 20), "the limit was met each time"


def test_the_budget_holds_while_several_write(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, 200 * MIB)
    with tier.reserve() as one, tier.reserve() as two:
        one.writer("s", "a").write(bytes(MIB))
        two.writer("s", "b").write(bytes(MIB))
        reserved = tier.used()
        assert 40 * MIB < reserved < 52 * MIB, "an eighth of the free space each"
        writer = one.writer("s", "c")
        with pytest.raises(CapacityError):
            for _ in range(200):
                writer.write(bytes(MIB))
        assert writer.size >= (200 - 3) * MIB - reserved // 2, "all but what the other one has reserved, and labels"
        assert 199 * MIB < tier.used() <= 200 * MIB
    assert tier.used() == 0


def test_what_a_writer_reserves_in_advance_leaves_room_for_others(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, objects.ROOM_BYTES)
    with contextlib.ExitStack() as stack:
        for number in range(8):
            stack.enter_context(tier.reserve()).writer("s", str(number)).write(bytes(4 * MIB))
        assert tier.used() <= objects.ROOM_BYTES


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    code = (
        "import sys, time; from pathlib import Path\n"
        "from headrace.dataio.store.local_tier.records import TierLimits\n"
        "from headrace.dataio.store.local_tier.tier import LocalTier\n"
        "with LocalTier(Path(sys.argv[1]), TierLimits(1 << 29, 2)).reserve() as r:\n"
        "    r.writer('s', 'half').write(bytes(1 << 20)); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tier.root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert tier.used() > MIB
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -9
    process.stdout.close()
    folder = next((tier.root / "writing").iterdir())
    os.utime(folder, (0, 0))
    tier.tidy()
    assert tier.used() == 0
    assert list((tier.root / "writing").iterdir()) == []


def test_objects_that_no_step_needs_go_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = local_tier(tmp_path)
    tier.keep("s", "stray", b"1")
    tier.keep("s", "needed", b"2")
    tier.put_record(record("s", 1, ["needed"]))
    for path in (tier.root / "objects").iterdir():
        os.utime(path, (0, 0))
    with clock_jump(86400):
        tier.tidy()
        tier.tidy()
    assert tier.has("s", "stray"), "it may be a living writer's: only its clock says that it is old"
    monkeypatch.setattr(shelves, "STRAY_SECONDS", -1.0)
    tier.tidy()
    assert [tier.has("s", key) for key in ("stray", "needed")] == [False, True]


def test_more_steps_than_wanted_go_when_it_is_tidied(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, steps=2)
    for step in range(5):
        tier.keep("s", str(step), b"x")
        tier.put_record(record("s", step, [str(step)]))
    tier.tidy()
    assert [r.step for r in tier.records("s", "run")] == [4, 3]
    assert [tier.has("s", str(step)) for step in range(5)] == [False] * 3 + [True] * 2
    assert tier.records("s", "another") == tier.records("another") == []


def test_a_committed_record_stays_committed(tmp_path: Path) -> None:
    tier = local_tier(tmp_path)
    tier.put_record(record("s", 1, ["a"], committed=5.0))
    tier.put_record(record("s", 1, ["a"], committed=0.0))
    assert [r.committed for r in tier.records()] == [5.0]


def test_an_earlier_record_that_comes_last_does_not_replace_a_committed_one(tmp_path: Path) -> None:
    """It is of a worker whose packs are others; only the committed one says what the step needs."""
    tier, earlier, committed = local_tier(tmp_path), record("s", 1, ["a"], committed=0.0), record("s", 1, ["b"])
    for each in (earlier, committed, earlier):
        tier.put_record(each)
    assert tier.records() == [committed]
    tier.withdraw(earlier)
    assert tier.records() == [committed]
    tier.withdraw(committed)
    assert tier.records() == []


def test_a_record_that_is_torn_or_too_new_is_set_aside_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = local_tier(tmp_path)
    for number, data in enumerate((b"", b"\xc1garbage", documents.encode(record("s", 1, ["a"]))[:-3])):
        (tier.root / "records" / f"bad{number}").write_bytes(data)
    tier.put_record(record("s", 7, ["a"]))
    assert [r.step for r in tier.records()] == [7]
    assert caplog.text.count("is not a record of a kept step") == 3
    assert sorted(p.name for p in (tier.root / "records").glob(".bad*")) == [".bad-bad0", ".bad-bad1", ".bad-bad2"]
    with pytest.raises(UnsupportedError, match="version 9"):
        documents.decode(b"\x81\xa7version\x09", "it")
    with pytest.raises(CorruptionError):
        documents.decode(b"\x81\xa7version\x01", "it")


def test_limits_are_seen_by_every_process(tmp_path: Path) -> None:
    one = local_tier(tmp_path, 100 * MIB)
    two = LocalTier(one.root, TierLimits(70 * MIB, 1))
    one.keep("s", "a", bytes(10 * MIB))
    with pytest.raises(CapacityError):
        two.make_room(65 * MIB)
    one.make_room(65 * MIB)


def test_a_step_that_is_held_stays_until_its_space_is_needed_or_its_holder_ends(tmp_path: Path) -> None:
    tier = local_tier(tmp_path, size=4 * MIB, steps=1)
    for step in (1, 2):
        tier.keep("s", f"packs/{step}", b"a" * MIB)
        tier.put_record(record("s", step, [f"packs/{step}"]))
    with tier.hold("A1"):
        tier.tidy()
        tier.remove_surplus()
        assert tier.forget_unchanged(tier.records()) == [record("s", 1, ["packs/1"])]
        assert [r.step for r in tier.records()] == [1]
        tier.put_record(record("s", 3, ["packs/3"]))
        tier.keep("s", "packs/3", b"a" * (3 * MIB + 1000))
        assert [r.step for r in tier.records()] == [3]
    holder = tier.hold("A3")
    holder.__enter__()
    (file,) = (tier.root / "holds").iterdir()
    assert tier.forget_unchanged(tier.records()) != []
    dead = file.with_name(f"{file.name}0")
    dead.touch()  # its process was killed: no process has a lock
    holder.__exit__(None, None, None)
    assert not file.exists()
    assert tier.forget_unchanged(tier.records()) == []
    assert tier.records() == []
    assert list((tier.root / "holds").iterdir()) == []
