"""Reads shards that are files of this machine, without a cache: the kernel has one.

Purpose: what a process reads of a local file stays in the page cache; a cache of our own in the same process would copy
it once more, and show it through mappings that count as this process's memory. So exactly the wanted bytes are read,
straight into the memory where they are wanted, and what was announced is named to the kernel.
Invariants: every read is a `preadv` and never a mapping, so that a file that becomes shorter is an error and no SIGBUS.
A thread's memory is used again when nothing refers to what it held; a view stays valid and unchanged for as long as it
is referenced. At most `ADVISED_BYTES` of an announcement are named to the kernel.
Failure behaviour: what cannot be read whole (truncated, a bad disk) is asked of the store, whose errors pass through;
objects that are no files of this machine are read by the `other` reader, which is made when the first one comes.
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

ADVISED_BYTES = 256 * limits.MIB
PIECES = 512
"""The most that one system call fills."""
SURE = 16
"""So many announced ranges in the page cache, one after the other, and only every `SURE`-th is looked at."""
_TOLD_BYTES = 64 * limits.MIB
_GAP = memoryview(bytearray(GAP_BYTES))  # whatever lies between members, from any thread
_READ = metrics.store_bytes.labels("posix", "read")

Pieces = Sequence[tuple[int, memoryview]]
Range = tuple[str, int, int]
Run = tuple[int, int, list[memoryview]]


class DirectReader:
    """A `ShardReader` of `store`'s files; what is none is left to `other`. Closing it closes that, and not the
    store."""

    def __init__(self, store: Store, other: Callable[[], ShardReader], clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._make, self._files = store, other, FdCache(clock)
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._other: ShardReader | None = None
        self._memory = ThreadBuffer()
        self._announced: Range | None = None  # the last of all that were looked at
        self._cached = 0  # announced ranges that were looked at, one after the other, and were there already
        self._passing = 0  # so many of the next ones are not looked at
        self._read = 0

    def read(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """A read-only view for every (offset, length) of the object `key`."""
        descriptor = self._opened(key)
        if descriptor is None:
            return self._fallback().read(key, ranges)
        pieces = self._memory.allocate_pieces(ranges)
        self._count(self._fill(key, descriptor, _runs(pieces), pieces))
        return [view.toreadonly() for _, view in pieces]

    def read_into(self, key: str, pieces: Pieces) -> None:
        """Fill every (offset, buffer) from the object `key`."""
        descriptor = self._opened(key)
        if descriptor is None:
            self._fallback().read_into(key, pieces)
        else:
            self._count(self._fill(key, descriptor, _runs(pieces), pieces))

    def read_each(self, reads: Sequence[Read]) -> Iterator[None]:
        """Fill the pieces of every (key, pieces), and yield after each. Where all of them lie is found out before the
        first is read: between what it copies, the processor then has little else to do, and keeps its caches for it."""
        prepared, failed = list[tuple[Descriptor | None, Sequence[Run], str, Pieces]](), None
        opened = dict[str, Descriptor | None]()
        for key, pieces in reads:
            try:
                if key not in opened:
                    opened[key] = self._opened(key)
                prepared.append((opened[key], _runs(pieces), key, pieces))
            except HeadraceError as error:  # raised when those before it are read
                failed = error
                break
        read = 0
        try:
            for descriptor, runs, key, pieces in prepared:
                if descriptor is None:
                    self._fallback().read_into(key, pieces)
                else:
                    read += self._fill(key, descriptor, runs, pieces)
                yield
        finally:
            self._count(read)
        if failed is not None:
            raise failed

    def announce(self, upcoming: Sequence[Range]) -> None:
        """Have the kernel read what it has not read yet. Lists that go on where the last one was cost what is new in
        them."""
        at = _behind(upcoming, self._announced)
        while at < len(upcoming):
            passed = min(self._passing, len(upcoming) - at)
            if not passed and not self._look(upcoming, at):
                break
            at, self._passing = at + max(1, passed), self._passing - passed
            self._announced = upcoming[at - 1]
        if self._other is not None:
            elsewhere = {key for key in {one[0] for one in upcoming} if not self._is_here(key)}
            self._other.announce([one for one in upcoming if one[0] in elsewhere])

    def close(self) -> None:
        """Let go of all descriptors; views stay valid."""
        self._files.clear()
        with self._lock:
            other, self._other = self._other, None
            read, self._read = self._read, 0
        _READ.inc(read)
        if other is not None:
            other.close()

    # files

    def _opened(self, key: str) -> Descriptor | None:
        """The object's file; None where it is none of this machine."""
        return self._files.get(self._store, key)

    def _fallback(self) -> ShardReader:
        with self._making:
            if self._other is None:
                self._other = self._make()
            return self._other

    # bytes

    def _fill(self, key: str, descriptor: Descriptor, runs: Sequence[Run], pieces: Pieces) -> int:
        """Read all of them; how many bytes came from the file."""
        size, fd = 0, descriptor.fileno()
        try:
            for start, length, buffers in runs:
                if (
                    os.preadv(fd, buffers, start) != length
                ):  # the file is shorter, or the kernel gave less than was asked for
                    raise EOFError
                size += length
        except (OSError, EOFError):
            self._files.forget(self._store, key)
            self._store.get_ranges_into(key, [(offset, buffer) for offset, buffer in pieces if len(buffer)])
            return 0
        return size

    def _count(self, size: int) -> None:
        """Tell the metrics, now and then."""
        with self._lock:
            self._read += size
            told, self._read = (self._read, 0) if self._read >= _TOLD_BYTES else (0, self._read)
        if told:
            _READ.inc(told)

    def _look(self, upcoming: Sequence[Range], at: int) -> bool:
        """Name a range to the kernel, unless it has it; False when that has to wait, since enough before it was
        named."""
        key, offset, length = upcoming[at]
        with contextlib.suppress(HeadraceError):  # a hint that cannot be followed; the read that comes will say why
            descriptor = self._opened(key)
            if descriptor is not None and not mostly_cached(descriptor.fileno(), offset, length):
                self._cached = 0
                if at and sum([one[2] for one in upcoming[: at + 1]]) > ADVISED_BYTES:
                    return False
                os.posix_fadvise(descriptor.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
                return True
        self._cached += 1
        self._passing = SURE - 1 if self._cached >= SURE else 0
        return True

    def _is_here(self, key: str) -> bool:
        """Whether it is a file of this machine, or one that nobody can open."""
        with contextlib.suppress(HeadraceError):
            return self._opened(key) is not None
        return True


_OFFSET = itemgetter(0)


def _behind(upcoming: Sequence[Range], last: Range | None) -> int:
    """Where in the list begins what comes behind the `last` range of another one."""
    for number in range(len(upcoming) - 1, -1, -1):
        if upcoming[number] == last:
            return number + 1
    return 0


def _runs(pieces: Pieces) -> list[Run]:
    """From where on how much to read, and what is filled by it: neighbours together, with what lies between them, in
    whatever order they are wanted."""
    runs: list[Run] = []  # plainly: `list[Run]()` asks a generic alias each time, and thousands a second pass here
    buffers: list[memoryview] = []
    start, at, end = 0, 0, -GAP_BYTES - 1
    for offset, buffer in pieces:
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
