"""Time that passes when a test says so.

Invariants: `monotonic` and `time` move together, by what is added to `now` and by what is slept, and never by themselves; `ahead`
moves `time` alone, as a clock that is set does. They are far apart, so that a stamp taken for a duration shows.
Failure behaviour: none.
"""

from __future__ import annotations

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
