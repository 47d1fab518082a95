"""The keeper: a real process that holds descriptors for a daemon that may die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.jobs import fd_keeper, keeper_process
from headrace.dataio.sidecar.jobs.fd_keeper import FdKeeper
from tests.dataio.sidecar.conftest import wait_for

PUT_AND_DIE = """
import os, sys
from pathlib import Path
from headrace.dataio.sidecar.jobs.fd_keeper import FdKeeper
fd = os.memfd_create("arena")
os.write(fd, b"bytes of a trainer")
FdKeeper(Path(sys.argv[1])).put("a", fd)
os.kill(os.getpid(), 9)
"""


def memory(data: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, data)
    return fd


def content(fd: int) -> bytes:
    return os.pread(fd, 100, 0)


def keeper_pid(folder: Path) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.fspath(folder / "keeper"))
        sock.sendall(b"who")
        return int(sock.recv(100).split()[1])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[FdKeeper]:
    made = FdKeeper(tmp_path)
    yield made
    for name in list(made._held):
        made.drop(name)
    made.close()


def test_what_a_killed_daemon_had_put_is_there_for_the_next_one(tmp_path: Path, place: FdKeeper) -> None:
    killed = subprocess.run([sys.executable, "-c", PUT_AND_DIE, str(tmp_path)], timeout=150)
    assert killed.returncode == -signal.SIGKILL
    found = place.take()
    assert list(found) == ["a"]
    assert content(found["a"]) == b"bytes of a trainer"
    again = FdKeeper(tmp_path)
    assert list(again.take()) == ["a"], "taking does not take away"
    again.close()
    place.drop("a")
    wait_for(lambda: not place.take())


def test_a_keeper_ends_when_it_is_of_no_more_use(tmp_path: Path, place: FdKeeper) -> None:
    place.put("a", memory(b"1"))
    place.put("b", memory(b"2"))
    assert place.holds == 2
    pid = keeper_pid(tmp_path)
    place.drop("a")
    place.drop("b")
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
    assert place.holds == 0
    place.put("c", memory(b"3"))
    assert content(place.take()["c"]) == b"3"


def test_a_keeper_that_was_killed_is_replaced_and_gets_everything_again(tmp_path: Path, place: FdKeeper) -> None:
    place.put("a", memory(b"1"))
    os.kill(keeper_pid(tmp_path), signal.SIGKILL)
    place.put("b", memory(b"2"))
    found = place.take()
    assert {name: content(fd) for name, fd in found.items()} == {"a": b"1", "b": b"2"}


def test_without_a_keeper_nothing_fails_and_it_is_said(
    tmp_path: Path, place: FdKeeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper_process, "__file__", "/nowhere/keeper.py")
    monkeypatch.setattr(fd_keeper, "SECONDS", 0.2)
    place.put("a", memory(b"1"))
    assert place.holds == 0
    assert "staged checkpoints do not survive this daemon" in caplog.text


def test_a_keeper_whose_daemon_never_comes_back_lets_go(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.fspath(tmp_path / "keeper"))
        listening.listen(8)
        folder = os.open(tmp_path, os.O_RDONLY)
        command = [sys.executable, "-I", "-S", keeper_process.__file__, str(folder), "0.5"]
        subprocess.run(command, stdin=listening.fileno(), pass_fds=[folder], timeout=150)
        os.close(folder)
    place = FdKeeper(tmp_path)
    place.put("a", memory(b"1"))
    pid = keeper_pid(tmp_path)
    place.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


def test_the_keeper_is_bounded_and_ends_conversations_that_it_does_not_understand(
    place: FdKeeper, tmp_path: Path
) -> None:
    place.put("a", memory(b"1"))
    for message, descriptors in (
        (b"dance", 0),
        (b"put", 1),
        (b"put " + b"x" * 65, 1),
        (b"put a b", 1),
        (b"\xff" * 500, 0),
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, open("/dev/null", "rb") as null:
            sock.settimeout(30)
            sock.connect(os.fspath(tmp_path / "keeper"))
            wire.send(sock, message, [null.fileno()] * descriptors)
            assert sock.recv(100) == b""
    before = len(os.listdir(f"/proc/{keeper_pid(tmp_path)}/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, open("/dev/null", "rb") as null:
        sock.settimeout(30)
        sock.connect(os.fspath(tmp_path / "keeper"))
        answers = []
        for n in range(keeper_process.HELD + 5):
            wire.send(sock, f"put n{n}".encode(), [null.fileno()])
            answers.append(sock.recv(100))
        assert answers.count(b"no") == 6, "one place is taken by a"
        for n in range(keeper_process.HELD):
            sock.sendall(f"drop n{n}".encode())
            assert sock.recv(100) == b"ok"
    wait_for(lambda: len(os.listdir(f"/proc/{keeper_pid(tmp_path)}/fd")) <= before)
    assert list(place.take()) == ["a"]


def test_a_keeper_that_cannot_be_found_any_more_lets_go(tmp_path: Path) -> None:
    place = FdKeeper(tmp_path)
    place.put("a", memory(b"1"))
    pid = keeper_pid(tmp_path)
    place.close()
    os.unlink(tmp_path / "keeper")
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])
