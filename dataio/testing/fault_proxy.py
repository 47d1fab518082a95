"""A proxy on loopback that damages chosen HTTP requests and responses.

Invariants: the proxy passes everything through unchanged, `100 Continue` included, except for requests that an injected
fault matches. `fired` counts each fault that took place, so that a test can assert it. For some faults the proxy
responds in the server's place, or sends a request on later. It then holds the request's body in memory, up to
`BODY_BYTES`.

Failure behaviour: if the proxy cannot connect to the upstream server, it closes the client's connection. `stop` ends
the loop and its thread. Delayed requests are then never sent on.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
import threading
import urllib.parse
from collections import Counter, deque
from dataclasses import dataclass
from typing import Self

_HEAD_BYTES = 64 << 10
_CHUNK = 64 << 10
REQUESTS = 100_000
BODY_BYTES = 64 << 20
DRIP_SECONDS = 0.05
"""The pause between two bytes of a response that arrives byte by byte, in seconds."""
_ERROR = "<?xml version='1.0'?><Error><Code>{}</Code><Message>injected</Message></Error>"


class Fault(enum.Enum):
    """What happens to a request."""

    REFUSE = "the connection is reset before the request reaches the server"
    SLOW_DOWN = "the answer is 503 SlowDown; the server never sees the request"
    LOSE_ANSWER = "the server carries out the request, and the connection is reset instead of the answer"
    RESET_BODY = "the connection is reset in the middle of the answer's body"
    CUT_BODY = "the connection is closed properly in the middle of the answer's body"
    STALL = "after the first half of the answer's body no byte follows, and the connection stays open"
    FLIP_BIT = "one bit in the middle of the answer's body is flipped"
    LATE = "the connection is reset, and the server carries out the request `seconds` later"
    TWICE = "the server carries out the request and answers, and carries it out once more `seconds` later"
    APPLIED_409 = "the server carries out the request, and the answer is 409 ConditionalRequestConflict"
    APPLIED_412 = "the server carries out the request, and the answer is 412 PreconditionFailed"
    ERROR_IN_200 = "the answer is 200 with the document of an InternalError; the server never sees the request"
    DRIP_HEAD = "the answer's headers arrive a byte at a time, without end"
    DRIP_BODY = "the answer's body arrives a byte at a time"
    CONTINUE = "the answer is 100 Continue, again and again"


_PROXY_ANSWERS = {
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.ERROR_IN_200: (200, "InternalError"),
    Fault.APPLIED_409: (409, "ConditionalRequestConflict"),
    Fault.APPLIED_412: (412, "PreconditionFailed"),
}
"""The faults with which the proxy responds in the server's place: status and code."""
_APPLIES = {Fault.APPLIED_409, Fault.APPLIED_412, Fault.LATE, Fault.TWICE}


