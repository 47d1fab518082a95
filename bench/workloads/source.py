"""Where a loader reads its files: from this machine, or from an S3 server that counts the bytes it sends.

Invariant: both have the same bytes. A candidate whose library reads S3 uses the library. The others get short files whole, over
one connection for each thread, and long files as file objects. Worker processes have their own connections (`part_at_fork`).
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
    """Make this process end its connections before it forks. Workers of Energon and mosaicml-streaming would share those of the
    parent: two workers that send requests over one connection get each other's bytes."""
    os.register_at_fork(before=_hang_up)


def _hang_up() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)  # a client reconnects when its connection has ended


def the_file(sample: Mapping[str, Any]) -> bytes:
    """A file's bytes, of what a library gives of it."""
    (found,) = (value for value in sample.values() if isinstance(value, bytes))
    return found


@dataclass(frozen=True)
class Place:
    """`folder` holds clips/, dataset/ and litdata/; with a `port`, they are read from the server there, whose bucket it is."""

    folder: Path
    port: int = 0

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.folder.name}"

    def url(self, name: str) -> str:
        """A folder of it, as libraries take it."""
        return f"s3://{self.folder.name}/{name}" if self.port else str(self.folder / name)

    def shards(self) -> list[str]:
        """The tars, as webdataset takes them."""
        names = sorted(path.name for path in (self.folder / "dataset" / "shards").iterdir())
        base = f"{self.http}/dataset/shards" if self.port else str(self.folder / "dataset" / "shards")
        return [f"{base}/{name}" for name in names]

    def clips(self) -> list[str]:
        """Names of the files. No candidate pays for this listing."""
        return sorted(path.name for path in (self.folder / "clips").iterdir())

    def read(self, clip: str) -> bytes:
        """One clip's bytes."""
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
        """A path, or from S3 what s3fs opens, whose blocks of 50 MiB, left as they are, would be whole films."""
        if not self.port:
            yield str(self.folder / "clips" / clip)
            return
        import s3fs

        with s3fs.S3FileSystem().open(f"{self.folder.name}/clips/{clip}", "rb", block_size=1 << 20) as file:
            yield file

    def link(self, clip: str) -> str:
        """A path, or a URL as S3's signed ones are."""
        return f"{self.http}/clips/{clip}" if self.port else str(self.folder / "clips" / clip)

    def sent(self) -> int:
        """Bytes that the server has sent so far; 0 without one."""
        if not self.port:
            return 0
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/sent", timeout=30) as answer:
            return int(answer.read())
