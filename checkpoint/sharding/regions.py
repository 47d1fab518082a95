"""Which bytes of one shard of a tensor belong where in another shard of it: pure arithmetic on boxes.

A run of a shard's row-major bytes is at most 2 n - 1 boxes (n dimensions and one for the bytes of an element): a part of a
row, whole rows, a part of a row, and so on inwards. Each is cut with the target's box and copied as one strided block.

Invariant: `copy` writes exactly the bytes that lie in both shards, each to its place; `touches` says whether there are any,
so that a chunk that holds none is not read at all; `place` says where a run lies in another shard that holds all of it.
Failure behaviour: none; callers give boxes of the same global tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format.chunking import Box, run_start

Bytes = npt.NDArray[np.uint8]
Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and extent in each dimension."""


def run_parts(shape: Sequence[int], start: int, stop: int) -> Iterator[Part]:
    """The elements [start, stop) of a row-major array of this shape, as boxes in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, *at), (1, *n)) for at, n in run_parts(inner, head, tail))
        return
    if head:
        yield from (((first, *at), (1, *n)) for at, n in run_parts(inner, head, row))
        first += 1
    if last > first:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from (((last, *at), (1, *n)) for at, n in run_parts(inner, 0, tail))


def touches(source: Box, target: Box, item_bytes: int, start: int, length: int) -> bool:
    """Whether the `length` bytes from byte `start` of the shard `source` hold any of the shard `target`."""
    return any(True for _ in _common(source, target, item_bytes, start, length))


def place(source: Box, target: Box, item_bytes: int, start: int, length: int) -> int | None:
    """The byte of the shard `target` from which on it holds just the `length` bytes from byte `start` of the shard `source`.

    None when it does not hold all of them, or not as one run.
    """
    if source == target:
        return start
    from_, to = run_start(source, item_bytes), run_start(target, item_bytes)
    if from_ is None or to is None:
        return None
    at = from_ + start - to
    return at if 0 <= at <= math.prod(target.local) * item_bytes - length else None


def copy(
    source: Box, target: Box, item_bytes: int, start: int, payload: memoryview, memory: memoryview | bytearray
) -> None:
    """Put what `payload`, the bytes of `source` from byte `start` on, holds of `target` to its place in `memory`.

    `memory` is the whole of `target`, row-major.
    """
    into = np.frombuffer(memory, np.uint8)
    given = np.frombuffer(payload, np.uint8)
    if source == target:
        np.copyto(into[start : start + len(given)], given)
        return
    grid = into.reshape((*target.local, item_bytes))
    for done, extent, from_, to in blocks(source, target, item_bytes, start, len(given)):
        np.copyto(grid[to], given[done : done + math.prod(extent)].reshape(extent)[from_])


def blocks(
    source: Box, target: Box, item_bytes: int, start: int, length: int
) -> Iterator[tuple[int, tuple[int, ...], _Slices, _Slices]]:
    """What a run of `source`'s bytes holds of `target`, as strided blocks.

    Each: where in the run it begins, its extents (the bytes of an element last), and the part of it that goes to which part
    of the target's.
    """
    done = 0
    for (_, extent), found in _walk(source, target, item_bytes, start, length):
        if found is not None:
            yield done, extent, *found
        done += math.prod(extent)


_Slices = tuple[slice, ...]


def _common(source: Box, target: Box, item_bytes: int, start: int, length: int) -> Iterator[tuple[_Slices, _Slices]]:
    return (found for _, found in _walk(source, target, item_bytes, start, length) if found is not None)


def _walk(
    source: Box, target: Box, item_bytes: int, start: int, length: int
) -> Iterator[tuple[Part, tuple[_Slices, _Slices] | None]]:
    """Every part of the run, with the slices that it has in common with the target: in itself, and in the target."""
    for at, extent in run_parts((*source.local, item_bytes), start, start + length):
        yield (at, extent), _cut((at, extent), source, target, item_bytes)


def _cut(part: Part, source: Box, target: Box, item_bytes: int) -> tuple[_Slices, _Slices] | None:
    inside, outside = [], []
    origins, places, sizes = (*source.offset, 0), (*target.offset, 0), (*target.local, item_bytes)
    for at, n, origin, place, size in zip(*part, origins, places, sizes, strict=True):
        begin = at + origin
        low, high = max(begin, place), min(begin + n, place + size)
        if low >= high:
            return None
        inside.append(slice(low - begin, high - begin))
        outside.append(slice(low - place, high - place))
    return tuple(inside), tuple(outside)