@dataclass(slots=True)
class _Plan:
    fault: Fault
    method: str
    path: str
    remaining: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `length` is the length of its body in bytes."""

    method: str
    path: str
    length: int


@dataclass(frozen=True, slots=True)
class _Head:
    """The first line and the headers of a request or a response."""

    raw: bytes

    @property
    def words(self) -> list[str]:
        return self.raw.split(b"\r\n", 1)[0].decode("latin-1").split(" ")

    def header(self, name: str) -> str:
        for line in self.raw.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return ""


class FaultProxy:
    """A proxy in front of an HTTP server. It is a context manager; clients use `endpoint` instead of `upstream`.

    Args:
        upstream: The server's URL.
        rate: The most bytes per second of all requests together. Default: no limit.
        answers: The most bytes per second of all responses with a known length. Default: no limit.
    """

    def __init__(self, upstream: str, rate: float | None = None, answers: float | None = None) -> None:
        parts = urllib.parse.urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._plans: list[_Plan] = []
        self._bucket, self._response_bucket = _Bucket(rate), _Bucket(answers)
        self._tasks: set[asyncio.Task[None] | None] = set()  # a loop has only weak references to its tasks
        self.requests: deque[Request] = deque(maxlen=REQUESTS)
        """The requests, newest last: method, path with query, and the bytes of the body."""
        self.answered = 0
        """The bytes of all response bodies with a Content-Length."""
        self._lock, self._ready = threading.Lock(), threading.Event()
        self.fired: Counter[Fault] = Counter()
        self.later: list[int] = []
        """The statuses of the responses to requests that were sent on later."""
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)

    def inject(self, fault: Fault, *, times: int = 1, method: str = "", path: str = "", seconds: float = 0.5) -> None:
        """Apply a fault to the next matching requests.

        Args:
            fault: The fault.
            times: The number of requests.
            method: The method of these requests. Default: any.
            path: A part of their path and query. Default: any path.
            seconds: The delay of `LATE` and `TWICE`.
        """
        with self._lock:
            self._plans.append(_Plan(fault, method, path, times, seconds))

    def forget(self) -> None:
        """Drop all injected faults."""
        with self._lock:
            self._plans.clear()

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._client, sock=self._socket, limit=_HEAD_BYTES))
        self._loop.call_soon(self._ready.set)
        self._loop.run_forever()
        server.close()
        for _ in range(5):  # a connection that was accepted a moment ago becomes a task only a few turns later
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    def _pick(self, head: _Head) -> _Plan | None:
        method, path = head.words[:2]
        with self._lock:
            for plan in self._plans:
                if plan.remaining and plan.method in ("", method) and plan.path in path:
                    plan.remaining -= 1
                    self.fired[plan.fault] += 1
                    return plan
        return None

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server: asyncio.StreamWriter | None = None
        self._tasks.add(task := asyncio.current_task())
        try:
            upstream, server = await asyncio.open_connection(*self._upstream, limit=_HEAD_BYTES)
            while await self._exchange(reader, writer, upstream, server):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a cancelled connection ends normally: streams of Python 3.11 would complain about the cancellation
        finally:
            self._tasks.discard(task)
            for end in (writer, server):
                if end is not None:
                    end.close()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        upstream: asyncio.StreamReader,
        server: asyncio.StreamWriter,
    ) -> bool:
        """Pass on one request and its response. Returns whether the connection stays open."""
        request = _Head(await reader.readuntil(b"\r\n\r\n"))
        length = int(request.header("content-length") or 0)
        method, path = request.words[:2]
        self.requests.append(Request(method, path, length))
        plan = self._pick(request)
        fault = plan.fault if plan is not None else None
        if fault is Fault.REFUSE:
            return _reset(writer)
        if plan is not None and (fault in _APPLIES or fault in _PROXY_ANSWERS):
            return await self._respond_instead(reader, writer, request, length, plan)
        if fault in (Fault.DRIP_HEAD, Fault.CONTINUE):
            return await _drip(writer, fault)
        server.write(request.raw)
        response = None
        if request.header("expect"):
            response = _Head(await upstream.readuntil(b"\r\n\r\n"))
            if response.words[1] == "100":
                writer.write(response.raw)
                response = None
        if response is None:
            await self._bucket.pass_on(reader, server, length)
            response = _Head(await upstream.readuntil(b"\r\n\r\n"))
        if fault is Fault.LOSE_ANSWER:
            return _reset(writer)
        writer.write(response.raw)
        if request.words[0] != "HEAD" and response.words[1] not in ("204", "304"):
            self.answered += int(response.header("content-length") or 0)
        return await _pass_on_body(upstream, writer, request, response, fault, self._response_bucket)

    async def _respond_instead(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: _Head, length: int, plan: _Plan
    ) -> bool:
        """Apply a fault that reads the request's body, and sends it on later or never."""
        if length > BODY_BYTES:
            raise ConnectionError(f"a body of {length} bytes")
        if request.header("expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length)
        if plan.fault is Fault.LATE:
            self._do_later(request, body, plan.seconds)
            return _reset(writer)
        if plan.fault in _APPLIES:
            response = await self._forward(request, body)
        if plan.fault is Fault.TWICE:
            self._do_later(request, body, plan.seconds)
        else:
            response = _error(*_PROXY_ANSWERS[plan.fault])
        writer.write(response)
        with contextlib.suppress(OSError):
            await writer.drain()
        return False

    def _do_later(self, request: _Head, body: bytes, seconds: float) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                response = await self._forward(request, body)
                self.later.append(int(_Head(response).words[1]))

        self._tasks.add(task := asyncio.get_running_loop().create_task(later()))
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, request: _Head, body: bytes) -> bytes:
        """Send the request over a new connection, and return the server's whole response."""
        lines = [
            line
            for line in request.raw[:-4].split(b"\r\n")
            if not line.lower().startswith((b"connection:", b"expect:"))
        ]
        upstream, server = await asyncio.open_connection(*self._upstream, limit=_HEAD_BYTES)
        try:
            server.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            await server.drain()
            return await upstream.read(-1)
        finally:
            server.close()


