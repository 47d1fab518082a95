"""Named points where a test kills the process, to check the state after a crash there.

Invariants:

* A point is declared once, at import, with the meaning of a crash there.
* `HEADRACE_CRASH=<name>` or `<name>#<n>` makes the process kill itself with SIGKILL when it reaches that point for the
  first or n-th time, and nowhere else. The name is first appended to the file `HEADRACE_CRASH_MARK`, so that a test can
  assert that its fault took place.
* With `HEADRACE_HOLD=<name>`, the first process that reaches the point writes the point's name and its process id to
  that file. Then it waits until `<mark>.go` exists, for at most `HOLD_SECONDS`. So a test can kill *other* processes
  while this one is at the point.

Failure behaviour: without these variables a point costs two attribute reads. An undeclared name never fires, so tests
must take names from `declared()`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

HOLD_SECONDS = 120.0
_declared: dict[str, CrashPoint] = {}


class CrashPoint:
    """A crash point. The program calls it when it reaches the point."""

    __slots__ = ("_hits_left", "_holds", "meaning", "name")

    def __init__(self, name: str, meaning: str, environ: Mapping[str, str] = os.environ) -> None:
        self.name, self.meaning = name, meaning
        crash_name, _, nth = environ.get("HEADRACE_CRASH", "").partition("#")
        self._hits_left = int(nth or 1) if crash_name == name else 0
        self._holds = environ.get("HEADRACE_HOLD", "") == name

    def __call__(self) -> None:
        if self._hits_left:
            self._hits_left -= 1
            if not self._hits_left:
                _kill_self(self.name)
        if self._holds:
            self._holds = False
            _hold(self.name)


def _hold(name: str, environ: Mapping[str, str] = os.environ) -> None:
    """Hold the first caller at the point. Later callers, in this process or another one, pass."""
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
    """Declare the point `name`. `meaning` describes the stored state after a crash at this point."""
    if name in _declared:
        raise ValueError(f"crash point {name!r} is declared twice")
    point = _declared[name] = CrashPoint(name, meaning)
    return point


def declared() -> dict[str, str]:
    """Return the names and meanings of the points of all modules that were imported so far."""
    return {name: point.meaning for name, point in _declared.items()}


def _kill_self(name: str) -> None:
    mark = os.environ.get("HEADRACE_CRASH_MARK")
    if mark:
        with open(mark, "a") as file:
            file.write(name + "\n")
    os.kill(os.getpid(), signal.SIGKILL)
