"""The heads of files that were read lately: what every clip of a film reads before it finds its pictures.

Purpose: a film's tables may be as long as the clip; clips of one film come all through an epoch.
Invariants: what is held was compared with its digest, and never changes. At most `most` bytes, but one piece in any case; those
used least recently go first. Safe to share between threads.
Failure behaviour: none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from headrace.dataio.core import limits
from headrace.dataio.shards.contract import Member
from headrace.loaders.partial.needed import Runs, merged

HELD_BYTES = 64 * limits.MIB
"""Of one loader, whose sources share it out evenly."""
Which = tuple[str, int, int]
"""A piece: the object, where its file begins there, its number."""


class Heads:
    """Pieces of the heads of files."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most, self._size = most, 0
        self._held = OrderedDict[Which, memoryview]()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._size

    def get(self, name: str, member: Member, number: int) -> memoryview | None:
        """A piece of a file in the object `name`, if it is held."""
        with self._lock:
            found = self._held.get((name, member.offset, number))
            if found is not None:
                self._held.move_to_end((name, member.offset, number))
            return found

    def put(self, name: str, member: Member, number: int, view: memoryview) -> None:
        """Hold a copy of this piece, which is right, if it is of the file's head."""
        assert member.pieces is not None
        if not any(first <= number < first + count for first, count in member.pieces.head):
            return
        with self._lock:
            if (name, member.offset, number) in self._held:
                return
            self._held[name, member.offset, number] = memoryview(bytes(view))
            self._size += len(view)
            while self._size > self._most and len(self._held) > 1:
                self._size -= len(self._held.popitem(last=False)[1])

    def others(self, name: str, member: Member, runs: Runs) -> Runs:
        """Of these pieces, those that are not held."""
        assert member.pieces is not None
        with self._lock:
            held = {
                number
                for first, count in member.pieces.head
                for number in range(first, first + count)
                if (name, member.offset, number) in self._held
            }
        if not held:
            return runs
        return merged(
            (number, 1) for first, count in runs for number in range(first, first + count) if number not in held
        )
