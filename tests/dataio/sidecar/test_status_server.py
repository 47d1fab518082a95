"""The HTTP endpoint on loopback, which every user of the machine can connect to."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from headrace.dataio.sidecar import status_server
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for

ASK = """
import socket, sys
for path in sys.argv[2:]:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n".encode())
        print(path, sock.makefile("rb").readline().split()[1].decode())
"""
PATHS = ["/livez", "/readyz", "/metrics", "/status.json", "/history.json", "/", "/none", "//", "/status.json?x=1"]


def port_of(daemon: RunningDaemon) -> int:
    port: int = daemon.status()["http_port"]
    return port


def lives(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@contextlib.contextmanager
def holders(port: int, count: int) -> Iterator[list[int]]:
    """`count` threads that begin a request, hold it, and come again when they are cut off; how often each came."""
    stop, came = threading.Event(), [0] * count

    def hold(number: int) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as sock:
                came[number] += 1
                sock.sendall(b"G")
                sock.recv(1)

    threads = [threading.Thread(target=hold, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield came
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_held_connections_keep_no_health_check_out(daemon: RunningDaemon) -> None:
    port = port_of(daemon)
    with contextlib.ExitStack() as held:
        for _ in range(status_server.CONNECTIONS + 10):
            sock = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            sock.sendall(b"G")
        assert lives(port)
    with holders(port, 40) as came:
        wait_for(lambda: all(came))
        assert [lives(port) for _ in range(8)] == [True] * 8


PYTHON = "/usr/bin/python3"  # the tests' own may lie where `nobody` has no access


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(PYTHON), reason="only root can ask as another user")
def test_other_users_see_no_paths(daemon: RunningDaemon) -> None:
    nobody = pwd.getpwnam("nobody")
    command = [sys.executable, "-IS", "-c", ASK, str(port_of(daemon)), *PATHS]
    own = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    assert own[1::2] == ["200"] * 6 + ["404", "404", "200"]
    command[0] = PYTHON
    other = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60, user=nobody.pw_uid, extra_groups=[], cwd="/"
    ).stdout.split()
    assert other[1::2] == ["200"] * 3 + ["403"] * 3 + ["404", "404", "403"]


def test_the_other_end_of_a_connection_is_found_by_both_of_its_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            assert status_server.user_of(accepted) == os.geteuid()
            client.close()
            assert status_server.user_of(accepted) is None  # the kernel's table says root of what is closed
