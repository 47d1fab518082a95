"""Reads from S3: the plan of a ranged read, a pure function, and the bytes, requests and errors of each client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core.errors import HeadraceError, NotFoundError, SlowDownError, TransientError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.ranges import GAP_BYTES, SPAN_BYTES, plan
from headrace.dataio.testing.conformance import some_bytes
from headrace.dataio.testing.fault_proxy import FaultProxy

_SIZE = st.one_of(st.integers(1, 100), st.integers(1, 3 * SPAN_BYTES), st.just(SPAN_BYTES))
_AT = st.one_of(st.integers(0, 1000), st.integers(0, 4 * SPAN_BYTES))


@given(st.lists(st.tuples(_AT, _SIZE), min_size=1, max_size=8))
def test_spans_cover_every_range_exactly_and_keep_their_bounds(ranges: list[tuple[int, int]]) -> None:
    # each buffer is a window of one address space, so where a segment's bytes go tells which range it serves
    space = memoryview(bytearray(max(size for _, size in ranges)))
    spans = plan([(offset, space[:size]) for offset, size in ranges])
    wanted, planned = sum(size for _, size in ranges), 0
    for span in spans:
        assert 0 < span.stop - span.start <= SPAN_BYTES
        assert sum(length for length, _ in span.segments) == span.stop - span.start
        assert all(length <= GAP_BYTES for length, target in span.segments if target is None)
        assert span.segments[0][1] is not None
        assert span.segments[-1][1] is not None
        planned += sum(length for length, target in span.segments if target is not None)
    assert planned == wanted
    assert [span.start for span in spans] == sorted(span.start for span in spans)


def test_neighbours_travel_together_and_distant_ranges_do_not() -> None:
    buffers = [memoryview(bytearray(10)) for _ in range(4)]
    near, gap, far = 10, 20 + GAP_BYTES, 1 << 30
    spans = plan([(far, buffers[3]), (0, buffers[0]), (gap, buffers[2]), (near, buffers[1])])
    assert [(span.start, span.stop) for span in spans] == [(0, gap + 10), (far, far + 10)]


def test_a_large_range_is_cut_into_spans_that_can_be_fetched_side_by_side() -> None:
    spans = plan([(3, memoryview(bytearray(3 * SPAN_BYTES + 1)))])
    assert [span.stop - span.start for span in spans] == [SPAN_BYTES] * 3 + [1]


# reads through each client

MIB = 1 << 20
BODY = some_bytes(3 * MIB)


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "obstore":
        pytest.importorskip("obstore", reason="the extra s3 is not installed")
    monkeypatch.setenv("HEADRACE_S3", request.param)
    return str(request.param)


@pytest.fixture
def store(client: str, s3_url: str, proxy: FaultProxy) -> Iterator[Store]:
    """With an object of 3 MiB; the proxy records the requests."""
    with open_store(s3_url, storage_options={"endpoint_url": proxy.endpoint}) as found:
        found.put("k", BODY)
        proxy.requests.clear()
        yield found


@pytest.mark.s3
def test_each_read_of_one_span_is_one_request_for_the_objects_bytes(store: Store, proxy: FaultProxy) -> None:
    reads = [(0, 1), (7, 1000), (5, MIB), (1, MIB + 1), (0, len(BODY)), (len(BODY) - 3, 3)]
    for offset, size in reads:
        buffer = bytearray(size)
        store.get_into("k", offset, memoryview(buffer))
        assert buffer == BODY[offset : offset + size]
    assert [request.method for request in proxy.requests] == ["GET"] * len(reads)
    proxy.requests.clear()
    near, far = bytearray(100), bytearray(2 * MIB)
    store.get_ranges_into("k", [(200_000, memoryview(far)), (180_000, memoryview(near))])
    assert (bytes(near), bytes(far)) == (BODY[180_000:180_100], BODY[200_000 : 200_000 + 2 * MIB])
    assert store.get("k") == BODY
    assert store.stat("k").size == len(BODY)
    assert [request.method for request in proxy.requests] == ["GET", "GET", "HEAD"]


@pytest.mark.s3
def test_pieces_arrive_in_order_even_if_their_reader_overwrites_the_buffer(store: Store, proxy: FaultProxy) -> None:
    for offset, size in [(3, 1), (0, 256 << 10), (1, (256 << 10) + 1), (17, 2 * MIB)]:
        buffer, found = memoryview(bytearray(size)), bytearray()

        def take(at: int, piece: memoryview, first: int = offset, found: bytearray = found) -> None:
            assert at == first + len(found)
            found += piece
            piece[:] = bytes(len(piece))

        store.get_pieces("k", offset, buffer, take)
        assert found == BODY[offset : offset + size]
    assert len(proxy.requests) == 4


@pytest.mark.s3
@pytest.mark.parametrize("key", ["a b+c", "a%20b", "deep/er/still", "é/ü", "q?x=1&y#z", "star*'()!~"])
def test_an_object_is_found_by_any_name_that_it_may_have(key: str, store: Store) -> None:
    store.put(key, b"here")
    assert (store.get(key), store.stat(key).size) == (b"here", 4)


@pytest.mark.s3
def test_a_read_that_cannot_succeed_says_why(store: Store) -> None:
    for size in (10, 2 * MIB):
        with pytest.raises(UsageError, match=str(len(BODY))):
            store.get_into("k", len(BODY) - 5, memoryview(bytearray(size)))
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


@contextlib.contextmanager
def _server(*answers: bytes) -> Iterator[tuple[Store, list[int], threading.Event]]:
    """A store without retries at a server that gives these answers in order, and ends a connection before an empty one; the
    number of answers on each connection; and whether the client has closed a connection that the server ended.
    """
    answered: list[int] = []
    closed = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(20)

    def serve() -> None:
        left = list(answers)
        while left:
            connection, _ = listening.accept()
            answered.append(0)
            with connection:
                while left and (answer := left.pop(0)):
                    asked = b""
                    while b"\r\n\r\n" not in asked:
                        asked += connection.recv(65536)
                    connection.sendall(answer)
                    answered[-1] += 1
                with contextlib.suppress(ConnectionError):
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
                closed.set()

    thread = threading.Thread(target=serve)
    thread.start()
    options = {"endpoint_url": f"http://127.0.0.1:{listening.getsockname()[1]}", "key": "k", "secret": "s"}
    try:
        with open_store("s3://b/p", storage_options=options) as store:
            yield store.inner, answered, closed  # type: ignore[attr-defined]
    finally:
        thread.join()
        listening.close()


_MODIFIED = "Last-Modified: Fri, 02 Jan 2026 03:04:05 GMT\r\n"


def _http(body: bytes, status: str = "200 OK", more: str = _MODIFIED) -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_connection_is_used_again_until_the_server_ends_it(client: str) -> None:
    with _server(_http(b"1"), _http(b"2"), b"", _http(b"3")) as (store, answered, closed):
        assert [store.get("k") for _ in range(2)] == [b"1", b"2"]
        assert closed.wait(20)  # a request on a connection that is being ended would fail
        assert store.get("k") == b"3"
    assert answered == [2, 1]


def test_after_reconnecting_reads_use_other_connections() -> None:
    pytest.importorskip("obstore", reason="the extra s3 is not installed")
    with _server(_http(b"1"), b"", _http(b"2")) as (store, answered, _):
        assert store.get("k") == b"1"
        store.reconnect()
        assert store.get("k") == b"2"
    assert answered == [1, 1]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (_http(b"12345")[:-1], TransientError, "body|payload|Connection"),
        (b"what?\r\n\r\n", HeadraceError, "127.0.0.1"),
        (_http(b"", "503 S", "Retry-After: 7\r\n"), SlowDownError, "503"),
        (_http(b"<html>cut", "500 I"), TransientError, "500"),
        (_http(b"<Error><Code>NoSuchBucket</Code></Error>", "404 N"), NotFoundError, "bucket 'b'"),
    ],
)
def test_a_wrong_answer_is_one_clear_error(client: str, answer: bytes, kind: type[HeadraceError], words: str) -> None:
    with _server(answer, b"") as (store, _, _), pytest.raises(kind, match=words):
        store.get("k")
