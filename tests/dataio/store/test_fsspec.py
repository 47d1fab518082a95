"""Other file systems of fsspec: what they give, and what is refused there."""

from __future__ import annotations

import functools
import http.server
import os
import re
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from headrace.dataio.core.errors import (
    AccessDeniedError,
    CapacityError,
    HeadraceError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.store import fsspec as fsspec_store
from headrace.dataio.store.base import Store
from headrace.dataio.store.fsspec import FsspecStore
from headrace.dataio.store.open import open_location, open_store
from headrace.dataio.testing.conformance import StoreConformance, some_bytes
from headrace.dataio.testing.fault_proxy import Fault, FaultProxy


class TestMemory(StoreConformance):
    many, racers = 50, 16

    @pytest.fixture
    def store_url(self) -> str:
        return f"memory://{uuid.uuid4().hex}/data"

    @pytest.fixture
    def store(self, store_url: str) -> Iterator[Store]:
        with open_store(store_url) as opened:
            yield opened
        fsspec.filesystem("memory").store.clear()

    # it lives in one process
    test_of_many_processes_one_wins = None  # type: ignore[assignment]
    test_a_killed_writer_leaves_what_was_there = None  # type: ignore[assignment]
    test_its_location_opens_the_same_store = None  # type: ignore[assignment]


def test_memory_is_not_shared_with_other_processes() -> None:
    with pytest.raises(UsageError):
        open_location(open_store("memory://x").location)


def test_what_is_written_at_once_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "WRITE_BYTES", 10)
    store = open_store(f"memory://{uuid.uuid4().hex}")
    assert store.put_multipart("k", [b"12345", b"67890"]) == 10
    with pytest.raises(CapacityError, match="in one request"):
        store.put_multipart("k", [b"12345", b"67890", b"1"])
    assert store.get("k") == b"1234567890"


def test_a_listing_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("a", b"")
    store.put("b", b"")
    monkeypatch.setattr(fsspec_store, "LISTED", 1)
    with pytest.raises(CapacityError, match="longer prefix"):
        list(store.list())


# read only


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a b#1%.tar").write_bytes(some_bytes(20_000))
    (tmp_path / "empty.json").write_bytes(b"")
    return tmp_path


def _refuses_to_write(store: Store) -> None:
    for write in (
        lambda: store.put("k", b""),
        lambda: store.put_multipart("k", [b""]),
        lambda: store.put_if_absent("k", b""),
        lambda: store.delete_many(["empty.json"]),
    ):
        with pytest.raises(UnsupportedError):
            write()


def _reads(store: Store) -> None:
    key, body = "shards/a b#1%.tar", some_bytes(20_000)
    assert store.get(key) == body
    assert store.stat(key).size == 20_000
    assert store.stat(key).size == 20_000
    buffers = [bytearray(100), bytearray(0), bytearray(5000)]
    store.get_ranges_into(key, [(at, memoryview(b)) for at, b in zip((19_900, 20_000, 1), buffers, strict=True)])
    assert [bytes(b) for b in buffers] == [body[19_900:], b"", body[1:5001]]
    assert store.get("empty.json") == b""
    with pytest.raises(UsageError, match="20000"):
        store.get_into(key, 19_999, memoryview(bytearray(2)))
    with pytest.raises(CapacityError):
        store.get(key, max_bytes=100)
    is_http = store.location.url.startswith("http")  # where a folder's page is an object like any other
    for missing in ("no/such",) if is_http else ("no/such", "shards"):
        with pytest.raises(NotFoundError, match=missing):
            store.get(missing)
    assert [(info.key, info.size) for info in store.list()] == [("empty.json", 0), (key, 20_000)]
    assert [info.key for info in store.list("shards/a")] == [key]
    assert list(store.list("none/")) == []
    assert list(store.list_folders()) == ["shards"]
    assert list(store.list_folders(after="shards")) == list(store.list_folders("shards/")) == []
    assert list(store.list_folders("none/")) == []


def test_a_local_file_system_through_fsspec_is_read_only(folder: Path) -> None:
    with open_store(f"local://{folder}") as store:
        _reads(store)
        _refuses_to_write(store)
        with open_location(store.location) as again:
            assert again.get("empty.json") == b""


