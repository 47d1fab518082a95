"""Direct I/O (O_DIRECT): large reads into the caller's buffer, and large writes of a new file, past the page cache.

Purpose: a shard that is read once and cached elsewhere should not displace other data from the page cache. A direct
read also needs only about a quarter of the CPU. It does not help data that is read again soon, so callers must ask for
it. A range that is already in the page cache is read from there, which is faster still. A direct write of a new file
has the disk's speed. This is twice the speed of a write through the page cache with an fsync, at a tenth of its CPU.

Invariants:

* Only ranges and files of at least `LEAST_BYTES` use O_DIRECT. Everything else, and everything where the file system or
  device refuses, uses ordinary reads and writes. The bytes are the same either way.
* A buffer that does not have the file's alignment (a tensor never has it) is filled through an aligned buffer of
  `_BOUNCE_BYTES`, one per thread. Ranges with a gap below `_GAP` between them are filled by one read.
* `FileWriter` writes two runs of `_BLOCK` bytes in threads while it collects the next one. A read-only part with the
  file's alignment is written from its own memory, and must not change until the file is finished or closed. Other parts
  are copied into a block, and may change once `write` returns. Memory is three blocks at most.
* After `finish` the file holds all parts, but is not yet synced. `close` waits for the threads: nothing writes to `fd`
  afterwards.

Failure behaviour: if the file system refuses O_DIRECT (EINVAL and similar), ordinary reads and writes are used. A later
`write` or `finish` raises the error of a background write. Every other error is raised by the call that failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.dataio.store.base import Buffer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Block = npt.NDArray[np.uint8]

ALIGN = 4096
"""An alignment that every common file system and device accepts."""
LEAST_BYTES = 1 << 20
_BOUNCE_BYTES = 4 << 20
_GAP = 64 << 10
"""Ranges with at most this gap between them are filled by one read."""
REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""The errors by which file systems and devices refuse O_DIRECT."""
_CACHESTAT = 451
"""The system call's number, the same on every architecture; since Linux 6.5."""
_BLOCK = 8 << 20
_IN_FLIGHT = 2
_ALWAYS_COPIED = 256 << 10
"""Smaller parts are always copied."""
_TMPFS = 0x01021994
Part = tuple[int, memoryview]
"""An offset in the file, and the writable, flat memory to fill from there."""


def aligned_part(offset: int, address: int, length: int) -> tuple[int, int]:
    """Return the part [start, stop) of a buffer at memory `address` that O_DIRECT can fill from file `offset`."""
    start = -offset % ALIGN
    if (address + start) % ALIGN:
        return 0, 0
    stop = length - (offset + length) % ALIGN
    return (start, stop) if stop - start >= LEAST_BYTES else (0, 0)


def fill_directly(fd: int, offset: int, buffer: memoryview) -> tuple[int, int]:
    """Fill as much of `buffer` (writable, flat) as possible from file `offset`; return the filled [start, stop).

    No other thread may use `fd` meanwhile, because its flags change for the time of the call.
    """
    if len(buffer) < LEAST_BYTES or mostly_cached(fd, offset, len(buffer)):
        return 0, 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start, stop = aligned_part(offset, address, len(buffer))
    if start == stop:
        return 0, _with_o_direct(fd, lambda: _fill_through_buffer(fd, offset, address, len(buffer)))
    return start, start + _with_o_direct(fd, lambda: _fill_in_place(fd, offset + start, buffer[start:stop]))


def fill_together(fd: int, ranges: Iterable[Part]) -> list[Part]:
    """Fill several ranges of any size, as `fill_directly` does. Returns the parts that are still to be filled."""
    return [part for piece in pieces(ranges) for part in _fill_piece(fd, piece)]


def pieces(ranges: Iterable[Part]) -> Iterator[list[Part]]:
    """Group the ranges into pieces without large gaps. One aligned read of `_BOUNCE_BYTES` covers each piece."""
    piece: list[Part] = []
    start = end = 0
    for offset, buffer in ranges:
        done = 0
        while done < len(buffer):
            at = offset + done
            if piece and not (end <= at <= end + _GAP and at < start + _BOUNCE_BYTES):
                yield piece
                piece = []
            if not piece:
                start = at - at % ALIGN
            part = buffer[done : done + start + _BOUNCE_BYTES - at]
            piece.append((at, part))
            done += len(part)
            end = at + len(part)
    if piece:
        yield piece


