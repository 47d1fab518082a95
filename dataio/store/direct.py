"""O_DIRECT: large ranges straight into the caller's buffer, or from it, past the page cache.

Purpose: a shard that is read once and cached elsewhere should not push everything else out of the page cache; it also
costs about a quarter of the CPU. It does not help what is read again soon, so reading so is asked for, never assumed.
Writing so is twice as fast as through the cache with the fsync that follows anyway, at a tenth of the CPU; large runs that
happen to be aligned, as the chunks of a staged checkpoint are, always go this way.
Invariants: only the part of a range that is aligned in the file and in memory goes this way, and only from `LEAST_BYTES`
on; the rest, and everything where the file system or its device refuses, is read as usual. The bytes are the same either
way.
Failure behaviour: a refusal (EINVAL and its kind) is no error; any other error is the read's own.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

ALIGN = 4096
"""What every common file system and device is content with."""
LEAST_BYTES = 1 << 20
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY}


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
    if len(buffer) < LEAST_BYTES:
        return 0, 0
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    start, stop = aligned_part(offset, address, len(buffer))
    if start == stop:
        return 0, 0
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    done = start
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        while done < stop:
            n = os.preadv(fd, [buffer[done:stop]], offset + done)
            done += n
            if n % ALIGN or not n:  # the file became shorter: whoever reads the rest will say so
                break
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, before)
    return start, done


def write_directly(fd: int, data: memoryview) -> int:
    """Write what can be written of `data` (flat) from its beginning, at the file's position; how many bytes that was.

    `fd` must be used by nobody else meanwhile: its flags change and change back.
    """
    length = len(data) - len(data) % ALIGN
    if length < LEAST_BYTES:
        return 0
    import numpy as np  # for an address alone, and readers, such as the sidecar, do without it

    if np.frombuffer(data, np.uint8).ctypes.data % ALIGN:
        return 0
    if os.lseek(fd, 0, os.SEEK_CUR) % ALIGN:
        return 0
    before = fcntl.fcntl(fd, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, before | os.O_DIRECT)
        while done < length:
            n = os.write(fd, data[done:length])
            done += n
            if n % ALIGN:
                break
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, before)
    return done
