"""The client's side: which reader one gets, threads, forks, and a daemon of which something is odd."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.dataio.cache.readers.bypass import BypassReader
from headrace.dataio.core import log
from headrace.dataio.core.errors import DeadlineError, TransientError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar import connection, wire
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar.client import Sidecar, open_reader
from headrace.dataio.sidecar.connection import AdaptivePoll
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import stopped
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for
from tests.support.denied import denied

FORKED = """
import os, sys
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.store.open import open_store
from headrace.dataio.testing.system import stopped
from tests.support.denied import denied
url, socket, key = sys.argv[1:]
reader = open_reader(open_store(url), socket)
first = bytes(reader.read(key, [(0, 100)])[0])
child = os.fork()
if not child:
    again = open_reader(open_store(url), socket)
    same = bytes(again.read(key, [(0, 100)])[0]) == first and again._fallback_reader is None
    old = reader._connection.broken
    os._exit(0 if same and old else 1)
assert os.waitpid(child, 0)[1] == 0, "the child reads by a connection of its own"
reader.read(key, [(5 << 20, 100)])
assert reader._fallback_reader is None, "the parent's connection still works"
"""


@pytest.mark.s3
def test_shards_on_s3_are_fetched_once_with_the_daemons_own_credentials(
    s3_url: str, fresh_daemon: RunningDaemon
) -> None:
    data = os.urandom(5 * MIB)
    with open_store(s3_url) as store:
        store.put("shards/0.tar", data)
        readers = [open_reader(store, fresh_daemon.socket) for _ in range(2)]
        for reader in readers:
            assert b"".join(reader.read("shards/0.tar", [(0, MIB), (MIB, 4 * MIB)])) == data
            assert getattr(reader, "_fallback_reader", 1) is None
            reader.close()
    assert fresh_daemon.status()["cache"]["fetched_bytes"] == len(data)
    loaded = Path(f"/proc/{fresh_daemon.pid}/maps").read_text()
    assert "/torch" not in loaded
    assert "/arrow" not in loaded


def test_a_store_opened_with_secrets_stays_in_the_process(
    daemon: RunningDaemon, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = Location("s3://bucket/with-secrets", {}, shareable=False)
    monkeypatch.setattr(type(store), "location", property(lambda _: secret))
    reader = open_reader(store, daemon.socket)
    assert isinstance(reader, BypassReader)
    assert "never sent to another process" in caplog.text
    reader.close()


def test_many_threads_share_one_connection(daemon: RunningDaemon, store: Store, shards: dict[str, bytes]) -> None:
    reader = open_reader(store, daemon.socket)

    def some(n: int) -> bool:
        key, offset = f"shards/{n % 3}.tar", (n * 79199) % (9 * MIB - 3000)
        return bytes(reader.read(key, [(offset, 3000)])[0]) == shards[key][offset : offset + 3000]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(some, range(500)))
    assert daemon.status()["cache"]["fetched_bytes"] == sum(map(len, shards.values()))
    reader.close()


def test_a_reader_that_is_forgotten_ends_its_connection(daemon: RunningDaemon, store: Store) -> None:
    reader = open_reader(store, daemon.socket)
    (view,) = reader.read("shards/0.tar", [(0, 10)])
    kept = bytes(view)
    assert daemon.status()["clients"] == 2
    del reader
    gc.collect()
    wait_for(lambda: daemon.status()["clients"] == 1)
    assert bytes(view) == kept


def test_a_daemon_that_hangs_is_done_without(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection, "HUNG_SECONDS", 0.5)
    reader = open_reader(store, daemon.socket)
    reader.read("shards/0.tar", [(0, 10)])
    with daemon.connect() as sidecar, stopped(daemon.pid):
        began = time.monotonic()
        assert bytes(reader.read("shards/1.tar", [(0, 100)])[0]) == shards["shards/1.tar"][:100]
        with pytest.raises(TransientError, match="the daemon hangs"):
            sidecar.status()
        held = time.monotonic() - began
        for n in range(50):
            assert (
                bytes(reader.read("shards/2.tar", [(n * MIB // 8, 9)])[0]) == shards["shards/2.tar"][n * MIB // 8 :][:9]
            )
        looked = time.monotonic() - began - held
    assert held < 30
    assert looked < 10, "a daemon that lets others wait is looked for seldom"
    reader.close()
    assert daemon.status()["pid"] == daemon.pid


def test_a_daemon_that_has_nothing_to_say_of_a_job_does_not_hang(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection, "HUNG_SECONDS", 2.0)
    with daemon.connect() as sidecar:
        sidecar._jobs.follow("waits")
        time.sleep(3.5)
        assert sidecar._last_ping > 0
        assert not sidecar.broken


def test_a_forked_child_opens_its_own_connection(daemon: RunningDaemon, store: Store) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, store.location.url, str(daemon.socket), "shards/0.tar"]
    subprocess.run(command, check=True, timeout=150)


def test_a_closed_connection_refuses_to_be_used(daemon: RunningDaemon) -> None:
    sidecar = daemon.connect()
    sidecar.close()
    assert sidecar.broken
    with pytest.raises(TransientError, match="this process closed it"):
        sidecar.status()


def quick() -> AdaptivePoll:
    """Where all answers have come quickly, and minutes count as quick."""
    spin = AdaptivePoll(600.0, processors=2)
    for _ in range(100):
        spin.waited(0.0, polled=False)
    return spin


def test_an_answer_that_comes_while_it_is_looked_for_is_the_same(daemon: RunningDaemon, store: Store) -> None:
    with daemon.connect() as sidecar:
        expected = sidecar.status()["pid"]
        sidecar.spin = quick()
        assert [sidecar.status()["pid"] for _ in range(3)] == [expected] * 3
        assert (sidecar.spin.polled, sidecar.spin.helped) == (3, 3)


def test_looking_ends_with_the_connection(impostor: socket.socket, daemon: RunningDaemon) -> None:
    def hang_up() -> None:
        with impostor.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(wire.frame(m.encode(m.Welcome(m.VERSION, 1))))
            sock.recv(1000)

    thread = threading.Thread(target=hang_up)
    thread.start()
    sidecar = Sidecar.find(daemon.folder / "odd.sock")
    assert sidecar is not None
    sidecar.spin = quick()
    with pytest.raises(TransientError, match="the daemon closed it"):
        sidecar.call(m.AskStatus)
    thread.join()


@pytest.fixture
def impostor(daemon: RunningDaemon) -> Iterator[socket.socket]:
    """A socket on which a process listens that is not a daemon."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(os.fspath(daemon.folder / "odd.sock"))
    listening.listen(5)
    with listening:
        yield listening


