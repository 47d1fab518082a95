"""Pauses workers while an urgent one runs, by a lock on a file.

Purpose: a worker calls `pass_by` before each piece that it uploads, and waits while the gate is closed.
Invariant: the daemon holds the lock exclusively while the gate is closed. The kernel releases it when the daemon dies,
so a dead daemon pauses no worker.
Failure behaviour: a worker waits at most `seconds`, then continues.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

PASS_SECONDS = 120.0
_POLL = 0.02


class PriorityGate:
    """The daemon's side of the gate. The gate is open at first."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._path, self.closed = path, False

    def close_for_others(self, closed: bool) -> None:
        """Close or open the gate.

        If a worker holds the lock at this moment, because it is passing, the gate stays open: call again.
        """
        if closed == self.closed:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB if closed else fcntl.LOCK_UN)
            self.closed = closed
        except BlockingIOError:  # a worker is passing: the caller tries again
            return

    def for_a_worker(self) -> int:
        """A descriptor for a worker, which the caller must close.

        The file is opened again, because a lock belongs to an open file description.
        """
        return os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        os.close(self._fd)


def pass_by(fd: int, seconds: float = PASS_SECONDS) -> None:
    """Wait until the gate is open, at most `seconds`."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_POLL)
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)
            return
