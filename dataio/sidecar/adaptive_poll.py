"""Whether a client polls for the daemon's answer before it sleeps.

Invariant: polling lasts at most `SPIN_SECONDS`, and is never used on a machine with one processor.
Failure behaviour: it raises no errors.
"""

from __future__ import annotations

import os

SPIN_SECONDS = 100e-6
_WEIGHT = 1 / 8
"""Weight of the newest wait in the moving average."""
_MAX_FACTOR = 8
"""A longer wait counts as this many times `seconds`: one slow answer ends the polling, and a few fast ones restart it."""


class AdaptivePoll:
    """Decides whether to poll for an answer before sleeping until it arrives.

    The cache answers within tens of microseconds, and waking an idle processor may take as long; polling saves one of
    the two wake-ups of a round trip. It lasts at most `SPIN_SECONDS`, is used only while answers usually arrive within
    that time, and never on a machine with one processor, which the daemon needs. For one wait at a time. `polled`
    counts waits that began with polling, `helped` those that ended during it.

    Adaptive spinning: Karlin, Li, Manasse, Owicki, SOSP 1991.
    """

    __slots__ = ("_average", "_one_processor", "helped", "polled", "seconds")

    def __init__(self, seconds: float = SPIN_SECONDS, processors: int | None = None) -> None:
        self.seconds = seconds
        self._one_processor = (processors or len(os.sched_getaffinity(0))) < 2
        self._average = _MAX_FACTOR * seconds
        self.polled = self.helped = 0

    @property
    def worth(self) -> bool:
        """Whether to poll first now."""
        return self._average < self.seconds and not self._one_processor

    def waited(self, seconds: float, *, polled: bool) -> None:
        """Record a wait of `seconds`, infinity without an answer; `polled`: it began with polling."""
        self._average += (min(seconds, _MAX_FACTOR * self.seconds) - self._average) * _WEIGHT
        if polled:
            self.polled += 1
            self.helped += seconds < self.seconds
