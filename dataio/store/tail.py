"""When is a request slow, and may a second one be sent? Decided from the latencies seen, without clock or threads.

Invariants: no more than `share` of all requests are sent twice, counted from the start, with `burst` more at once. A
request is slow when it has taken longer than the given percentile of the last `_WINDOW` of about its size; before
`_ENOUGH` of them were seen nothing is called slow.
Failure behaviour: none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW, _ENOUGH = 256, 20
_SMALLEST_CLASS = 16  # sizes up to 64 KiB are all about latency


@dataclass(slots=True)
class Tail:
    """The state of one store. `percentile` in (0, 1), `share` in [0, 1], `floor` in seconds: nothing faster is called slow."""

    percentile: float = 0.95
    share: float = 0.05
    burst: int = 2
    floor: float = 0.01
    requests: int = 0
    hedged: int = 0
    _seen: dict[int, deque[float]] = field(default_factory=dict)

    def begin(self, size: int) -> float | None:
        """Count a request of `size` bytes; after how many seconds it is slow, or None when that is not known yet."""
        self.requests += 1
        seen = self._seen.get(_class(size), ())
        if len(seen) < _ENOUGH:
            return None
        return max(self.floor, sorted(seen)[min(len(seen) - 1, int(len(seen) * self.percentile))])

    def spend(self) -> bool:
        """Whether a second request may be sent now; if so, it is counted."""
        allowed = self.hedged + 1 <= self.burst + self.share * self.requests
        self.hedged += allowed
        return allowed

    def end(self, size: int, seconds: float) -> None:
        """A request of `size` bytes was answered, by whichever of the two, after `seconds`."""
        self._seen.setdefault(_class(size), deque(maxlen=_WINDOW)).append(seconds)


def _class(size: int) -> int:
    """Sizes within a factor of four share a class; there are at most 24."""
    return max(_SMALLEST_CLASS, min(size, 1 << 62).bit_length()) // 2
