"""Reads shards that are local files directly, without a cache.

Purpose: the kernel's page cache already holds local files. A second cache in this process would copy them again,
through mappings that count as this process's memory. So the reader copies exactly the requested bytes into the caller's
memory, and passes announced ranges to the kernel as read-ahead hints. A joined shard is read from the files that it
names, if all ranges are in local files.
Invariants: every read is a `preadv` and never a mapping, so a truncated file is an error and not a SIGBUS. A view stays
valid and unchanged while it is referenced; a thread's memory is reused afterwards. At most `ADVISED_BYTES` of an
announcement are passed to the kernel.
Failure behaviour: when the file cannot serve a read (truncated, bad disk), the store reads it, and its errors pass
through. The fallback reader, created on first use, reads objects that are not local files.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter

from headrace.dataio.cache.blocks import Descriptor, FdCache
from headrace.dataio.cache.readers.base import GAP_BYTES, Read, ShardReader, ThreadBuffer
from headrace.dataio.core import limits, metrics
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.store.base import Store
from headrace.dataio.store.direct_io import mostly_cached
from headrace.dataio.store.joined import SHARD_PREFIX
from headrace.dataio.store.mounts import all_local, locate

ADVISED_BYTES = 256 * limits.MIB
PIECES = 512
"""Maximum number of buffers per system call."""
MIN_SAMPLES = 16
"""After this many consecutive announced ranges in the page cache, only every `MIN_SAMPLES`-th is checked."""
_REPORT_BYTES = 64 * limits.MIB
_GAP = memoryview(bytearray(GAP_BYTES))  # receives the bytes between members; shared by all threads
_READ = metrics.store_bytes.labels("posix", "read")

Pieces = Sequence[tuple[int, memoryview]]
Range = tuple[str, int, int]
Run = tuple[int, int, list[memoryview]]


class DirectReader:
    """A `ShardReader` of `store`'s local files.

    It reads other objects through `fallback`. Closing it closes that reader, but not the store.

    Args:
        store: The store that holds the objects.
        fallback: A reader of objects that are not local files, or a function that creates one when it is needed.
        clock: The source of time.
        count: Called with the size of each direct read, in bytes.
    """

    def __init__(
        self,
        store: Store,
        fallback: ShardReader | Callable[[], ShardReader],
        clock: Clock = SYSTEM_CLOCK,
        *,
        count: Callable[[int], None] | None = None,
    ) -> None:
        self._store, self._files, self._count_read = store, FdCache(clock), count
        self._lock, self._fallback_lock = threading.Lock(), threading.Lock()
        self._make = fallback if callable(fallback) else None
        self._fallback_reader = None if callable(fallback) else fallback
        self._announced_elsewhere = False
        self._memory = ThreadBuffer()
        self._announced: Range | None = None  # the last range that was checked
        self._cached = 0  # consecutive announced ranges that were in the page cache
        self._num_unchecked = 0  # number of next ranges that are not checked
        self._read = 0

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        descriptor = self._descriptor_of(key)
        if descriptor is None:
            if key.startswith(SHARD_PREFIX) and self._is_local(key):
                pieces = self._memory.allocate_pieces(ranges)
                self._fill_joined(key, pieces)
                return [view.toreadonly() for _, view in pieces]
            return self._fallback().read(key, ranges)
        pieces = self._memory.allocate_pieces(ranges)
        self._count(self._fill(key, descriptor, _runs(pieces), pieces))
        return [view.toreadonly() for _, view in pieces]

    def read_into(self, key: str, pieces: Pieces) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        descriptor = self._descriptor_of(key)
        if descriptor is not None:
            self._count(self._fill(key, descriptor, _runs(pieces), pieces))
        elif key.startswith(SHARD_PREFIX) and self._is_local(key):
            self._fill_joined(key, pieces)
        else:
            self._fallback().read_into(key, pieces)

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each.

        All files and offsets are resolved before the first read. So no other work runs between the copies, which keeps the
        processor's caches warm.
        """
        prepared, deferred_error = list[tuple[Descriptor | None, Sequence[Run], str, Pieces]](), None
        opened = dict[str, Descriptor | None]()
        for key, pieces in reads:
            try:
                if key not in opened:
                    opened[key] = self._descriptor_of(key)
                prepared.append((opened[key], _runs(pieces), key, pieces))
            except HeadraceError as error:  # raised after the reads before it
                deferred_error = error
                break
        read = 0
        try:
            for descriptor, runs, key, pieces in prepared:
                if descriptor is None:
                    self.read_into(key, pieces)
                else:
                    read += self._fill(key, descriptor, runs, pieces)
                yield
        finally:
            self._count(read)
        if deferred_error is not None:
            raise deferred_error

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Ask the kernel to read ahead. A list that continues the last one costs only its new part."""
        at = _index_after(upcoming, self._announced)
        while at < len(upcoming):
            passed = min(self._num_unchecked, len(upcoming) - at)
            if not passed and not self._advise(upcoming, at):
                break
            at, self._num_unchecked = at + max(1, passed), self._num_unchecked - passed
            self._announced = upcoming[at - 1]
        if self._fallback_reader is not None:
            not_local = {key for key in {key for key, _, _ in upcoming} if not self._is_local(key)}
            if not_local or self._announced_elsewhere:
                self._fallback_reader.announce([planned for planned in upcoming if planned[0] in not_local])
                self._announced_elsewhere = bool(not_local)

    def close(self) -> None:
        """Close all descriptors; views stay valid."""
        self._files.clear()
        with self._lock:
            fallback = self._fallback_reader
            self._fallback_reader = None if self._make is not None else fallback
            read, self._read = self._read, 0
        _READ.inc(read)
        if fallback is not None:
            fallback.close()

    # files

    def _descriptor_of(self, key: str) -> Descriptor | None:
        """The object's descriptor; None if it is not a local file."""
        return self._files.get(self._store, key)

    def _fallback(self) -> ShardReader:
        with self._fallback_lock:
            if self._fallback_reader is None:
                assert self._make is not None
                self._fallback_reader = self._make()
            return self._fallback_reader

    # bytes

    def _fill(self, key: str, descriptor: Descriptor, runs: Sequence[Run], pieces: Pieces) -> int:
        """Fill all pieces; returns the bytes read from the file."""
        size, fd = 0, descriptor.fileno()
        try:
            for start, length, buffers in runs:
                # the file may be shorter, or the kernel may return less than requested
                if os.preadv(fd, buffers, start) != length:
                    raise EOFError
                size += length
        except (OSError, EOFError):
            self._files.forget(self._store, key)
            self._store.get_ranges_into(key, [(offset, buffer) for offset, buffer in pieces if len(buffer)])
            return 0
        return size

    def _fill_joined(self, key: str, pieces: Pieces) -> None:
        """Fill all pieces from the local files of a joined shard."""
        by_file = dict[str, list[tuple[int, memoryview]]]()
        for offset, buffer in pieces:
            if not buffer:
                continue
            file, at = locate(self._store, key, offset)
            by_file.setdefault(file, []).append((at, buffer))
        for file, parts in by_file.items():
            descriptor = self._descriptor_of(file)
            if descriptor is None:  # the file was replaced by another kind of object
                self._store.get_ranges_into(file, parts)
            else:
                self._count(self._fill(file, descriptor, _runs(parts), parts))

    def _count(self, size: int) -> None:
        """Count bytes, and pass them to the metrics in batches."""
        with self._lock:
            self._read += size
            to_report, self._read = (self._read, 0) if self._read >= _REPORT_BYTES else (0, self._read)
        if to_report:
            _READ.inc(to_report)
        if self._count_read is not None:
            self._count_read(size)

    def _advise(self, upcoming: Sequence[Range], at: int) -> bool:
        """Ask the kernel to read a range ahead if it is not cached; returns False if enough is read ahead already."""
        key, offset, length = upcoming[at]
        if not length:  # it bounds a file
            return True
        with contextlib.suppress(HeadraceError):  # a hint: the read reports the error
            key, offset = locate(self._store, key, offset)
            descriptor = self._descriptor_of(key)
            if descriptor is not None and not mostly_cached(descriptor.fileno(), offset, length):
                self._cached = 0
                if at and sum([size for _, _, size in upcoming[: at + 1]]) > ADVISED_BYTES:
                    return False
                os.posix_fadvise(descriptor.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
                return True
        self._cached += 1
        self._num_unchecked = MIN_SAMPLES - 1 if self._cached >= MIN_SAMPLES else 0
        return True

    def _is_local(self, key: str) -> bool:
        """Whether the object is a local file, or cannot be opened."""
        with contextlib.suppress(HeadraceError):
            if key.startswith(SHARD_PREFIX):
                return all_local(self._store, key)
            return self._descriptor_of(key) is not None
        return True


_OFFSET = itemgetter(0)


def _index_after(upcoming: Sequence[Range], last: Range | None) -> int:
    """The index after `last`, the last range of the previous list; 0 if `upcoming` does not contain it."""
    for number in range(len(upcoming) - 1, -1, -1):
        if upcoming[number] == last:
            return number + 1
    return 0


def _runs(pieces: Pieces) -> list[Run]:
    """Group pieces, in any order, into (start, length, buffers) reads.

    Neighbours are read together, with the gaps between them.
    """
    runs: list[Run] = []  # not `list[Run]()`, which is slower: this runs thousands of times a second
    buffers: list[memoryview] = []
    start, at, end = 0, 0, -GAP_BYTES - 1
    for offset, buffer in pieces:
        if not len(buffer):
            continue
        gap = offset - end
        if 0 <= gap <= GAP_BYTES and len(buffers) < PIECES:
            if gap:
                buffers.append(_GAP[:gap])
        elif offset < at:
            return _runs(sorted(pieces, key=_OFFSET))
        else:
            if buffers:
                runs.append((start, end - start, buffers))
            start, buffers = offset, []
        buffers.append(buffer)
        at, end = offset, offset + len(buffer)
    if buffers:
        runs.append((start, end - start, buffers))
    return runs
