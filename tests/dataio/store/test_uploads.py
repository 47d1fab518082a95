"""Uploads in parts that are written down, so that the next process aborts what a killed one left, against a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.saving.progress import ProgressFile, RecordingStore
from headrace.dataio.core.errors import NotFoundError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.open import open_store
from headrace.dataio.store.s3_client import connect
from headrace.dataio.store.s3_config import parse
from headrace.dataio.store.wrappers import PausableUploads

pytestmark = pytest.mark.s3

KILLED = """
import os, sys
from headrace.dataio.store.open import open_store
from headrace.checkpoint.saving.progress import RecordingStore, ProgressFile
url, path = sys.argv[1:]
fd = os.open(path, os.O_RDWR | os.O_CREAT)
RecordingStore(open_store(url), ProgressFile(fd)).put_multipart("big", [os.urandom(8 << 20)] * 5)
"""


def uploads(url: str) -> list[Any]:
    """The unfinished uploads below `url`, as the server lists them."""
    config = parse(url, {})
    client = connect(config)
    answer = client.run(client.call("list_multipart_uploads", "listing", Prefix=config.prefix))
    client.close()
    found: list[Any] = answer.get("Uploads", [])
    return found


def test_an_upload_that_a_killed_process_left_is_aborted_by_the_next(s3_url: str, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, s3_url, str(path)],
        env={**os.environ, "HEADRACE_CRASH": "store.s3.part-sent#3", "HEADRACE_CRASH_MARK": str(tmp_path / "mark")},
        timeout=120,
    )
    assert killed.returncode == -9
    assert (tmp_path / "mark").read_text() == "store.s3.part-sent\n"
    assert len(uploads(s3_url)) == 1
    fd = os.open(path, os.O_RDWR)
    with open_store(s3_url) as store:
        book = ProgressFile(fd)
        assert list(book.unfinished) == ["big"]
        upload = book.unfinished["big"]
        book.abandon(store)
        store.abort_upload("big", upload)  # the server does not know it any more
        with pytest.raises(NotFoundError):
            store.stat("big")
    assert uploads(s3_url) == []
    assert ProgressFile(fd).unfinished == {}
    os.close(fd)


def test_an_upload_that_is_complete_is_not_unfinished(s3_url: str) -> None:
    book, data = ProgressFile(None), bytes(8 * MIB + 1)
    with open_store(s3_url) as store:
        assert RecordingStore(store, book).put_multipart("big", [data]) == len(data)
        assert store.stat("big").size == len(data)
    assert book.unfinished == {}


def test_the_gate_is_asked_before_each_piece(s3_url: str) -> None:
    asked = list[int]()
    with open_store(s3_url) as store:
        gated = PausableUploads(store, lambda: asked.append(1))
        assert gated.put_multipart("a", [b"x", b"y", b"z"]) == 3
        assert RecordingStore(gated, ProgressFile(None)).put_multipart("b", [b"x", b"y"]) == 2
    assert len(asked) == 5


def test_small_objects_and_directories_have_no_uploads(tmp_path: Path) -> None:
    with open_store(tmp_path / uuid.uuid4().hex) as store:
        assert RecordingStore(store, book := ProgressFile(None)).put_multipart("a", [b"x", b"y"]) == 2
        assert store.get("a") == b"xy"
    assert book.unfinished == {}
