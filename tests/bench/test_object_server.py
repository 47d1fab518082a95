"""The S3 server that benchmarks save to: whole objects, one winner, and limits."""

from __future__ import annotations

import concurrent.futures
import http.client
from collections.abc import Iterator

import pytest

from headrace.bench.core.object_server import PART_BYTES
from headrace.bench.core.processes import Server, environment_variables, server
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("server")
    (root / "bench").mkdir()
    (root.parent / "outside").write_text("not served")
    with server(root, writable=True) as made, environment_variables(made.environ):
        yield made


@pytest.fixture
def store(running: Server, request: pytest.FixtureRequest) -> Iterator[Store]:
    with open_store(f"s3://bench/{abs(hash(request.node.name))}") as opened:
        yield opened


def test_objects_of_several_parts_are_read_back(store: Store, running: Server) -> None:
    parts, before = [bytes([n]) * PART_BYTES for n in range(3)], running.received()
    size = store.put_multipart("packs/a", [*parts, b"the end"])
    assert size == 3 * PART_BYTES + 7
    tail = bytearray(9)
    store.get_into("packs/a", 3 * PART_BYTES - 2, memoryview(tail))
    assert tail == b"\2\2the end"
    assert store.stat("packs/a").size == size
    assert running.received() - before >= size


def test_of_many_conditional_writers_one_wins(store: Store) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: store.put_if_absent("key", b"writer %d" % n), range(8)))
    assert sum(won) == 1
    assert store.get("key") == b"writer %d" % won.index(True)


def test_objects_are_listed_and_deleted(store: Store) -> None:
    for key in ("a/1", "a/2", "b&c"):
        store.put(key, key.encode())
    assert [info.key for info in store.list("")] == ["a/1", "a/2", "b&c"]
    store.delete_many(["a/1", "b&c"])
    assert [info.key for info in store.list("")] == ["a/2"]
    with pytest.raises(NotFoundError):
        store.get("a/1")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", "/bench/../outside"),
        ("PUT", "/bench/%2e%2e/outside"),
        ("DELETE", "/bench/../../outside"),
        ("PUT", "/-uploads/x"),
        ("PUT", "/bench"),
        ("PATCH", "/bench/x"),
    ],
)
def test_nothing_outside_of_a_bucket_is_written(running: Server, method: str, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request(method, path, b"")
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("query", ["partNumber=0&uploadId=x", "partNumber=1&uploadId=..%2Fx"])
def test_an_impossible_part_ends_the_connection(running: Server, query: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
    connection.request("PUT", f"/bench/x?{query}", b"bytes")
    with pytest.raises(ConnectionError):
        connection.getresponse()
    connection.close()
