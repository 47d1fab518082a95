"""`SidecarStore`: each byte once a node, and the store itself whenever the daemon does not deliver."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.errors import CapacityError, NotFoundError, RangeError, TransientError, UsageError
from headrace.dataio.core.limits import MIB
from headrace.dataio.sidecar import protocol as m
from headrace.dataio.sidecar import store as module
from headrace.dataio.sidecar.connection import Sidecar
from headrace.dataio.sidecar.store import SidecarStore, divided, through_sidecar
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.testing.system import stopped
from tests.dataio.sidecar.conftest import RunningDaemon, wait_for


class Counted(PosixStore):
    """Counts the bytes that this process reads from the store itself."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read = Counter[str]()

    def get(self, key: str, *, max_bytes: int = 64 * MIB) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        self.read[key] += len(data)
        return data

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        super().get_ranges_into(key, ranges)
        self.read[key] += sum(len(buffer) for _, buffer in ranges)


def is_shard(key: str) -> bool:
    return key.startswith("shards/")


@pytest.fixture
def direct(store: Store, tmp_path: Path) -> Counted:
    return Counted(tmp_path / "data")


@pytest.fixture
def shared(direct: Counted, daemon: RunningDaemon) -> Iterator[SidecarStore]:
    made = SidecarStore(direct, daemon.socket, is_shard)
    yield made
    made.close()


def read(store: Store, key: str, *ranges: tuple[int, int]) -> list[bytes]:
    pieces = [(offset, memoryview(bytearray(length))) for offset, length in ranges]
    store.get_ranges_into(key, pieces)
    return [bytes(buffer) for _, buffer in pieces]


def test_all_reads_of_an_unchanging_object_come_from_the_daemon(
    daemon: RunningDaemon, direct: Counted, shared: SidecarStore, shards: dict[str, bytes]
) -> None:
    whole = shards["shards/1.tar"]
    assert shared.get("shards/1.tar") == whole
    ranges = [(5, 10), (4 * MIB - 5, 10), (3, 0), (9 * MIB, 1000)]
    assert read(shared, "shards/1.tar", *ranges) == [whole[offset : offset + length] for offset, length in ranges]
    buffer = bytearray(7)
    shared.get_into("shards/1.tar", 2, memoryview(buffer))
    assert buffer == whole[2:9]
    assert not direct.read
    assert daemon.status()["cache"]["fetched_bytes"] == len(whole)
    assert shared.bytes == {"sidecar": len(whole) + 1020 + 7, "store": 0}


def test_objects_that_may_change_are_read_from_the_store(direct: Counted, shared: SidecarStore) -> None:
    direct.put("records/1", b"first")
    assert shared.get("records/1") == b"first"
    direct.put("records/1", b"second")
    assert shared.get("records/1") == b"second"
    assert shared.stat("records/1").size == 6
    assert [info.key for info in shared.list("records/")] == ["records/1"]
    assert shared.bytes == {"sidecar": 0, "store": 0}


def test_an_empty_object_is_read(direct: Counted, shared: SidecarStore) -> None:
    direct.put("shards/empty", b"")
    assert shared.get("shards/empty") == b""


def test_the_errors_are_those_of_the_store(shared: SidecarStore) -> None:
    with pytest.raises(NotFoundError):
        shared.get("shards/none")
    with pytest.raises(RangeError):
        read(shared, "shards/1.tar", (20 * MIB, 1))
    with pytest.raises(CapacityError):
        shared.get("shards/1.tar", max_bytes=100)
    with pytest.raises(UsageError):
        read(shared, "shards/1.tar", (-1, 1))
    with pytest.raises(UsageError):
        shared.get("shards/../records/1")
    assert read(shared, "shards/1.tar", (0, 1))  # none of them ended the connection
    assert shared.bytes["sidecar"] == 1


def test_the_files_that_were_read_are_not_held(
    daemon: RunningDaemon, shared: SidecarStore, shards: dict[str, bytes]
) -> None:
    for _ in range(5):
        for key in shards:
            read(shared, key, (0, 100))
    with daemon.connect():
        shared._connection._housekeeping()  # type: ignore[union-attr]  # it runs once a second
        assert daemon.status()["cache"]["dropped_but_held_bytes"] == 0
    assert not [path for path in Path("/proc/self/fd").iterdir() if _is_cache_file(path, daemon)]


def _is_cache_file(path: Path, daemon: RunningDaemon) -> bool:
    try:
        return path.readlink().is_relative_to(daemon.folder / "cache")
    except FileNotFoundError:
        return False


