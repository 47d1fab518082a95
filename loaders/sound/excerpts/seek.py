"""Where in a recording to begin: places of which one knows how many samples lie before them.

Purpose: containers of sound say it here and there in the file, and nowhere all of it.
Invariant: what is found lies before what is wanted; how many reads that takes depends little on how long the file is.
Failure behaviour: none; where nothing is found nearer, the place that was given first.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.dataio.core import limits

Mark = tuple[int, int]
"""A byte at which decoding may begin, and the samples before it."""
Find = Callable[[int], Mark | None]
"""The first mark behind a byte, if there is one not far behind."""

NEAR = 64 * limits.KIB
"""Bytes before what is wanted from which on marks are looked at one by one."""
_GUESSES, _STEPS = 6, 40


def before(find: Find, low: Mark, high: Mark, wanted: int, near: int = NEAR) -> Mark:
    """The last mark, from `low` to `high`, with no more than `wanted` samples before it."""
    for step in range(_STEPS):
        ahead = (high[0] - low[0]) * (wanted - low[1]) // max(1, high[1] - low[1])  # by its share
        if min(ahead, high[0] - low[0]) <= near:
            break
        at = low[0] + ahead - near // 2 if step < _GUESSES else (low[0] + high[0]) // 2
        found = find(at)
        if found is None or found[0] >= high[0]:
            high = (at, high[1])
        elif found[1] <= wanted:
            low = found
        else:
            high = (at, found[1])
    while (found := find(low[0])) is not None and found[1] <= wanted:
        low = found
    return low
