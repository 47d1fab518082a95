"""A daemon that is given its socket, as a service manager does it: by a real listening socket, LISTEN_PID and LISTEN_FDS."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar import connection, systemd
from headrace.dataio.sidecar.connection import Sidecar
from tests.dataio.sidecar.conftest import wait_for

LAUNCHER = """
import os, sys
names, *command = sys.argv[1:]
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1", LISTEN_FDNAMES=names)
os.dup2(int(os.environ.pop("GIVEN")), 3, inheritable=True)
os.execv(sys.executable, [sys.executable, *command])
"""


class Manager:
    """Holds the socket and starts daemons on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "s" / "sidecar.sock"
        self.path.parent.mkdir(mode=0o700)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(self.path))
        self.socket.listen(16)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, names: str = "sidecar") -> subprocess.Popen[bytes]:
        command = [
            "-m",
            "headrace.dataio.cli",
            "sidecar",
            "run",
            "--socket",
            str(self.folder / "ignored.sock"),
            "--cache-dir",
            str(self.folder / "cache"),
        ]
        fd = os.dup(self.socket.fileno())
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, names, *command],
                pass_fds=[fd],
                env={**os.environ, "GIVEN": str(fd)},
                stderr=subprocess.PIPE,
            )
        finally:
            os.close(fd)
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
        self.socket.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        made = Manager(Path(folder))
        yield made
        made.close()


def test_a_client_that_came_first_is_served_when_the_daemon_is_there(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_SECONDS", 30.0)
    found: list[Sidecar | None] = []
    waiting = threading.Thread(target=lambda: found.append(Sidecar.find(manager.path)))
    waiting.start()
    daemon = manager.start()
    waiting.join(60)
    (sidecar,) = found
    assert sidecar is not None
    status = sidecar.status()
    assert status["socket"] == str(manager.path), "the path of the socket that was given"
    sidecar.close()
    later = Sidecar.find(manager.path)
    assert later is not None
    assert later.daemon_pid == daemon.pid, "who connects now sees the daemon, not the manager"
    later.close()
    assert not (manager.folder / "ignored.sock").exists()


def test_the_socket_outlives_the_daemon_and_the_next_one_serves_it(manager: Manager) -> None:
    for number, names in ((signal.SIGKILL, "headrace-sidecar@alice.socket"), (signal.SIGTERM, "sidecar")):
        daemon = manager.start(names)
        wait_for(lambda: (found := Sidecar.find(manager.path)) and (found.close() or True))
        daemon.send_signal(number)
        daemon.communicate(timeout=150)
        assert daemon.returncode in (0, -signal.SIGKILL)
        assert manager.path.is_socket()


def test_descriptors_of_another_process_are_left_alone() -> None:
    assert systemd.given({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}
    assert systemd.given({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "many"}) == {}
    assert systemd.given({}) == {}
    assert systemd.listening({}) is None


def test_of_several_descriptors_the_one_of_that_name_is_meant() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "3", "LISTEN_FDNAMES": "arena-1:sidecar"}
    assert systemd.given(environ) == {"arena-1": 3, "sidecar": 4, "5": 5}


def test_other_names_are_other_peoples(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as third:
        monkeypatch.setattr(systemd, "_open_socket", {3: third}.__getitem__)
        environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
        assert systemd.listening({**environ, "LISTEN_FDNAMES": "arena-1"}) is None
        assert systemd.listening({**environ, "LISTEN_FDNAMES": "x.socket"}) is third
        assert systemd.listening(environ) is third


@pytest.mark.parametrize("kind", ["file", "tcp", "datagram", "deaf", "unnamed"])
def test_what_is_no_listening_unix_socket_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    makers: dict[str, Callable[[], socket.socket | TextIO]] = {
        "file": lambda: open(tmp_path / "f", "w"),  # noqa: SIM115
        "tcp": lambda: socket.socket(),
        "datagram": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        "deaf": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
        "unnamed": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM),
    }
    with makers[kind]() as thing:
        if isinstance(thing, socket.socket) and kind == "unnamed":
            thing.bind(b"\0headrace-test-" + str(os.getpid()).encode())
            thing.listen(1)
        with pytest.raises(UsageError, match=f"descriptor {thing.fileno()}, which LISTEN_FDS passes"):
            systemd._open_socket(thing.fileno())
