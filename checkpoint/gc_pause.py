"""The garbage collector, held off while a save or a restore is planned.

Planning makes tens of thousands of small values within milliseconds and drops them together. Counted as they come, they bring on
looks through the trainer's whole heap, which is large with torch alone, in the very moment in which it waits for us.
Invariant: what is planned goes by reference counts; inside of `gc_paused` there is planning and the small reads for it only; the
collector is on afterwards if it was before, whichever of several threads ends last.
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
