"""Files that commands write."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from headrace.dataio.core.outputs import is_special, written_aside, written_whole


def write(path: Path, text: bytes) -> None:
    with written_whole(path) as file:
        file.write(text)


def test_a_file_has_its_name_when_all_is_in_it_and_an_error_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page"
    write(path, b"old")
    with pytest.raises(ValueError, match="stop"), written_whole(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        raise ValueError("stop")
    assert path.read_bytes() == b"old"
    with pytest.raises(FileExistsError), written_aside(path, replace=False) as file:
        file.write(b"new")
    write(path, b"new")
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("page", b"new")]


def test_a_pipe_is_written_into_and_stays_one_and_so_is_what_a_link_leads_to(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read: list[bytes] = []
    for path in (pipe, link):
        reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
        reader.start()
        write(path, b"page")
        reader.join()
    assert read == [b"page", b"page"]
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "link").symlink_to("there")
    write(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").read_bytes() == b"new"


def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent/page'"):
        write(tmp_path / "absent" / "page", b"")


def test_devices_and_pipes_are_special_and_files_folders_and_what_is_not_there_are_not(tmp_path: Path) -> None:
    assert is_special(Path("/dev/null"))
    assert not any(map(is_special, (tmp_path, tmp_path / "absent", Path(__file__))))
