"""Named places where a test kills the process, to prove what a crash there leaves behind.

Invariant: a point is declared once, at import, with what a crash there means; `HEADRACE_CRASH=<name>` or `<name>#<n>`
makes the process kill itself with SIGKILL when it reaches that point for the first or n-th time, and at no other
place. The name is first appended to the file `HEADRACE_CRASH_MARK`, so that a test can assert that its fault fired.
With `HEADRACE_HOLD=<name>` the first process that comes to the point writes its name and number into that file and
waits there until `<mark>.go` exists, so that a test can kill *others* at that point. Failure behaviour: with the
variables unset a point costs two attribute reads. A name that nobody declared never fires, which is why tests take
names from `declared()`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

HOLD_SECONDS = 120.0
_declared: dict[str, CrashPoint] = {}


class CrashPoint:
    """Calling it marks that the program has come this far."""

    __slots__ = ("_held", "_left", "meaning", "name")

    def __init__(self, name: str, meaning: str, environ: Mapping[str, str] = os.environ) -> None:
        self.name, self.meaning = name, meaning
        wanted, _, nth = environ.get("HEADRACE_CRASH", "").partition("#")
        self._left = int(nth or 1) if wanted == name else 0
        self._held = environ.get("HEADRACE_HOLD", "") == name

    def __call__(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                _die(self.name)
        if self._held:
            self._held = False
            _waits(self.name)


def _waits(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Whoever comes to the held point first stays there; who comes later, in this process or another, passes."""
    mark = environ["HEADRACE_CRASH_MARK"]
    try:
        os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with open(mark, "w") as file:
        file.write(f"{name} {os.getpid()}\n")
    until = time.monotonic() + HOLD_SECONDS
    while not os.path.exists(mark + ".go") and time.monotonic() < until:
        time.sleep(0.01)


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
    mark = os.environ.get("HEADRACE_CRASH_MARK")
    if mark:
        with open(mark, "a") as file:
            file.write(name + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
