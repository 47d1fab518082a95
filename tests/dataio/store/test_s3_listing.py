"""Listings without botocore: the same pages, the same errors, and nothing slow imported."""

from __future__ import annotations

import contextlib
import datetime
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from headrace.dataio.core.errors import (
    AccessDeniedError,
    HeadraceError,
    NotFoundError,
    SlowDownError,
    TransientError,
)
from headrace.dataio.store.base import Store
from headrace.dataio.store.credential_chain import Keys, keys_of_variables
from headrace.dataio.store.open import open_store
from headrace.dataio.store.s3_config import parse
from headrace.dataio.store.s3_errors import UnreachableError
from headrace.dataio.store.s3_http import behind_a_proxy, canonical_query, parse_listing, signed
from headrace.dataio.testing.s3_server import S3Server

ODD = ["a b+c", "a%20b", "a/b", "a-b", "é/ü", "q?x=1&y#z", "star*'()!~", "plus+/+", "deep/er/still", "<&>\"'"]
_PAGE = b"""<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><EncodingType>url</EncodingType><IsTruncated>%s</IsTruncated>%s
<Contents><Key>p/a+b%%2B%%01</Key><LastModified>2026-01-02T03:04:05.678Z</LastModified><Size>7</Size></Contents></ListBucketResult>"""


@pytest.mark.parametrize("token", [None, "of/a+session=="])
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9000/bucket", "https://b.s3.eu-west-1.amazonaws.com/", "https://h:443/x/b"]
)
def test_a_signature_is_the_one_that_botocore_makes(url: str, token: str | None) -> None:
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    now = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    query = {"list-type": "2", "prefix": "".join(ODD), "continuation-token": "a+/=="}
    ours = signed(
        urllib.parse.urlsplit(url), query, {"x-amz-request-payer": "requester"}, Keys("K", "S", token), "r", now
    )
    request = AWSRequest("GET", f"{url}?{canonical_query(query)}", headers={"x-amz-request-payer": "requester"})
    signer = auth.S3SigV4Auth(Credentials("K", "S", token), "s3", "r")
    request.context = {"timestamp": "20260102T030405Z", "payload_signing_enabled": True, "client_config": None}
    request.headers["X-Amz-Date"] = "20260102T030405Z"
    if token:
        request.headers["X-Amz-Security-Token"] = token
    request.headers["X-Amz-Content-SHA256"] = ours["x-amz-content-sha256"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert ours["authorization"].endswith(f"Signature={signer.signature(text, request)}")


def test_without_keys_nothing_is_signed() -> None:
    now = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert "authorization" not in signed(urllib.parse.urlsplit("https://h"), {}, {}, None, "r", now)


@pytest.mark.s3
def test_both_clients_list_the_same_whatever_is_in_the_keys(s3_url: str, s3_server: S3Server) -> None:
    pytest.importorskip("obstore")
    with (
        open_store(s3_url, storage_options={"client": "s3fs"}) as slow,
        open_store(s3_url, storage_options={"client": "http"}) as fast,
    ):
        for key in ODD:
            fast.put(key, key.encode())
        prefix = s3_url.removeprefix("s3://headrace/")
        session = slow.inner.inner._session  # type: ignore[attr-defined]
        session.run(session.call("put_object", "test", Key=f"{prefix}/marker/", Body=b""))
        for part in ("", "a", "a ", "plus+", "é/", "none"):
            assert list(fast.list(part)) == list(slow.list(part))
        assert [info.key for info in fast.list()] == sorted(ODD)


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


def test_behind_a_proxy_botocore_asks() -> None:
    assert behind_a_proxy({"HTTPS_PROXY": "http://proxy:3128"})
    assert not behind_a_proxy({"http_proxy": "", "NO_PROXY": "x"})


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


def test_a_page_is_read_as_it_was_encoded() -> None:
    found = parse_listing(_PAGE % (b"true", b"<NextContinuationToken>t+1</NextContinuationToken>"))
    (one,) = found["Contents"]
    assert (one["Key"], one["Size"], one["LastModified"].timestamp()) == ("p/a b+\x01", 7, 1767323045.678)
    assert (found["IsTruncated"], found["NextContinuationToken"]) == (True, "t+1")


# answers of servers that are not as they should be


@contextlib.contextmanager
def _answering(*answers: bytes) -> Iterator[Store]:
    """A store at a server that gives these answers, one a connection; without retries."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(20)

    def serve() -> None:
        for answer in answers:
            connection, _ = listening.accept()
            with connection:
                asked = b""
                while b"\r\n\r\n" not in asked:
                    asked += connection.recv(65536)
                with contextlib.suppress(OSError):  # who has seen enough has left
                    connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    where = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with open_store(
        "s3://b/p", storage_options={"endpoint_url": where, "key": "k", "secret": "s", "client": "http"}
    ) as store:
        yield store.inner  # type: ignore[attr-defined]
    thread.join()
    listening.close()


def _http(body: bytes, status: str = "200 OK", more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body


_LAST = _PAGE % (b"false", b"")
_CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x;x=1\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        _http(_LAST),
        b"HTTP/1.1 100 Continue\r\n\r\n" + _http(_LAST),
        b"HTTP/1.0 200 OK\r\n\r\n" + _LAST,
        _CHUNKED % (50, _LAST[:50], len(_LAST) - 50, _LAST[50:]),
    ],
    ids=["length", "continue", "until it closes", "chunked"],
)
def test_a_body_comes_in_every_way_of_http(answer: bytes) -> None:
    pytest.importorskip("obstore")
    key = _LAST.replace(b"%2B%01", b"")  # a key that is one
    with _answering(answer.replace(_LAST, key).replace(b": %d" % len(_LAST), b": %d" % len(key))) as store:
        if b"chunked" not in answer:
            assert [(info.key, info.size) for info in store.list()] == [("a b", 7)]
        else:
            assert list(store.list()) == []  # it has a control character, so it is none of ours


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (_http(_LAST)[:-9], TransientError, "the body ended early"),
        (b"", TransientError, "closed connection without response"),
        (_http(b"<html></html>"), HeadraceError, "no listing"),
        (_http(b"<a"), HeadraceError, "no listing"),
        (b"SSH-2.0-x\r\n", HeadraceError, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", HeadraceError, "no HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"x" * (1 << 17), HeadraceError, "no HTTP"),
        (
            _http(b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>", "403 F"),
            AccessDeniedError,
            "403 AccessDenied",
        ),
        (_http(b"<Error><Code>NoSuchBucket</Code></Error>", "404 N"), NotFoundError, "bucket 'b'"),
        (_http(b"", "503 S", "Retry-After: 7\r\n"), SlowDownError, "503"),
        (_http(b"oops", "500 I"), TransientError, "500"),
    ],
)
def test_an_answer_that_is_no_page_is_one_clear_error(answer: bytes, kind: type[HeadraceError], words: str) -> None:
    pytest.importorskip("obstore")
    # a refusal is repeated by the ordinary client, which then asks whether the bucket exists
    times = 3 if kind is AccessDeniedError else 1
    with _answering(*[answer] * times) as store, pytest.raises(kind, match=words) as caught:
        list(store.list())
    assert type(caught.value) is kind
    if kind is SlowDownError:
        assert caught.value.seconds == 7  # type: ignore[attr-defined]


def test_a_server_that_is_not_there_is_told_apart() -> None:
    pytest.importorskip("obstore")
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s", "client": "http"}
    with (
        open_store("s3://b/p", storage_options=options) as store,
        pytest.raises(UnreachableError, match="AWS_ENDPOINT_URL"),
    ):
        list(store.inner.list())  # type: ignore[attr-defined]
