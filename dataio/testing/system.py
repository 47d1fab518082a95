"""Faults of the operating system for tests: an fsync that fails, a clock that jumps, a stopped process.

The module also has a manual clock.

Invariants: each fault ends with its block. `failing_fsync` and `clock_jump` affect all threads of this process, and no
other process. The list that they yield shows whether the fault took place. Both times of `ManualClock` move when `now`
changes or a caller sleeps. `ahead` moves only `time`, as setting the system's clock does. The values of `time` and
`monotonic` differ widely, so that a test notices a timestamp that is used as a duration.

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
    """Let the next `times` calls of `os.fsync` fail with EIO, for files with `path` in their path.

    Later calls succeed, because the kernel reports a lost write only once. Yields the paths of the failed calls.
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
    """Move the wall clock ahead by `seconds` (back, if negative). The monotonic clock does not change.

    Yields the times that callers got.
    """
    real, shown = time.time, list[float]()

    def jumped() -> float:
        shown.append(real() + seconds)
        return shown[-1]

    with mock.patch.object(time, "time", jumped):
        yield shown


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop the process (SIGSTOP) for the block, so that it looks hung to others, then continue it (SIGCONT)."""
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
    """A `Clock` with a `sleep` that returns at once. `pauses` has the seconds of each sleep."""

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
