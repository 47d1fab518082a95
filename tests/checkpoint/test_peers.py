"""Lifelines between ranks of different nodes, over real connections."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from headrace.checkpoint.peers import ADDRESS_BYTES, ENDED, LIVES, SILENT, PeerConnection, PeerProbe, _packed

_HOLDER = """
import os, sys
from headrace.checkpoint.peers import PeerProbe
probe = PeerProbe()
if os.fork() == 0:  # as a loader's worker, which outlives it
    sys.stdin.read()
    os._exit(0)
print(probe.address.hex(), flush=True)
sys.stdin.read()
"""
_CUT_OFF = """
import ctypes, fcntl, socket, struct, sys, time
from headrace.checkpoint.peers import PeerProbe, PeerConnection
if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000):  # a user and a network of its own
    sys.exit(77)
def link(flags):
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH22x", b"lo", flags))
link(1)
probe = PeerProbe()
connection = PeerConnection(probe.address, idle=1, interval=1, probes=1, answer=0.5)
while connection._connected is False:
    print(connection.state(), flush=True)
link(0)
while connection.state() == "lives":
    time.sleep(0.01)
print(connection.state(), flush=True)
"""


def test_a_process_that_ends_is_noticed_though_its_children_live_and_one_that_is_stopped_lives() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment()
    ) as held:
        assert held.stdout is not None
        connection = PeerConnection(bytes.fromhex(held.stdout.readline()))
        _until(lambda: connection.state() == LIVES and connection._connected)
        held.send_signal(signal.SIGSTOP)
        assert connection.state() == LIVES
        held.kill()
        _until(lambda: connection.state() == ENDED)
        connection.close()
    assert connection.state() == ENDED


def test_a_line_that_something_between_cut_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between:
        connection = PeerConnection(_packed("127.0.0.1", between.getsockname()[1]))
        _until(lambda: connection.state() == LIVES and connection._connected)
        between.accept()[0].close()
        _until(lambda: connection.state() == LIVES and connection._reconnected > 0)
        second = between.accept()[0]
        _until(lambda: connection.state() == LIVES and connection._reconnected == 0)
        second.close()
    _until(lambda: connection.state() == ENDED)
    connection.close()


def test_what_could_never_be_reached_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as failed_ranks:
        address = _packed("127.0.0.1", failed_ranks.getsockname()[1])
    for each in (address, bytes(ADDRESS_BYTES)):
        connection = PeerConnection(each)
        assert {connection.state() for _ in range(100)} == {LIVES}
        connection.close()
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    probe = PeerProbe()
    assert probe.address == bytes(ADDRESS_BYTES)
    probe.close()


def test_a_node_that_answers_nothing_any_more_is_silent() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _CUT_OFF], capture_output=True, text=True, timeout=150, env=_environment(), check=False
    )
    if found.returncode == 77:
        pytest.skip("this system gives no process a network of its own")
    assert found.stdout.splitlines()[-1:] == [SILENT], found.stderr


def _environment() -> dict[str, str]:
    return os.environ | {"MASTER_ADDR": "127.0.0.1"}


def _until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)
