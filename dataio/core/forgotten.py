"""What is done when something was forgotten: not by the garbage collector itself.

Purpose: the collector runs in any thread, in the middle of anything, so also where that thread holds a lock. Work that takes
locks, waits or talks to a store would then wait for the thread's own lock for ever.
Invariant: the work is done once: when it is asked for, else in a thread of its own soon after the thing is gone, else at the end
of the process, which waits for threads that are at it, for at most `LEAVE_SECONDS`: one that is inside a library of C++ when the
interpreter goes would end the process by an abort.
Failure behaviour: the work's own, of which nobody but the interpreter hears where nobody asked for it.
"""

from __future__ import annotations

import _thread
import atexit
import os
import time
import weakref
from collections.abc import Callable

LEAVE_SECONDS = 10.0

_leaving = False
_late: list[Callable[[], object]] = []
_at_work: dict[object, None] = {}
"""One key for each thread: changed by single steps of the interpreter, since the collector can take no lock."""


class Ending:
    """`work`, to be done when `thing` is gone, or by a call. It must not hold `thing`. A forked child does not do it: the
    threads, files and leases that it would end are its parent's."""

    def __init__(self, thing: object, work: Callable[[], object]) -> None:
        self._pid = os.getpid()
        self._forgotten = weakref.finalize(thing, _elsewhere, work, self._pid)
        self._work = work

    @property
    def alive(self) -> bool:
        """Whether it is still to be done."""
        return self._forgotten.alive

    def __call__(self) -> None:
        if self._forgotten.detach() is not None and os.getpid() == self._pid:
            self._work()


def _elsewhere(work: Callable[[], object], pid: int) -> None:
    if os.getpid() != pid:
        return
    if _leaving:
        work()
        return
    me = object()
    _at_work[me] = None
    try:
        _thread.start_new_thread(_do, (work, me))  # a `Thread` would take locks to start, and wait
    except RuntimeError:  # Python 3.12.0 to 3.12.2 start none from the end of the main thread on
        del _at_work[me]
        _late.append(work)


def _do(work: Callable[[], object], me: object) -> None:
    try:
        work()
    finally:
        del _at_work[me]


def _leave() -> None:
    global _leaving
    _leaving = True
    while _late:
        _late.pop()()
    until = time.monotonic() + LEAVE_SECONDS
    while _at_work and time.monotonic() < until:
        time.sleep(0.001)


weakref.finalize(_leave, _leave).detach()  # the first one registers what all do at the end: ours is to come before
atexit.register(_leave)
os.register_at_fork(after_in_child=_at_work.clear)  # the threads are its parent's
os.register_at_fork(after_in_child=_late.clear)
