"""Time as a parameter, so that time-outs, leases and retries are tested without waiting.

Invariant: code that decides by time takes a `Clock`. It takes durations from `monotonic`, and timestamps from `time`.

Failure behaviour: none."""

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
