"""Faults of the operating system for tests: an fsync that fails once, a clock that jumps, a stopped process; and a
manual clock.

Invariants: each fault ends with its block. `failing_fsync` and `clock_jump` change all threads of this process, and no
other process. What they yield tells whether the fault took place. The times of `ManualClock` move together, by what is
added to `now` and by what is slept. `ahead` moves `time` alone, as setting a clock does. `time` and `monotonic` are far
apart, so that a test notices a stamp that is used as a duration.

Failure behaviour: `stopped` raises `ProcessLookupError` if there is no such process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

_STOP_SECONDS = 10.0


@contextlib.contextmanager
def failing_fsync(path: str, *, times: int = 1) -> Iterator[list[str]]:
    """The next `times` calls of `os.fsync` on files whose path contains `path` fail with EIO, and later ones
    succeed: the kernel reports a lost write once. Yields the paths of the calls that failed.
    """
    real, failed = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if path in name and len(failed) < times:
            failed.append(name)
            raise OSError(5, "Input/output error")
        real(fd)

    with mock.patch.object(os, "fsync", fsync):
        yield failed


@contextlib.contextmanager
def clock_jump(seconds: float) -> Iterator[list[float]]:
    """The wall clock is ahead by so many seconds (behind, where negative); the monotonic clock is as it was.

    Yields the times that were told.
    """
    real, told = time.time, list[float]()

    def jumped() -> float:
        told.append(real() + seconds)
        return told[-1]

    with mock.patch.object(time, "time", jumped):
        yield told


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped (SIGSTOP), as a hung one looks to others, and goes on afterwards (SIGCONT)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + _STOP_SECONDS
        while _state(pid) not in "Tt":
            if time.monotonic() > until:
                raise TimeoutError(f"process {pid} does not stop")
            time.sleep(0.01)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


_EPOCH = 1_000_000.0


class ManualClock:
    """A `Clock` whose sleepers wake at once; `pauses` is what they asked for."""

    def __init__(self) -> None:
        self.now, self.ahead = 1000.0, 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return _EPOCH + self.now + self.ahead

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
