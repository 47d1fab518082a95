"""Cancelling work whose result is not needed any more.

Purpose: a loader that closes does not wait until a clip is decoded, however long that takes.
Invariant: a cancellation event applies to one thread, inside one `with` block. Outside of such blocks `check_cancelled`
does nothing.
Failure behaviour: `Cancelled` is not a `HeadraceError`, so handlers of damaged samples do not catch it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_current = threading.local()


class Cancelled(Exception):
    """The loader was closed."""


@contextmanager
def cancelled_by(event: threading.Event) -> Iterator[None]:
    """Inside the block, `check_cancelled` raises in this thread once `event` is set."""
    _current.event = event
    try:
        yield
    finally:
        _current.event = None


def check_cancelled() -> None:
    """Raise `Cancelled` if this thread's work was cancelled. Long work calls this between its steps."""
    event: threading.Event | None = getattr(_current, "event", None)
    if event is not None and event.is_set():
        raise Cancelled
