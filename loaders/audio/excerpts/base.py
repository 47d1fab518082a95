"""The code that all excerpt modules share: the `Excerpt`, a search for the byte at which to begin, and in-memory files.

Purpose: each container format has its own way to find a time. Each module writes a small file, which FFmpeg decodes.

Invariants:
- Decoding an excerpt returns the same samples as decoding the recording, except for the first few samples, which only
  warm up the decoder.
- Time stamps of the excerpt are smaller than the recording's by `shift`.
- Before an excerpt is used, the packets in the file are compared with those that the index marked (`marks_around`).
- The search (`last_mark_before`) returns a position at or before the requested sample. The number of reads hardly
  depends on the file's length.

Failure behaviour: for a file with an unusual structure, a module returns None, and libav then reads the file itself.
The search falls back to its lower bound. `OSError` if there is no memory for a `memfd`.
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
    """A file made of `parts` in order.

    `demuxer` is the libav demuxer that reads it, and may include options. `shift` and `audio_end` are seconds on the
    recording's time line. If `audio_end` is known, there is no audio after it. `from_start` means that the excerpt
    starts at the recording's beginning, so there is silence before time zero.
    """

    parts: Sequence[Bytes]
    demuxer: str
    shift: Fraction = Fraction(0)
    audio_end: Fraction | None = None
    from_start: bool = False


_pts = attrgetter("pts")


def mark_before(marks: Sequence[AudioMark], pts: int) -> AudioMark | None:
    """The last marked packet that begins at or before this time stamp."""
    number = bisect_right(marks, pts, key=_pts)
    return marks[number - 1] if number else None


def marks_around(info: AudioInfo, low: Fraction, high: Fraction) -> Sequence[AudioMark]:
    """The marked packets from the last one before `low` to the first one after `high`.

    Times are seconds on the file's own time line. At least one packet is returned, if any are marked.
    """
    if info.time_base is None:
        return ()
    start = bisect_right(info.marks, low / info.time_base, key=_pts)
    end = bisect_right(info.marks, high / info.time_base, key=_pts)
    return info.marks[max(0, start - 1) : end + 1]


Bytes = bytes | memoryview
_AT_ONCE = 1024
"""Number of buffers that Linux accepts in one call."""


@contextlib.contextmanager
def memfd(parts: Sequence[Bytes]) -> Iterator[int]:
    """The descriptor of an in-memory file that contains `parts` in order. The file position is its beginning."""
    descriptor = os.memfd_create("sound", os.MFD_CLOEXEC)
    try:
        at = 0
        # as few calls as possible, since the thread waits for the GIL after each one
        for start in range(0, len(parts), _AT_ONCE):
            buffers = parts[start : start + _AT_ONCE]
            end = at + sum(map(len, buffers))
            if os.pwritev(descriptor, buffers, at) != end - at:
                raise OSError(errno.ENOSPC, f"not enough memory for {end} bytes")
            at = end
        yield descriptor
    finally:
        os.close(descriptor)


Mark = tuple[int, int]
"""A byte offset at which decoding may begin, and the number of samples before it."""
FindMark = Callable[[int], Mark | None]
"""Returns the first mark after a byte, or None if there is none within reach."""

NEAR = 64 * limits.KIB
"""Bytes. If the requested position is at most this far ahead, `last_mark_before` steps from mark to mark."""
_GUESSES, _STEPS = 6, 40


def last_mark_before(find: FindMark, low: Mark, high: Mark, sample: int, near: int = NEAR) -> Mark:
    """The last mark between `low` and `high` that has at most `sample` samples before it."""
    for step in range(_STEPS):
        ahead = (high[0] - low[0]) * (sample - low[1]) // max(1, high[1] - low[1])  # by interpolation
        if min(ahead, high[0] - low[0]) <= near:
            break
        at = low[0] + ahead - near // 2 if step < _GUESSES else (low[0] + high[0]) // 2
        mark = find(at)
        if mark is None or mark[0] >= high[0]:
            high = (at, high[1])
        elif mark[1] <= sample:
            low = mark
        else:
            high = (at, mark[1])
    while (mark := find(low[0])) is not None and mark[1] <= sample:
        low = mark
    return low
