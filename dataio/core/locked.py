"""One process or thread of a node at a time, by a lock on a file.

Invariant: given back when the block ends, also where a process that was forked meanwhile has the file open as well, or when
the process dies.
Failure behaviour: `TimeoutError`, an OSError, after so many seconds in which somebody else held it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, seconds: float, poll: float) -> Iterator[None]:
    """Hold the lock on the file at `path`, which is made where it is not there; look every `poll` seconds. Not reentrant."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + seconds
        while not _taken(fd):
            if time.monotonic() >= until:
                why = f"another process has held this lock for {seconds:g} s (lsof names it)"
                raise TimeoutError(errno.ETIMEDOUT, why, str(path))
            time.sleep(poll)
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do: who was forked meanwhile has it open as well
    finally:
        os.close(fd)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
