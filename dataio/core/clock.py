"""Clocks as parameters, so that tests of time-outs, leases and retries do not wait.

Invariant: code that makes a decision by time takes a `Clock`. It measures durations with `monotonic`, and takes
timestamps from `time`.

Failure behaviour: none.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """All times are in seconds."""

    def monotonic(self) -> float: ...
    def time(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK = SystemClock()
