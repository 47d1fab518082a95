"""A small S3 server over a directory, for saves: `range_server` with writes. It limits bandwidth and adds latency.

    python -m headrace.bench.core.object_server DIRECTORY [BYTES_PER_SECOND [SECONDS_OF_DELAY]]

It prints its port, and accepts PUT, multipart uploads, `If-None-Match: *`, and deletes. Parts have `PART_BYTES`, except
the last. `GET /-/received` returns the number of bytes of all request bodies so far. Signatures are not checked.

Invariants: all connections share the bandwidth, in both directions together. Objects appear whole. Of several
conditional writes of one key, one succeeds. Unfinished uploads are in `DIRECTORY/-uploads`, which no bucket contains.

Failure behaviour: the status is 400 for another request, for a path outside the directory and for a part of another
size; 404 for a missing object or upload; 412 for a conditional write of a key that exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import urllib.parse
from pathlib import Path
from xml.sax.saxutils import unescape

from headrace.bench.core.range_server import CHUNK, Connection, RangeServer, main

PART_BYTES, PARTS = 8 << 20, 10_000
"""The size of a part, and the largest number of one."""
_DOCUMENT_BYTES = 4 << 20
"""The largest body of a request that deletes objects or completes an upload."""
_KEY = re.compile(rb"<Key>(.*?)</Key>", re.DOTALL)


class ObjectServer(RangeServer):
    """Serves and stores files below `root` as bucket/key. `rate` and `delay`: see `RangeServer`."""

    def __init__(self, root: Path, rate: float = 0.0, delay: float = 0.0) -> None:
        super().__init__(root, rate, delay)
        self.received = 0
        self._uploads = root / "-uploads"
        self._uploads.mkdir(exist_ok=True)

    async def answer(self, head: list[str], connection: Connection, reader: asyncio.StreamReader) -> None:
        request = _Request(head)
        if request.path == "-/received":
            await self._respond(connection, 200, str(self.received))
        elif request.method in ("GET", "HEAD"):
            await super().answer(head, connection, reader)
        elif not request.is_valid:
            await self._respond(connection, 400, "")
        else:
            await self._write(request, connection, reader)

    async def _write(self, request: _Request, connection: Connection, reader: asyncio.StreamReader) -> None:
        """Answer a request that changes something."""
        if request.expects_continue:
            await connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        match request.method:
            case "PUT" if "partNumber" in request.query:
                await self._put_part(request, connection, reader)
            case "PUT":
                await self._put(request, connection, reader)
            case "POST" if "uploads" in request.query:
                await self._begin_upload(request, connection)
            case "POST" if "uploadId" in request.query:
                await self._complete(request, connection, reader)
            case "POST":
                await self._delete(request, connection, reader)
            case _:
                self._remove(request)
                await self._respond(connection, 204, "")

    async def _put(self, request: _Request, connection: Connection, reader: asyncio.StreamReader) -> None:
        whole = self._uploads / secrets.token_hex(8)
        await self._receive(reader, request.length, whole, 0)
        if request.must_be_new and self._file_of(request).exists():
            whole.unlink()
            await self._respond(connection, 412, "")
            return
        await self._respond_with_tag(connection, self._publish(whole, request))

    async def _begin_upload(self, request: _Request, connection: Connection) -> None:
        name = secrets.token_hex(8)
        (self._uploads / name).touch()
        text = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        await self._respond(connection, 200, text)

    async def _put_part(self, request: _Request, connection: Connection, reader: asyncio.StreamReader) -> None:
        number, upload = int(request.query["partNumber"]), self._upload_of(request)
        if upload is None or not 0 < number <= PARTS or request.length > PART_BYTES:
            raise ConnectionResetError("an impossible part")
        await self._receive(reader, request.length, upload, (number - 1) * PART_BYTES)
        await self._respond_with_tag(connection, f"{number:x}")

    async def _complete(self, request: _Request, connection: Connection, reader: asyncio.StreamReader) -> None:
        await reader.readexactly(min(request.length, _DOCUMENT_BYTES))
        upload = self._upload_of(request)
        if upload is None:
            await self._respond(connection, 404, "<Error><Code>NoSuchUpload</Code></Error>")
            return
        tag = self._publish(upload, request)
        text = f"<CompleteMultipartUploadResult><ETag>&quot;{tag}&quot;</ETag></CompleteMultipartUploadResult>"
        await self._respond(connection, 200, text)

    async def _delete(self, request: _Request, connection: Connection, reader: asyncio.StreamReader) -> None:
        document = await reader.readexactly(min(request.length, _DOCUMENT_BYTES))
        for encoded in _KEY.findall(document):
            key = unescape(encoded.decode())
            if ".." not in key.split("/"):
                (self._root / request.path / key).unlink(missing_ok=True)
        await self._respond(connection, 200, "<DeleteResult></DeleteResult>")

    def _remove(self, request: _Request) -> None:
        """Remove an object, or abort an upload."""
        target = self._upload_of(request) if "uploadId" in request.query else self._file_of(request)
        if target is not None:
            target.unlink(missing_ok=True)

    def _file_of(self, request: _Request) -> Path:
        return self._root / request.path

    def _upload_of(self, request: _Request) -> Path | None:
        name = request.query["uploadId"]
        file = self._uploads / name
        return file if name.isalnum() and file.is_file() else None

    def _publish(self, file: Path, request: _Request) -> str:
        """Give the file the object's name, and return its tag."""
        target = self._file_of(request)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, target)
        return f"{target.stat().st_mtime_ns:x}"

    async def _receive(self, reader: asyncio.StreamReader, length: int, file: Path, at: int) -> None:
        """Write a request's body to the file from byte `at`."""
        fd = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            end = at + length
            while at < end:
                data = await reader.read(min(CHUNK, end - at))
                if not data:
                    raise ConnectionResetError("the client closed the connection")
                await self._throttle(len(data))
                self.received += len(data)
                at += os.pwrite(fd, data, at)
        finally:
            os.close(fd)

    async def _respond_with_tag(self, connection: Connection, tag: str) -> None:
        await connection.write(f'HTTP/1.1 200 OK\r\nETag: "{tag}"\r\nContent-Length: 0\r\n\r\n'.encode())


class _Request:
    """The head of a request: `path` is bucket/key."""

    def __init__(self, head: list[str]) -> None:
        self.method, target, _ = head[0].split(" ")
        path, _, query = target.partition("?")
        self.path = urllib.parse.unquote(path).strip("/")
        self.query = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self.length = int(headers.get("content-length", "0"))
        self.must_be_new = headers.get("if-none-match") == "*"
        self.expects_continue = headers.get("expect", "").lower() == "100-continue"

    @property
    def is_valid(self) -> bool:
        parts = self.path.split("/")
        deletes_many = self.method == "POST" and "delete" in self.query
        return (
            self.method in ("PUT", "POST", "DELETE")
            and not {"", ".", "..", "-uploads"} & set(parts)
            and (len(parts) > 1 or deletes_many)
        )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(ObjectServer))
