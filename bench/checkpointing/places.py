"""What lies beneath a benchmark of checkpoints: bytes that were written, and what the page cache has of them.

Invariant: nothing here changes what was saved, but for `empty`, which comes before. Failure behaviour: a file that goes away
meanwhile is not counted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


def empty(where: str) -> None:
    """Remove what an earlier candidate left: what is written over an object of the same name would not be seen as written."""
    if where.startswith("s3://"):
        from headrace.dataio.store.open import open_store

        with open_store(where) as store:
            store.delete_many([info.key for info in store.list()])
    else:
        shutil.rmtree(where, ignore_errors=True)


def stored_bytes(where: str) -> int:
    """Of all objects or files."""
    if where.startswith("s3://"):
        from headrace.dataio.store.open import open_store

        with open_store(where) as store:
            return sum(info.size for info in store.list())
    return sum(size for _, size in _files(where))


def forget(where: str) -> None:
    """Take all files out of the page cache."""
    for path, _ in _files(where):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def recall(where: str) -> None:
    """Put all files into it."""
    buffer = bytearray(4 << 20)
    for path, _ in _files(where):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _files(where: str) -> Iterator[tuple[Path, int]]:
    for path in sorted(Path(where).rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                yield path, path.stat().st_size
