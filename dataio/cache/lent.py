"""A thread's memory for what it reads, used again and again.

Purpose: fresh memory for every read costs a page fault for every 4 KiB of it.
Invariant: what was lent stays as it is for as long as anything refers to it; the next read then takes other memory.
Failure behaviour: `MemoryError`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np

from headrace.dataio.core import limits

KEPT_BYTES = 64 * limits.MIB
"""What a thread needs more than this for is not kept for its next read."""
_GRAIN = 1 << 16


class Lent(threading.local):
    """This thread's memory for reads, lent to one at a time."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._lent: weakref.ref[np.ndarray] | None = None

    def lend(self, size: int) -> memoryview:
        """`size` writable bytes, which nothing else refers to for as long as anything refers to them."""
        if size > KEPT_BYTES:
            return np.empty(size, np.uint8).data
        if size > len(self._block) or (self._lent is not None and self._lent() is not None):
            self._block = np.empty(max(size + size // 8, _GRAIN), np.uint8)
        loan = self._block[:size]
        self._lent = weakref.ref(loan)
        return loan.data

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, memoryview]]:
        """Memory for every (offset, length), as (offset, memory), one after the other."""
        memory, at, pieces = self.lend(sum([length for _, length in ranges])), 0, list[tuple[int, memoryview]]()
        for offset, length in ranges:
            pieces.append((offset, memory[at : at + length]))
            at += length
        return pieces
