"""Decides whether a read gets its blocks or only its own bytes, and computes the byte ranges. Pure functions.

Purpose: a small sample shares its blocks with other samples, which are read in the same epoch. So its blocks are
fetched whole, in few requests. A clip of a long video needs a small part of its file, and the rest may not be needed for
many epochs. So only its bytes are fetched.

The shape of a read shows which of the two it is. The ranges of a read belong to one sample. If they leave out
`HOLE_BYTES` or more between the first and the last of them, the read is a *part* (`is_part`). A reader of a part of a
file adds an empty range at each end of the file, so its read has this shape wherever the bytes lie.

An *extent* is a byte range that is fetched with one request. Ranges with small gaps share an extent.

Invariants: extents cover all bytes that a read lacks, and at most `GAP_BYTES` more between two ranges. Runs are sorted,
disjoint and not adjacent.
Failure behaviour: none.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from headrace.dataio.cache.plan.events import Ranges
from headrace.dataio.core import limits

HOLE_BYTES = 1 * limits.MIB
"""A read that leaves out this many bytes is a part."""
GAP_BYTES = 64 * limits.KIB
"""Ranges with at most this gap are fetched together. A store reads such a gap in less time than another request takes."""

Runs = Sequence[tuple[int, int]]
"""Byte ranges as (first, end)."""


def is_part(ranges: Ranges) -> bool:
    """Whether a read leaves out `HOLE_BYTES` or more between its first and its last byte. Its ranges may overlap.

    Example:
        >>> is_part(((0, 4096), (4096, 100)))
        False
        >>> is_part(((0, 0), (4 << 20, 4096), (100 << 20, 0)))
        True
    """
    if len(ranges) < 2:
        return False
    first, end = min(offset for offset, _ in ranges), max(offset + length for offset, length in ranges)
    return end - first - sum(length for _, length in ranges) >= HOLE_BYTES


def extents_of(ranges: Iterable[tuple[int, int]], at_most: int, gap: int | None = None) -> Ranges:
    """Sorted, disjoint extents that cover `ranges`, each of at most `at_most` bytes.

    Ranges with at most `gap` bytes (default: `GAP_BYTES`) between them share an extent.
    """
    gap = GAP_BYTES if gap is None else gap
    merged: list[tuple[int, int]] = []
    for offset, length in sorted(ranges):
        if not length:
            continue
        if merged and offset <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], offset + length))
        else:
            merged.append((offset, offset + length))
    return tuple((at, min(at_most, end - at)) for first, end in merged for at in range(first, end, at_most))


def without(ranges: Iterable[tuple[int, int]], runs: Runs) -> list[tuple[int, int]]:
    """The parts of `ranges` that are outside the sorted, disjoint `runs`, as (offset, length)."""
    out: list[tuple[int, int]] = []
    for offset, length in ranges:
        at, end = offset, offset + length
        number = max(0, bisect.bisect_right(runs, (offset, 1 << 63)) - 1)
        while at < end and number < len(runs) and runs[number][0] < end:
            first, last = runs[number]
            if first > at:
                out.append((at, first - at))
            at = max(at, last)
            number += 1
        if at < end:
            out.append((at, end - at))
    return out


def within(runs: Runs, offset: int, length: int) -> list[tuple[int, int]]:
    """The parts of the sorted, disjoint `runs` that are inside [offset, offset + length), as (offset, length)."""
    out: list[tuple[int, int]] = []
    end = offset + length
    for number in range(max(0, bisect.bisect_right(runs, (offset, 1 << 63)) - 1), len(runs)):
        first, last = runs[number]
        if first >= end:
            break
        if max(first, offset) < min(last, end):
            out.append((max(first, offset), min(last, end) - max(first, offset)))
    return out


def joined(runs: Runs, first: int, end: int) -> list[tuple[int, int]]:
    """A new list of the sorted, disjoint `runs` and [first, end), which may overlap them."""
    low = bisect.bisect_left(runs, first, key=lambda run: run[1])
    high = bisect.bisect_right(runs, end, key=lambda run: run[0])
    if low < high:
        first, end = min(first, runs[low][0]), max(end, runs[high - 1][1])
    return [*runs[:low], (first, end), *runs[high:]]
