"""What is done when something was forgotten: not by the garbage collector itself.

Purpose: the collector runs in any thread, in the middle of anything, so also where that thread holds a lock. Work that takes
locks, waits or talks to a store would then wait for the thread's own lock for ever.
Invariant: the work is done once: when it is asked for, else in a thread of its own soon after the thing is gone, else at the end
of the process. A thread that is still at it then is not waited for.
Failure behaviour: the work's own, of which nobody but the interpreter hears where nobody asked for it.
"""

from __future__ import annotations

import _thread
import atexit
import weakref
from collections.abc import Callable

_leaving = False
_late: list[Callable[[], object]] = []


class Ending:
    """`work`, to be done when `thing` is gone, or by a call. It must not hold `thing`."""

    def __init__(self, thing: object, work: Callable[[], object]) -> None:
        self._forgotten = weakref.finalize(thing, _elsewhere, work)
        self._work = work

    @property
    def alive(self) -> bool:
        """Whether it is still to be done."""
        return self._forgotten.alive

    def __call__(self) -> None:
        if self._forgotten.detach() is not None:
            self._work()


def _elsewhere(work: Callable[[], object]) -> None:
    if _leaving:
        work()
        return
    try:
        _thread.start_new_thread(work, ())  # a `Thread` would take locks to start, and wait
    except RuntimeError:  # Python 3.12.0 to 3.12.2 start none from the end of the main thread on
        _late.append(work)


def _leave() -> None:
    global _leaving
    _leaving = True
    while _late:
        _late.pop()()


weakref.finalize(
    _leave, _leave
).detach()  # what it does at the end is registered with the first one; ours is to come before
atexit.register(_leave)