def test_a_daemon_that_drips_hangs(
    impostor: socket.socket, daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_SECONDS", 0.2)
    monkeypatch.setattr(connection, "HUNG_SECONDS", 0.5)
    over, dripped = threading.Event(), 0

    def drip() -> None:
        nonlocal dripped
        with impostor.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(wire.frame(m.encode(m.Welcome(m.VERSION, 1))))
            for at in range(1000):
                if over.wait(0.05):
                    return
                try:
                    sock.sendall(wire.frame(bytes(1000))[at : at + 1])
                except OSError:  # the client has given up
                    return
                dripped += 1

    thread = threading.Thread(target=drip)
    thread.start()
    sidecar = Sidecar.find(daemon.folder / "odd.sock")
    assert sidecar is not None
    job = sidecar._jobs.follow("waits")
    with pytest.raises(TransientError, match="the daemon hangs"):
        sidecar.status()
    with pytest.raises(TransientError, match="the daemon hangs"):
        job.result(10)
    over.set()
    thread.join()
    assert dripped > 5


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", wire.frame(b"\xc1"), wire.frame(b"") * 3])
def test_who_does_not_speak_like_a_sidecar_is_none(
    impostor: socket.socket, answer: bytes, daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    def speak() -> None:
        with impostor.accept()[0] as sock:
            sock.recv(1000)
            sock.sendall(answer)

    thread = threading.Thread(target=speak)
    thread.start()
    reader = open_reader(store, daemon.folder / "odd.sock")
    assert bytes(reader.read("shards/0.tar", [(0, 10)])[0]) == shards["shards/0.tar"][:10]
    thread.join()
    reader.close()


@pytest.mark.parametrize("looks", [False, True])
def test_a_daemon_that_never_answers_costs_a_deadline(
    impostor: socket.socket, daemon: RunningDaemon, looks: bool
) -> None:
    accepted = list[socket.socket]()

    def welcome() -> None:
        sock = impostor.accept()[0]
        sock.recv(1000)
        sock.sendall(wire.frame(m.encode(m.Welcome(m.VERSION, 1))))
        accepted.append(sock)

    thread = threading.Thread(target=welcome)
    thread.start()
    sidecar = Sidecar.find(daemon.folder / "odd.sock")
    thread.join()
    assert sidecar is not None
    if looks:
        sidecar.spin = quick()
    with pytest.raises(DeadlineError):
        sidecar.call(m.AskStatus, timeout=0.1)
    assert (sidecar.spin.polled, sidecar.spin.helped) == (int(looks), 0)
    accepted[0].close()
    wait_for(lambda: sidecar.broken)


def test_another_users_daemon_is_named_as_such_and_done_without(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log._logged.clear()
    monkeypatch.setenv("HEADRACE_SIDECAR", str(daemon.socket))
    with denied(daemon.socket.parent):
        assert Sidecar.find() is None
    assert f"this user may not use the sidecar on {daemon.socket}: Permission denied" in caplog.text
