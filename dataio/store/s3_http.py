"""Our own small HTTP client for S3: GET, HEAD and listings in the caller's thread, from the socket into the caller's
buffer.

Why it exists: one read of an object is a request that the caller waits for anyway. Handing it to an event loop or to
obstore's threads costs more than the request does. Client CPU seconds per GiB, on two busy cores, by
`headrace bench store --operations get --sizes 8MiB --threads 4` (24 November 2026): this client 0.31-0.34 and obstore
through the event loop 0.90-1.01 in three alternating rounds, obstore in the caller's thread 0.61-0.66 in two.
`HEADRACE_S3=obstore` does without this module.

Invariants:

* One request per call. It is sent a second time only if a kept connection turns out to be dead before any byte of the
  answer arrived.
* At most `MAX_IDLE` connections are kept, none with an unread answer. An interrupt at any moment drops the connection.
  After any return or error nothing writes into the caller's buffers.
* One deadline covers the whole request, from connecting to the last byte of the answer (`S3Config.request_seconds`), so
  a server that sends a byte now and then gains nothing.
* Requests are signed by AWS Signature Version 4; a test compares the signature with botocore's. botocore's own signer
  takes half a second to import. Listings have the form of botocore's `list_objects_v2`.

Failure behaviour: the errors of `s3_errors`. A method returns None for an answer that needs a closer look: a refusal, a
redirect, a range that does not exist, a body of another length. The caller then repeats the request through the
session's ordinary client, which renews credentials and finds the exact error. `close` ends requests in flight. Only the
system's resolver bounds the look-up of the server's name.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import hashlib
import hmac
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, TransientError, UsageError
from headrace.dataio.store.credential_chain import Keys
from headrace.dataio.store.s3_config import S3Config
from headrace.dataio.store.s3_errors import CERTIFICATE_HINT, NETWORK_HINT, REACH_HINT, UnreachableError, from_answer
from headrace.dataio.store.s3_session import closed_in_use

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_IDLE = 32
_ERROR_BYTES = 64 << 10
_PAGE_BYTES = 16 * limits.MIB
"""A thousand keys of 1 KiB, percent-encoded, are 4 MiB."""
_UNCLEAR = (400, 401, 403, 416)
"""Statuses that newer credentials, or the object's size, may explain."""
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_QUERY = {"Prefix": "prefix", "ContinuationToken": "continuation-token", "MaxKeys": "max-keys"}


