"""What no client may do to another: foreign frames, floods, silence, sudden ends. And two daemons on one socket."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.dataio.core.errors import AccessDeniedError, ConflictError, HeadraceError, UsageError
from headrace.dataio.sidecar import paths, wire
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import Sidecar, open_reader
from headrace.dataio.sidecar.reader import SidecarReader
from headrace.dataio.store.base import Store
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for


@pytest.fixture
def quiet(daemon: RunningDaemon, store: Store, shards: dict[str, bytes], tmp_path: Path) -> Iterator[RunningDaemon]:
    """The daemon, with a client that must not be disturbed, and its descriptors counted before and after."""
    reader = open_reader(store, daemon.socket)
    assert isinstance(reader, SidecarReader)
    with daemon.connect() as sidecar:
        sidecar.status()
        before = daemon.descriptors()
        yield daemon
        wait_for(lambda: sidecar.status()["clients"] == 2)
        for key, data in shards.items():
            assert bytes(reader.read(key, [(7, 1000)])[0]) == data[7:1007]
        assert reader._fallback_reader is None
        files = daemon.status()["cache"]["files"]
        assert files == len(shards)
        # To write, to read, and its list of blocks. The store keeps the sources open a while longer by itself.
        wait_for(lambda: daemon.descriptors(but=tmp_path / "data") == before + 3 * files)
    reader.close()
    assert "Traceback" not in daemon.log.read_text()


def raw(daemon: RunningDaemon, *, hello: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(30)
    sock.connect(os.fspath(daemon.socket))
    if hello:
        sock.sendall(wire.frame(m.encode(m.Hello(m.VERSION, os.getpid()))))
        assert isinstance(m.decode_from_daemon(sock.recv(1000)[5:]), m.Welcome)
    return sock


def ended(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    struct.pack("<IB", 65537, 0),
    struct.pack("<IB", 2**32 - 1, 0),
    struct.pack("<IB", 4, 200),
    wire.frame(b""),
    wire.frame(b"\xc1"),
    wire.frame(b"\x91" * 60_000),
    wire.frame(m.encode(m.Welcome(1, 1))),
    wire.frame(m.encode(m.Open(1, m.Where("x" * 5000, {}), "k", [], 1.0))),
    wire.frame(m.encode(m.Open(1, m.Where("file:///", {}), "k", [(-1, 3)], 1.0))),
    wire.frame(m.encode(m.Closed([77]))),
]


@pytest.mark.parametrize("hello", [False, True])
def test_garbage_ends_its_own_connection_only(quiet: RunningDaemon, hello: bool) -> None:
    for data in GARBAGE:
        with raw(quiet, hello=hello) as sock:
            sock.sendall(data)
            assert ended(sock)


def test_random_bytes_from_many_clients_disturb_no_other(quiet: RunningDaemon) -> None:
    rng = random.Random(0)
    for _ in range(100):
        with raw(quiet, hello=rng.random() < 0.5) as sock:
            try:
                for _ in range(rng.randrange(1, 4)):
                    body = rng.randbytes(rng.randrange(200))
                    sock.sendall(wire.frame(body) if rng.random() < 0.7 else body)
            except ConnectionError:
                pass


def test_another_version_is_told_so(quiet: RunningDaemon) -> None:
    with raw(quiet, hello=False) as sock:
        sock.sendall(wire.frame(m.encode(m.Hello(99, 1))))
        answer = m.decode_from_daemon(sock.recv(1000)[5:])
        assert isinstance(answer, m.Refused)
        assert "version 1" in answer.message
        assert ended(sock)


def test_odd_locations_fail_their_own_request(quiet: RunningDaemon) -> None:
    with raw(quiet) as sock:
        wheres = [
            m.Where("gopher://x/y", {}),
            m.Where("file:///nowhere/at/all", {}),
            m.Where("s3://", {"a": [1]}),
            m.Where("", {}),
            m.Where("file:///tmp", {"dance": {"x": 1}}),
        ]
        for id, where in enumerate(wheres, 1):
            sock.sendall(wire.frame(m.encode(m.Open(id, where, "../../etc/passwd", [(0, 1)], 5.0))))
        framer, answers = wire.Framer(), list[m.FromDaemon]()
        while len(answers) < len(wheres):
            answers += [m.decode_from_daemon(f.payload) for f in framer.feed(sock.recv(65536))]
        assert all(isinstance(answer, m.Failed) for answer in answers)
        assert sorted(a.id for a in answers if isinstance(a, m.Failed)) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_a_flood_of_descriptors_leaks_none(quiet: RunningDaemon, count: int) -> None:
    with open("/dev/null", "rb") as null:
        for _ in range(20):
            with raw(quiet) as sock:
                try:
                    for _ in range(20):
                        wire.send(sock, wire.frame(m.encode(m.AskStatus(1))), [null.fileno()] * count)
                except OSError:
                    pass


def test_clients_that_vanish_in_the_middle_of_a_stage_leak_nothing(quiet: RunningDaemon) -> None:
    for n in range(50):
        fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
        with raw(quiet) as sock:
            data = wire.frame(m.encode(m.Stage(1, "test")), 2)
            wire.send(sock, data[: 1 + n % len(data)], (fd, fd))
        os.close(fd)
    wait_for(lambda: quiet.status()["clients"] == 3)
    assert quiet.status()["jobs"]["running"] == 0


def test_a_client_that_does_not_read_is_cut_off_and_the_others_are_served(quiet: RunningDaemon, store: Store) -> None:
    with raw(quiet) as sock:
        question = wire.frame(m.encode(m.AskStatus(1))) * 1000
        sock.settimeout(2)
        with pytest.raises(OSError):
            for _ in range(1000):
                sock.sendall(question)
        reader = open_reader(store, quiet.socket)
        assert reader.read("shards/0.tar", [(0, 10)])
        assert getattr(reader, "_fallback_reader", 1) is None
        reader.close()
    assert "does not read" in quiet.log.read_text()


def test_options_that_cannot_be_put_in_order_fail_the_one_open(quiet: RunningDaemon) -> None:
    odd = m.Where("file:///data", {"a": {1: 2, "b": 3}})
    with quiet.connect() as sidecar:
        with pytest.raises(HeadraceError, match="TypeError"):
            sidecar.call(lambda id: m.Open(id, odd, "k", [(0, 1)], 20.0), timeout=20)
        assert sidecar.status()


FOREIGNER = """
import os, sys
from headrace.dataio.sidecar.client import Sidecar
os.setuid(65534)
assert Sidecar.find(sys.argv[1]) is None
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_even_where_the_socket_is_open_to_all(quiet: RunningDaemon) -> None:
    for path, mode in ((quiet.folder, 0o755), (quiet.socket.parent, 0o755), (quiet.socket, 0o666)):
        path.chmod(mode)
    for path in quiet.folder.parents:  # those that the tests made for themselves are closed as well
        if not path.stat().st_mode & 0o001:
            path.chmod(0o711)
    subprocess.run([sys.executable, "-c", FOREIGNER, str(quiet.socket)], check=True, timeout=150)
    assert "of user 65534" in quiet.log.read_text()


