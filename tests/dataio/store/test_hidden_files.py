"""Hidden files of the directory store: killed writers, leftovers, locks, and fsync errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import HeadraceError, TransientError
from headrace.dataio.store import hidden_files
from headrace.dataio.store.hidden_files import TEMPORARY
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.testing.system import clock_jump, failing_fsync
from tests.support.crashed_writer import crash_writer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("action", ["store.put('k', b'new')", "store.put_if_absent('other', b'new')"])
def test_a_writer_killed_before_it_names_its_bytes_leaves_nothing_visible(root: Path, action: str) -> None:
    store = open_store(root)
    store.put("k", b"old")
    crash_writer(root, "store.posix.written", action)
    assert {info.key: store.get(info.key) for info in store.list()} == {"k": b"old"}
    assert len(os.listdir(root / TEMPORARY)) == 1


def test_leftovers_are_removed_when_they_are_a_day_old_and_not_before(root: Path) -> None:
    crash_writer(root, "store.posix.written", "store.put('k', b'new')")
    (left,) = (root / TEMPORARY).iterdir()
    open_store(root).put("a", b"")
    assert left.exists()
    os.utime(left, (0, 0))
    open_store(root).put("b", b"")
    assert not left.exists()


def test_a_clock_that_is_days_ahead_removes_no_hidden_file_of_a_live_writer(root: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"first "
        (hidden,) = (root / TEMPORARY).iterdir()
        os.utime(hidden, (0, 0))  # the machine's clock, and so the file system's, was behind until now
        with clock_jump(3 * 86400) as told:
            open_store(root).put("other", b"")
        assert told
        assert hidden.exists()
        yield b"second"

    store = open_store(root)
    store.put_multipart("k", parts())
    assert store.get("k") == b"first second"
    assert os.listdir(root / TEMPORARY) == []


def test_a_hidden_file_stays_locked_until_it_has_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired, real = [], os.link

    def link(source: str, target: str, **more: bool) -> None:
        os.utime(source, (0, 0))
        open_store(root).put("other", b"")  # removes old leftovers
        fired.append(source)
        real(source, target, **more)

    monkeypatch.setattr(os, "link", link)
    assert open_store(root).put_if_absent("k", b"new")
    assert fired


def test_a_writer_whose_new_file_was_taken_for_a_dead_ones_makes_another(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fired = os.open, list[str]()

    def opened(path: str, flags: int, *more: int) -> int:
        fd = real(path, flags, *more)
        if flags & os.O_EXCL and not fired:
            fired.append(path)
            os.unlink(path)
        return fd

    monkeypatch.setattr(os, "open", opened)
    before = len(os.listdir("/proc/self/fd"))
    open_store(root).put("k", b"new")
    assert open_store(root).get("k") == b"new"
    assert (len(fired), len(os.listdir("/proc/self/fd"))) == (1, before)


@pytest.mark.parametrize("operation", ["put", "put_if_absent", "put_multipart"])
@pytest.mark.parametrize("where", [TEMPORARY, "/folder"])
def test_an_fsync_error_that_is_reported_once_fails_the_write(root: Path, operation: str, where: str) -> None:
    store = open_store(root)
    store.put("folder/before", b"")
    with failing_fsync(where) as failed, pytest.raises(HeadraceError, match=r"fsync of .*may be lost") as caught:
        getattr(store, operation)("folder/k", [b"new"] if operation == "put_multipart" else b"new")
    assert len(failed) == 1
    assert not isinstance(caught.value, TransientError)  # which would be tried again
    assert store.get("folder/before") == b""


@pytest.mark.parametrize("times", [2, 100])
def test_the_folder_of_hidden_files_is_made_anew_when_it_vanishes_a_bounded_number_of_times(
    root: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real, fired = os.open, list[str]()

    def vanish(path: str, flags: int, *more: int, **others: int) -> int:
        if flags & os.O_CREAT and len(fired) < times:
            (root / TEMPORARY).rmdir()
            fired.append(path)
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", vanish)
    if times > hidden_files._TRIES:
        with pytest.raises(TransientError, match=r"no folder for unfinished files.*another program deletes"):
            PosixStore(root).put("a", b"1")
        assert len(fired) == hidden_files._TRIES
    else:
        PosixStore(root).put("a", b"1")
        assert (len(fired), (root / "a").read_bytes()) == (times, b"1")


def test_a_bounded_number_of_leftovers_is_removed_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_files, "_STALE_SCAN", 2)
    (root / TEMPORARY).mkdir(parents=True)
    for number in range(5):
        (root / TEMPORARY / str(number)).touch()
        os.utime(root / TEMPORARY / str(number), (0, 0))
    PosixStore(root).put("a", b"")
    assert len(os.listdir(root / TEMPORARY)) == 3
