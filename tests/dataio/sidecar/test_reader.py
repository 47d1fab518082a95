"""Reading through a real daemon, and without it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from headrace.dataio.cache.readers.local import DirectReader
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import reader as reader_module
from headrace.dataio.sidecar.client import Sidecar, open_reader
from headrace.dataio.sidecar.reader import SidecarReader
from headrace.dataio.sidecar.session import Prefetch, Session
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import JoinedObject, write_list
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for

READ_ALL = """
import hashlib, sys
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.store.open import open_store
url, socket, *keys = sys.argv[1:]
store = open_store(url)
reader = open_reader(store, socket)
digest = hashlib.sha256()
for key in keys:
    size = store.stat(key).size
    for offset in range(0, size, 1 << 20):
        (view,) = reader.read(key, [(offset, min(1 << 20, size - offset))])
        digest.update(view)
print(digest.hexdigest(), reader._fallback_reader is None)
"""


def expected(shards: dict[str, bytes], key: str, ranges: list[tuple[int, int]]) -> list[bytes]:
    return [shards[key][offset : offset + length] for offset, length in ranges]


def test_the_bytes_are_those_of_the_object(daemon: RunningDaemon, store: Store, shards: dict[str, bytes]) -> None:
    reader = open_reader(store, daemon.socket)
    ranges = [(0, 10), (4 * MIB - 5, 10), (9 * MIB, 1000), (3, 0)]
    for _ in range(2):
        views = reader.read("shards/1.tar", ranges)
        assert [bytes(v) for v in views] == expected(shards, "shards/1.tar", ranges)
        assert all(v.readonly for v in views)
    assert daemon.status()["cache"]["fetched_bytes"] == 1020, "ranges far apart come without their blocks"
    everything = [(0, 9 * MIB + 1000)]
    assert [bytes(v) for v in reader.read("shards/1.tar", everything)] == expected(shards, "shards/1.tar", everything)
    assert daemon.status()["cache"]["fetched_bytes"] == 9 * MIB + 1000, "and are not fetched again with these"
    reader.close()


def test_two_processes_that_read_the_same_cost_one_fetch(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    command = [sys.executable, "-c", READ_ALL, store.location.url, str(daemon.socket), *sorted(shards)]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [client.communicate(timeout=150)[0].decode().split() for client in clients]
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == "True", "neither needed a cache of its own"
    cache = daemon.status()["cache"]
    assert cache["fetched_bytes"] == sum(map(len, shards.values()))
    port = daemon.status()["http_port"]
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120).read().decode()
    assert "headrace_cache_bytes_total" in metrics


def test_a_client_cannot_write_to_the_cache(daemon: RunningDaemon, store: Store) -> None:
    with daemon.connect() as sidecar:
        answer, descriptors = sidecar.call(
            lambda id: m.Open(id, m.where(store.location), "shards/0.tar", [(0, 10)], 30.0)
        )
        assert isinstance(answer, m.Opened)
        (fd,) = descriptors
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(OSError):
            os.ftruncate(fd, 0)
        os.close(fd)


def test_what_is_present_is_read_without_asking(daemon: RunningDaemon, store: Store, shards: dict[str, bytes]) -> None:
    reader = open_reader(store, daemon.socket)
    reader.read("shards/0.tar", [(0, 8 * MIB)])
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        (view,) = reader.read("shards/0.tar", [(5 * MIB, 100)])
        assert bytes(view) == shards["shards/0.tar"][5 * MIB : 5 * MIB + 100]
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    reader.close()


def test_more_ranges_than_one_message_holds(daemon: RunningDaemon, store: Store, shards: dict[str, bytes]) -> None:
    reader = open_reader(store, daemon.socket)
    ranges = [(n * 2000, 7) for n in range(2 * m.RANGES + 1)]
    assert [bytes(v) for v in reader.read("shards/2.tar", ranges)] == expected(shards, "shards/2.tar", ranges)
    reader.close()


def test_eviction_keeps_the_views_of_clients_and_frees_the_rest(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes]
) -> None:
    daemon.stop()
    daemon.options["cache_bytes"] = 14 * MIB  # holds one object and a half
    daemon.start()
    reader = open_reader(store, daemon.socket)
    (view,) = reader.read("shards/0.tar", [(0, 9 * MIB)])
    kept = shards["shards/0.tar"][: 9 * MIB]
    for _ in range(3):
        for key in ("shards/1.tar", "shards/2.tar"):
            (other,) = reader.read(key, [(0, 5 * MIB)])
            assert bytes(other) == shards[key][: 5 * MIB]
            del other
    assert bytes(view) == kept
    assert daemon.status()["cache"]["used_bytes"] <= 14 * MIB
    assert daemon.status()["cache"]["dropped_but_held_bytes"] == 9 * MIB
    del view
    gc.collect()
    wait_for(lambda: daemon.status()["cache"]["dropped_but_held_bytes"] == 0)
    reader.close()


def test_a_killed_daemon_is_done_without_and_returned_to(
    daemon: RunningDaemon,
    store: Store,
    shards: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(reader_module, "RETRY_SECONDS", 0.2)
    reader = open_reader(store, daemon.socket)
    assert isinstance(reader, SidecarReader)
    rng, errors, stop = random.Random(1), list[BaseException](), threading.Event()
    held: list[tuple[memoryview, bytes]] = []
    rounds = 0

    def read_on() -> None:
        nonlocal rounds
        while not stop.is_set():
            key = rng.choice(sorted(shards))
            offset = rng.randrange(8 * MIB)
            try:
                (view,) = reader.read(key, [(offset, 5000)])
                assert bytes(view) == shards[key][offset : offset + 5000]
                held.append((view, shards[key][offset : offset + 5000]))
                del held[:-50]
            except BaseException as error:
                errors.append(error)
                return
            rounds += 1

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        wait_for(lambda: rounds > 20)
        daemon.kill()
        before = rounds
        wait_for(lambda: reader._fallback_reader is not None and rounds > before + 20)
        assert reader._connection is None or reader._connection.broken
        daemon.start()
        wait_for(lambda: daemon.status()["cache"]["fetched_bytes"] > 0)
        assert reader._connection is not None
        assert reader._connection.daemon_pid == daemon.pid
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert f"the sidecar on {daemon.socket} answers again" in caplog.text
    assert all(bytes(view) == data for view, data in held)
    reader.close()


def test_without_a_daemon_the_process_reads_by_itself_and_says_so_once(
    tmp_path: Path, store: Store, shards: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        reader = open_reader(store, tmp_path / "absent.sock")
        (view,) = reader.read("shards/0.tar", [(1, 10)])
        assert bytes(view) == shards["shards/0.tar"][1:11]
        reader.close()
    output = f"no sidecar answers on {tmp_path / 'absent.sock'}: this process reads shards directly"
    assert sum(output in record.message for record in caplog.records) == 1


def test_without_a_name_no_daemon_is_asked(store: Store) -> None:
    reader = open_reader(store, None)
    assert isinstance(reader, DirectReader)
    assert Sidecar.find(None) is None
    reader.close()


def test_an_absent_object_is_not_found(daemon: RunningDaemon, store: Store) -> None:
    reader = open_reader(store, daemon.socket)
    with pytest.raises(NotFoundError):
        reader.read("shards/none.tar", [(0, 1)])
    reader.close()


def test_what_is_announced_is_fetched_before_it_is_read(daemon: RunningDaemon, store: Store) -> None:
    reader = open_reader(store, daemon.socket)
    reader.announce([("shards/1.tar", 0, 10), ("shards/2.tar", 5 * MIB, 10)])
    wait_for(lambda: daemon.status()["cache"]["fetched_bytes"] == 8 * MIB)
    reader.read("shards/2.tar", [(4 * MIB, 4 * MIB)])
    assert daemon.status()["cache"]["fetched_bytes"] == 8 * MIB
    reader.close()


def test_what_is_known_to_be_present_is_announced_no_more(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = list[object]()
    send = Sidecar.send
    monkeypatch.setattr(Sidecar, "send", lambda self, message: (messages.append(message), send(self, message)))
    reader = open_reader(store, daemon.socket)
    assert isinstance(reader, SidecarReader)

    def announced(upcoming: list[tuple[str, int, int]]) -> bool:
        messages.clear()
        reader.announce(upcoming)
        return any(isinstance(message, m.Announce) for message in messages)

    reader.read("shards/0.tar", [(0, len(shards["shards/0.tar"]))])
    assert announced([("shards/0.tar", 0, 10)]), "the daemon hears once that this is a loader"
    assert not announced([("shards/0.tar", 0, 10), ("shards/0.tar", MIB, MIB)])
    assert announced([("shards/0.tar", 0, 10), ("shards/1.tar", 0, 10)])
    assert announced([("shards/1.tar", 5 * MIB, 10)]), "a part of the file is known at most"
    reader._forget(reader._cached_files["shards/0.tar"].file)
    assert announced([("shards/0.tar", 0, 10)]), "the daemon has dropped it"
    reader.close()


def test_an_answer_tells_what_came_of_other_files_too(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, other = open_reader(store, daemon.socket), open_reader(store, daemon.socket)
    for key in ("shards/0.tar", "shards/1.tar"):
        reader.read(key, [(0, 10)])
    other.read("shards/1.tar", [(0, len(shards["shards/1.tar"]))])
    reader.read("shards/0.tar", [(4 * MIB, 10)])
    monkeypatch.setattr(Sidecar, "call", None)
    ranges = [(4 * MIB - 5, 10), (len(shards["shards/1.tar"]) - 10, 10)]
    views = reader.read("shards/1.tar", ranges)
    assert [bytes(v) for v in views] == expected(shards, "shards/1.tar", ranges), "without asking"
    reader.close()
    other.close()


def test_of_an_announcement_that_goes_on_what_is_new_is_told_when_it_is_a_quarter(
    daemon: RunningDaemon, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, followed = list[m.Announce](), list[list[tuple[str, int, int]]]()
    session, send = Session(1), Sidecar.send

    def telling(self: Sidecar, message: m.FromClient) -> None:
        if isinstance(message, m.Announce):
            messages.append(message)
            (prefetch,) = session.received(message, ())
            assert isinstance(prefetch, Prefetch)
            followed.append(prefetch.request.upcoming)
        send(self, message)

    session.received(m.Hello(m.VERSION, 1), ())
    monkeypatch.setattr(Sidecar, "send", telling)
    coming = [("shards/1.tar", 100 * n, 100) for n in range(64)]

    def gone() -> int | None:
        return messages[-1].dropped

    reader = open_reader(store, daemon.socket)
    reader.announce(coming[:16])
    reader.announce(coming[3:19])
    assert len(messages) == 1, "three of sixteen are new"
    reader.announce(coming[4:20])
    assert messages[-1].upcoming == coming[16:20]
    assert gone() == 4
    reader.announce(coming[40:56])
    assert gone() is None, "nothing of it was known"
    reader.announce([*coming[44:50], *coming[60:64]])
    assert gone() is None, "it goes on with something else"
    assert followed == [coming[:16], coming[4:20], coming[40:56], [*coming[44:50], *coming[60:64]]]
    reader.close()


def test_the_mapping_that_was_not_used_goes_first(
    daemon: RunningDaemon, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "MAPPED_FILES", 2)
    reader = open_reader(store, daemon.socket)
    assert isinstance(reader, SidecarReader)
    for key in ("shards/0.tar", "shards/1.tar", "shards/2.tar"):
        reader.read(key, [(0, 10)])  # the third looks at both, and finds both used
    assert list(reader._cached_files) == ["shards/1.tar", "shards/2.tar"]
    reader.read("shards/1.tar", [(0, 10)])
    reader.read("shards/0.tar", [(0, 10)])
    assert "shards/1.tar" in reader._cached_files
    reader.close()


def test_the_end_of_a_client_lets_go_of_all_it_held(daemon: RunningDaemon, store: Store, tmp_path: Path) -> None:
    code = READ_ALL + "print('here', flush=True); import time; time.sleep(60)"
    command = [sys.executable, "-c", code, store.location.url, str(daemon.socket), "shards/0.tar"]
    daemon.status()
    before = daemon.descriptors()
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline()
    assert client.stdout.readline() == b"here\n"
    assert [c["held_files"] for c in daemon.status()["client_list"] if c["pid"] == client.pid] == [1]
    client.kill()
    client.communicate()
    wait_for(lambda: daemon.status()["clients"] == 1)
    # The cached file, open to write and to read, and its list; the store keeps the source open a while longer by itself.
    wait_for(lambda: daemon.descriptors(but=tmp_path / "data") <= before + 3)


def ask(port: int, request: bytes) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), 30) as sock:
        sock.sendall(request)
        while piece := sock.recv(65536):
            answer += piece
    return answer


def test_status_over_http_and_by_the_command(daemon: RunningDaemon, store: Store, tmp_path: Path) -> None:
    port = daemon.status()["http_port"]

    def get(path: str) -> Any:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120).read()

    assert get("/livez") == get("/readyz") == b"ok\n"
    assert json.loads(get("/status.json"))["pid"] == daemon.pid
    with pytest.raises(urllib.error.HTTPError) as missing:
        get("/etc/passwd")
    missing.value.close()
    assert missing.value.code == 404
    assert ask(port, b"POST /livez HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert ask(port, b"HEAD /livez HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
    assert ask(port, b"GET /" + b"x" * 20_000) == b""
    command = [sys.executable, "-m", "headrace.dataio.cli", "sidecar", "status", "--socket", str(daemon.socket)]
    assert json.loads(subprocess.check_output([*command, "--json"]))["pid"] == daemon.pid
    assert f"process {daemon.pid}" in subprocess.check_output(command, text=True)
    absent = subprocess.run([*command[:-1], str(tmp_path / "no.sock")], capture_output=True, text=True)
    assert absent.returncode == 2
    assert "no sidecar answers" in absent.stderr


def test_the_daemon_holds_no_heavy_library(fresh_daemon: RunningDaemon, store: Store) -> None:
    reader = open_reader(store, fresh_daemon.socket)
    reader.read("shards/0.tar", [(0, 10)])
    reader.close()
    loaded = Path(f"/proc/{fresh_daemon.pid}/maps").read_text()
    for name in ("torch", "arrow", "nvidia", "numpy"):
        assert f"/{name}" not in loaded
    assert "/msgspec" in loaded, "the test looks at the right thing"


def test_a_forgotten_reader_ends_its_connection_and_not_in_the_thread_that_collects_it(
    daemon: RunningDaemon, store: Store, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = list[int](), Sidecar.close
    monkeypatch.setattr(Sidecar, "close", lambda it: (close(it), closed.append(threading.get_ident())))
    reader = SidecarReader(store, daemon.socket)
    del reader
    gc.collect()
    wait_for(lambda: closed)
    assert threading.get_ident() not in closed


def test_a_connection_that_is_found_while_the_reader_closes_is_closed(
    daemon: RunningDaemon, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, found = SidecarReader(store, daemon.socket), list[Sidecar]()
    assert reader._connection is not None
    reader._connection.close()
    reader._next_try = 0.0
    find = Sidecar.find

    def find_and_close(name: Any) -> Sidecar | None:
        connection = find(name)
        assert connection is not None
        found.append(connection)
        reader.close()
        return connection

    monkeypatch.setattr(Sidecar, "find", find_and_close)
    assert reader._get_connection() is None
    assert found[0].broken
    assert reader._connection is None


def test_joined_shards_are_read_through_the_daemon(daemon: RunningDaemon, tmp_path: Path) -> None:
    base, clips = open_store(tmp_path / "set"), open_store(tmp_path / "clips")
    contents = [random.Random(number).randbytes(size) for number, size in enumerate((10, 5 * MIB, 700_001))]
    for number, data in enumerate(contents):
        clips.put(f"{number}.mp4", data)
    objects = [JoinedObject(key=f"mounts/m1/{n}.mp4", size=len(data)) for n, data in enumerate(contents)]
    whole = b"".join(contents)
    with Mounts(base, {"m1": clips}, joined=True) as store:
        shard, _ = write_list(store, 0, objects)
        reader = open_reader(store, daemon.socket)
        ranges = [(0, 20), (5 * MIB - 3, 4000), (len(whole) - 7, 7)]
        views = reader.read(shard, ranges)
        assert [bytes(view) for view in views] == [whole[at : at + length] for at, length in ranges]
        assert daemon.status()["cache"]["fetched_bytes"] == 4027
        assert bytes(reader.read(shard, [(0, len(whole))])[0]) == whole
        assert daemon.status()["cache"]["fetched_bytes"] == len(whole)
        with pytest.raises(NotFoundError):
            reader.read("mounts/joined/00000009-" + "0" * 32, [(0, 1)])
        reader.close()
