"""Frames of every kind, damaged in every way, with descriptors of every kind, at a real daemon: no other client is disturbed."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import time

import pytest

from headrace.dataio.core.errors import UsageError
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import wire
from headrace.dataio.sidecar.connections import ClientSocket
from headrace.dataio.sidecar.jobs.memfd import sealed
from tests.dataio.sidecar.conftest import RunningDaemon
from tests.dataio.sidecar.test_abuse import quiet as quiet

WHERE = m.Where("file:///nowhere", {})
SOUND: list[m.Message] = [
    m.Hello(m.VERSION, 1),
    m.Open(1, WHERE, "shards/0.tar", [(0, 10)], 0.1),
    m.Announce(WHERE, [("shards/0.tar", 0, 10)]),
    m.Announce(WHERE, [("shards/1.tar", 0, 10)], dropped=1),
    m.Touched([1, 2]),
    m.Closed([]),
    m.Stage(2, "test", "about", priority=1, wait=1.0),
    m.Follow(3, "0" * 32),
    m.AskStatus(4),
    m.Report(5, "group", "run", wall=1.0),
    m.Welcome(1, 1),
]


def damaged(rng: random.Random, frame: bytes) -> bytes:
    """The frame, with a few bytes changed, cut out, put in, or none."""
    data = bytearray(frame)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(4):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                del data[at : at + rng.randrange(1, 20)]
            case 2:
                data[at:at] = rng.randbytes(rng.randrange(1, 20))
            case _ if data:
                data[at] = rng.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
    return bytes(data)


def descriptors(rng: random.Random) -> list[int]:
    """None as a rule; otherwise pipes, files, folders, sockets, memory files of every sealing."""
    made: list[int] = []
    for _ in range(rng.choice((0, 0, 0, 1, 2, 2, 3, 6))):
        match rng.randrange(6):
            case 0:
                made += os.pipe()
            case 1:
                made.append(os.open("/dev/null", os.O_RDONLY))
            case 2:
                made.append(os.open("/tmp", os.O_PATH))
            case 3:
                made.append(os.memfd_create("loose"))
            case 4:
                made.append(os.eventfd(0))
            case _:
                made.append(sealed("plan", b"{}"))
    return made


def attack(rng: random.Random, path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30)
        while sock.connect_ex(path) == errno.EAGAIN:  # so many wait to be accepted
            time.sleep(0.005)
        if rng.random() < 0.8:
            sock.sendall(wire.frame(m.encode(m.Hello(m.VERSION, os.getpid()))))
        for _ in range(rng.choice((1, 1, 2, 5))):
            fds = descriptors(rng)
            frame = wire.frame(m.encode(rng.choice(SOUND)), rng.choice((0, 0, len(fds) % 256)))
            try:
                wire.send(sock, damaged(rng, frame) or b"\0", fds)
            except OSError:
                return
            finally:
                wire.close_all(fds)


@pytest.mark.parametrize("cases", [pytest.param(1_000), pytest.param(100_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(1200)
def test_no_frame_disturbs_anybody_or_leaks_a_descriptor(quiet: RunningDaemon, cases: int) -> None:
    rng = random.Random(cases)
    for _ in range(cases):
        attack(rng, os.fspath(quiet.socket))


def test_hanging_up_on_a_client_that_is_gone_already_is_nothing() -> None:
    async def run() -> int:
        ours, theirs = socket.socketpair()
        ends = list[int]()
        peer = ClientSocket(
            ours, asyncio.get_running_loop(), frame=lambda _payload, _descriptors: None, ended=lambda: ends.append(1)
        )
        theirs.close()
        peer.send(m.encode(m.Refused("unsupported", "another version")))
        assert not peer.open
        peer.hang_up("another version")
        return len(ends)

    assert asyncio.run(run()) == 1


def test_the_frames_are_sound_before_they_are_damaged() -> None:
    decoded = 0
    for message in SOUND:
        try:
            decoded += m.decode_from_client(m.encode(message)) == message
        except UsageError:
            assert isinstance(message, m.Welcome)
    assert decoded == len(SOUND) - 1
