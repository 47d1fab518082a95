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
door = PeerProbe()
if os.fork() == 0:  # as a loader's worker, which outlives it
    sys.stdin.read()
    os._exit(0)
print(door.address.hex(), flush=True)
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
door = PeerProbe()
line = PeerConnection(door.address, idle=1, interval=1, probes=1, answer=0.5)
while line._held is False:
    print(line.state(), flush=True)
link(0)
while line.state() == "lives":
    time.sleep(0.01)
print(line.state(), flush=True)
"""


def test_a_process_that_ends_is_noticed_though_its_children_live_and_one_that_is_stopped_lives() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_here()
    ) as held:
        assert held.stdout is not None
        line = PeerConnection(bytes.fromhex(held.stdout.readline()))
        _until(lambda: line.state() == LIVES and line._held)
        held.send_signal(signal.SIGSTOP)
        assert line.state() == LIVES
        held.kill()
        _until(lambda: line.state() == ENDED)
        line.close()
    assert line.state() == ENDED


def test_a_line_that_something_between_cut_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as between:
        line = PeerConnection(_packed("127.0.0.1", between.getsockname()[1]))
        _until(lambda: line.state() == LIVES and line._held)
        between.accept()[0].close()
        _until(lambda: line.state() == LIVES and line._reconnected > 0)
        second = between.accept()[0]
        _until(lambda: line.state() == LIVES and line._reconnected == 0)
        second.close()
    _until(lambda: line.state() == ENDED)
    line.close()


def test_what_could_never_be_reached_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = _packed("127.0.0.1", gone.getsockname()[1])
    for each in (address, bytes(ADDRESS_BYTES)):
        line = PeerConnection(each)
        assert {line.state() for _ in range(100)} == {LIVES}
        line.close()
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    door = PeerProbe()
    assert door.address == bytes(ADDRESS_BYTES)
    door.close()


def test_a_node_that_answers_nothing_any_more_is_silent() -> None:
    found = subprocess.run(
        [sys.executable, "-c", _CUT_OFF], capture_output=True, text=True, timeout=150, env=_here(), check=False
    )
    if found.returncode == 77:
        pytest.skip("this system lets nobody have a network of its own")
    assert found.stdout.splitlines()[-1:] == [SILENT], found.stderr


def _here() -> dict[str, str]:
    return os.environ | {"MASTER_ADDR": "127.0.0.1"}


def _until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)