def _fill_piece(fd: int, piece: list[Part]) -> list[Part]:
    """Fill a piece by one read; return the parts that are still to be filled."""
    (start, head), (tail_offset, tail) = piece[0], piece[-1]
    stop = tail_offset + len(tail)
    if len(piece) == 1:
        begin, end = fill_directly(fd, start, head)
        return [(start + at, part) for at, part in ((0, head[:begin]), (end, head[end:])) if part]
    if stop - start < LEAST_BYTES or mostly_cached(fd, start, stop - start):
        return piece
    bounce, base = _bounce, start - start % ALIGN
    target = memoryview(bounce.bytes)[: -(-(stop - base) // ALIGN) * ALIGN]
    if _with_o_direct(fd, lambda: os.preadv(fd, [target], base)) < stop - base:
        return piece  # refused, or the file became shorter: the ordinary read reports it
    for offset, part in piece:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(part)), bounce.address + offset - base, len(part))
    return []


def mostly_cached(fd: int, offset: int, length: int) -> bool:
    """Whether most of the range is in the page cache; False where the kernel cannot tell."""
    byte_range, counts = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    if _cachestat()(_CACHESTAT, fd, byte_range, counts, 0):
        return False
    return int(counts[0]) * mmap.PAGESIZE * 2 > length


@cache
def _cachestat() -> Callable[..., int]:
    call: Callable[..., int] = ctypes.CDLL(None).syscall
    return call


def _with_o_direct(fd: int, read: Callable[[], int]) -> int:
    """Call `read` with O_DIRECT set, and return how many bytes it filled; 0 if the file system refuses O_DIRECT."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        return read()
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return 0  # the ordinary read fills it all again
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def _fill_in_place(fd: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        n = os.preadv(fd, [buffer[done:]], offset + done)
        done += n
        if n % ALIGN or not n:  # the file became shorter: the ordinary read reports it
            break
    return done


class _Bounce(threading.local):
    """One aligned buffer per thread, allocated on first use. With huge pages, a device reads more in one request."""

    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, _BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self.bytes.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


_bounce = _Bounce()


def _fill_through_buffer(fd: int, offset: int, address: int, length: int) -> int:
    """Fill unaligned memory from any offset, through the bounce buffer."""
    bounce, done = _bounce, 0
    view = memoryview(bounce.bytes)
    while done < length:
        skip = (offset + done) % ALIGN
        size = min(length - done, _BOUNCE_BYTES - skip)
        n = os.preadv(fd, [view[: -(-(skip + size) // ALIGN) * ALIGN]], offset + done - skip)
        filled = min(n - skip, size)
        if filled <= 0:
            break
        ctypes.memmove(address + done, bounce.address + skip, filled)  # releases the GIL
        done += filled
        if filled < size:
            break
    return done


class FileWriter:
    """Writes the new file `fd` from its beginning to its end. No other thread may use `fd`; the caller closes it."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size = fd, 0
        self._head = bytearray()
        self._background: _BackgroundWriter | None = None
        self._large = False

    def write(self, data: Buffer) -> None:
        """Append `data`."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._size += len(view)
        if not self._large and self._size < LEAST_BYTES:
            self._head += view
            return
        if not self._large:
            self._begin()
        if self._background is not None:
            self._background.add(view)
        else:
            write_all(self._fd, view)

    def finish(self) -> int:
        """Wait until everything is written, and return the file's size."""
        if self._background is not None:
            self._background.finish()
        elif not self._large:
            write_all(self._fd, memoryview(self._head))
        return self._size

    def close(self) -> None:
        """Stop writing, and wait for the threads."""
        if self._background is not None:
            self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _begin(self) -> None:
        self._large, head = True, memoryview(bytes(self._head))
        self._head.clear()
        if _in_memory(self._fd):
            write_all(self._fd, head)
            return
        self._background = _BackgroundWriter(self._fd)
        self._background.add(head)


