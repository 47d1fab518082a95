"""Files without a name, in memory, for libraries that read a file in C.

Purpose: from Python's own files they read in small pieces, and take the interpreter's lock for each.
Invariant: gone when the block ends.
Failure behaviour: `OSError` where there is no memory for one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

Bytes = bytes | memoryview


@contextlib.contextmanager
def nameless(parts: Sequence[Bytes]) -> Iterator[int]:
    """The descriptor of a file that holds `parts`, one after the other; it is at its beginning."""
    descriptor = os.memfd_create("sound", os.MFD_CLOEXEC)
    try:
        for part in parts:
            left = memoryview(part)
            while left:
                left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
