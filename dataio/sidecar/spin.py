"""Whether to look for an answer for a while before sleeping until it comes.

Purpose: what the cache has is answered within tens of microseconds, and waking a processor that has nothing to do may take as
long again. Who looks in the meantime saves one of the two such wakes of a round trip.
Invariants: nobody looks for longer than `SPIN_SECONDS`; only while answers usually come within that, so that what has to be
fetched first costs one look in vain and not one each time; and never where there is one processor, which the daemon needs.
Failure behaviour: none; looking in vain costs at most that time of a processor.

Adaptive spinning: Karlin, Li, Manasse, Owicki, SOSP 1991.
"""

from __future__ import annotations

import os

SPIN_SECONDS = 100e-6
_NEW = 1 / 8
_MOST = 8
"""Times `seconds` that a longer wait counts for: one fetch ends the looking, and some quick answers later it begins again."""


class Spin:
    """For one connection; its caller sees to one wait at a time. `looked` counts waits that began with looking, `helped` those
    of them that ended with it."""

    __slots__ = ("_alone", "_usual", "helped", "looked", "seconds")

    def __init__(self, seconds: float = SPIN_SECONDS, processors: int | None = None) -> None:
        self.seconds = seconds
        self._alone = (processors or len(os.sched_getaffinity(0))) < 2
        self._usual = _MOST * seconds
        self.looked = self.helped = 0

    @property
    def worth(self) -> bool:
        """Whether to look first now."""
        return self._usual < self.seconds and not self._alone

    def waited(self, seconds: float, *, looked: bool) -> None:
        """An answer took so long, forever where none came; `looked`: it was looked for first."""
        self._usual += (min(seconds, _MOST * self.seconds) - self._usual) * _NEW
        if looked:
            self.looked += 1
            self.helped += seconds < self.seconds
