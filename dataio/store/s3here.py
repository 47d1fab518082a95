"""Objects of S3 read in the caller's own thread, from the socket to where the bytes are wanted.

Purpose: most reads are of one span of one object, by a thread that would only wait. Handing them to a loop's thread and back
costs more than the request does; and each thread that called obstore kept megabytes of what it had passed on.
Invariants: one request a call; it is sent once more where a connection that was kept turns out to be dead before anything of an
answer came. At most `KEPT` connections are kept, none that has not been read to its end. An interrupt at any moment drops the
connection, and after any return or error nobody writes into the caller's buffers. One deadline covers the whole of a request,
from connecting to the last byte of its answer (`S3Config.patience`): a server that drips gains nothing by it.
Failure behaviour: the errors of `s3errors`. None where the answer has to be looked at closely (a refusal, a redirection, a range
that is not there, a body of another length): whatever came is to be read again in the session's ordinary way, which renews
credentials and says what it is. A server that is silent for the configured time ends the call, as the deadline and `close` do.
The system's own limits bound the look-up of the server's name.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import http.client
import io
import os
import select
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.dataio.core import limits
from headrace.dataio.core.errors import HeadraceError, TransientError, UsageError
from headrace.dataio.store.s3config import S3Config
from headrace.dataio.store.s3credentials import Keys
from headrace.dataio.store.s3errors import CERTIFICATE_HINT, NETWORK_HINT, REACH_HINT, UnreachableError
from headrace.dataio.store.s3pages import quoted, refusal, signed
from headrace.dataio.store.s3session import closed_in_use

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

KEPT = 32
_ERROR_BYTES = 64 << 10
_CLOSELY = (400, 401, 403, 416)
"""What newer credentials, or the object's size, may explain."""

Trust = Callable[[str], ssl.SSLContext | None]


