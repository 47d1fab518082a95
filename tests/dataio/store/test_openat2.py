"""One system call opens what the slow way would, and nothing that a link leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.dataio.core.errors import NotFoundError, UnsupportedError
from headrace.dataio.store import openat2
from headrace.dataio.store.posix import PosixStore


@pytest.fixture(params=["openat2", "without it"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PosixStore:
    if request.param == "without it":
        monkeypatch.setattr(openat2, "_missing", True)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_bytes(b"bytes")
    (tmp_path / "folder link").symlink_to("there")
    (tmp_path / "file link").symlink_to("there/file")
    (tmp_path / "nowhere").symlink_to("not/there")
    os.mkfifo(tmp_path / "pipe")
    return PosixStore(tmp_path)


def test_a_plain_file_is_read(store: PosixStore) -> None:
    assert store.get("there/file") == b"bytes"


@pytest.mark.parametrize("key", ["folder link/file", "file link", "nowhere"])
def test_no_link_is_followed_wherever_it_stands(store: PosixStore, key: str) -> None:
    with pytest.raises(UnsupportedError, match="symbolic link"):
        store.get(key)


@pytest.mark.parametrize("key", ["there", "pipe", "there/other", "there/file/below", "folder link/other"])
def test_what_is_no_file_does_not_exist(store: PosixStore, key: str) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        store.get(key)


def test_the_quick_way_opens_files_and_no_links(store: PosixStore, tmp_path: Path) -> None:
    if openat2._missing:
        pytest.skip("this machine is taken to have no such call")
    fd = openat2.open_plain(str(tmp_path / "there" / "file"))
    if fd is None:
        pytest.skip("no openat2 here")
    with open(fd, "rb") as file:
        assert file.read() == b"bytes"
        assert not os.get_inheritable(file.fileno())
    assert openat2.open_plain(str(tmp_path / "folder link" / "file")) is None
    assert openat2.open_plain(str(tmp_path / "file\0other")) is None