def _new_block() -> mmap.mmap:
    """Return memory for `_BLOCK` bytes, if possible in huge pages: the kernel clears them in a tenth of the time."""
    memory = mmap.mmap(-1, _BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel may be built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _BackgroundWriter:
    """Writes runs of up to `_BLOCK` bytes in the background.

    The current run consists of parts that are written from their own memory, and of bytes copied into `_block`.
    `_block[_start:_end]` was copied after the last part of the first kind. All parts of a run begin at a page boundary,
    in the file and in memory.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._offset, self._length = fd, 0, 0
        self._run: list[memoryview] = []
        self._block: _Block | None = None
        self._start = self._end = 0
        self._free: list[_Block] = []
        self._pool = ThreadPoolExecutor(_IN_FLIGHT, thread_name_prefix="headrace-write")
        self._writing: deque[Future[None]] = deque()
        self._flags, self._direct = fcntl.fcntl(fd, fcntl.F_GETFL), False
        with contextlib.suppress(OSError):  # some file systems refuse the flag itself
            fcntl.fcntl(fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)
            self._direct = True

    def add(self, view: memoryview) -> None:
        while view:
            part = view[: _BLOCK - self._length]
            view = view[self._add_in_place(part) or self._copy_in(part) :]
            if self._length == _BLOCK:
                self._submit()

    def finish(self) -> None:
        """Write the last run. Its incomplete last page goes through the page cache, after the threads have finished."""
        tail, block = self._length % ALIGN, self._block
        self._length, self._end = self._length - tail, self._end - tail
        end = self._end
        self._submit()
        self._wait_for(0)
        if tail and block is not None:
            self._give_up_direct()
            self._write([block[end : end + tail].data], self._offset, block)

    def close(self) -> None:
        self._pool.shutdown()

    def _add_in_place(self, view: memoryview) -> int:
        """Add the aligned part of `view` to the run without a copy. Returns its length; 0 if it must be copied."""
        import numpy as np

        aligned = len(view) - len(view) % ALIGN
        if not view.readonly or aligned < _ALWAYS_COPIED or self._length % ALIGN:
            return 0
        if np.frombuffer(view, np.uint8).ctypes.data % ALIGN:
            return 0
        self._end_copy()
        self._run.append(view[:aligned])
        self._length += aligned
        return aligned

    def _copy_in(self, view: memoryview) -> int:
        import numpy as np

        if self._block is None:
            self._block = self._free.pop() if self._free else np.frombuffer(_new_block(), np.uint8)
        np.copyto(self._block[self._end : self._end + len(view)], np.frombuffer(view, np.uint8))
        self._end, self._length = self._end + len(view), self._length + len(view)
        return len(view)

    def _end_copy(self) -> None:
        if self._block is not None and self._end > self._start:
            self._run.append(self._block[self._start : self._end].data)
            self._start = self._end

    def _submit(self) -> None:
        """Submit the run for writing, once fewer than `_IN_FLIGHT` are in flight."""
        self._end_copy()
        self._wait_for(_IN_FLIGHT - 1)
        self._writing.append(self._pool.submit(self._write, self._run, self._offset, self._block))
        self._offset, self._length = self._offset + self._length, 0
        self._run, self._block, self._start, self._end = [], None, 0, 0

    def _wait_for(self, most: int) -> None:
        """Wait until at most `most` runs are in flight."""
        while len(self._writing) > most:
            self._writing.popleft().result()

    def _write(self, run: list[memoryview], offset: int, block: _Block | None) -> None:
        while run:
            direct = self._direct
            try:
                written = os.pwritev(self._fd, run, offset)
            except OSError as error:
                if error.errno not in REFUSALS or not direct:
                    raise
                self._give_up_direct()
                continue
            offset, run = offset + written, _unwritten_parts(run, written)
        if block is not None:
            self._free.append(block)

    def _give_up_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
        self._direct = False  # set after the flag, so that a thread that reads False writes without O_DIRECT


def _unwritten_parts(run: list[memoryview], written: int) -> list[memoryview]:
    """The parts that remain after `done` bytes were written."""
    for number, part in enumerate(run):
        if written < len(part):
            return [part[written:], *run[number + 1 :]]
        written -= len(part)
    return []


def write_all(fd: int, view: memoryview) -> None:
    """Write all of `view` at the file's position, through the page cache."""
    while view:
        view = view[os.write(fd, view) :]


def _in_memory(fd: int) -> bool:
    """Whether the file is on a tmpfs. Its files are in the page cache anyway."""
    fields = (ctypes.c_long * 32)()
    return ctypes.CDLL(None).fstatfs(fd, fields) == 0 and fields[0] == _TMPFS
