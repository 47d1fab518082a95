"""Long work that is given up when nobody wants its result any more.

Purpose: a loader that closes does not wait for the rest of a clip, however long that takes to decode.
Invariant: an event holds for one thread, inside one block; outside of such blocks `check_cancelled` does nothing.
Failure behaviour: `Cancelled`, which is nobody's damage and no `HeadraceError`, passes all handlers of samples.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_mine = threading.local()


class Cancelled(Exception):
    """The loader was closed."""


@contextmanager
def cancelled_by(when: threading.Event) -> Iterator[None]:
    """Inside the block, `check_cancelled` raises in this thread once `when` is set."""
    _mine.when = when
    try:
        yield
    finally:
        _mine.when = None


def check_cancelled() -> None:
    """Between two steps of the work."""
    when: threading.Event | None = getattr(_mine, "when", None)
    if when is not None and when.is_set():
        raise Cancelled
