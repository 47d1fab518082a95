"""The HTTP endpoint on loopback, which every user of the machine can connect to."""

from __future__ import annotations

import asyncio
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


# --- metrics for other machines


def ask(host: str, port: int, method: str, path: str, name: str) -> tuple[int, bytes]:
    with socket.create_connection((host, port), timeout=60) as sock:
        sock.sendall(f"{method} {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        return int(head.split()[1]), body


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_other_machines_see_the_metrics_and_neither_paths_nor_processes(host: str) -> None:
    async def answers() -> list[tuple[int, bytes]]:
        server = status_server.MetricsServer(lambda: False)
        port = await server.start(0, host)
        requests = [("GET", path) for path in PATHS] + [("HEAD", "/metrics"), ("POST", "/metrics"), ("GET", "")]
        try:
            return [await asyncio.to_thread(ask, host, port, *request, "node7.example:9465") for request in requests]
        finally:
            server.close()

    try:
        said = asyncio.run(answers())
    except OSError as error:
        if host == "::1":
            pytest.skip(f"no IPv6 here: {error}")
        raise
    assert [status for status, _ in said] == [200, 503, 200, 404, 404, 404, 404, 404, 404, 200, 405, 404]
    assert b"python_info" in said[2][1] or b"# HELP" in said[2][1]
    assert said[9][1] == b""


def test_a_daemon_serves_metrics_where_it_is_told(fresh_daemon: RunningDaemon) -> None:
    fresh_daemon.stop()
    fresh_daemon.options["metrics_listen"] = "127.0.0.1:0"
    fresh_daemon.start()
    status = fresh_daemon.status()
    assert ask("127.0.0.1", status["metrics_port"], "GET", "/metrics", "node")[0] == 200
    assert ask("127.0.0.1", status["metrics_port"], "GET", "/status.json", "localhost")[0] == 404
    assert ask("127.0.0.1", status["http_port"], "GET", "/metrics", "node")[0] == 421
