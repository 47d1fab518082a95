"""Files of removed objects are overwritten by the next objects, and no reader ever sees that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.dataio.core.limits import MIB
from headrace.dataio.store.local_tier import spare
from headrace.dataio.store.local_tier.tier import LocalTier
from tests.support.local_tier import local_tier, record


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return local_tier(tmp_path, size=16 * MIB)


def keep(tier: LocalTier, step: int, data: bytes) -> int:
    """Keep an object with a record; returns the inode of its file."""
    tier.keep("s", f"packs/{step}", data)
    tier.put_record(record("s", step, [f"packs/{step}"]))
    return tier.path_of("s", f"packs/{step}").stat().st_ino


def forget(tier: LocalTier, step: int) -> None:
    tier.forget([r for r in tier.records() if r.step == step])


def content(tier: LocalTier, step: int) -> bytes:
    found = tier.open("s", f"packs/{step}")
    assert found is not None
    return b"".join(found.pieces())


def spares(tier: LocalTier) -> list[int]:
    return sorted(path.stat().st_size for path in (tier.root / "spare").iterdir())


@pytest.mark.parametrize("size", [MIB, 2 * MIB, 3 * MIB + 1])
def test_an_object_takes_the_file_of_a_removed_one(tier: LocalTier, size: int) -> None:
    file = keep(tier, 1, b"a" * 2 * MIB)
    forget(tier, 1)
    assert tier.used() == 0
    assert keep(tier, 2, b"b" * size) == file
    assert content(tier, 2) == b"b" * size
    assert spares(tier) == []
    assert tier.open("s", "packs/1") is None


def test_the_first_small_bytes_of_an_object_are_not_lost(tier: LocalTier) -> None:
    file = keep(tier, 1, b"a" * 2 * MIB)
    forget(tier, 1)
    with tier.reserve() as reservation:
        writer = reservation.writer("s", "packs/2")
        for part in (b"a header", b"b" * MIB, b"c"):
            writer.write(part)
        writer.commit()
    assert content(tier, 2) == b"a header" + b"b" * MIB + b"c"
    assert tier.path_of("s", "packs/2").stat().st_ino == file


def test_a_file_that_is_being_read_is_not_overwritten(tier: LocalTier) -> None:
    file = keep(tier, 1, b"a" * 2 * MIB)
    reading = tier.open("s", "packs/1")
    assert reading is not None
    forget(tier, 1)
    assert keep(tier, 2, b"b" * 2 * MIB) != file
    assert b"".join(reading.pieces()) == b"a" * 2 * MIB
    assert spares(tier) == []


def test_an_object_that_is_being_written_into_its_old_file_is_absent(tier: LocalTier) -> None:
    keep(tier, 1, b"a" * 2 * MIB)
    path = tier.path_of("s", "packs/1")
    alias = path.with_name("0" * 40)
    alias.hardlink_to(path)  # as a reader that has found the file before its removal
    forget(tier, 1)
    with tier.reserve() as reservation:
        writer = reservation.writer("s", "packs/2")
        writer.write(b"b" * MIB)
        alias.rename(path)
        assert tier.open("s", "packs/1") is None
        writer.commit()
    assert tier.open("s", "packs/1") is None


def test_small_files_are_removed_and_few_large_ones_kept(tier: LocalTier) -> None:
    for step in range(1, spare.FILES + 3):
        keep(tier, step, b"a" * MIB)
    keep(tier, 100, b"small")
    for step in (*range(1, spare.FILES + 3), 100):
        forget(tier, step)
    assert len(spares(tier)) == spare.FILES


def test_spare_files_give_way_to_objects_within_the_budget(tier: LocalTier) -> None:
    for step in (1, 2, 3):
        keep(tier, step, b"a" * 4 * MIB)
    for step in (1, 2, 3):
        forget(tier, step)
    assert len(spares(tier)) == 3
    for step in range(10, 14):
        tier.keep("s", f"small/{step}", b"b" * (MIB - 1))  # too small for a spare file
        assert tier.used() + sum(spares(tier)) <= tier.limits.bytes
    keep(tier, 4, b"c" * 10 * MIB)
    assert tier.used() + sum(spares(tier)) <= tier.limits.bytes
    assert content(tier, 4) == b"c" * 10 * MIB


def test_spare_files_are_removed_after_a_while(tier: LocalTier, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(tier, 1, b"a" * 2 * MIB)
    forget(tier, 1)
    tier.tidy()
    assert len(spares(tier)) == 1
    monkeypatch.setattr(spare, "SECONDS", 0.0)
    tier.tidy()
    assert spares(tier) == []


def test_an_object_in_an_old_file_is_there_although_a_fork_has_the_file_open(tier: LocalTier) -> None:
    """A forked child, such as a worker of a DataLoader, has the descriptors that its parent had at that moment."""
    keep(tier, 1, b"a" * 2 * MIB)
    forget(tier, 1)
    with tier.reserve() as reservation:
        writer = reservation.writer("s", "packs/2")
        writer.write(b"b" * 2 * MIB)
        forked = os.dup(writer._fd)
        writer.commit()
    try:
        assert content(tier, 2) == b"b" * 2 * MIB
    finally:
        os.close(forked)


def test_a_write_that_fails_in_an_old_file_leaves_no_descriptor(tier: LocalTier) -> None:
    keep(tier, 1, b"a" * 2 * MIB)
    forget(tier, 1)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="the parts end"), tier.reserve() as reservation:
        reservation.writer("s", "packs/2").write(b"b" * MIB)
        raise ValueError("the parts end")
    assert len(os.listdir("/proc/self/fd")) == before
