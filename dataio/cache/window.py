"""How many bytes to have in flight, and when a fetch is late: both measured on the way.

In flight: bandwidth times latency times a safety factor; a block is in flight until it is in the cache's file. The bandwidth
of a fetch is what all fetches together delivered while it was under way; the best of the last `KEPT` and the shortest latency
of them are used, as congestion control does: while more requests bring more bytes the window grows, and when they only wait
for each other it stops.
Late: later than 95 of 100 of the last. Invariant: bounded, sans-I/O; the caller holds its lock.
"""

from __future__ import annotations

from collections import deque

KEPT = 64
ENOUGH = 20
"""Fetches before anything is called late."""
SAFETY = 2.0
LEAST_LATE_SECONDS = 0.02
HEDGED_SHARE = 0.01
"""At most so many fetches of all are asked for twice, so that hedging costs no more than that in bytes."""


class Window:
    """For one engine."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._times: deque[float] = deque(maxlen=KEPT)
        self._flights: deque[float] = deque(maxlen=KEPT)
        self.delivered = 0
        self.fetches = self.hedges = 0

    def landed(self, size: int, seconds: float, delivered_before: int) -> None:
        """A fetch of `size` bytes took `seconds`; `delivered` was so much when it began."""
        seconds = max(seconds, 1e-6)
        self.delivered += size
        self.fetches += 1
        self._rates.append((self.delivered - delivered_before) / seconds)
        self._times.append(seconds)

    def stored(self, seconds: float) -> None:
        """A block was in the cache's file `seconds` after it had been asked for."""
        self._flights.append(max(seconds, 1e-6))

    def bytes(self) -> int:
        """What may be in flight."""
        if not self._rates or not self._flights:
            return self._least
        return int(min(self._most, max(self._least, max(self._rates) * min(self._flights) * SAFETY)))

    def late_after(self) -> float | None:
        """Seconds after which a fetch is asked for again, or None while nothing may be."""
        if len(self._times) < ENOUGH or self.hedges + 1 > self.fetches * HEDGED_SHARE:
            return None
        return max(LEAST_LATE_SECONDS, sorted(self._times)[len(self._times) * 95 // 100])

    def report(self) -> dict[str, float | int]:
        times = sorted(self._times)
        return {
            "window_bytes": self.bytes(),
            "bandwidth_bytes_per_s": int(max(self._rates, default=0)),
            "fetch_median_s": round(times[len(times) // 2], 6) if times else 0.0,
            "hedged": self.hedges,
        }
