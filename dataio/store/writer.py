"""A file written from its beginning to its end: large ones by O_DIRECT, behind the back of whoever gives the parts.

Purpose: past the page cache a new file is written at the speed of the disk, twice that of the cache with the fsync that follows
anyway and at a tenth of its CPU, if the disk never waits: two runs of `_BLOCK` bytes are being written, by a thread each, while
the next is put together. A read-only part that lies in memory as the file needs it is written from where it is; the others are
gathered in a block, which costs a copy and makes parts of any size and alignment equally good.
Invariants: a read-only part keeps its bytes until the file is finished or closed, for which its giver answers; any other may be
changed when `write` has returned. Memory is three blocks at most, from `LEAST_BYTES` on; smaller files, and those on memory file
systems, are written as usual. When `finish` has returned the file holds all parts; it is not yet synced.
Failure behaviour: a file system that refuses O_DIRECT (EINVAL and its kind) is written to as usual; any other error of a
write is raised by a later `write` or by `finish`. `close` waits for the threads: nobody writes to `fd` afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

from headrace.dataio.store.contract import Buffer
from headrace.dataio.store.direct import ALIGN, LEAST_BYTES, REFUSALS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    _Block = npt.NDArray[np.uint8]

_BLOCK = 8 << 20
_IN_FLIGHT = 2
_STRAIGHT = 256 << 10
"""Less than this is gathered, wherever it lies."""
_TMPFS = 0x01021994


class FileWriter:
    """Writes the new file `fd`, which is used by nobody else meanwhile, and stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd, self._size = fd, 0
        self._head = bytearray()
        self._ahead: _Ahead | None = None
        self._large = False

    def write(self, data: Buffer) -> None:
        """Add `data` to the file's end."""
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._size += len(view)
        if not self._large and self._size < LEAST_BYTES:
            self._head += view
            return
        if not self._large:
            self._begin()
        if self._ahead is not None:
            self._ahead.add(view)
        else:
            write_all(self._fd, view)

    def finish(self) -> int:
        """The file's size, when everything was written."""
        if self._ahead is not None:
            self._ahead.finish()
        elif not self._large:
            write_all(self._fd, memoryview(self._head))
        return self._size

    def close(self) -> None:
        """Write no more."""
        if self._ahead is not None:
            self._ahead.close()

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
        self._ahead = _Ahead(self._fd)
        self._ahead.add(head)


class _Ahead:
    """The run that is being put together, of parts as they lie and of what was gathered in `_block`; and those being written.

    What is gathered since the last part that was not is `_block[_start:_end]`. In file and memory it begins with a page, as do
    all parts of a run.
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
        with contextlib.suppress(OSError):  # a file system that refuses at once
            fcntl.fcntl(fd, fcntl.F_SETFL, self._flags | os.O_DIRECT)
            self._direct = True

    def add(self, view: memoryview) -> None:
        while view:
            part = view[: _BLOCK - self._length]
            view = view[self._as_it_lies(part) or self._gathered(part) :]
            if self._length == _BLOCK:
                self._next()

    def finish(self) -> None:
        """Write the last run; less than a page, its end, can only go through the page cache, once nobody else writes."""
        tail, block = self._length % ALIGN, self._block
        self._length, self._end = self._length - tail, self._end - tail
        end = self._end
        self._next()
        self._leave(0)
        if tail and block is not None:
            self._give_up_direct()
            self._write([block[end : end + tail].data], self._offset, block)

    def close(self) -> None:
        self._pool.shutdown()

    def _as_it_lies(self, view: memoryview) -> int:
        """How much of `view` became a part of the run without a copy."""
        import numpy as np

        whole = len(view) - len(view) % ALIGN
        if not view.readonly or whole < _STRAIGHT or self._length % ALIGN:
            return 0
        if np.frombuffer(view, np.uint8).ctypes.data % ALIGN:
            return 0
        self._end_gathering()
        self._run.append(view[:whole])
        self._length += whole
        return whole

    def _gathered(self, view: memoryview) -> int:
        import numpy as np

        if self._block is None:
            self._block = self._free.pop() if self._free else np.frombuffer(mmap.mmap(-1, _BLOCK), np.uint8)
        np.copyto(self._block[self._end : self._end + len(view)], np.frombuffer(view, np.uint8))
        self._end, self._length = self._end + len(view), self._length + len(view)
        return len(view)

    def _end_gathering(self) -> None:
        if self._block is not None and self._end > self._start:
            self._run.append(self._block[self._start : self._end].data)
            self._start = self._end

    def _next(self) -> None:
        """Hand the run over, once there is room."""
        self._end_gathering()
        self._leave(_IN_FLIGHT - 1)
        self._writing.append(self._pool.submit(self._write, self._run, self._offset, self._block))
        self._offset, self._length = self._offset + self._length, 0
        self._run, self._block, self._start, self._end = [], None, 0, 0

    def _leave(self, most: int) -> None:
        """Wait until no more than this are being written."""
        while len(self._writing) > most:
            self._writing.popleft().result()

    def _write(self, run: list[memoryview], offset: int, block: _Block | None) -> None:
        while run:
            direct = self._direct
            try:
                done = os.pwritev(self._fd, run, offset)
            except OSError as error:
                if error.errno not in REFUSALS or not direct:
                    raise
                self._give_up_direct()
                continue
            offset, run = offset + done, _after(run, done)
        if block is not None:
            self._free.append(block)

    def _give_up_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags)
        self._direct = False  # second: whoever sees it writes as usual


def _after(run: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts when so many bytes are written."""
    for number, part in enumerate(run):
        if done < len(part):
            return [part[done:], *run[number + 1 :]]
        done -= len(part)
    return []


def write_all(fd: int, view: memoryview) -> None:
    """Write all of `view` at the file's position, as usual."""
    while view:
        view = view[os.write(fd, view) :]


def _in_memory(fd: int) -> bool:
    """Whether the file lies on a tmpfs, which has nothing but the page cache."""
    told = (ctypes.c_long * 32)()
    return ctypes.CDLL(None).fstatfs(fd, told) == 0 and told[0] == _TMPFS