def test_a_cache_without_room_is_bypassed(tmp_path: Path, direct: Counted, shards: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="mr-") as folder:
        daemon = RunningDaemon(Path(folder), tmp_path / "small.log", {"cache_bytes": 1 * MIB})
        daemon.start()
        shared = SidecarStore(direct, daemon.socket, is_shard)
        assert shared.get("shards/1.tar") == shards["shards/1.tar"]
        assert direct.read["shards/1.tar"] == len(shards["shards/1.tar"])
        shared.close()
        daemon.stop()


def test_a_daemon_that_calls_an_object_empty_is_not_believed_twice(
    direct: Counted, shared: SidecarStore, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SidecarStore, "_ask", lambda *_: 0)
    key = "shards/1.tar"
    assert shared.get(key) == b""
    assert shared.invalidate(key), "the digest of no bytes is wrong"
    assert shared.get(key) == shards[key]
    assert not shared.invalidate(key), "the store has no other copy"


def test_a_reader_of_wrong_bytes_gets_those_of_the_store(
    daemon: RunningDaemon,
    direct: Counted,
    shared: SidecarStore,
    shards: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    key = "shards/1.tar"
    assert shared.get(key) == shards[key]
    for path in (daemon.folder / "cache").rglob("*"):
        if path.is_file() and path.stat().st_size == len(shards[key]):
            with path.open("r+b") as file:
                file.write(b"damaged")
    wrong = read(shared, key, (0, 7))
    assert wrong == [b"damaged"]
    assert shared.invalidate(key)
    assert read(shared, key, (0, 7)) == [shards[key][:7]]
    assert not shared.invalidate(key), "the store has no other copy"
    assert direct.read[key] == 7
    assert read(shared, "shards/2.tar", (0, 7)) == [shards["shards/2.tar"][:7]]
    assert direct.read["shards/2.tar"] == 0
    assert [r.getMessage() for r in caplog.records].count(
        f"the sidecar's cache has wrong bytes of {key}: this process reads it from the store"
    ) == 1


def test_only_the_last_read_of_an_object_decides_where_the_next_one_goes(shared: SidecarStore) -> None:
    read(shared, "shards/1.tar", (0, 1))
    read(shared, "shards/2.tar", (0, 1))
    assert shared.invalidate("shards/1.tar"), "another object was read in between"
    assert not shared.invalidate("shards/0.tar"), "it was never read"


def test_a_daemon_that_dies_is_used_again_when_it_is_back(
    daemon: RunningDaemon,
    direct: Counted,
    shared: SidecarStore,
    shards: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)
    assert read(shared, "shards/0.tar", (0, 9)) == [shards["shards/0.tar"][:9]]
    for _ in range(2):
        assert daemon.kill() == -signal.SIGKILL
        before = shared.bytes["sidecar"]
        for key in ("shards/1.tar", "shards/2.tar"):
            assert shared.get(key) == shards[key]
        assert shared.bytes["sidecar"] == before
        daemon.start()

        def is_served(before: int = before) -> bool:
            assert read(shared, "shards/0.tar", (0, 9)) == [shards["shards/0.tar"][:9]]
            return shared.bytes["sidecar"] > before

        wait_for(is_served)
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert 1 <= len(told) <= 2, told  # the connection ended during a request, or no daemon answered


def test_a_daemon_that_dies_during_a_request_is_replaced_by_the_store(
    daemon: RunningDaemon, shared: SidecarStore, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_BYTES", 1 * MIB)
    asked, real = [], Sidecar.call

    def call(connection: Sidecar, *args: object, **more: object) -> object:
        asked.append(args)
        if len(asked) == 4:
            assert daemon.kill() == -signal.SIGKILL
        return real(connection, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Sidecar, "call", call)
    assert read(shared, "shards/1.tar", (0, 9 * MIB)) == [shards["shards/1.tar"][: 9 * MIB]]
    assert len(asked) == 4
    assert shared.bytes == {"sidecar": 3 * MIB, "store": 6 * MIB}


def test_a_daemon_that_hangs_costs_half_of_the_time_that_is_left(
    daemon: RunningDaemon, shared: SidecarStore, shards: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    read(shared, "shards/0.tar", (0, 1))
    waited, real = list[float](), Sidecar.call

    def call(connection: Sidecar, build: Callable[[int], m.FromClient], *, timeout: float) -> object:
        waited.append(timeout)
        return real(connection, build, timeout=timeout)

    with pytest.MonkeyPatch.context() as patch, stopped(daemon.pid):
        patch.setattr(Sidecar, "call", call)
        with shared.limited(time.monotonic() + 1):
            for _ in range(3):
                assert read(shared, "shards/1.tar", (0, 9)) == [shards["shards/1.tar"][:9]]
    assert len(waited) == 1, "after a failure it is not asked for some seconds"
    assert 0 < waited[0] <= 0.5
    assert shared.bytes == {"sidecar": 1, "store": 27}
    assert sum("could not serve" in r.getMessage() for r in caplog.records) == 1


def test_a_read_after_the_deadline_asks_no_daemon(daemon: RunningDaemon, shared: SidecarStore) -> None:
    with shared.limited(time.monotonic() - 1):
        assert shared.get("shards/1.tar")
    assert shared.bytes["sidecar"] == 0
    assert shared.get("shards/1.tar")
    assert shared.bytes["sidecar"] > 0


def test_the_deadline_is_that_of_one_thread(shared: SidecarStore) -> None:
    with shared.limited(time.monotonic() - 1):
        thread = threading.Thread(target=shared.get, args=["shards/1.tar"])
        thread.start()
        thread.join(60)
    assert shared.bytes["store"] == 0


def test_without_a_daemon_the_store_is_read_and_that_is_logged_once(
    direct: Counted, tmp_path: Path, shards: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    shared = SidecarStore(direct, tmp_path / "none.sock", is_shard)
    for _ in range(3):
        assert shared.get("shards/1.tar") == shards["shards/1.tar"]
    assert sum("no sidecar answers" in r.getMessage() for r in caplog.records) == 1
    shared.close()


def test_a_daemon_that_accepts_and_never_answers_is_asked_rarely(
    direct: Counted, tmp_path: Path, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, real = list[object](), Sidecar.find

    def find(sidecar: str) -> Sidecar | None:
        found.append(sidecar)
        return real(sidecar)

    monkeypatch.setattr("headrace.dataio.sidecar.connection.CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(Sidecar, "find", find)
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir(tmp_path)  # a socket's path must be short
        listening.bind("s")
        listening.listen()
        shared = SidecarStore(direct, "s", is_shard)
        for _ in range(3):
            assert shared.get("shards/1.tar") == shards["shards/1.tar"]
        assert len(found) == 1
        shared.close()


@pytest.mark.parametrize("error", [TransientError("x"), OSError(5, "the disk of the cache failed")])
def test_an_error_of_the_daemon_is_no_error_of_the_reader(
    error: Exception, shared: SidecarStore, shards: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "fill", fail)
    assert shared.get("shards/1.tar")[:3] == shards["shards/1.tar"][:3]
    assert read(shared, "shards/1.tar", (1, 3)) == [shards["shards/1.tar"][1:4]]


def test_a_closed_store_reads_without_the_daemon_and_leaves_the_other_store_open(
    direct: Counted, shared: SidecarStore
) -> None:
    shared.close()
    assert shared.get("shards/1.tar")
    assert direct.read["shards/1.tar"]


def test_a_child_of_a_fork_connects_by_itself(shared: SidecarStore, shards: dict[str, bytes]) -> None:
    assert shared.get("shards/1.tar")
    if (child := os.fork()) == 0:
        code = 1
        try:
            before = shared.bytes["sidecar"]
            found = shared.get("shards/1.tar") == shards["shards/1.tar"]
            code = 0 if found and shared.bytes["sidecar"] > before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(shared, "shards/1.tar", (0, 2)) == [shards["shards/1.tar"][:2]]


def test_stores_that_no_other_process_can_open_are_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store("s3://bucket/x", storage_options={"key": "K", "secret": "not-in-the-log"}) as store:
        assert through_sidecar(store, tmp_path / "s", is_shard) is store
    assert "not read through the sidecar" in caplog.text
    assert "not-in-the-log" not in caplog.text


def test_off_means_no_daemon(direct: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    assert through_sidecar(direct, None, is_shard) is direct
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    assert through_sidecar(direct, "auto", is_shard) is direct


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 60)), max_size=20))
def test_requests_hold_all_bytes_once_and_keep_the_limits(ranges: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REQUEST_BYTES", 16)
        patch.setattr(m, "RANGES", 3)
        requests = list(divided([(offset, memoryview(bytearray(length))) for offset, length in ranges]))
    asked = [(offset + n) for request in requests for offset, buffer in request for n in range(len(buffer))]
    assert asked == [offset + n for offset, length in ranges for n in range(length)]
    assert all(1 <= len(request) <= 3 for request in requests)
    assert all(0 < sum(len(buffer) for _, buffer in request) <= 16 for request in requests)
