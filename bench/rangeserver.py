"""As much of S3 as a reader needs, over a directory: it counts the bytes it sends and may be held to a bandwidth.

    python -m bench.rangeserver DIRECTORY [BYTES_PER_SECOND]

It prints its port. `GET /-/sent` answers with the bytes of all bodies so far. One process, one thread, loopback only.
Invariant: the bandwidth is that of all connections together. What is not there is 404,
what is not understood 400.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import urllib.parse
from email.utils import formatdate
from pathlib import Path

CHUNK = 256 << 10
HEAD_BYTES = 64 << 10


class RangeServer:
    """Serves files below `root` as bucket/key. `rate` in bytes a second, 0 for no limit."""

    def __init__(self, root: Path, rate: float = 0.0) -> None:
        self._root, self._rate, self.sent = root, rate, 0
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                await self._answer(head, writer)
        writer.close()

    async def _answer(self, head: list[str], writer: asyncio.StreamWriter) -> None:
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        path = urllib.parse.unquote(target.partition("?")[0]).lstrip("/")
        if path == "-/sent":
            await self._small(writer, 200, str(self.sent))
            return
        file = self._root / path
        if method not in ("GET", "HEAD") or not file.is_file() or ".." in path.split("/"):
            await self._small(writer, 404 if method in ("GET", "HEAD") else 400, "")
            return
        await self._file(writer, file, headers.get("range", ""), body=method == "GET")

    async def _file(self, writer: asyncio.StreamWriter, file: Path, wanted: str, *, body: bool) -> None:
        found = file.stat()
        first, end = 0, found.st_size
        if wanted.startswith("bytes="):
            a, _, b = wanted[6:].partition("-")
            first, end = int(a), min(end, int(b) + 1 if b else end)
        status = "206 Partial Content" if wanted else "200 OK"
        span = f"Content-Range: bytes {first}-{end - 1}/{found.st_size}\r\n" if wanted else ""
        writer.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {end - first}\r\n{span}Accept-Ranges: bytes\r\n"
            f'ETag: "{found.st_mtime_ns:x}"\r\nLast-Modified: {formatdate(found.st_mtime, usegmt=True)}\r\n\r\n'.encode()
        )
        fd = os.open(file, os.O_RDONLY)
        try:
            while body and first < end:
                data = os.pread(fd, min(CHUNK, end - first), first)
                await self._wait(len(data))
                writer.write(data)
                await writer.drain()
                self.sent += len(data)
                first += len(data)
        finally:
            os.close(fd)

    async def _wait(self, size: int) -> None:
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    async def _small(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        await writer.drain()


async def main() -> None:
    server = RangeServer(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=HEAD_BYTES, backlog=256)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
