"""The daemon's read-only HTTP endpoint on loopback: /livez, /readyz, /metrics, /status.json.

Invariant: only GET and HEAD of these paths are answered, nothing is changed by them, and nothing but loopback is listened on.
Failure behaviour: a request head over `HEAD_BYTES`, or one that takes longer than `HEAD_SECONDS`, is cut off; over
`CONNECTIONS` at once are turned away.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from prometheus_client import generate_latest

from dataio.core.metrics import REGISTRY

HEAD_BYTES = 8 << 10
HEAD_SECONDS = 5.0
CONNECTIONS = 32
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class StatusServer:
    """Serves `status()`; `ready()` says whether new work is taken."""

    def __init__(self, status: Callable[[], dict[str, object]], ready: Callable[[], bool]) -> None:
        self._status, self._ready = status, ready
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, port: int) -> int:
        """Listen on `port` of 127.0.0.1, any free one for 0; returns it. OSError when it is taken."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=HEAD_BYTES)
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._open -= 1
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"only GET\n", "GET, HEAD")
        status, kind, body = self._page(rest.split(b" ")[0].split(b"?")[0])
        answer = _response(status, kind, body)
        return answer if method == b"GET" else answer[: -len(body)]

    def _page(self, path: bytes) -> tuple[int, str, bytes]:
        if path == b"/livez":
            return 200, _TEXT, b"ok\n"
        if path == b"/readyz":
            return (200, _TEXT, b"ok\n") if self._ready() else (503, _TEXT, b"draining\n")
        if path == b"/metrics":
            return 200, _METRICS, generate_latest(REGISTRY)
        if path == b"/status.json":
            return 200, "application/json", json.dumps(self._status()).encode()
        return 404, _TEXT, b"/livez /readyz /metrics /status.json\n"


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


def _response(status: int, kind: str, body: bytes, allow: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    head += f"Allow: {allow}\r\n" if allow else ""
    return head.encode() + b"\r\n" + body
