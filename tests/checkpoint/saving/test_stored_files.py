"""Copies of files: they have the bytes of the moment of the copy, they keep holes, and end with their object."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.checkpoint.saving import stored_files
from headrace.checkpoint.saving.stored_files import StoredFile, WithFiles, copy_of
from headrace.dataio.core.errors import CapacityError, CorruptionError


def copied(path: Path) -> StoredFile:
    with open(path, "rb") as file:
        return copy_of(file.fileno(), path.stat().st_size, str(path.parent))


def content(copy: StoredFile) -> bytes:
    data = bytearray(copy.nbytes)
    copy.read_into(0, memoryview(data))
    return bytes(data)


@pytest.mark.parametrize("error", [0, errno.EXDEV, errno.EOPNOTSUPP])
def test_data_and_holes_are_copied_whether_the_file_system_helps_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    source, refused = tmp_path / "f", []
    with open(source, "wb") as file:
        for at in (0, 3 << 20, 40 << 20):
            file.seek(at)
            file.write(b"x" * 5000)
        file.truncate(64 << 20)

    def refuse(*arguments: Any) -> int:
        refused.append(arguments)
        raise OSError(error, "refused")

    if error:
        monkeypatch.setattr(os, "copy_file_range", refuse)
    copy = copied(source)
    assert bool(refused) == bool(error)
    expected = source.read_bytes()
    source.write_bytes(b"changed")
    assert content(copy) == expected
    assert os.fstat(copy._fd).st_blocks * 512 < 1 << 20
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_that_becomes_shorter_gives_a_shorter_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, original = tmp_path / "f", stored_files._move
    source.write_bytes(b"x" * 100_000)

    def cut(*arguments: int) -> int:
        os.truncate(source, 300)
        return original(*arguments)

    monkeypatch.setattr(stored_files, "_move", cut)
    assert content(copied(source)) == b"x" * 300


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)

    def full(*arguments: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stored_files, "_move", full)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=r"a file of 100 B cannot be copied: No space left on device .*TMPDIR"):
        copied(tmp_path / "f")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_copy_ends_with_its_object_and_a_cut_one_is_corruption(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    copy = copied(tmp_path / "f")
    assert len(os.listdir("/proc/self/fd")) == before + 1
    os.truncate(copy._fd, 10)
    with pytest.raises(CorruptionError, match="ends at byte 10"):
        content(copy)
    del copy
    assert len(os.listdir("/proc/self/fd")) == before


@given(st.binary(max_size=50), st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=3), st.data())
def test_any_piece_of_the_bytes_is_that_of_state_and_files(
    tmp_path_factory: pytest.TempPathFactory, state: bytes, contents: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / f"stored-{os.getpid()}"
    files, total = [], 64
    for each in contents:
        path.write_bytes(each)
        files.append((total, copied(path)))
        total += 64
    both = WithFiles(memoryview(state), files, total)
    number = data.draw(st.integers(-1, len(contents) - 1))
    whole, start = (state, 0) if number < 0 else (contents[number], files[number][0])
    first = data.draw(st.integers(0, len(whole)))
    last = data.draw(st.integers(first, len(whole)))
    if last > first:
        assert bytes(both[start + first : start + last]) == whole[first:last]
    assert len(both) == total
