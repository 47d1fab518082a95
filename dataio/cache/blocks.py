"""The cache's disk: one sparse file per cached object, without a name.

Purpose: somewhere to put blocks that can be mapped, handed to another process and dropped at any moment.
Invariant: a file is unlinked as soon as it is open (but see `kept`), so its bytes live exactly as long as somebody holds a
descriptor or a mapping: dropping it never changes what a holder sees, and a killed process leaves nothing behind.
Descriptors handed out are read-only. No file is ever truncated or punched.
Failure behaviour: `OSError` (no space, directory gone) goes to the caller, who continues without the cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from pathlib import Path


class Descriptor:
    """An open file descriptor that closes when its last reference goes: safe to share between threads and messages."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


def fill(file: Descriptor, offset: int, into: memoryview) -> None:
    """Fill `into` with the cache file's bytes at `offset`; OSError when it ends before."""
    done = 0
    while done < len(into):
        got = os.preadv(file.fileno(), [into[done:]], offset + done)
        if not got:
            raise OSError(errno.EIO, "a cache file is shorter than it was")
        done += got


class BlockFile:
    """A sparse file of `size` bytes. `reader` is open read-only."""

    __slots__ = ("_writer", "reader", "size")

    def __init__(self, writer: Descriptor, reader: Descriptor, size: int) -> None:
        self._writer, self.reader, self.size = writer, reader, size

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`. By `pwrite` and not through a mapping: a full disk is then an error and no SIGBUS."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._writer.fileno(), data[done:], offset + done)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes at `offset`; OSError when the file ends before."""
        fill(self.reader, offset, into)

    def wrote(self, block: int, digest: int) -> None:
        """All bytes of the block are in the file, and this is their digest. A file without a name keeps no list of them."""

    def unlink(self) -> None:
        """Forget the file's name, if it has one."""


class BlockDirectory:
    """Where cache files are made. It may be a shared one such as /tmp: a file has a name for microseconds, mode 0400."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, size: int) -> BlockFile:
        """A new empty file of `size` bytes; nothing is allocated yet."""
        path = self.path / f"headrace-{secrets.token_hex(8)}.blocks"
        writer = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400))
        try:
            reader = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            os.ftruncate(writer.fileno(), size)
        finally:
            os.unlink(path)
        return BlockFile(writer, reader, size)


class MappedFile(mmap.mmap):
    """A read-only mapping of a cache file. Views keep it alive; `lease` goes with it."""

    lease: object = None


def map_file(fd: int, size: int, lease: object) -> MappedFile:
    """Map all `size` (> 0) bytes read-only; `lease` lives as long as the mapping or any view of it."""
    mapped = MappedFile(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    mapped.lease = lease
    return mapped
