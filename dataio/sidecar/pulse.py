"""When a point of the charts is drawn: every few seconds while anything can happen, and not at all while nothing can.

Purpose: a daemon that nobody uses does not wake up; each time its pages would have to come back first.
Invariant: sans-I/O but for `later`; at most one beat is due. Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Callable


class Pulse:
    """`draw()` draws a point and says whether it differs from the last one, `busy()` whether anything can happen by itself;
    `later(seconds, action)` is the loop's."""

    def __init__(
        self,
        seconds: float,
        draw: Callable[[], bool],
        busy: Callable[[], bool],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._seconds, self._draw, self._busy, self._later = seconds, draw, busy, later
        self._due = False

    def wake(self) -> None:
        """Something may happen from now on: a point of how it was until now, and then one every few seconds."""
        if not self._due:
            self._due = True
            self._draw()
            self._later(self._seconds, self._beat)

    def _beat(self) -> None:
        self._due = self._draw() or self._busy()
        if self._due:
            self._later(self._seconds, self._beat)
