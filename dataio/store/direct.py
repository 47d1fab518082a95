"""O_DIRECT: large ranges straight into the caller's buffer, past the page cache. Writing so is `headrace.dataio.store.writer`'s.

Purpose: a shard that is read once and cached elsewhere should not push everything else out of the page cache; it also
costs about a quarter of the CPU. It does not help what is read again soon, so reading so is asked for, never assumed; and what
lies in the page cache already is taken from there, which is faster still.
Invariants: only ranges from `LEAST_BYTES` on go this way; the rest, and everything where the file system or its device
refuses, is read as usual. A buffer whose memory is not aligned as the file is (a tensor's never is) is filled through an aligned
one of `_BOUNCE_BYTES`, one for each thread; so are several that lie close together in the file, by one read. The bytes are the
same either way.
Failure behaviour: a refusal (EINVAL and its kind) is no error; any other error is the read's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache

ALIGN = 4096
"""What every common file system and device is content with."""
LEAST_BYTES = 1 << 20
_BOUNCE_BYTES = 4 << 20
_GAP = 64 << 10
"""What lies closer together than this is read at once."""
REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}
"""How file systems and devices say that they cannot."""
_CACHESTAT = 451
"""The number of the system call, the same on all of Linux; since 6.5."""
Part = tuple[int, memoryview]
"""An offset in the file, and the writable, flat memory for what is there."""


def aligned_part(offset: int, address: int, length: int) -> tuple[int, int]:
    """The [start, stop) that O_DIRECT can fill of a buffer at memory `address`, to be filled from file `offset`."""
    start = -offset % ALIGN
    if (address + start) % ALIGN:
        return 0, 0
    stop = length - (offset + length) % ALIGN
    return (start, stop) if stop - start >= LEAST_BYTES else (0, 0)


def fill_directly(fd: int, offset: int, buffer: memoryview) -> tuple[int, int]:
    """Fill what can be filled of `buffer` (writable, flat) from `offset` of the file; the filled [start, stop) of it.

    `fd` must be used by nobody else meanwhile: its flags change and change back.
    """
    if len(buffer) < LEAST_BYTES or mostly_cached(fd, offset, len(buffer)):
        return 0, 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start, stop = aligned_part(offset, address, len(buffer))
    if start == stop:
        return 0, _directly(fd, lambda: _bounced(fd, offset, address, len(buffer)))
    return start, start + _directly(fd, lambda: _straight(fd, offset + start, buffer[start:stop]))


def fill_together(fd: int, ranges: Iterable[Part]) -> list[Part]:
    """As `fill_directly`, of several ranges, each large or small; what is still to be filled."""
    return [part for piece in pieces(ranges) for part in _not_gathered(fd, piece)]


def pieces(ranges: Iterable[Part]) -> Iterator[list[Part]]:
    """The ranges, cut so that one read of `_BOUNCE_BYTES` from an aligned place holds a piece; none has wide gaps. Pure."""
    piece: list[Part] = []
    start = end = 0
    for offset, buffer in ranges:
        done = 0
        while done < len(buffer):
            here = offset + done
            if piece and not (end <= here <= end + _GAP and here < start + _BOUNCE_BYTES):
                yield piece
                piece = []
            if not piece:
                start = here - here % ALIGN
            taken = buffer[done : done + start + _BOUNCE_BYTES - here]
            piece.append((here, taken))
            done += len(taken)
            end = here + len(taken)
    if piece:
        yield piece


def _not_gathered(fd: int, piece: list[Part]) -> list[Part]:
    """Fill a piece by one read; what of it is still to be filled."""
    (start, first), (last, tail) = piece[0], piece[-1]
    stop = last + len(tail)
    if len(piece) == 1:
        begin, end = fill_directly(fd, start, first)
        return [(start + at, part) for at, part in ((0, first[:begin]), (end, first[end:])) if part]
    if stop - start < LEAST_BYTES or mostly_cached(fd, start, stop - start):
        return piece
    through, base = _bounce, start - start % ALIGN
    wanted = memoryview(through.bytes)[: -(-(stop - base) // ALIGN) * ALIGN]
    if _directly(fd, lambda: os.preadv(fd, [wanted], base)) < stop - base:
        return piece  # refused, or the file became shorter, which whoever reads the rest will say
    for offset, part in piece:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(part)), through.address + offset - base, len(part))
    return []


def mostly_cached(fd: int, offset: int, length: int) -> bool:
    """Whether most of the range is in the page cache; False where the kernel does not say."""
    asked, told = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    if _cachestat()(_CACHESTAT, fd, asked, told, 0):
        return False
    return int(told[0]) * mmap.PAGESIZE * 2 > length


@cache
def _cachestat() -> Callable[..., int]:
    call: Callable[..., int] = ctypes.CDLL(None).syscall
    return call


def _directly(fd: int, read: Callable[[], int]) -> int:
    """How many bytes `read` filled with the flag set; 0 where that is refused."""
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        return read()
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return 0  # what was filled before is filled again
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, before)


def _straight(fd: int, offset: int, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        n = os.preadv(fd, [buffer[done:]], offset + done)
        done += n
        if n % ALIGN or not n:  # the file became shorter: whoever reads the rest will say so
            break
    return done


class _Bounce(threading.local):
    """An aligned buffer of this thread, made when it is needed; of huge pages, where a device takes more at once."""

    def __init__(self) -> None:
        self.bytes = mmap.mmap(-1, _BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self.bytes.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


_bounce = _Bounce()


def _bounced(fd: int, offset: int, address: int, length: int) -> int:
    """Fill memory that is not aligned, from any offset."""
    through, done = _bounce, 0
    view = memoryview(through.bytes)
    while done < length:
        skip = (offset + done) % ALIGN
        wanted = min(length - done, _BOUNCE_BYTES - skip)
        n = os.preadv(fd, [view[: -(-(skip + wanted) // ALIGN) * ALIGN]], offset + done - skip)
        got = min(n - skip, wanted)
        if got <= 0:
            break
        ctypes.memmove(address + done, through.address + skip, got)  # other threads go on meanwhile
        done += got
        if got < wanted:
            break
    return done