async def _pass_on_body(
    upstream: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    request: _Head,
    response: _Head,
    fault: Fault | None,
    bucket: _Bucket,
) -> bool:
    if request.words[0] == "HEAD" or response.words[1] in ("204", "304"):
        await writer.drain()
        return True
    if "chunked" in response.header("transfer-encoding"):
        return await _pass_on_chunks(upstream, writer)
    length = int(response.header("content-length") or 0)
    half = length // 2
    half = 0 if fault is Fault.DRIP_BODY else half
    await bucket.pass_on(upstream, writer, half)
    if fault is Fault.RESET_BODY:
        return _reset(writer)
    if fault is Fault.CUT_BODY:
        return False
    if fault is Fault.STALL:
        await asyncio.Event().wait()  # until the proxy stops
    if fault is Fault.DRIP_BODY:
        await _drip_bytes(writer, await upstream.readexactly(length - half))
        return True
    if fault is Fault.FLIP_BIT:
        byte = await upstream.readexactly(1)
        writer.write(bytes([byte[0] ^ 1]))
        half += 1
    await bucket.pass_on(upstream, writer, length - half)
    return True


class _Bucket:
    """Passes bodies on, with at most `rate` bytes per second for all of them."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free = rate, 0.0

    async def pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, count: int) -> None:
        while count:
            piece = min(count, _CHUNK)
            if self._rate is not None:
                now = asyncio.get_running_loop().time()
                self._free = max(self._free, now) + piece / self._rate
                await asyncio.sleep(self._free - now)
            await _pass_on(source, target, piece)
            count -= piece


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter, count: int) -> None:
    while count:
        data = await source.read(min(count, _CHUNK))
        if not data:
            raise asyncio.IncompleteReadError(b"", count)
        target.write(data)
        await target.drain()
        count -= len(data)
    await target.drain()


async def _pass_on_chunks(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> bool:
    while True:
        line = await source.readuntil(b"\r\n")
        target.write(line)
        size = int(line.split(b";")[0], 16)
        await _pass_on(source, target, size + 2)
        if not size:
            return True


async def _drip(writer: asyncio.StreamWriter, fault: Fault) -> bool:
    """Send a response with headers that never end, until the client disconnects."""
    if fault is Fault.CONTINUE:
        while True:
            await _drip_bytes(writer, b"HTTP/1.1 100 Continue\r\n\r\n", len(b"HTTP/1.1 100 Continue\r\n\r\n"))
    writer.write(b"HTTP/1.1 200 OK\r\nX-Injected: ")
    while True:
        await _drip_bytes(writer, b"a")


async def _drip_bytes(writer: asyncio.StreamWriter, data: bytes, step: int = 1) -> None:
    for start in range(0, len(data), step):
        writer.write(data[start : start + step])
        await writer.drain()
        await asyncio.sleep(DRIP_SECONDS)


def _error(status: int, code: str) -> bytes:
    body = _ERROR.format(code).encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def _reset(writer: asyncio.StreamWriter) -> bool:
    """Close with RST instead of FIN."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False
