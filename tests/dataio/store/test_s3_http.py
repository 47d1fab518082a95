"""Reads in the caller's own thread: the same bytes and errors as the ordinary way, which takes over whatever is odd."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.dataio.core.errors import HeadraceError, NotFoundError, SlowDownError, TransientError, UsageError
from headrace.dataio.store import s3_http
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.s3_http import SyncHttpClient
from headrace.dataio.testing.conformance import some_bytes
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy
from headrace.dataio.testing.s3_server import S3Server
from headrace.dataio.testing.system import stopped
from tests.support.waiting import wait_for

pytest.importorskip("obstore", reason="the extra s3 is not installed")
MIB = 1 << 20
BODY = some_bytes(3 * MIB)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that their caller's thread began; with a `?` what it left to the ordinary way."""
    names: list[str] = []

    def count(name: str) -> None:
        real = getattr(SyncHttpClient, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            names.append(f"{name}?")
            found = real(*arguments, **keywords)
            names[-1] = name if found is not None else names[-1]
            return found

        monkeypatch.setattr(SyncHttpClient, name, counted)

    for name in ("get", "read", "head"):
        count(name)
    return names


@pytest.fixture
def store(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Connected, with an object of 3 MiB."""
    monkeypatch.setenv("HEADRACE_S3", "http")
    with open_store(s3_url) as found:
        found.put("k", BODY)
        yield found


@pytest.mark.s3
def test_reads_of_every_size_are_the_objects_bytes(store: Store, taken: list[str]) -> None:
    for offset, size in [(0, 1), (7, 1000), (5, MIB), (1, MIB + 1), (0, len(BODY)), (len(BODY) - 3, 3)]:
        buffer = bytearray(size)
        store.get_into("k", offset, memoryview(buffer))
        assert buffer == BODY[offset : offset + size]
    assert taken == ["read"] * 6
    near, far = bytearray(100), bytearray(2 * MIB)
    store.get_ranges_into("k", [(200_000, memoryview(far)), (180_000, memoryview(near))])
    assert (near, far) == (BODY[180_000:180_100], BODY[200_000 : 200_000 + 2 * MIB])
    assert taken[6:] == ["read"], "neighbours travel in one request"
    assert store.get("k") == BODY
    assert store.stat("k").size == len(BODY)
    assert taken[7:] == ["get", "head"]


@pytest.mark.s3
def test_pieces_come_in_order_and_add_up_whatever_their_reader_does_with_its_buffer(
    store: Store, taken: list[str]
) -> None:
    for offset, size in [(3, 1), (0, 256 << 10), (1, (256 << 10) + 1), (17, 2 * MIB)]:
        buffer, found = memoryview(bytearray(size)), bytearray()

        def take(at: int, piece: memoryview, first: int = offset, found: bytearray = found) -> None:
            assert at == first + len(found)
            found += piece
            piece[:] = bytes(len(piece))

        store.get_pieces("k", offset, buffer, take)
        assert found == BODY[offset : offset + size]
    assert taken == ["read"] * 4


@pytest.mark.s3
@pytest.mark.parametrize("key", ["a b+c", "a%20b", "deep/er/still", "é/ü", "q?x=1&y#z", "star*'()!~"])
def test_an_object_is_found_by_whatever_name_it_has(key: str, store: Store, taken: list[str]) -> None:
    store.put(key, b"here")
    assert (store.get(key), store.stat(key).size) == (b"here", 4)
    assert taken == ["get", "head"]


@pytest.mark.s3
def test_errors_are_those_of_the_ordinary_way(store: Store) -> None:
    with pytest.raises(UsageError, match=str(len(BODY))):
        store.get_into("k", len(BODY) - 5, memoryview(bytearray(10)))
    with pytest.raises(UsageError, match=str(len(BODY))):
        store.get_into("k", len(BODY) - 5, memoryview(bytearray(2 * MIB)))
    with pytest.raises(HeadraceError, match="bytes"):
        store.get("k", max_bytes=len(BODY) - 1)
    for read in (
        lambda: store.get_into("other", 0, memoryview(bytearray(1))),
        lambda: store.stat("other"),
        lambda: store.get("other"),
    ):
        with pytest.raises(NotFoundError, match="other"):
            read()
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.get_into("k", 0, memoryview(bytearray(1)))


@pytest.mark.s3
@pytest.mark.parametrize("size", [1000, 2 * MIB])
@pytest.mark.parametrize("fault", [Fault.RESET_BODY, Fault.CUT_BODY, Fault.SLOW_DOWN, Fault.REFUSE])
def test_a_read_survives(
    size: int, fault: Fault, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_S3", "http")
    with (
        FaultProxy(s3_server.endpoint) as proxy,
        open_store(s3_url, storage_options={"endpoint_url": proxy.endpoint}) as behind,
    ):
        behind.put("k", BODY)
        proxy.inject(fault, method="GET", times=2)
        buffer = bytearray(size)
        behind.get_into("k", 5, memoryview(buffer))
        assert buffer == BODY[5 : 5 + size]
        assert proxy.fired == {fault: 2}


@pytest.mark.s3
def test_closing_ends_what_a_silent_server_holds(s3_server: S3Server, store: Store, taken: list[str]) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        store.get_into("k", 0, memoryview(bytearray(1)))  # so that there is a connection
        with stopped(s3_server.process.pid):
            reading = pool.submit(store.get_into, "k", 5, memoryview(bytearray(1000)))
            wait_for(lambda: store.inner.inner._session._http._used)  # type: ignore[attr-defined]
            store.close()
            with pytest.raises(UsageError, match="closed while it was used"):
                reading.result(150)


READS = """
import sys
from headrace.dataio.store.open import open_store
with open_store(sys.argv[1]) as store:
    (info,) = store.list()
    assert len(store.get(info.key)) == store.stat(info.key).size == info.size
    store.get_into(info.key, 0, memoryview(bytearray(info.size)))
print([name for name in ("obstore", "s3fs", "botocore") if name in sys.modules])
"""


@pytest.mark.s3
def test_after_reconnecting_reads_go_by_other_connections(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, real = list[str](), SyncHttpClient._connected

    def connected(here: SyncHttpClient, doing: str) -> Any:
        begun.append(doing)
        return real(here, doing)

    monkeypatch.setattr(SyncHttpClient, "_connected", connected)
    buffer = memoryview(bytearray(100))
    for expected in (0, 0, 1):
        begun.clear()
        if expected:
            store.reconnect()
        store.get_into("k", 0, buffer)
        store.get_into("k", 5, buffer)
        assert bytes(buffer) == BODY[5:105]
    assert len(begun) == 1


def test_who_only_reads_loads_no_library_for_it(store: Store, s3_url: str) -> None:
    said = subprocess.run(
        [sys.executable, "-c", READS, s3_url], capture_output=True, text=True, timeout=150, check=True
    )
    assert said.stdout.split() == ["[]"]


@contextlib.contextmanager
def _server(*answers: bytes) -> Iterator[tuple[Store, list[int]]]:
    """A store, without retries, at a server that gives these answers in order and ends a connection before an empty one; and how
    many answers each connection got."""
    got: list[int] = []
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(20)

    def serve() -> None:
        left = list(answers)
        while left:
            connection, _ = listening.accept()
            got.append(0)
            with connection:
                while left and (answer := left.pop(0)):
                    asked = b""
                    while b"\r\n\r\n" not in asked:
                        asked += connection.recv(65536)
                    connection.sendall(answer)
                    got[-1] += 1

    thread = threading.Thread(target=serve)
    thread.start()
    where = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        with open_store(
            "s3://b/p", storage_options={"endpoint_url": where, "key": "k", "secret": "s", "client": "http"}
        ) as store:
            yield store.inner, got  # type: ignore[attr-defined]
    finally:
        thread.join()
        listening.close()


def _http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_connection_is_used_again_until_the_server_ends_it() -> None:
    with _server(_http(b"1"), _http(b"2"), b"", _http(b"3")) as (store, got):
        assert [store.get("k") for _ in range(3)] == [b"1", b"2", b"3"]
    assert got == [2, 1]


def test_headers_that_are_cut_in_the_middle_of_a_size_give_no_size() -> None:
    whole = b"HTTP/1.1 200 OK\r\nLast-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\nContent-Length: 1234\r\n\r\n"
    with _server(whole[:-6], b"", whole) as (store, got):
        assert store.stat("k").size == 1234
    assert got == [1, 1]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (_http(b"12345")[:-1], TransientError, "the body ended early"),
        (b"what?\r\n\r\n", HeadraceError, "no HTTP"),
        (_http(b"", "503 S", "Retry-After: 7\r\n"), SlowDownError, "503"),
        (_http(b"<html>cut", "500 I"), TransientError, "500"),
        (_http(b"<Error><Code>NoSuchBucket</Code></Error>", "404 N"), NotFoundError, "bucket 'b'"),
    ],
)
def test_an_answer_that_is_not_as_it_should_be_is_one_clear_error(
    answer: bytes, kind: type[HeadraceError], words: str
) -> None:
    with _server(answer, b"") as (store, _), pytest.raises(kind, match=words) as caught:
        store.get("k")
    assert type(caught.value) is kind


def test_an_address_that_swallows_everything_leaves_time_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.2", 0), backlog=0) as silent,
        socket.create_connection(silent.getsockname()),  # its queue is full, and the kernel drops what else comes
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        addresses = [(*kind, silent.getsockname()), (*kind, server.getsockname())]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        until = time.monotonic() + 1.0
        with s3_http._connect("store.example", 443, until, None) as connected:
            assert connected.getpeername() == server.getsockname()
            assert 0.3 < until - time.monotonic() < 0.7  # the first address had its part, and no more