class SyncHttpClient:
    """GET, HEAD and listings of one bucket. Safe to share between threads; a forked child must not use it."""

    def __init__(self, config: S3Config) -> None:
        self._config = config
        self._url = urllib.parse.urlsplit(config.bucket_url)
        self._lock, self._closed, self._pid = threading.Lock(), False, os.getpid()
        self._idle, self._used = list[http.client.HTTPConnection](), set[http.client.HTTPConnection]()
        self._ssl: ssl.SSLContext | None = None

    def get(self, doing: str, key: str, keys: Keys | None, max_bytes: int) -> bytes | None:
        """A whole object of at most `max_bytes`."""
        with self._request(doing, "GET", key, keys) as answer:
            if answer is None or answer.status != 200 or answer.length is None or answer.length > max_bytes:
                return None
            answer.timed.until += answer.length / limits.LEAST_RATE
            with self._translated(doing):
                return answer.read()

    def head(self, doing: str, key: str, keys: Keys | None) -> dict[str, Any] | None:
        """An object's size and time, in the form of botocore's `head_object`."""
        with self._request(doing, "HEAD", key, keys) as answer:
            if answer is None:
                return None
            size, modified = answer.headers.get("content-length"), answer.headers.get("last-modified")
            if answer.status != 200 or size is None or modified is None:
                return None
            answer.read()  # an empty body; afterwards the connection can be kept
            return {"ContentLength": int(size), "LastModified": email.utils.parsedate_to_datetime(modified)}

    def read(
        self, doing: str, key: str, keys: Keys | None, start: int, stop: int, buffers: Iterable[memoryview]
    ) -> bool | None:
        """Fill `buffers` one after the other with the bytes [start, stop) of an object; True when all are full.

        The next buffer is requested from the iterable when the one before it is full.
        """
        headers = {"range": f"bytes={start}-{stop - 1}"}
        with self._request(doing, "GET", key, keys, headers=headers) as answer:
            if answer is None or answer.status != 206 or answer.length != stop - start:
                return None
            if not str(answer.headers.get("content-range")).startswith(f"bytes {start}-{stop - 1}/"):
                return None
            answer.timed.until += (stop - start) / limits.LEAST_RATE
            for buffer in buffers:
                while buffer:
                    with self._translated(doing):
                        if not (count := answer.readinto(buffer)):
                            raise EOFError
                    buffer = buffer[count:]
            return True

    def list_objects(self, doing: str, keys: Keys | None, parameters: Mapping[str, object]) -> dict[str, Any] | None:
        """One page of a listing, in the form of botocore's `list_objects_v2`."""
        query = {"list-type": "2", "encoding-type": "url"} | {_QUERY[n]: str(v) for n, v in parameters.items()}
        with self._request(doing, "GET", None, keys, query=query) as answer:
            if answer is None or answer.status != 200:
                return None
            with self._translated(doing):
                body = _read_at_most(answer, _PAGE_BYTES)
            headers = {name.lower(): value for name, value in answer.headers.items()}
        if b"<Error" in body[:200]:  # S3 may begin an answer before it knows the outcome
            raise refusal(500, body, headers.get("retry-after"), self._config, doing)
        try:
            return parse_listing(body) | {"ResponseMetadata": {"HTTPStatusCode": 200, "HTTPHeaders": headers}}
        except (ValueError, ET.ParseError) as error:
            where = f"{doing}: {self._config.endpoint}"
            raise HeadraceError(f"{where} answered something that is no listing: {error}") from error

    def reconnect(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """Close all connections; requests in flight raise an error. In a forked child nothing: the parent owns them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for connection in self._used:
                with contextlib.suppress(OSError, TypeError):  # it is closed already
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            while self._idle:
                self._idle.pop().close()

    @contextlib.contextmanager
    def _request(
        self,
        doing: str,
        method: str,
        key: str | None,
        keys: Keys | None,
        *,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Iterator[_Answer | None]:
        """The server's answer; None where it needs a closer look. A clear error is raised."""
        url = self._url if key is None else self._url._replace(path=f"{self._url.path}/{_quoted(key, '/')}")
        payer = {"x-amz-request-payer": "requester"} if self._config.options.get("requester_pays") else {}
        now, region = datetime.datetime.now(datetime.UTC), self._config.region or "us-east-1"
        sent = signed(url, query or {}, {**(headers or {}), **payer}, keys, region, now, method)
        target = (url.path or "/") + (f"?{canonical_query(query)}" if query else "")
        connection: http.client.HTTPConnection | None = None
        reusable = False
        try:
            with self._translated(doing):
                connection, answer = self._send(doing, method, target, sent)
                unclear = 300 <= answer.status < 400 or answer.status in _UNCLEAR
                if method == "HEAD" and not answer.will_close:  # more bytes mean that the headers were cut short
                    unclear = unclear or _has_input(connection)
                body = b"" if unclear or answer.status < 300 else answer.read(_ERROR_BYTES)
            if not unclear and answer.status >= 300:
                raise refusal(answer.status, body, answer.headers.get("retry-after"), self._config, doing)
            yield None if unclear else answer
            reusable = answer.isclosed() and not answer.will_close
        finally:
            if connection is not None:
                self._release(connection, reusable)

    def _send(
        self, doing: str, method: str, target: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, _Answer]:
        until = time.monotonic() + self._config.request_seconds()
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # the server had closed it
                return idle, self._send_over(idle, method, target, headers, until)
        connection = self._connected(doing)
        return connection, self._send_over(connection, method, target, headers, until)

    def _send_over(
        self, connection: http.client.HTTPConnection, method: str, target: str, headers: Mapping[str, str], until: float
    ) -> _Answer:
        """Send a request and read the answer's head. The connection is dropped if there is none."""
        try:
            with self._lock:
                self._used.add(connection)
                if self._closed or _has_input(connection):
                    raise ConnectionResetError("the connection was closed")
            seconds = self._config.read_seconds
            connection.sock.settimeout(seconds)
            connection.request(method, target, headers=dict(headers))
            answer = _Answer(_TimedSocket(connection.sock, seconds, until), method=method)
            connection.response_class = lambda *_, **__: answer  # type: ignore[assignment]
            connection.getresponse()
            return answer
        except BaseException:
            self._release(connection, False)
            raise

    def _connected(self, doing: str) -> http.client.HTTPConnection:
        where, context = f"{doing}: {self._config.endpoint}", self._ssl_context()
        host, seconds = self._url.hostname or "", self._config.connect_seconds
        connection = http.client.HTTPConnection(host, self._url.port or (443 if context else 80))
        try:
            connection.sock = _connect(host, connection.port, time.monotonic() + seconds, context)
        except ssl.SSLError as error:
            raise UsageError(f"{where}: {error}", hint=CERTIFICATE_HINT) from error
        except OSError as error:
            raise UnreachableError(f"{where}: {str(error) or 'timed out'}", hint=REACH_HINT) from error
        return connection

    def _ssl_context(self) -> ssl.SSLContext | None:
        """The certificates to trust, read once; None for plain http."""
        if self._url.scheme == "http":
            return None
        if self._ssl is None:
            verify = self._config.verify
            self._ssl = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            if verify is False:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        return self._ssl

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        where = f"{doing}: {self._config.endpoint}"
        try:
            yield
        except HeadraceError:
            raise
        except (OSError, EOFError, http.client.IncompleteRead) as error:
            if self._closed:
                raise closed_in_use(self._config.url) from error
            short = isinstance(error, EOFError | http.client.IncompleteRead)
            words = "the body ended early" if short else str(error) or "the read timed out"
            raise TransientError(f"{where}: {words}", hint=NETWORK_HINT) from error
        except (ValueError, http.client.HTTPException) as error:
            raise HeadraceError(f"{where} answered something that is no HTTP: {error}") from error

    def _release(self, connection: http.client.HTTPConnection, reusable: bool) -> None:
        with self._lock:
            self._used.discard(connection)
            if reusable and not self._closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _TimedSocket(io.RawIOBase):
    """Reads from a socket: silence of `seconds` is an error, and `until` is the deadline of the whole answer."""

    def __init__(self, sock: socket.socket, seconds: float, until: float) -> None:
        self._sock, self._seconds, self.until = sock, seconds, until
        self._open = sock.makefile("rb", buffering=0)  # keeps the socket open as long as this object

    def makefile(self, _mode: str) -> io.BufferedReader:
        """What `http.client` wants of a socket."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long as a whole")
        self._sock.settimeout(min(left, self._seconds))
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._open.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that is read through `timed`."""

    def __init__(self, timed: _TimedSocket, method: str) -> None:
        super().__init__(timed, method=method)  # type: ignore[arg-type]  # it needs only the socket's `makefile`
        self.timed = timed


def _read_at_most(answer: _Answer, limit: int) -> bytes:
    """The whole body; `ValueError` if it is longer than `limit`, `IncompleteRead` if it ends early."""
    too_long = ValueError(f"a body of more than {limit} bytes")
    if answer.length is not None:
        if answer.length > limit:
            raise too_long
        return answer.read()
    body = bytearray()
    while piece := answer.read(64 << 10):
        body += piece
        if len(body) > limit:
            raise too_long
    return bytes(body)


def _connect(host: str, port: int, until: float, context: ssl.SSLContext | None) -> socket.socket:
    """Connect, with TLS if there is a context, before the time `until`.

    Each address of the host gets its share of the time left, so that one that drops all packets leaves some to the
    others.
    """
    last = OSError("no address is known for this host")
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for left, (family, kind, protocol, _, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max((until - time.monotonic()) / left, 0.001))
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(max(until - time.monotonic(), 0.001))
            return sock if context is None else context.wrap_socket(sock, server_hostname=host)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError) or isinstance(error, ssl.SSLError):
                raise
            last = error
    raise last


