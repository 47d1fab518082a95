"""Files without a name, in memory, for libraries that read a file in C.

Purpose: from Python's own files they read in small pieces, and take the interpreter's lock for each.
Invariant: gone when the block ends.
Failure behaviour: `OSError` where there is no memory for one.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

Bytes = bytes | memoryview
_AT_ONCE = 1024
"""Parts that Linux takes in a call."""


@contextlib.contextmanager
def nameless(parts: Sequence[Bytes]) -> Iterator[int]:
    """The descriptor of a file that holds `parts`, one after the other; it is at its beginning."""
    descriptor = os.memfd_create("sound", os.MFD_CLOEXEC)
    try:
        at = 0
        for first in range(
            0, len(parts), _AT_ONCE
        ):  # few calls: after each one a thread waits for the interpreter's lock
            some = parts[first : first + _AT_ONCE]
            end = at + sum(map(len, some))
            if os.pwritev(descriptor, some, at) != end - at:
                raise OSError(errno.ENOSPC, f"no room in memory for {end} bytes")
            at = end
        yield descriptor
    finally:
        os.close(descriptor)
