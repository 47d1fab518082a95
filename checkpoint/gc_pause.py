"""Pauses Python's garbage collector while a save or a restore is planned.

Planning creates tens of thousands of small objects within milliseconds and drops them together. They would trigger
collections of the trainer's whole heap while the trainer waits.
Invariant: only planning and its small reads run inside `gc_paused`. Reference counting frees their objects. When the
last thread leaves the block, the collector is enabled again if it was enabled before. A process that is forked
meanwhile, such as a worker of a DataLoader, has none of the other threads, so its collector is enabled at once.
Failure behaviour: it raises no errors of its own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.RLock()
_inside = 0
_was_on = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic garbage collection inside the block."""
    global _inside, _was_on
    with _lock:
        if not _inside:
            _was_on = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside = max(0, _inside - 1)  # in a process that was forked inside the block, it is 0 already
            if not _inside and _was_on:
                gc.enable()


def _in_child() -> None:
    global _inside
    if _inside and _was_on:
        gc.enable()
    _inside = 0
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
