"""The daemon's read-only HTTP endpoint on loopback, and the one for the metrics alone.

Purpose: serves /livez, /readyz, /metrics, /status.json, /history.json, and the status page at /.
Invariants: the server listens on loopback only. It answers only GET and HEAD of these paths, and no request changes
anything. It refuses a request whose Host is not a name of loopback. So a page of another site cannot read this one by
pointing its domain here (DNS rebinding). The page may connect only to this server, and runs only its own script. Any
user of the machine may read /livez, /readyz and /metrics. The other paths reveal file paths, so only the daemon's user
and root may read them. `MetricsServer` serves these three paths, and no other, on an address for other machines.
Failure behaviour: the server closes a connection whose request head exceeds `HEAD_BYTES` or whose request takes longer
than `HEAD_SECONDS`. With more than `CONNECTIONS` connections it closes the oldest, so idle connections keep no request
out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from prometheus_client import generate_latest

from headrace.dataio.core.metrics import REGISTRY

HEAD_BYTES = 8 << 10
HEAD_SECONDS = 5.0
ACCEPTED = 64
"""Maximum number of connections that the loop accepts before it reads again."""
CONNECTIONS = 4 * ACCEPTED
QUEUED = 1024
"""Length of the kernel's accept queue."""
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_PUBLIC_PATHS = (b"/livez", b"/readyz", b"/metrics")
_ESTABLISHED = "01"
_PATHS = b"/ /livez /readyz /metrics /status.json /history.json\n"
_OWN_NAME = re.compile(rb"(?i)(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
_HOST = re.compile(rb"(?im)^host:[ \t]*([^\r\n]*?)[ \t]*\r?$")


@dataclass(frozen=True, slots=True)
class Page:
    """The status page as one document, and its Content-Security-Policy, which allows only its own style and script."""

    body: bytes
    policy: str


class StatusServer:
    """Serves `status()` and `history()`. `ready()` returns whether the daemon accepts new work."""

    def __init__(
        self,
        status: Callable[[], dict[str, object]],
        history: Callable[[], dict[str, object]],
        ready: Callable[[], bool],
    ) -> None:
        self._status, self._history, self._ready = status, history, ready
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}  # oldest first
        self._lookup_lock = asyncio.Lock()

    async def start(self, port: int, host: str = "127.0.0.1") -> int:
        """Listen on `port` of `host`, or on any free port for 0; returns the port. `OSError` when it is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=HEAD_BYTES, backlog=ACCEPTED)
        listening.listen(QUEUED)
        chosen: int = listening.getsockname()[1]
        return chosen

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open[writer] = None
        if len(self._open) > CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head, writer.get_extra_info("socket")))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _answer(self, head: bytes, connection: socket.socket) -> bytes:
        line, _, fields = head.partition(b"\r\n")
        method, _, target = line.partition(b" ")
        if not is_own(fields):
            return _response(421, _TEXT, b"this is not the name of this machine's loopback\n")
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"only GET\n", "Allow: GET, HEAD\r\n")
        path = target.split(b" ")[0].split(b"?")[0]
        if path in _PATHS.split() and path not in _PUBLIC_PATHS:
            # with many connections the kernel's table is long, so only one lookup runs at a time
            async with self._lookup_lock:
                user = await asyncio.to_thread(user_of, connection)
            if user not in (os.geteuid(), 0):
                return _response(403, _TEXT, b"this is for the daemon's user and root\n")
        response, length = self._page(path)
        return response if method == b"GET" else response[: len(response) - length]

    def _page(self, path: bytes) -> tuple[bytes, int]:
        """The answer to a GET, and the length of its body."""
        status, kind, body, headers = 200, _TEXT, b"ok\n", ""
        if path == b"/":
            status_page = page()
            kind, body, headers = (
                "text/html; charset=utf-8",
                status_page.body,
                f"Content-Security-Policy: {status_page.policy}\r\n",
            )
        elif path == b"/readyz" and not self._ready():
            status, body = 503, b"draining\n"
        elif path == b"/metrics":
            kind, body = _METRICS, generate_latest(REGISTRY)
        elif path == b"/status.json":
            kind, body = _JSON, json.dumps(self._status()).encode()
        elif path == b"/history.json":
            kind, body = _JSON, json.dumps(self._history()).encode()
        elif path not in (b"/livez", b"/readyz"):
            status, body = 404, _PATHS
        return _response(status, kind, body, headers), len(body)


class MetricsServer(StatusServer):
    """Serves /metrics, /livez and /readyz to other machines, such as a Prometheus outside the node."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        super().__init__(dict, dict, ready)

    async def _answer(self, head: bytes, connection: socket.socket) -> bytes:
        method, _, target = head.partition(b"\r\n")[0].partition(b" ")
        path = target.split(b" ")[0].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"only GET\n", "Allow: GET, HEAD\r\n")
        if path not in _PUBLIC_PATHS:
            return _response(404, _TEXT, b"/livez /readyz /metrics\n")
        response, length = self._page(path)
        return response if method == b"GET" else response[: len(response) - length]


def user_of(connection: socket.socket) -> int | None:
    """The uid that owns the other end of a loopback connection; None if that end is closed."""
    endpoints = [_hex_address(*address) for address in (connection.getpeername(), connection.getsockname())]
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, *addresses, state, _, _, _, user, _ = line.split(maxsplit=8)
        if addresses == endpoints and state == _ESTABLISHED:
            return int(user)
    return None


def _hex_address(host: str, port: int) -> str:
    """An address in the format of /proc/net/tcp."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"


def is_own(fields: bytes) -> bool:
    """Whether every Host header of a request is a name of loopback.

    A request without one is accepted too, because browsers always send it.
    """
    return all(_OWN_NAME.fullmatch(host) for host in _HOST.findall(fields))


@cache
def page() -> Page:
    """The status page, assembled from its parts once."""
    folder = resources.files("headrace.dataio.sidecar") / "page"
    parts = {name: (folder / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    body = parts["html"].replace("/*css*/", parts["css"]).replace("/*js*/", parts["js"])
    hashes = {name: base64.b64encode(hashlib.sha256(parts[name].encode()).digest()).decode() for name in ("css", "js")}
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes['css']}'; script-src 'sha256-{hashes['js']}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(body.encode(), policy)


_REASONS = {
    200: "OK",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    503: "Service Unavailable",
}


def _response(status: int, kind: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    head += f"Referrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\n{headers}"
    return head.encode() + b"\r\n" + body
