"""Cancelling long work whose result is not wanted any more.

Purpose: a loader that closes does not wait for the rest of a clip, however long that takes to decode.
Invariant: an event holds for one thread, inside one block; outside of such blocks `check_cancelled` does nothing.
Failure behaviour: `Cancelled` is not a `HeadraceError` and says nothing about a sample, so no handler of damaged
samples catches it.
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
    """Raise `Cancelled` if this thread's work was cancelled. Called between two steps of the work."""
    when: threading.Event | None = getattr(_mine, "when", None)
    if when is not None and when.is_set():
        raise Cancelled
