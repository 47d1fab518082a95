"""The source of a loader's files: this machine, or an S3 server that counts the bytes it sends.

Invariant: both sources have the same bytes. A candidate whose library reads S3 uses that library. The others get short
files whole, over one connection for each thread, and long files as file objects. Worker processes have their own
connections (`part_at_fork`).
Failure behaviour: `RuntimeError` for an answer other than 200.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import stat
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_mine = threading.local()


def part_at_fork() -> None:
    """Make this process end its connections before it forks.

    Workers of Energon and mosaicml-streaming would share the parent's connections. Two workers that send requests over
    one connection get each other's bytes.
    """
    os.register_at_fork(before=_hang_up)


def _hang_up() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)  # a client reconnects when its connection has ended


def the_file(sample: Mapping[str, Any]) -> bytes:
    """Return the file's bytes from a sample as a library delivers it."""
    (found,) = (value for value in sample.values() if isinstance(value, bytes))
    return found


@dataclass(frozen=True)
class Place:
    """A source. `folder` holds clips/, dataset/ and litdata/. With a `port`, they are read from the local server there.

    The server's bucket is named like the folder.
    """

    folder: Path
    port: int = 0

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.folder.name}"

    def url(self, name: str) -> str:
        """Return the path or the URL of a subfolder, as libraries take it."""
        return f"s3://{self.folder.name}/{name}" if self.port else str(self.folder / name)

    def shards(self) -> list[str]:
        """Return the paths or URLs of the tars, as webdataset takes them."""
        names = sorted(path.name for path in (self.folder / "dataset" / "shards").iterdir())
        base = f"{self.http}/dataset/shards" if self.port else str(self.folder / "dataset" / "shards")
        return [f"{base}/{name}" for name in names]

    def clips(self) -> list[str]:
        """Return the names of the files. They are always listed locally, so no candidate pays for a listing over S3."""
        return sorted(path.name for path in (self.folder / "clips").iterdir())

    def read(self, clip: str) -> bytes:
        """Return the bytes of one file."""
        if not self.port:
            return (self.folder / "clips" / clip).read_bytes()
        connection: http.client.HTTPConnection | None = getattr(_mine, "connection", None)
        if connection is None:
            connection = _mine.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/{self.folder.name}/clips/{clip}")
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"GET {clip}: {answer.status}")
        return data

    @contextlib.contextmanager
    def opened(self, clip: str) -> Iterator[Any]:
        """Yield a path or, from S3, a file object of s3fs.

        The blocks are 1 MiB. The default of s3fs, 50 MiB, would read whole long videos.
        """
        if not self.port:
            yield str(self.folder / "clips" / clip)
            return
        import s3fs

        with s3fs.S3FileSystem().open(f"{self.folder.name}/clips/{clip}", "rb", block_size=1 << 20) as file:
            yield file

    def link(self, clip: str) -> str:
        """Return a path, or an HTTP URL like a presigned URL of S3."""
        return f"{self.http}/clips/{clip}" if self.port else str(self.folder / "clips" / clip)

    def sent(self) -> int:
        """Return the bytes that the server has sent so far, or 0 without a server."""
        if not self.port:
            return 0
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/sent", timeout=30) as answer:
            return int(answer.read())