class Here:
    """GET and HEAD of objects in a bucket; safe to share between threads. `trust` gives what TLS is to trust, by the scheme."""

    def __init__(self, config: S3Config, trust: Trust) -> None:
        self._config, self._trust = config, trust
        self._url = urllib.parse.urlsplit(config.bucket_url)
        self._lock, self._closed, self._pid = threading.Lock(), False, os.getpid()
        self._kept, self._used = list[http.client.HTTPConnection](), set[http.client.HTTPConnection]()

    def get(self, doing: str, key: str, keys: Keys | None, most: int) -> bytes | None:
        """A whole object of at most `most` bytes."""
        with self._answer(doing, "GET", key, keys, {}) as answer:
            if answer is None or answer.status != 200 or answer.length is None or answer.length > most:
                return None
            answer.timed.until += answer.length / limits.LEAST_RATE
            with self._translated(doing):
                return answer.read()

    def head(self, doing: str, key: str, keys: Keys | None) -> dict[str, Any] | None:
        """Size and time of an object, by botocore's names."""
        with self._answer(doing, "HEAD", key, keys, {}) as answer:
            if answer is None:
                return None
            size, time = answer.headers.get("content-length"), answer.headers.get("last-modified")
            if answer.status != 200 or size is None or time is None:
                return None
            answer.read()  # nothing, after which the connection is kept
            return {"ContentLength": int(size), "LastModified": email.utils.parsedate_to_datetime(time)}

    def read(
        self, doing: str, key: str, keys: Keys | None, start: int, stop: int, buffers: Iterable[memoryview]
    ) -> bool | None:
        """Fill `buffers`, one after the other, with the bytes [start, stop) of an object; each is asked for when the one before
        it is full. True when all are."""
        with self._answer(doing, "GET", key, keys, {"range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer is None or answer.status != 206 or answer.length != stop - start:
                return None
            if not str(answer.headers.get("content-range")).startswith(f"bytes {start}-{stop - 1}/"):
                return None
            answer.timed.until += (stop - start) / limits.LEAST_RATE
            for buffer in buffers:
                while buffer:
                    with self._translated(doing):
                        if not (some := answer.readinto(buffer)):
                            raise EOFError
                    buffer = buffer[some:]
            return True

    def reconnect(self) -> None:
        """Keep none of the connections that wait for a request."""
        with self._lock:
            idle, self._kept = self._kept, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """End all connections; who waits for an answer gets an error. A forked child leaves them: they are its parent's too."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            for connection in self._used:
                with contextlib.suppress(OSError, TypeError):  # it is over already
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            while self._kept:
                self._kept.pop().close()

    @contextlib.contextmanager
    def _answer(
        self, doing: str, method: str, key: str, keys: Keys | None, more: Mapping[str, str]
    ) -> Iterator[_Answer | None]:
        """The server's answer; None where it is to be looked at closely. An error of it is raised."""
        url = self._url._replace(path=f"{self._url.path}/{quoted(key, '/')}")
        payer = {"x-amz-request-payer": "requester"} if self._config.options.get("requester_pays") else {}
        now, region = datetime.datetime.now(datetime.UTC), self._config.region or "us-east-1"
        headers = signed(url, {}, {**more, **payer}, keys, region, now, method)
        connection: http.client.HTTPConnection | None = None
        done = False
        try:
            with self._translated(doing):
                connection, answer = self._asked(doing, method, url.path, headers)
                closely = 300 <= answer.status < 400 or answer.status in _CLOSELY
                if method == "HEAD" and not answer.will_close:  # nothing follows, unless the headers were cut short
                    closely = closely or _said_something(connection)
                said = b"" if closely or answer.status < 300 else answer.read(_ERROR_BYTES)
            if not closely and answer.status >= 300:
                raise refusal(answer.status, said, answer.headers.get("retry-after"), self._config, doing)
            yield None if closely else answer
            done = answer.isclosed() and not answer.will_close
        finally:
            if connection is not None:
                self._leave(connection, done)

    def _asked(
        self, doing: str, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, _Answer]:
        until = time.monotonic() + self._config.patience()
        with self._lock:
            kept = self._kept.pop() if self._kept else None
        if kept is not None:
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # the server had ended it
                return kept, self._sent(kept, method, path, headers, until)
        connection = self._connected(doing)
        return connection, self._sent(connection, method, path, headers, until)

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, headers: Mapping[str, str], until: float
    ) -> _Answer:
        """The answer to a request. The connection is left unless there is one."""
        try:
            with self._lock:
                self._used.add(connection)
                if self._closed or _said_something(connection):
                    raise ConnectionResetError("it was ended")
            seconds = self._config.read_seconds
            connection.sock.settimeout(seconds)
            connection.request(method, path, headers=dict(headers))
            answer = _Answer(_Timed(connection.sock, seconds, until), method=method)
            connection.response_class = lambda *_, **__: answer  # type: ignore[assignment]
            connection.getresponse()
            return answer
        except BaseException:
            self._leave(connection, False)
            raise

    def _connected(self, doing: str) -> http.client.HTTPConnection:
        where, context = f"{doing}: {self._config.endpoint}", self._trust(self._url.scheme)
        host, seconds = self._url.hostname or "", self._config.connect_seconds
        connection = http.client.HTTPConnection(host, self._url.port or (443 if context else 80))
        try:
            connection.sock = _dial(host, connection.port, time.monotonic() + seconds, context)
        except ssl.SSLError as error:
            raise UsageError(f"{where}: {error}", hint=CERTIFICATE_HINT) from error
        except OSError as error:
            raise UnreachableError(f"{where}: {str(error) or 'timed out'}", hint=REACH_HINT) from error
        return connection

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

    def _leave(self, connection: http.client.HTTPConnection, done: bool) -> None:
        with self._lock:
            self._used.discard(connection)
            if done and not self._closed and len(self._kept) < KEPT:
                self._kept.append(connection)
                return
        connection.close()


class _Timed(io.RawIOBase):
    """What comes over a connection, as a file: silence of `seconds` ends it, and the time `until` at the latest."""

    def __init__(self, sock: socket.socket, seconds: float, until: float) -> None:
        self._sock, self._seconds, self.until = sock, seconds, until
        self._open = sock.makefile("rb", buffering=0)  # keeps the socket open for as long as this is

    def makefile(self, _mode: str) -> io.BufferedReader:
        """As a socket's."""
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

    def __init__(self, timed: _Timed, method: str) -> None:
        super().__init__(timed, method=method)  # type: ignore[arg-type]  # of a socket it wants `makefile` only
        self.timed = timed


def _dial(host: str, port: int, until: float, context: ssl.SSLContext | None) -> socket.socket:
    """A connection, with TLS where there is a context; all addresses of the host together have until then. Each gets its part of
    the time that is left: one that swallows everything leaves some to the others."""
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


def _said_something(connection: http.client.HTTPConnection) -> bool:
    """Whether the server said something that nobody asked for: as a rule, that it is the end."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))
