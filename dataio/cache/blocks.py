"""Cache files, the descriptors that refer to them, and the buffers that blocks pass through.

Purpose: cache files can be mapped, passed to another process, and dropped at any moment.
Invariants: an unnamed cache file is unlinked as soon as it is open. So its bytes exist exactly as long as a descriptor
or a mapping of it exists, and a killed process leaves no such files. It costs one descriptor while the cache has it.
(`disks` describes files with a name, which cost none.) Dropping a file never changes the bytes that a holder sees.
Descriptors that other processes get are read-only. No file is ever truncated, and no holes are punched into it.
`DescriptorPool` keeps at most `limit` descriptors, `FdCache` at most `FILES`, and `Buffers` at most `count` buffers.
Failure behaviour: `OSError` (no space, no directory) goes to the caller, which continues without the cache. A store's
errors pass through. When the process has too many open files, `DescriptorPool` and `FdCache` close their own first.
"""

from __future__ import annotations

import abc
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
        count = os.preadv(file.fileno(), [into[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, "a cache file was truncated")
        done += count


NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Error numbers of a process or a machine that has too many open files."""


class DescriptorPool:
    """The most recently used descriptors of cache files, at most `limit`. Safe to share between threads.

    A file is opened when its descriptor is needed. A descriptor that leaves the pool closes when its last user is done.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._open: OrderedDict[tuple[BlockFile, int], Descriptor] = OrderedDict()

    def get(self, file: BlockFile, path: str, flags: int) -> Descriptor:
        """The file's descriptor with these flags; `OSError` if `path` cannot be opened."""
        with self._lock:
            descriptor = self._open.get((file, flags))
            if descriptor is not None:
                self._open.move_to_end((file, flags))
                return descriptor
        descriptor = self._open_file(path, flags)
        oldest = None
        with self._lock:
            if not file.dropped:
                self._open[file, flags] = descriptor
                oldest = self._open.popitem(last=False) if len(self._open) > self._limit else None
        del oldest  # closed outside the lock
        return descriptor

    def drop(self, file: BlockFile, *flags: int) -> None:
        """Forget the file's descriptors with these flags, and keep none of it from now on."""
        with self._lock:
            file.dropped = True
            dropped = [self._open.pop((file, flag), None) for flag in flags]
        del dropped

    def clear(self) -> None:
        """Forget all descriptors."""
        with self._lock:
            dropped, self._open = self._open, OrderedDict()
        del dropped

    def __len__(self) -> int:
        return len(self._open)

    def _open_file(self, path: str, flags: int) -> Descriptor:
        try:
            return Descriptor(os.open(path, flags | os.O_CLOEXEC))
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
        self.clear()
        return Descriptor(os.open(path, flags | os.O_CLOEXEC))


class BlockFile(abc.ABC):
    """A sparse file of `size` bytes. `dropped`: the cache has no use for it any more."""

    __slots__ = ("_pool", "dropped", "size")

    def __init__(self, pool: DescriptorPool, size: int) -> None:
        self._pool, self.size, self.dropped = pool, size, False

    @abc.abstractmethod
    def reader(self) -> Descriptor:
        """A read-only descriptor; `OSError` if the file cannot be opened."""

    @abc.abstractmethod
    def writer(self) -> Descriptor:
        """A descriptor for writing; `OSError` if the file cannot be opened."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`.

        It uses `pwrite`, because with a mapping a full disk would cause SIGBUS instead of an error.
        """
        writer, done = self.writer(), 0
        while done < len(data):
            done += os.pwrite(writer.fileno(), data[done:], offset + done)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes at `offset`; `OSError` when the file is too short."""
        fill(self.reader(), offset, into)

    @abc.abstractmethod
    def wrote(self, block: int, digest: int) -> None:
        """Record that the whole block, with this digest, is in the file. A file without a name records nothing."""

    @abc.abstractmethod
    def unlink(self) -> None:
        """Remove the file's name, if it has one. Bytes that a holder sees stay."""


class UnnamedFile(BlockFile):
    """A file that exists as long as a descriptor or a mapping of it does."""

    __slots__ = ("_writer",)

    def __init__(self, pool: DescriptorPool, writer: Descriptor, size: int) -> None:
        super().__init__(pool, size)
        self._writer = writer

    def reader(self) -> Descriptor:
        return self._pool.get(self, f"/proc/self/fd/{self._writer.fileno()}", os.O_RDONLY)

    def writer(self) -> Descriptor:
        return self._writer

    def wrote(self, block: int, digest: int) -> None:
        pass

    def unlink(self) -> None:
        self._pool.drop(self, os.O_RDONLY)


class BlockDirectory:
    """A directory for unnamed cache files.

    Other users may share it, as they share /tmp: a file has a name for microseconds only, with mode 0400.
    """

    def __init__(self, path: Path, pool: DescriptorPool) -> None:
        self.path, self._pool = path, pool

    def create(self, size: int) -> BlockFile:
        """A new empty file of `size` bytes; nothing is allocated yet."""
        path = self.path / f"headrace-{secrets.token_hex(8)}.blocks"
        writer = Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400))
        try:
            os.ftruncate(writer.fileno(), size)
        finally:
            os.unlink(path)
        return UnnamedFile(self._pool, writer, size)


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
        self._lock, self._available = threading.Lock(), threading.Semaphore(count)
        self._free: list[tuple[memoryview, float]] = []  # with the time of last use, latest last

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """A buffer for the duration of the `with` block. Its contents are undefined."""
        with self._available:
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
        cutoff = self._clock.monotonic() - IDLE_SECONDS
        with self._lock:
            self._free = [(buffer, used) for buffer, used in self._free if used > cutoff]
            return len(self._free)


class Lease:
    """A hold on a file that holds the requested ranges: while the lease exists, the file counts as held.

    `present` are the runs (first, end) of present bytes. `once`: it is a ring file, whose mapping need not be kept.
    The lease keeps a read-only descriptor open until `take_descriptor`.
    """

    __slots__ = ("_descriptor", "_ended", "file", "once", "present", "size")

    def __init__(
        self,
        file: int,
        descriptor: Descriptor,
        size: int,
        *,
        present: list[tuple[int, int]],
        ended: deque[int],
        once: bool = False,
    ) -> None:
        self.file, self.size, self.present, self.once = file, size, present, once
        self._descriptor: Descriptor | None = descriptor
        self._ended = ended

    def take_descriptor(self) -> Descriptor:
        """Pass the descriptor to the caller. The hold continues without it; call this once."""
        descriptor, self._descriptor = self._descriptor, None
        assert descriptor is not None
        return descriptor

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
            previous = self._files.pop((store, key), None)
            self._files[store, key] = file
            oldest = self._files.popitem(last=False) if len(self._files) > FILES else None
        del previous, oldest  # closed outside the lock, after the last read
        return file.descriptor