def test_the_number_of_clients_is_bounded(daemon: RunningDaemon) -> None:
    daemon.stop()
    daemon.options["clients"] = 3
    daemon.start()
    wait_for(lambda: daemon.status()["clients"] == 1)
    held = [daemon.connect() for _ in range(3)]
    assert Sidecar.find(daemon.socket) is None
    held.pop().close()
    wait_for(lambda: (found := Sidecar.find(daemon.socket)) and held.append(found) is None)
    for sidecar in held:
        sidecar.close()


def test_a_second_daemon_is_refused_and_told_who_holds_the_socket(daemon: RunningDaemon) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "sidecar",
        "run",
        "--socket",
        str(daemon.socket),
        "--http-port",
        "off",
    ]
    second = subprocess.run(
        [*command, "--cache-dir", str(daemon.folder / "c2")], capture_output=True, text=True, timeout=150
    )
    assert second.returncode == ConflictError.exit_code
    assert f"with process id {daemon.pid}" in second.stderr
    assert daemon.answers()


def test_the_socket_of_a_dead_daemon_is_taken_over(daemon: RunningDaemon) -> None:
    daemon.kill(signal.SIGKILL)
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.status()["pid"] == daemon.pid
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
    assert daemon.socket.parent.stat().st_mode & 0o777 == 0o700


def test_the_command_runs_a_daemon_until_sigterm(daemon: RunningDaemon) -> None:
    daemon.stop()
    path = daemon.folder / "t" / "x.sock"
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "sidecar",
        "run",
        "--socket",
        str(path),
        "--cache-bytes",
        "64MiB",
    ]
    process = subprocess.Popen([*command, "--cache-dir", str(daemon.folder / "c")], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: (found := Sidecar.find(path)) and found.close() is None)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=150)[1].count("ready on") == 1
        assert process.returncode == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--http-port", "70000"], "not a port"),
        (["--cache-bytes", "many"], "not a size"),
        (["--socket", "/tmp/x"], "private"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: list[str], reason: str) -> None:
    command = [
        sys.executable,
        "-m",
        "headrace.dataio.cli",
        "sidecar",
        "run",
        "--cache-dir",
        str(tmp_path / "c"),
        *options,
    ]
    environment = {**os.environ, "HEADRACE_SIDECAR": str(tmp_path / "s" / "x.sock")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == UsageError.exit_code
    assert reason in done.stderr


def test_a_directory_that_others_may_enter_is_no_place_for_a_socket(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(AccessDeniedError):
        paths.claim(tmp_path / "x.sock")
    with pytest.raises(UsageError, match="too long"):
        paths.claim(tmp_path / ("x" * 200))


def test_where_the_socket_is() -> None:
    assert paths.default_socket({"HEADRACE_SIDECAR": "/a/b"}) == Path("/a/b")
    assert paths.default_socket({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/headrace/sidecar.sock")
    assert paths.default_socket({}) == Path(f"/tmp/headrace-{os.geteuid()}/sidecar.sock")
