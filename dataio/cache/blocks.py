"""Cache files, the descriptors that refer to them, and the buffers that blocks pass through.

Purpose: cache files can be mapped, passed to another process, and dropped at any moment.
Invariants: an unnamed cache file is unlinked as soon as it is open. So its bytes exist exactly as long as a descriptor
or a mapping of it exists, and a killed process leaves no such files. (`disks` describes files with a name.) Dropping a
file never changes the bytes that a holder sees. Descriptors that other processes get are read-only. No file is ever
truncated, and no holes are punched into it. `FdCache` keeps at most `FILES` descriptors, and `Buffers` at most `count`
buffers.
Failure behaviour: `OSError` (no space, no directory) goes to the caller, which continues without the cache. A store's
errors pass through. When the process has too many open files, `FdCache` closes its own first.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CapacityError
from headrace.dataio.store.base import Store


class Descriptor:
    """An open file descriptor. It closes when the last reference is deleted, so threads and messages can share it."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        os.close(self._fd)


def fill(file: Descriptor, offset: int, into: memoryview) -> None:
    """Fill `into` with the cache file's bytes at `offset`; `OSError` when the file is too short."""
    done = 0
    while done < len(into):
        got = os.preadv(file.fileno(), [into[done:]], offset + done)
        if not got:
            raise OSError(errno.EIO, "a cache file was truncated")
        done += got


class BlockFile:
    """A sparse file of `size` bytes. `reader` is a read-only descriptor."""

    __slots__ = ("_writer", "reader", "size")

    def __init__(self, writer: Descriptor, reader: Descriptor, size: int) -> None:
        self._writer, self.reader, self.size = writer, reader, size

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`.

        It uses `pwrite`, because with a mapping a full disk would cause SIGBUS instead of an error.
        """
        done = 0
        while done < len(data):
            done += os.pwrite(self._writer.fileno(), data[done:], offset + done)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes at `offset`; `OSError` when the file is too short."""
        fill(self.reader, offset, into)

    def wrote(self, block: int, digest: int) -> None:
        """Record that the whole block, with this digest, is in the file. A file without a name records nothing."""

    def unlink(self) -> None:
        """Remove the file's name, if it has one."""


class BlockDirectory:
    """A directory for unnamed cache files.

    Other users may share it, as they share /tmp: a file has a name for microseconds only, with mode 0400.
    """

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
    """A read-only mapping of a cache file. Views keep it alive, and it keeps `lease` alive."""

    lease: object = None


def map_file(fd: int, size: int, lease: object) -> MappedFile:
    """Map all `size` (> 0) bytes read-only; `lease` lives as long as the mapping or any view of it."""
    mapped = MappedFile(fd, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    mapped.lease = lease
    return mapped


IDLE_SECONDS = 5.0


class Buffers:
    """At most `count` buffers of `size` bytes. Safe to share between threads.

    The buffer that was used last is used next, because its memory is still in the processor's caches. This takes less
    than half the processor time of using sixteen buffers in turn.
    """

    def __init__(self, size: int, count: int, clock: Clock) -> None:
        self._size, self._clock = size, clock
        self._lock, self._left = threading.Lock(), threading.Semaphore(count)
        self._free: list[tuple[memoryview, float]] = []  # with the time of last use, latest last

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """A buffer for the duration of the `with` block. Its contents are undefined."""
        with self._left:
            with self._lock:
                buffer = self._free.pop()[0] if self._free else None
            if buffer is None:
                buffer = memoryview(mmap.mmap(-1, self._size))  # not a bytearray: malloc would keep its memory
            try:
                yield buffer
            finally:
                with self._lock:
                    self._free.append((buffer, self._clock.monotonic()))

    def trim(self) -> int:
        """Free buffers that were idle for `IDLE_SECONDS`; returns how many are left."""
        oldest = self._clock.monotonic() - IDLE_SECONDS
        with self._lock:
            self._free = [(buffer, used) for buffer, used in self._free if used > oldest]
            return len(self._free)


class Lease:
    """A hold on a file that holds the requested ranges: while the lease exists, the file counts as held.

    `present` are the runs (first, end) of present bytes. `once`: it is a ring file, whose mapping need not be kept.
    """

    __slots__ = ("_ended", "descriptor", "file", "once", "present", "size")

    def __init__(
        self, file: int, opened: BlockFile, *, present: list[tuple[int, int]], ended: deque[int], once: bool = False
    ) -> None:
        self.file, self.size, self.present, self.once = file, opened.size, present, once
        self.descriptor: Descriptor = opened.reader
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self.file)  # may run in any thread, under any lock, so the engine handles it later


FILES = 128
TRUSTED_SECONDS = 30.0


class _File:
    """An entry of `FdCache`. `descriptor` is None if the object is not a local file."""

    __slots__ = ("descriptor", "since")

    def __init__(self, descriptor: Descriptor | None, since: float) -> None:
        self.descriptor, self.since = descriptor, since


class FdCache:
    """The most recently used descriptors of local files, of any store. An entry is used for `TRUSTED_SECONDS`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._files: OrderedDict[tuple[Store, str], _File] = OrderedDict()

    def get(self, store: Store, key: str) -> Descriptor | None:
        """The object's descriptor; None if it is not a local file."""
        now = self._clock.monotonic()
        with self._lock:
            file = self._files.get((store, key))
            if file is not None and now - file.since < TRUSTED_SECONDS:
                self._files.move_to_end((store, key))
                return file.descriptor
        return self._open(store, key, now)

    def forget(self, store: Store, key: str) -> None:
        """Reopen the file at the next `get`."""
        with self._lock:
            dropped = self._files.pop((store, key), None)
        del dropped

    def clear(self) -> None:
        """Close all."""
        with self._lock:
            dropped, self._files = self._files, OrderedDict()
        del dropped

    def _open(self, store: Store, key: str, now: float) -> Descriptor | None:
        try:
            fd = store.open_file(key)
        except CapacityError:  # too many open files; some of them may be this cache's
            self.clear()
            fd = store.open_file(key)
        file = _File(None if fd is None else Descriptor(fd), now)
        with self._lock:
            before = self._files.pop((store, key), None)
            self._files[store, key] = file
            oldest = self._files.popitem(last=False) if len(self._files) > FILES else None
        del before, oldest  # closed outside the lock, after the last read
        return file.descriptor
