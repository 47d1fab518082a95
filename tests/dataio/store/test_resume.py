"""Uploads that go on where a killed process stopped, against a real S3 server whose requests are counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dataio.core.errors import NotFoundError
from dataio.core.limits import MIB
from dataio.store.gated import Gated
from dataio.store.open import open_store
from dataio.store.resume import Resuming
from dataio.store.s3client import connect
from dataio.store.s3config import parse
from dataio.store.uploads import Part, Unfinished
from dataio.testing.proxy import FaultProxy
from dataio.testing.s3server import S3Server

pytestmark = pytest.mark.s3
DATA = os.urandom(8 * MIB) * 5 + b"end"
"""Six parts, five of them with equal bytes."""

KILLED = """
import os, sys
from dataio.store.open import open_store
from dataio.store.resume import Resuming
from checkpoint.saving.progress import ProgressFile
url, path = sys.argv[1:]
data = open(path + ".data", "rb").read()
fd = os.open(path, os.O_RDWR | os.O_CREAT)
Resuming(open_store(url), ProgressFile(fd)).put_multipart("big", [data])
"""


class Log:
    """An `UploadLog` in memory."""

    def __init__(self) -> None:
        self.uploads: dict[str, Unfinished] = {}
        self.said: list[str] = []

    def unfinished(self, key: str) -> Unfinished | None:
        return self.uploads.get(key)

    def begun(self, key: str, upload: Unfinished) -> None:
        self.uploads[key] = upload
        self.said.append("begun")

    def sent(self, key: str, part: Part) -> None:
        upload = self.uploads[key]
        self.uploads[key] = replace(upload, parts={**upload.parts, part.number: part})
        self.said.append("sent")

    def filled(self, key: str) -> None:
        self.said.append("filled")

    def ended(self, key: str, size: int | None) -> None:
        self.uploads.pop(key, None)
        self.said.append(f"ended {size}")


@pytest.fixture
def proxy(s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3_server.endpoint) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        yield running


def sent_bytes(proxy: FaultProxy) -> int:
    return sum(request.length for request in proxy.requests if request.method == "PUT")


def begun(proxy: FaultProxy) -> int:
    return sum(request.method == "POST" and request.path.endswith("?uploads") for request in proxy.requests)


def uploads(url: str) -> list[Any]:
    """The unfinished uploads below `url`, as the server lists them."""
    config = parse(url, {})
    session = connect(config)
    answer = session.run(session.call("list_multipart_uploads", "listing", Prefix=config.prefix))
    session.close()
    found: list[Any] = answer.get("Uploads", [])
    return found


def test_a_killed_upload_goes_on_with_the_parts_that_the_server_lacks(
    proxy: FaultProxy, s3_url: str, tmp_path: Any
) -> None:
    from checkpoint.saving.progress import ProgressFile

    path = tmp_path / "progress"
    (tmp_path / "progress.data").write_bytes(DATA)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, s3_url, str(path)],
        env={**os.environ, "MILLRACE_CRASH": "store.s3.part-sent#3", "MILLRACE_CRASH_MARK": str(tmp_path / "mark")},
        timeout=120,
    )
    assert killed.returncode == -9
    assert (tmp_path / "mark").read_text() == "store.s3.part-sent\n"
    unfinished = uploads(s3_url)
    assert len(unfinished) == 1
    before = sent_bytes(proxy)
    proxy.requests.clear()
    fd = os.open(path, os.O_RDWR)
    with open_store(s3_url) as store:
        assert Resuming(store, ProgressFile(fd)).put_multipart("big", [DATA]) == len(DATA)
        assert store.get("big", max_bytes=len(DATA)) == DATA
    os.close(fd)
    assert begun(proxy) == 0
    assert before >= 24 * MIB
    assert sent_bytes(proxy) <= len(DATA) - 24 * MIB  # parts are sent side by side: the others may have arrived, too
    assert uploads(s3_url) == []


def stopped(url: str, key: str, log: Log) -> None:
    """Begin an upload and leave it, as a killed process does; its first three parts are there."""

    class Killed(BaseException):
        pass

    def parts() -> Iterator[bytes]:
        yield DATA[: 24 * MIB]
        yield DATA[24 * MIB : 25 * MIB]
        yield DATA[25 * MIB : 26 * MIB]  # nothing is sent before the next piece has come
        while log.said.count("sent") < 3:
            time.sleep(0.01)
        raise Killed

    from dataio.store import s3upload

    with open_store(url) as store, pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(s3upload.Upload, "_abort", lambda upload: upload._session.run(upload._cancel()))
        Resuming(store, log).put_multipart(key, parts())


def test_bytes_that_changed_are_sent_whatever_was_written_down(proxy: FaultProxy, s3_url: str) -> None:
    stopped(s3_url, "big", log := Log())
    other = bytes(8 * MIB) + DATA[8 * MIB :]
    proxy.requests.clear()
    with open_store(s3_url) as store:
        Resuming(store, log).put_multipart("big", [other])
        assert store.get("big", max_bytes=len(other)) == other
    assert sent_bytes(proxy) == 8 * MIB + len(DATA) - 24 * MIB
    assert log.said[-1] == f"ended {len(other)}"


def test_parts_that_nobody_wrote_down_are_known_by_their_md5(proxy: FaultProxy, s3_url: str) -> None:
    stopped(s3_url, "big", log := Log())
    log.uploads["big"] = replace(log.uploads["big"], parts={})
    proxy.requests.clear()
    with open_store(s3_url) as store:
        Resuming(store, log).put_multipart("big", [DATA])
        assert store.get("big", max_bytes=len(DATA)) == DATA
    assert sent_bytes(proxy) == len(DATA) - 24 * MIB


def test_an_upload_that_the_server_forgot_is_begun_anew(proxy: FaultProxy, s3_url: str) -> None:
    stopped(s3_url, "big", log := Log())
    with open_store(s3_url) as store:
        store.abort_upload("big", log.uploads["big"].id)
        store.abort_upload("big", log.uploads["big"].id)
        proxy.requests.clear()
        Resuming(store, log).put_multipart("big", [DATA])
        assert store.get("big", max_bytes=len(DATA)) == DATA
    assert begun(proxy) == 1
    assert sent_bytes(proxy) == len(DATA)


def test_an_upload_that_is_given_up_leaves_nothing(s3_url: str) -> None:
    stopped(s3_url, "big", log := Log())
    assert len(uploads(s3_url)) == 1
    with open_store(s3_url) as store:
        Resuming(store, log).abandon("big")
        Resuming(store, log).abandon("big")
        with pytest.raises(NotFoundError):
            store.stat("big")
    assert uploads(s3_url) == []
    assert log.said[-1] == "ended None"


def test_the_gate_is_asked_before_each_piece(s3_url: str) -> None:
    asked = list[int]()
    with open_store(s3_url) as store:
        gated = Gated(store, lambda: asked.append(1))
        assert gated.put_multipart("a", [b"x", b"y", b"z"]) == 3
        assert Resuming(gated, Log()).put_multipart("b", [b"x", b"y"]) == 2
    assert len(asked) == 5


def test_small_objects_and_directories_need_no_log(tmp_path: Any) -> None:
    log = Log()
    with open_store(tmp_path / uuid.uuid4().hex) as store:
        assert Resuming(store, log).put_multipart("a", [b"x", b"y"]) == 2
        Resuming(store, log).abandon("a")
        assert store.get("a") == b"xy"
    assert log.said == ["filled", "ended 2"]
