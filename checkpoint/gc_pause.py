"""Pauses Python's garbage collector while a save or a restore is planned.

Planning creates tens of thousands of small objects within milliseconds and drops them together. They would trigger
collections of the trainer's whole heap while the trainer waits.
Invariant: inside `gc_paused` there is only planning and small reads for it; its objects are freed by reference
counts. When the last of several threads leaves, the collector is on again if it was on before.
Failure behaviour: none.
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
    """No automatic collection inside."""
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
