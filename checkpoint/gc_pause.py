"""Pauses Python's garbage collector while a save or a restore is planned.

Planning creates tens of thousands of small objects within milliseconds and drops them together. They would trigger
collections of the trainer's whole heap while the trainer waits.
Invariant: only planning and its small reads run inside `gc_paused`. Reference counting frees their objects. When the
last thread leaves the block, the collector is enabled again if it was enabled before.
Failure behaviour: it raises no errors of its own.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
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
            _inside -= 1
            if not _inside and _was_on:
                gc.enable()
