"""The daemon's read-only HTTP endpoint on loopback: /livez, /readyz, /metrics, /status.json, /history.json and a page at /.

Invariants: only GET and HEAD of these paths are answered, nothing is changed by them, and nothing but loopback is listened on.
A request whose Host is not this machine's own name is refused, so a page from elsewhere cannot read this one by pointing
its domain here (DNS rebinding). The page may load and ask nothing but this server, and runs no script but its own.
Failure behaviour: a request head over `HEAD_BYTES`, or one that takes longer than `HEAD_SECONDS`, is cut off; over
`CONNECTIONS` at once are turned away.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from prometheus_client import generate_latest

from dataio.core.metrics import REGISTRY

HEAD_BYTES = 8 << 10
HEAD_SECONDS = 5.0
CONNECTIONS = 32
_TEXT = "text/plain; charset=utf-8"
_JSON = "application/json"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_PATHS = b"/ /livez /readyz /metrics /status.json /history.json\n"
_OWN_NAME = re.compile(rb"(?i)(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?")
_HOST = re.compile(rb"(?im)^host:[ \t]*([^\r\n]*?)[ \t]*\r?$")


@dataclass(frozen=True, slots=True)
class Page:
    """The status page as one document, and the policy that allows it its own style and script and nothing else."""

    body: bytes
    policy: str


class StatusServer:
    """Serves `status()` and `history()`; `ready()` says whether new work is taken."""

    def __init__(
        self,
        status: Callable[[], dict[str, object]],
        history: Callable[[], dict[str, object]],
        ready: Callable[[], bool],
    ) -> None:
        self._status, self._history, self._ready = status, history, ready
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
        line, _, fields = head.partition(b"\r\n")
        method, _, rest = line.partition(b" ")
        if not is_own(fields):
            return _response(421, _TEXT, b"this is not the name of this machine's loopback\n")
        if method not in (b"GET", b"HEAD"):
            return _response(405, _TEXT, b"only GET\n", "Allow: GET, HEAD\r\n")
        answer, length = self._page(rest.split(b" ")[0].split(b"?")[0])
        return answer if method == b"GET" else answer[: len(answer) - length]

    def _page(self, path: bytes) -> tuple[bytes, int]:
        """The answer to a GET, and the length of its body."""
        status, kind, body, more = 200, _TEXT, b"ok\n", ""
        if path == b"/":
            shown = page()
            kind, body, more = "text/html; charset=utf-8", shown.body, f"Content-Security-Policy: {shown.policy}\r\n"
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
        return _response(status, kind, body, more), len(body)


def is_own(fields: bytes) -> bool:
    """Whether every Host in a request's head is a name of loopback; a request without one came from no browser."""
    return all(_OWN_NAME.fullmatch(host) for host in _HOST.findall(fields))


@cache
def page() -> Page:
    """The document, put together from its parts once."""
    folder = resources.files("dataio.sidecar") / "page"
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
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    503: "Service Unavailable",
}


def _response(status: int, kind: str, body: bytes, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
    head += f"Referrer-Policy: no-referrer\r\nX-Frame-Options: DENY\r\n{more}"
    return head.encode() + b"\r\n" + body
