"""Shared parts of the excerpt makers: the `Excerpt`, a search for the byte to begin at, and in-memory files.

Purpose: containers differ in how a time is found in them. In every case FFmpeg decodes a small file at the end.
Invariants: decoding an excerpt gives the samples of decoding the recording, except for the first few, which only warm
up the decoder. Stamps of the excerpt are `shift` smaller than the recording's. Before an excerpt is used, its maker
compares the packets in the file with those that the index marked (`around`). The search (`before`) returns a position
at or before the wanted sample. The number of reads hardly depends on the file's length.
Failure behaviour: a maker returns None for a file with an unusual structure, and libav then reads that file itself. The
search falls back to its lower bound. `OSError` if there is no memory for a `memfd`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from operator import attrgetter

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.shards.sample import AudioInfo, AudioMark


class Excerpt(msgspec.Struct, frozen=True):
    """A file made of `parts` in order, for libav's `demuxer`, which may include options.

    `shift` and `until` are seconds on the recording's time line; there is no audio after `until`, if it is known.
    `whole` means that the excerpt starts at the recording's beginning, so silence precedes zero.
    """

    parts: Sequence[Bytes]
    demuxer: str
    shift: Fraction = Fraction(0)
    until: Fraction | None = None
    whole: bool = False


_pts = attrgetter("pts")


def mark_before(marks: Sequence[AudioMark], pts: int) -> AudioMark | None:
    """The last marked packet that begins at this stamp or before it."""
    number = bisect_right(marks, pts, key=_pts)
    return marks[number - 1] if number else None


def around(info: AudioInfo, low: Fraction, high: Fraction) -> Sequence[AudioMark]:
    """The marked packets from the last one before `low` to the first one after `high`, in seconds of the file's own
    time line. At least one packet, if any are marked."""
    if info.time_base is None:
        return ()
    first = bisect_right(info.marks, low / info.time_base, key=_pts)
    end = bisect_right(info.marks, high / info.time_base, key=_pts)
    return info.marks[max(0, first - 1) : end + 1]


Bytes = bytes | memoryview
_AT_ONCE = 1024
"""Buffers that Linux accepts in one call."""


@contextlib.contextmanager
def memfd(parts: Sequence[Bytes]) -> Iterator[int]:
    """The descriptor of an in-memory file that holds `parts` in order. Its position is the beginning."""
    descriptor = os.memfd_create("sound", os.MFD_CLOEXEC)
    try:
        at = 0
        for first in range(0, len(parts), _AT_ONCE):  # few calls: after each one the thread waits for the GIL
            some = parts[first : first + _AT_ONCE]
            end = at + sum(map(len, some))
            if os.pwritev(descriptor, some, at) != end - at:
                raise OSError(errno.ENOSPC, f"no room in memory for {end} bytes")
            at = end
        yield descriptor
    finally:
        os.close(descriptor)


Mark = tuple[int, int]
"""A byte offset at which decoding may begin, and the number of samples before it."""
Find = Callable[[int], Mark | None]
"""Returns the first mark after a byte, or None if there is none within reach."""

NEAR = 64 * limits.KIB
"""Bytes: when the wanted position is at most this far ahead, `before` walks from mark to mark."""
_GUESSES, _STEPS = 6, 40


def before(find: Find, low: Mark, high: Mark, wanted: int, near: int = NEAR) -> Mark:
    """The last mark between `low` and `high` that has at most `wanted` samples before it."""
    for step in range(_STEPS):
        ahead = (high[0] - low[0]) * (wanted - low[1]) // max(1, high[1] - low[1])  # by interpolation
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
