"""The daemon's own memory: what glibc's malloc keeps for itself.

Purpose: a daemon of thirty threads has as many heaps of malloc, each of which keeps what its thread once needed; with one heap
for all, what one thread gave back serves the next. Blocks do not pass through malloc, so speed is the same.
Invariant: `settle` is called before threads are started. Failure behaviour: with another C library nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8


def settle() -> None:
    """One heap from now on."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
