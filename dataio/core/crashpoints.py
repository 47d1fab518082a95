"""Named places where a test kills the process, to prove what a crash there leaves behind.

Invariant: a point is declared once, at import, with what a crash there means; `MILLRACE_CRASH=<name>` or `<name>#<n>` makes
the process kill itself with SIGKILL when it reaches that point for the first or n-th time, and at no other place. The
name is first appended to the file `MILLRACE_CRASH_MARK`, so that a test can assert that its fault fired.
Failure behaviour: with the variable unset a point costs one attribute read. A name that nobody declared never fires,
which is why tests take names from `declared()`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

_declared: dict[str, CrashPoint] = {}


class CrashPoint:
    """Calling it marks that the program has come this far."""

    __slots__ = ("_left", "meaning", "name")

    def __init__(self, name: str, meaning: str, environ: Mapping[str, str] = os.environ) -> None:
        self.name, self.meaning = name, meaning
        wanted, _, nth = environ.get("MILLRACE_CRASH", "").partition("#")
        self._left = int(nth or 1) if wanted == name else 0

    def __call__(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                _die(self.name)


def declare(name: str, meaning: str) -> CrashPoint:
    """Declare the point `name`; `meaning` says what is true of the stored state at this point."""
    if name in _declared:
        raise ValueError(f"crash point {name!r} is declared twice")
    point = _declared[name] = CrashPoint(name, meaning)
    return point


def declared() -> dict[str, str]:
    """Names and meanings of the points of every module imported so far."""
    return {name: point.meaning for name, point in _declared.items()}


def _die(name: str) -> None:
    mark = os.environ.get("MILLRACE_CRASH_MARK")
    if mark:
        with open(mark, "a") as file:
            file.write(name + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
