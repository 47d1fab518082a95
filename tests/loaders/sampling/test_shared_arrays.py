"""Arrays that processes compute together: they are those of one process, whatever happens to the others."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import shutil
import signal
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataio.core import files
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError
from headrace.dataio.core.json import seal, unseal
from headrace.loaders.sampling import shared_arrays
from headrace.loaders.sampling.shared_arrays import Arrays, NewArray, Work, compute, content_key

PIECES, PIECE_SIZE = 12, 1000
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of the test, which processes that it starts inherit."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 0)
    return tmp_path


def piece_of(calls: Path, number: int, *, seconds: float = 0.0, hold: int | None = None) -> Any:
    """Piece `number`. The file `calls` gets a line for each call; piece `hold` takes an hour."""
    with open(calls, "a") as file:
        file.write(f"{os.getpid()} {number}\n")
    time.sleep(3600 if number == hold else seconds)
    return np.arange(number * PIECE_SIZE, (number + 1) * PIECE_SIZE)


def join(pieces: Iterable[Any], new: NewArray) -> None:
    new("joined", 1, np.uint8)  # is replaced
    joined = new("joined", PIECES * PIECE_SIZE, np.int64)
    for number, piece in enumerate(pieces):
        joined[number * PIECE_SIZE : (number + 1) * PIECE_SIZE] = piece
    new("nothing", (3, 0), np.uint16)


def work(calls: Path, key: str = "numbers", **how: Any) -> Work:
    return Work(key=[key], samples=1, pieces=PIECES, piece=partial(piece_of, calls, **how), combine=join)


def check(arrays: Arrays) -> None:
    assert arrays["joined"].tolist() == list(range(PIECES * PIECE_SIZE))
    assert arrays["nothing"].shape == (3, 0)


def calls_in(path: Path) -> list[int]:
    return sorted(int(line.split()[1]) for line in path.read_text().splitlines())


def compute_and_report(results: Any, calls: Path, how: dict[str, Any]) -> None:
    shared_arrays.SHARED_SAMPLES = 0
    results.put(int(compute(work(calls, **how))["joined"].sum()))


def start(results: Any, calls: Path, **how: Any) -> Any:
    process = SPAWN.Process(target=compute_and_report, args=(results, calls, how))
    process.start()
    return process


def the_folder(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / f"headrace-{os.geteuid()}" / "arrays").iterdir()
    return folder


def test_processes_divide_the_pieces_and_all_get_the_arrays(tmp_path: Path) -> None:
    calls, results = tmp_path / "calls", SPAWN.Queue()
    processes = [start(results, calls, seconds=0.1) for _ in range(3)]
    sums = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sums == [sum(range(PIECES * PIECE_SIZE))] * 3
    assert calls_in(calls) == list(range(PIECES))
    assert len({line.split()[0] for line in calls.read_text().splitlines()}) > 1
    left = sorted(path.suffix for path in the_folder(tmp_path).iterdir())
    assert left == [".json", ".lock", ".npy", ".npy"]


def test_the_pieces_of_a_killed_process_are_computed_by_another(tmp_path: Path) -> None:
    calls, results = tmp_path / "calls", SPAWN.Queue()
    killed = start(results, calls, hold=5)
    until = time.monotonic() + 60
    while not calls.exists() or 5 not in calls_in(calls):
        assert time.monotonic() < until
        time.sleep(0.01)
    other = start(results, calls)
    time.sleep(0.5)
    os.kill(killed.pid, signal.SIGKILL)
    assert results.get(timeout=60) == sum(range(PIECES * PIECE_SIZE))
    killed.join()
    other.join()
    assert killed.exitcode == -signal.SIGKILL
    assert calls_in(calls) == sorted([*range(PIECES), 5])


def test_later_processes_compute_nothing(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    check(compute(work(calls)))
    arrays = compute(work(calls))
    check(arrays)
    assert not arrays["joined"].flags.writeable
    assert calls_in(calls) == list(range(PIECES))
    assert stat.S_IMODE(the_folder(tmp_path).stat().st_mode) == 0o700


def test_a_folder_that_is_used_is_not_old(tmp_path: Path) -> None:
    compute(work(tmp_path / "calls"))
    os.utime(the_folder(tmp_path), (0, 0))
    compute(work(tmp_path / "calls"))
    assert time.time() - the_folder(tmp_path).stat().st_mtime < 60


def test_a_content_key_has_names_types_shapes_and_values() -> None:
    arrays: list[Any] = [
        np.zeros(4, np.uint8),
        np.zeros(2, np.uint16),
        np.zeros((2, 2), np.uint8),
        np.zeros(0),
        np.ones(4, np.uint8),
    ]
    keys = {content_key({"a": array}) for array in arrays}
    assert len(keys | {content_key({"b": arrays[0]}), content_key({})}) == len(arrays) + 2
    assert content_key({"a": arrays[0], "b": arrays[1]}) == content_key({"b": arrays[1], "a": arrays[0]})
    assert content_key({"a": np.zeros(8, np.uint8)[::2]}) == content_key({"a": arrays[0]})


def test_other_keys_have_other_arrays(tmp_path: Path) -> None:
    compute(work(tmp_path / "one"))
    compute(work(tmp_path / "two", key="others"))
    assert calls_in(tmp_path / "two") == list(range(PIECES))


@pytest.mark.parametrize("damage", ["a flipped bit", "a shorter file", "no file", "no digest", "a path"])
def test_damaged_arrays_are_computed_again(tmp_path: Path, damage: str) -> None:
    calls = tmp_path / "calls"
    check(compute(work(calls)))
    folder = the_folder(tmp_path)
    (array,) = folder.glob("joined-*.npy")
    document = folder / "arrays.json"
    if damage == "a flipped bit":
        data = bytearray(array.read_bytes())
        data[-1] ^= 1
        array.write_bytes(data)
    elif damage == "a shorter file":
        os.truncate(array, 200)
    elif damage == "no file":
        array.unlink()
    elif damage == "no digest":
        document.write_bytes(document.read_bytes()[:-20])
    else:
        document.write_bytes(document.read_bytes().replace(b'"file": "', b'"file": "/'))
    check(compute(work(calls)))
    assert calls_in(calls) == sorted(2 * list(range(PIECES)))


def test_arrays_outside_the_folder_are_not_used(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    check(compute(work(calls)))
    folder = the_folder(tmp_path)
    (array,) = folder.glob("joined-*.npy")
    array.rename(tmp_path / "moved.npy")
    document = unseal((folder / "arrays.json").read_bytes(), "arrays.json")
    document = document.replace(array.name.encode(), str(tmp_path / "moved.npy").encode())
    (folder / "arrays.json").write_bytes(seal(document))
    check(compute(work(calls)))
    assert calls_in(calls) == sorted(2 * list(range(PIECES)))


@pytest.mark.parametrize("appears", ["3.piece", "arrays.json"])
def test_a_piece_is_not_computed_if_another_process_just_finished_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appears: str
) -> None:
    @contextlib.contextmanager
    def finished_before(path: Path, seconds: float, poll: float) -> Iterator[None]:
        (tmp_path / appears).touch()
        yield

    monkeypatch.setattr(shared_arrays, "file_lock", finished_before)
    assert shared_arrays._has_piece(tmp_path, work(tmp_path / "calls"), 3)
    assert not (tmp_path / "calls").exists()


def test_a_damaged_piece_is_computed_again(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    check(compute(work(calls)))
    folder = the_folder(tmp_path)
    (folder / "arrays.json").unlink()
    (folder / "3.piece").write_bytes(b"a piece that a crash left unfinished, longer than a digest")
    check(compute(work(calls)))
    assert calls_in(calls) == sorted(2 * list(range(PIECES)))


def alone_with_a_warning(arrays: Arrays, caplog: pytest.LogCaptureFixture, why: str) -> None:
    check(arrays)
    assert [why in record.message for record in caplog.records] == [True]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr("headrace.dataio.core.log._logged", set())
    caplog.set_level(logging.WARNING, "headrace")
    return caplog


@pytest.mark.parametrize("inside", [".", "arrays"])
def test_a_folder_of_another_mode_is_not_used(tmp_path: Path, warnings: pytest.LogCaptureFixture, inside: str) -> None:
    folder = tmp_path / f"headrace-{os.geteuid()}" / inside
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o777)
    alone_with_a_warning(compute(work(tmp_path / "calls")), warnings, "not a private directory")
    assert list(folder.iterdir()) == []


def test_without_space_each_process_computes_alone(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    alone_with_a_warning(compute(work(tmp_path / "calls")), warnings, "No space left")


def test_a_process_that_makes_no_progress_is_not_waited_for(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "WAIT_SECONDS", 0.3)
    calls = tmp_path / "calls"
    compute(work(calls))
    folder = the_folder(tmp_path)
    (folder / "arrays.json").unlink()
    with files.file_lock(folder / "7.lock", 0, 0):
        begin = time.monotonic()
        arrays = compute(work(calls))
        assert time.monotonic() - begin >= 0.3
    alone_with_a_warning(arrays, warnings, "makes no progress")


def test_a_process_that_makes_progress_is_waited_for(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "WAIT_SECONDS", 2.0)
    calls, other_calls = tmp_path / "calls", tmp_path / "others"
    folder, other = shared_arrays._folder_of(["numbers"]), work(other_calls)
    with contextlib.ExitStack() as held:
        locks = [contextlib.ExitStack() for _ in range(PIECES)]
        for number, lock in enumerate(locks):
            lock.enter_context(files.file_lock(folder / f"{number}.lock", 0, 0))
            held.callback(lock.close)

        def compute_slowly() -> None:
            for number, lock in enumerate(locks):
                time.sleep(0.2)
                lock.close()
                while not shared_arrays._has_piece(folder, other, number):  # the other thread may have the lock
                    time.sleep(0.005)

        thread = threading.Thread(target=compute_slowly)
        thread.start()
        check(compute(work(calls)))
        thread.join()
    assert not warnings.records


def test_a_process_that_combines_too_long_is_not_waited_for(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "WAIT_SECONDS", 0.3)
    calls = tmp_path / "calls"
    compute(work(calls))
    folder = the_folder(tmp_path)
    (folder / "arrays.json").unlink()
    with files.file_lock(folder / "combine.lock", 0, 0):
        arrays = compute(work(calls))
    alone_with_a_warning(arrays, warnings, "another process held this lock")


def test_an_error_of_a_piece_is_raised(tmp_path: Path) -> None:
    def fail(number: int) -> Any:
        raise ValueError(f"piece {number}")

    with pytest.raises(ValueError, match="piece 0"):
        compute(Work(key=["fails"], samples=1, pieces=2, piece=fail, combine=join))
    check(compute(work(tmp_path / "calls", key="fails")))


@pytest.mark.parametrize("error", [TimeoutError("the store"), AccessDeniedError("the store")])
def test_errors_of_the_store_are_not_taken_for_those_of_the_folder(error: Exception) -> None:
    calls = list[int]()

    def fail(number: int) -> Any:
        calls.append(number)
        raise error

    with pytest.raises(type(error), match="the store"):
        compute(Work(key=["fails"], samples=1, pieces=2, piece=fail, combine=join))
    assert len(calls) <= 2  # once more alone, if it is an `OSError`


def test_a_full_disk_does_not_stay_full(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, calls = os.posix_fallocate, list[int]()

    def full_later(file: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_later)
    alone_with_a_warning(compute(work(tmp_path / "calls")), warnings, "No space left")
    assert list((tmp_path / f"headrace-{os.geteuid()}" / "arrays").iterdir()) == []


def test_a_remote_temporary_folder_is_not_used(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "is_local", lambda path: False)
    alone_with_a_warning(compute(work(tmp_path / "calls")), warnings, "not on a local file system")


def test_small_work_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "SHARED_SAMPLES", 2)
    check(compute(work(tmp_path / "calls")))
    assert not (tmp_path / f"headrace-{os.geteuid()}").exists()


def test_old_folders_are_removed_and_mapped_arrays_stay_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_arrays, "MAX_WORKS", 3)
    arrays = {key: compute(work(tmp_path / "calls", key=key)) for key in "abcd"}
    folders = list((tmp_path / f"headrace-{os.geteuid()}" / "arrays").iterdir())
    assert len(folders) == 3
    for mapped in arrays.values():
        check(mapped)
    old = time.time() - shared_arrays.MAX_AGE_SECONDS - 60
    for folder in folders:
        os.utime(folder, (old, old))
    compute(work(tmp_path / "calls", key="e"))
    assert len(list((tmp_path / f"headrace-{os.geteuid()}" / "arrays").iterdir())) == 1


def test_the_folders_that_were_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "MAX_WORKS", 3)
    for key in "abcad":  # the use of b is the oldest one
        compute(work(tmp_path / "calls", key=key))
        time.sleep(0.01)
    for key in "acd":
        compute(work(tmp_path / "kept", key=key))
    assert not (tmp_path / "kept").exists()


def test_another_version_of_headrace_has_other_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute(work(tmp_path / "one"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "another")
    compute(work(tmp_path / "two"))
    assert calls_in(tmp_path / "two") == list(range(PIECES))


def test_the_bytes_of_all_folders_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "MAX_BYTES", 3 * 8 * PIECES * PIECE_SIZE)
    for key in "abcdef":
        compute(work(tmp_path / "calls", key=key))
        time.sleep(0.01)
    assert len(list((tmp_path / f"headrace-{os.geteuid()}" / "arrays").iterdir())) == 3


def make_room(parent: Path, barrier: Any, errors: Any) -> None:
    shared_arrays.MAX_WORKS = 1
    barrier.wait(60)
    try:
        shared_arrays._make_room(parent)
        errors.put("")
    except OSError as error:
        errors.put(repr(error))


def test_processes_that_remove_the_same_folders_do_not_disturb_each_other(tmp_path: Path) -> None:
    for folder in range(200):
        (tmp_path / "arrays" / str(folder)).mkdir(parents=True)
        for file in range(5):
            (tmp_path / "arrays" / str(folder) / str(file)).touch()
    (tmp_path / "arrays" / "a file").touch()
    barrier, errors = SPAWN.Barrier(4), SPAWN.Queue()
    processes = [SPAWN.Process(target=make_room, args=(tmp_path / "arrays", barrier, errors)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [errors.get(timeout=60) for _ in processes] == [""] * 4
    for process in processes:
        process.join()
    assert os.listdir(tmp_path / "arrays") == ["a file"]


def test_arrays_are_used_if_their_folder_is_removed_when_they_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_arrays = shared_arrays._open_arrays

    def open_and_remove(folder: Path) -> Arrays | None:
        arrays = open_arrays(folder)
        if arrays is not None:
            shutil.rmtree(folder)
        return arrays

    monkeypatch.setattr(shared_arrays, "_open_arrays", open_and_remove)
    check(compute(work(tmp_path / "calls")))
    assert calls_in(tmp_path / "calls") == list(range(PIECES))


def test_arrays_that_another_process_just_repaired_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(compute(work(tmp_path / "calls")))
    document = the_folder(tmp_path) / "arrays.json"
    good = document.read_bytes()
    document.write_bytes(good[:-20])

    def repaired_meanwhile(data: bytes, name: str) -> bytes:
        document.write_bytes(good)
        raise CorruptionError("is damaged")

    monkeypatch.setattr(shared_arrays, "unseal", repaired_meanwhile)
    assert shared_arrays._open_arrays(document.parent) is None
    assert document.read_bytes() == good