def _has_input(connection: http.client.HTTPConnection) -> bool:
    """Whether unread bytes wait on the connection; on an idle one that means that the server closed it."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


# signing


def behind_a_proxy(environ: Mapping[str, str]) -> bool:
    """Whether a variable names a proxy, which this client does not use."""
    return any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") and environ[name] for name in environ)


def signed(
    url: urllib.parse.SplitResult,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    keys: Keys | None,
    region: str,
    now: datetime.datetime,
    method: str = "GET",
) -> dict[str, str]:
    """The headers of a request without a body, signed for S3 (AWS Signature Version 4) unless `keys` is None."""
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname or ""
    port = f":{url.port}" if url.port and url.port != (443 if url.scheme == "https" else 80) else ""
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    given = {"host": host + port, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": stamp, **headers}
    if keys is None:
        return given
    if keys.token:
        given["x-amz-security-token"] = keys.token
    names = ";".join(sorted(given))
    lines = "".join(f"{name}:{given[name].strip()}\n" for name in sorted(given))
    request = "\n".join([method, url.path or "/", canonical_query(query), lines, names, _EMPTY_SHA256])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}".encode(), "sha256").hex()
    which = f"Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return given | {"authorization": f"AWS4-HMAC-SHA256 {which}"}


def canonical_query(query: Mapping[str, str]) -> str:
    """The query string as it is signed and sent."""
    pairs = sorted((_quoted(name), _quoted(value)) for name, value in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def _quoted(text: str, safe: str = "") -> str:
    return urllib.parse.quote(text, safe=f"-_.~{safe}")


# the server's XML


def refusal(status: int, body: bytes, retry_after: str | None, config: S3Config, doing: str) -> HeadraceError:
    """The error for an answer that reports a failure."""
    code = words = ""
    if body.lstrip().startswith(b"<"):
        with contextlib.suppress(ET.ParseError):  # an HTML page, or cut short
            root = ET.fromstring(body)
            code, words = _text(root, "Code"), _text(root, "Message")
    return from_answer(status, code or str(status), words, retry_after, config, doing)


def parse_listing(body: bytes) -> dict[str, Any]:
    """The XML of a listing in botocore's form; `ValueError` or `ET.ParseError` if it is none."""
    root = ET.fromstring(body)
    if not root.tag.endswith("ListBucketResult"):
        raise ValueError(f"a document of {root.tag[:100]!r}")
    unquoted = urllib.parse.unquote_plus if _text(root, "EncodingType") == "url" else str
    contents = [
        {
            "Key": unquoted(_text(one, "Key")),
            "Size": int(_text(one, "Size")),
            "LastModified": datetime.datetime.fromisoformat(_text(one, "LastModified")),
        }
        for one in root.iterfind("{*}Contents")
    ]
    return {
        "Contents": contents,
        "IsTruncated": _text(root, "IsTruncated") == "true",
        "NextContinuationToken": _text(root, "NextContinuationToken"),
    }


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(f"{{*}}{name}") or ""
