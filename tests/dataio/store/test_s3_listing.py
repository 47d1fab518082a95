"""Listings without botocore: the same pages, the same errors, and nothing slow imported."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest

from headrace.dataio.store.bucket_client import Head
from headrace.dataio.store.credential_chain import Keys, keys_of_variables
from headrace.dataio.store.open import open_store
from headrace.dataio.store.s3_config import parse
from headrace.dataio.testing.s3_server import S3Server

ODD = ["a b+c", "a%20b", "a/b", "a-b", "é/ü", "q?x=1&y#z", "star*'()!~", "plus+/+", "deep/er/still", "<&>\"'"]


@pytest.mark.s3
def test_both_clients_list_the_same_whatever_is_in_the_keys(s3_url: str, s3_server: S3Server) -> None:
    pytest.importorskip("obstore")
    with (
        open_store(s3_url, storage_options={"client": "s3fs"}) as slow,
        open_store(s3_url, storage_options={"client": "obstore"}) as fast,
    ):
        for key in ODD:
            fast.put(key, key.encode())
        prefix = s3_url.removeprefix("s3://headrace/")
        client = slow.inner.inner._client  # type: ignore[attr-defined]
        for marker in ("marker/", "deep/er/"):
            client.run(client.call("put_object", "test", Key=f"{prefix}/{marker}", Body=b""))
        for part in ("", "a", "a ", "plus+", "é/", "none"):
            assert list(fast.list(part)) == list(slow.list(part))
        assert [info.key for info in fast.list()] == sorted(ODD)


@pytest.mark.parametrize(
    ("names", "suspects"),
    [
        ({"a": 1, "a-b": 2, "b/c": 3}, []),
        ({"a": 1, "empty": 0}, ["empty"]),
        ({"deep": 5, "deep/er/x": 1, "deeper": 1}, ["deep"]),
    ],
)
def test_names_that_may_have_lost_their_final_slash_are_found(names: dict[str, int], suspects: list[str]) -> None:
    obstore = pytest.importorskip("headrace.dataio.store.obstore")
    now = datetime.now(UTC)
    assert obstore.possible_markers([(name, Head(size, now)) for name, size in names.items()]) == suspects


_USE = """
import sys
from headrace.dataio.store.open import open_store
with open_store(sys.argv[1]) as store:
    assert store.put_if_absent("shards/a", b"12") and store.get("shards/a") == b"12" and store.stat("shards/a").size == 2
    assert [info.key for info in store.list("shards/")] == ["shards/a"] and not store.exists("b")
    buffer = bytearray(1)
    store.get_into("shards/a", 1, memoryview(buffer))
    print([name for name in ("s3fs", "aiobotocore", "botocore", "aiohttp") if name in sys.modules])
"""


@pytest.mark.s3
def test_what_a_loader_asks_of_s3_imports_neither_s3fs_nor_botocore(s3_url: str) -> None:
    pytest.importorskip("obstore")
    done = subprocess.run([sys.executable, "-c", _USE, s3_url], capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_keys_are_read_from_the_variables_only_where_botocore_would_take_just_these() -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}
    assert keys_of_variables(keys) == Keys("a", "s", None)
    assert keys_of_variables(keys | {"AWS_SESSION_TOKEN": "t"}) == Keys("a", "s", "t")
    for more in ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CREDENTIAL_EXPIRATION"):
        assert keys_of_variables(keys | {more: "x"}) is None
    assert keys_of_variables({"AWS_ACCESS_KEY_ID": "a"}) is None


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"endpoint_url": "http://127.0.0.1:9000/"}, "http://127.0.0.1:9000/b"),
        ({"endpoint_url": "https://s3.eu-west-1.amazonaws.com"}, "https://b.s3.eu-west-1.amazonaws.com"),
        ({"endpoint_url": "https://h:1", "path_style": False}, "https://b.h:1"),
        ({"region": "eu-west-1"}, "https://b.s3.eu-west-1.amazonaws.com"),
        ({"region": "cn-north-1"}, "https://b.s3.cn-north-1.amazonaws.com.cn"),
    ],
)
def test_the_bucket_is_where_its_addressing_style_says(options: dict[str, object], url: str) -> None:
    assert parse("s3://b/x", options, {}).bucket_url == url


def test_a_bucket_with_dots_is_named_in_the_path() -> None:
    assert parse("s3://a.b/x", {"region": "r"}, {}).bucket_url == "https://s3.r.amazonaws.com/a.b"