class _Ranged(http.server.SimpleHTTPRequestHandler):
    """A static server with ranges, like nginx; `fail` answers everything with that status."""

    ranges, fail = True, 0

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def do_GET(self) -> None:
        self._serve(body=True)

    def _serve(self, body: bool) -> None:
        path = self.translate_path(self.path)
        if self.fail:
            return self.send_error(self.fail)
        if os.path.isdir(path):
            return super().do_GET() if body else super().do_HEAD()  # a page of links, by way of a redirect to the slash
        if not os.path.isfile(path):
            return self.send_error(404)
        data = Path(path).read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.ranges else None
        part = data[int(wanted[1]) : int(wanted[2]) + 1] if wanted else data
        self.send_response(206 if wanted else 200)
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        if wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{int(wanted[1]) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        if body:
            self.wfile.write(part)
        return None

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def handler() -> type[_Ranged]:
    return type("Handler", (_Ranged,), {})


@pytest.fixture
def http_url(folder: Path, handler: type[_Ranged]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_http_server_is_read_only(http_url: str) -> None:
    with open_store(http_url) as store:
        _reads(store)
        _refuses_to_write(store)
        with open_location(store.location) as again:
            assert again.get("empty.json") == b""


def test_an_http_server_that_ignores_ranges_is_refused(http_url: str, handler: type[_Ranged]) -> None:
    handler.ranges = False
    with open_store(http_url) as store, pytest.raises(UnsupportedError, match="range"):
        store.get_into("shards/a b#1%.tar", 10, memoryview(bytearray(10)))


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDeniedError), (503, TransientError), (404, NotFoundError)])
def test_an_http_status_becomes_the_error_of_its_remedy(
    http_url: str, handler: type[_Ranged], status: int, kind: type[HeadraceError]
) -> None:
    handler.fail = status
    with FsspecStore(http_url, {}) as store, pytest.raises(kind, match=r"empty\.json"):
        store.get("empty.json")


def test_an_http_server_that_drips_is_passing_trouble(http_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, buffer = "shards/a b#1%.tar", memoryview(bytearray(1000))
    with FaultProxy(http_url) as proxy:
        for fault in (Fault.DRIP_BODY, Fault.DRIP_HEAD):
            monkeypatch.setattr(fsspec_store, "_REQUEST_SECONDS", 0.5)
            with FsspecStore(proxy.endpoint, {}) as store:
                store.get_into(key, 0, buffer[:10])
                proxy.inject(fault, method="GET", times=100)
                with pytest.raises(TransientError):
                    store.get_into(key, 0, buffer)
            assert proxy.fired[fault]
            proxy.forget()


def test_an_http_server_that_is_away_is_passing_trouble() -> None:
    with FsspecStore("http://127.0.0.1:9", {}) as store:
        for ask in (
            lambda: store.get("k"),
            lambda: list(store.list("versions/")),  # and not an empty listing
            lambda: list(store.list_folders("versions/")),
        ):
            with pytest.raises(TransientError):
                ask()


class _Hosted(LocalFileSystem):
    """Like those of FTP, SFTP and HDFS: it has to know a host, which its URLs name, and connects when it is made."""

    protocol = "hosted"

    def __init__(self, host: str, port: int = 21, **options: Any) -> None:
        super().__init__(**options)
        self.connected_to = host, port
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "no such host")

    def __del__(self) -> None:
        assert self.connected_to  # as FTP's, which closes what a half made one has not

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        found = urllib.parse.urlsplit(path)
        return {name: value for name, value in (("host", found.hostname), ("port", found.port)) if value}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return re.sub(r"^hosted://[^/]*", "", path)


@pytest.fixture
def hosted() -> Iterator[None]:
    fsspec.register_implementation("hosted", _Hosted)
    yield
    _registry.pop("hosted")


@pytest.mark.usefixtures("hosted")
def test_the_host_of_a_url_is_the_file_systems_and_options_come_before_it(folder: Path) -> None:
    with open_store(f"hosted://there:99{folder}") as store, FsspecStore("hosted://there:99/x", {"port": 7}) as other:
        _reads(store)
        _refuses_to_write(store)
        assert other._fs.connected_to == ("there", 7)


@pytest.mark.usefixtures("hosted")
def test_a_folder_that_cannot_be_listed_is_not_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ls(self: LocalFileSystem, path: str, detail: bool = False, **options: Any) -> Any:
        if path.endswith("/shards"):
            raise PermissionError(path)
        return LocalFileSystem.ls(self, path, detail, **options)

    monkeypatch.setattr(_Hosted, "ls", ls)
    with open_store(f"hosted://there{folder}") as store:
        for listed in (lambda: store.list(), lambda: store.list_folders("shards/")):
            with pytest.raises(AccessDeniedError):
                list(listed())


@pytest.mark.usefixtures("hosted")
def test_a_host_that_is_missing_or_unknown_is_told_in_one_line() -> None:
    with pytest.raises(UsageError, match="argument: 'host'"):
        open_store("hosted:///x")  # and nothing is half made: a complaint of its `__del__` would be an error here
    with pytest.raises(TransientError, match="opening hosted://nowhere: no such host"):
        open_store("hosted://nowhere")


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("http://user:hunter2@host/x", UsageError),
        ("http://host/x?token=hunter2", UsageError),
        ("http://host/x?sp=hunter2", UsageError),
        ("zip://x::memory://y", UnsupportedError),
        ("gs://bucket/x", UnsupportedError),
    ],
)
def test_what_cannot_be_opened_says_why_without_secrets(url: str, kind: type[HeadraceError]) -> None:
    with pytest.raises(kind) as caught:
        open_store(url)
    assert "hunter2" not in str(caught.value)


def test_secrets_of_a_file_system_are_in_no_location() -> None:
    store = FsspecStore("memory://x", {"token": "hidden"})
    assert "hidden" not in f"{store!r} {store.location}"
    assert not store.location.shareable
