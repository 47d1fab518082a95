"""What the machine allows, measured in the same run: the physical limits that reports set figures beside.

Invariant: each rate is the best of three, in bytes a second, with buffers that are there already. Failure behaviour: a
file system that refuses O_DIRECT is written through the page cache and fsynced, and `Rate.why` says so.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 16 << 20


@dataclass(frozen=True)
class Rate:
    """Bytes a second, and how they were measured."""

    rate: float
    why: str


def copy_rate(size: int = 128 << 20) -> Rate:
    """Copying between two warm buffers, in one thread."""
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    views = memoryview(source), memoryview(target)
    best = _best(lambda: _copy(*views))
    for view in views:
        view.release()
    return Rate(size / best, "memcpy between warm buffers, one thread, same run")


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def write_rate(folder: Path, size: int = 256 << 20) -> Rate:
    """One thread of 16 MiB writes, past the page cache where the file system allows it, then fsync."""
    path, block = folder / "floor", mmap.mmap(-1, _BLOCK)
    block.write(os.urandom(1 << 20) * (_BLOCK >> 20))
    fd, how = _open(path, os.O_WRONLY | os.O_CREAT)
    try:
        best = _best(lambda: _write(fd, block, size))
    finally:
        os.close(fd)
        path.unlink()
    return Rate(size / best, f"one thread of 16 MiB writes ({how}) and fsync, same run")


def read_rate(folder: Path, size: int = 256 << 20) -> Rate:
    """One thread of 16 MiB reads of a file that is not in the page cache."""
    path, block = folder / "floor", mmap.mmap(-1, _BLOCK)
    with path.open("wb") as file:
        for _ in range(size // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    fd, how = _open(path, os.O_RDONLY)
    try:
        best = _best(lambda: _read(fd, block, size))
    finally:
        os.close(fd)
        path.unlink()
    return Rate(size / best, f"one thread of 16 MiB reads ({how}), same run")


def _open(path: Path, flags: int) -> tuple[int, str]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), "O_DIRECT"
    except OSError:
        return os.open(path, flags, 0o600), "through the page cache"


def _write(fd: int, block: mmap.mmap, size: int) -> None:
    for offset in range(0, size, _BLOCK):
        os.pwrite(fd, block, offset)
    os.fsync(fd)


def _read(fd: int, block: mmap.mmap, size: int) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    for offset in range(0, size, _BLOCK):
        os.preadv(fd, [block], offset)


def _best(action: Callable[[], object]) -> float:
    found = []
    for _ in range(3):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)
