"""When announced reads will be wanted, and how well that was foreseen.

A loader announces what comes next again and again; how far its list has moved since the last time says how fast it reads, and
an entry that has left the list was handed to whoever decodes it: that is when it was needed.
Invariant: bounded: one announcement per stream and `KEPT` errors are remembered. Sans-I/O.
Failure behaviour: a list that does not continue the last one (a loader was moved) is believed and judged by nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.dataio.cache.announced import gone_from

KEPT = 1024
FIRST_GUESS = 0.05
"""Seconds per read of a stream that has announced only once."""
WEIGHT = 0.3

Read = tuple[str, int]


@dataclass(slots=True)
class _Stream:
    at: float
    reads: list[Read]
    due: list[float]
    pace: float = FIRST_GUESS
    judged: bool = False


class Forecast:
    """The paces of all streams."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._errors: deque[float] = deque(maxlen=KEPT)

    def announced(self, stream: int, reads: Sequence[Read], now: float) -> list[float]:
        """When each of `reads` ((key, offset), soonest first) is due."""
        old = self._streams.get(stream)
        new = _Stream(now, list(reads), [])
        gone = gone_from(old.reads, new.reads) if old is not None else None
        if old is not None and gone is not None:
            self._judge(old, gone, now)
            new.pace, new.judged = old.pace, old.judged
            if gone:
                seen = (now - old.at) / gone
                new.pace, new.judged = seen if not old.judged else old.pace + WEIGHT * (seen - old.pace), True
            else:
                new.at = old.at  # nothing moved: the clock goes on
        new.due = [now + (n + 1) * new.pace for n in range(len(reads))]
        self._streams[stream] = new
        return new.due

    def over(self, stream: int) -> None:
        self._streams.pop(stream, None)

    def _judge(self, old: _Stream, gone: int, now: float) -> None:
        if old.judged:
            self._errors.extend(now - due for due in old.due[:gone])

    def report(self) -> dict[str, float | int]:
        """Actual minus predicted need in seconds: median, and the 95th percentile of its size."""
        errors = sorted(self._errors)
        sizes = sorted(abs(error) for error in errors)
        return {
            "forecasts": len(errors),
            "forecast_error_median_s": round(statistics.median(errors), 6) if errors else 0.0,
            "forecast_error_p95_s": round(sizes[len(sizes) * 95 // 100], 6) if sizes else 0.0,
        }
