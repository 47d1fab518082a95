"""Clean-up of objects that were garbage-collected without `close`.

Purpose: the garbage collector may run in any thread, at any moment, also while that thread holds a lock. A clean-up
that takes locks, waits or sends requests to a store could then deadlock on that lock. `Finalizer` runs it in a new
thread instead.

Invariant: the work runs once: when the finalizer is called, or soon after the object was collected, or when the process
exits. At exit the process waits up to `EXIT_SECONDS` for running threads, because a thread inside a C++ library would
otherwise abort the interpreter.

Failure behaviour: an error of the work is raised to the caller of the finalizer. If the work runs in a thread, the
interpreter prints the error.
"""

from __future__ import annotations

import _thread
import atexit
import os
import time
import weakref
from collections.abc import Callable

EXIT_SECONDS = 10.0

_exiting = False
_late: list[Callable[[], object]] = []
_running: dict[object, None] = {}
"""One key for each running thread. Only atomic dict operations change it: the collector must not take a lock."""


class Finalizer:
    """Calls `work` once, when `thing` is garbage-collected or when the finalizer itself is called.

    A forked child never runs it, because the threads, files and leases belong to its parent.

    Args:
        thing: The object to watch.
        work: Must not hold a reference to `thing`.
    """

    def __init__(self, thing: object, work: Callable[[], object]) -> None:
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(thing, _run_in_thread, work, self._pid)
        self._work = work

    @property
    def alive(self) -> bool:
        """Whether the work has not run yet."""
        return self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach() is not None and os.getpid() == self._pid:
            self._work()


def _run_in_thread(work: Callable[[], object], pid: int) -> None:
    if os.getpid() != pid:
        return
    if _exiting:
        work()
        return
    me = object()
    _running[me] = None
    try:
        _thread.start_new_thread(_run, (work, me))  # threading.Thread takes a lock and waits when it starts
    except RuntimeError:  # Python 3.12.0 to 3.12.2 start no thread once the main thread has ended
        del _running[me]
        _late.append(work)


def _run(work: Callable[[], object], me: object) -> None:
    try:
        work()
    finally:
        del _running[me]


def _at_exit() -> None:
    global _exiting
    _exiting = True
    while _late:
        _late.pop()()
    until = time.monotonic() + EXIT_SECONDS
    while _running and time.monotonic() < until:
        time.sleep(0.001)


weakref.finalize(_at_exit, _at_exit).detach()  # registers weakref's own exit hook first, so that ours runs before it
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_running.clear)  # the threads belong to the parent
os.register_at_fork(after_in_child=_late.clear)
