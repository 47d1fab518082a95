"""A small read-only S3 server over a directory. It counts the bytes it sends, and can limit bandwidth and add latency.

    python -m headrace.bench.core.range_server DIRECTORY [BYTES_PER_SECOND [SECONDS_OF_DELAY]]

It prints its port. The response to `GET /-/sent` is the number of bytes of all bodies so far. That to `GET /-/files` is a
JSON object: for each path, the number of requests with a body, and the bytes of these. The server has one process and
one thread, and listens on loopback only. A listing (version 2) has one page.

Invariants: all connections share the bandwidth. Each request is delayed by one round trip, and the first one of a
connection by two. If a client closes the connection during a response, only the bytes that its machine has acknowledged
count.

Failure behaviour: the status is 404 for a missing file, 416 for a range beyond the end, and 400 for another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import sys
import urllib.parse
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from xml.sax.saxutils import escape

CHUNK = 256 << 10
HEAD_BYTES = 64 << 10
_ACKNOWLEDGED = 120
"""The offset in Linux's `tcp_info` of the number of bytes that the other side has acknowledged."""


class Connection:
    """A connection, and the number of bytes that were written to it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._written = writer, 0
        self._socket = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))

    async def write(self, data: bytes) -> None:
        self._written += len(data)
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> int:
        """Close the connection, and return how many bytes were written but not acknowledged."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED + 8)
        self._socket.close()
        self._writer.close()
        return max(0, self._written - int(struct.unpack_from("Q", info, _ACKNOWLEDGED)[0]))


class RangeServer:
    """Serves files below `root` as bucket/key.

    `rate` is the bandwidth in bytes per second; 0 for no limit. `delay` is in seconds.
    """

    def __init__(self, root: Path, rate: float = 0.0, delay: float = 0.0) -> None:
        self._root, self._rate, self._delay = root, rate, delay
        self.sent, self.files = 0, dict[str, list[int]]()
        self._free_at = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, delay = Connection(writer), 2 * self._delay
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                if delay:
                    await asyncio.sleep(delay)
                await self.answer(head, connection, reader)
                delay = self._delay
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            self.sent -= connection.end()

    async def answer(self, head: list[str], connection: Connection, reader: asyncio.StreamReader) -> None:
        """Answer one request. `reader` has its body, if it has one."""
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        path, _, query = target.partition("?")
        path = urllib.parse.unquote(path).lstrip("/")
        query_values = dict(urllib.parse.parse_qsl(query))
        if method == "GET" and query_values.get("list-type") == "2":
            await self._respond(connection, 200, self._listing(path.strip("/"), query_values))
            return
        if path in ("-/sent", "-/files"):
            await self._respond(connection, 200, str(self.sent) if path == "-/sent" else json.dumps(self.files))
            return
        file = self._root / path
        if method not in ("GET", "HEAD") or not file.is_file() or ".." in path.split("/"):
            await self._respond(connection, 404 if method in ("GET", "HEAD") else 400, "")
            return
        await self._file(connection, file, headers.get("range", ""), body=method == "GET")

    def _listing(self, bucket: str, query_values: dict[str, str]) -> str:
        """Return a listing in one page."""
        prefix, delimiter = query_values.get("prefix", ""), query_values.get("delimiter", "")
        keys, folders = list[str](), set[str]()
        for path in sorted(p for p in (self._root / bucket).rglob("*") if p.is_file()):
            key = path.relative_to(self._root / bucket).as_posix()
            if not key.startswith(prefix):
                continue
            head, slash, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if slash:
                folders.add(prefix + head + delimiter)
            else:
                keys.append(self._contents_of(key, path))
        below = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(keys) + len(folders)}</KeyCount>"
            f"<MaxKeys>1000000</MaxKeys><IsTruncated>false</IsTruncated>{''.join(keys)}{below}</ListBucketResult>"
        )

    def _contents_of(self, key: str, path: Path) -> str:
        status = path.stat()
        when = datetime.fromtimestamp(status.st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified><ETag>&quot;{status.st_mtime_ns:x}&quot;"
            f"</ETag><Size>{status.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    async def _file(self, connection: Connection, file: Path, byte_range: str, *, body: bool) -> None:
        stat = file.stat()
        first, end = 0, stat.st_size
        if byte_range.startswith("bytes="):
            a, _, b = byte_range[6:].partition("-")
            first, end = int(a), min(end, int(b) + 1 if b else end)
            if first >= end:
                await self._respond(connection, 416, "")
                return
        status = "206 Partial Content" if byte_range else "200 OK"
        span = f"Content-Range: bytes {first}-{end - 1}/{stat.st_size}\r\n" if byte_range else ""
        await connection.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {end - first}\r\n{span}Accept-Ranges: bytes\r\n"
            f'ETag: "{stat.st_mtime_ns:x}"\r\nLast-Modified: {formatdate(stat.st_mtime, usegmt=True)}\r\n\r\n'.encode()
        )
        counts = self.files.setdefault(file.relative_to(self._root).as_posix(), [0, 0])
        counts[0] += body
        fd = os.open(file, os.O_RDONLY)
        try:
            while body and first < end:
                data = os.pread(fd, min(CHUNK, end - first), first)
                await self._throttle(len(data))
                self.sent += len(data)
                counts[1] += len(data)
                await connection.write(data)
                first += len(data)
        finally:
            os.close(fd)

    async def _throttle(self, size: int) -> None:
        if not self._rate:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + size / self._rate
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)

    async def _respond(self, connection: Connection, status: int, text: str) -> None:
        await connection.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())


async def main(kind: type[RangeServer]) -> None:
    """Serve the folder that the command line names, with its delay and rate, and print the port."""
    server = kind(Path(sys.argv[1]), *map(float, sys.argv[2:4]))
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, limit=HEAD_BYTES, backlog=256)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(RangeServer))
