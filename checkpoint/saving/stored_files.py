"""Large files that are saved with a state, without being in memory.

`copy_of` copies a file into a file without a name, so that later changes of the file change nothing. The space is free
again when the copy is dropped, also if the process dies. `WithFiles` shows the bytes of a staged state, followed by such
copies, to the worker.
Invariant: one piece of a copy is in memory at a time, for each piece that the worker holds.
Failure behaviour: `CapacityError` if no disk has space for the copy. `CorruptionError` if a copy cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from headrace.dataio.core.errors import CapacityError, CorruptionError
from headrace.dataio.core.limits import MIB, format_bytes

_COPY_BYTES = 8 * MIB
_UNSUPPORTED = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class StoredFile:
    """A copy of a file. It has no name, and ends with this object. `nbytes`: its size."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd, self.nbytes = fd, nbytes
        weakref.finalize(self, os.close, fd)

    def read_into(self, at: int, view: memoryview) -> None:
        """Fill `view` with the bytes from byte `at`."""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], at + done)
            except OSError as error:
                raise CorruptionError(
                    f"the copy of a file cannot be read: {error.strerror}", hint="save again"
                ) from None
            if not count:
                raise CorruptionError(f"the copy of a file ends at byte {at + done}", hint="save again")
            done += count


def copy_of(source: int, size: int, folder: str) -> StoredFile:
    """Copy `size` bytes of an open file, next to it in `folder` if possible, otherwise into the temporary folder.

    File systems that can share blocks copy nothing. If the file has become shorter, so is the copy.
    """
    failed = OSError()
    for place in (folder or ".", tempfile.gettempdir()):
        with contextlib.ExitStack() as undo:
            try:
                with tempfile.TemporaryFile(dir=place, buffering=0) as unnamed:
                    target = os.dup(unnamed.fileno())
                undo.callback(os.close, target)
                length = _copy(source, target, size)
            except OSError as error:
                failed = error
                continue
            undo.pop_all()
            return StoredFile(target, length)
    raise CapacityError(
        f"a file of {format_bytes(size)} cannot be copied: {failed.strerror}",
        hint="free space next to it, or set TMPDIR to a folder on a disk with space",
    )


def _copy(source: int, target: int, size: int) -> int:
    """Copy the data of a file, but not its holes. Returns the size, which is less if the file became shorter."""
    os.truncate(target, size)
    at, move = 0, _move
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
            end = min(os.lseek(source, at, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno != errno.ENXIO:  # no data after this place
                raise
            break
        while at < end and (count := move(source, target, at, end - at)):
            at += count
        if at < end:
            break
    length = min(size, os.fstat(source).st_size)
    os.truncate(target, length)
    return length


def _move(source: int, target: int, at: int, length: int) -> int:
    """Copy up to `length` bytes from byte `at`. Returns their number; 0 at the end of the file."""
    try:
        return os.copy_file_range(source, target, length, at, at)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    data = memoryview(os.pread(source, min(length, _COPY_BYTES), at))
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], at + done)
    return done


class Readable(Protocol):
    """The bytes of a staged state, as the worker reads them."""

    def __len__(self) -> int: ...
    def __getitem__(self, at: slice, /) -> memoryview: ...


class WithFiles:
    """The bytes of a staged state, and of files at these places after it. `total`: the number of bytes of all.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryFile() as file:
        ...     _ = file.write(b"abcd"), file.flush()
        ...     both = WithFiles(memoryview(b"state"), [(8, copy_of(file.fileno(), 4, ""))], 12)
        ...     bytes(both[0:5]), bytes(both[9:11]), len(both)
        (b'state', b'bc', 12)
    """

    def __init__(self, state: Readable, files: Sequence[tuple[int, StoredFile]], total: int) -> None:
        self._state, self._files, self._total = state, files, total
        self._starts = [at for at, _ in files]

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, at: slice) -> memoryview:
        number = bisect_right(self._starts, at.start) - 1
        if number < 0:
            return self._state[at]
        view = memoryview(mmap.mmap(-1, at.stop - at.start))  # on a page, for direct I/O, and freed at once
        self._files[number][1].read_into(at.start - self._starts[number], view)
        return view
