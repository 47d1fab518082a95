"""Arithmetic on the shards of a tensor: the ranks that write each part, and the bytes that shards share.

- `coverage_error`: whether shards make up their global tensor.
- `assign_writers`: which of the ranks that hold a tensor writes it.
- `overlaps`, `offset_in`, `copy_overlap` and `overlap_blocks`: which bytes of one shard belong to another shard.

A shard is a `Box` in the global tensor. Meshes are not used, so a step can be restored onto any mesh, placement and
number of ranks.

A range of a shard's row-major bytes is a list of at most 2 n - 1 boxes. Here n is the number of dimensions, plus one
for the bytes of an element. The boxes are part of a row, whole rows, part of a row, and the same again in each inner
dimension. Each box is intersected with the target shard and copied as one strided block.

Invariant: all functions are pure. They give the same answer on every rank, without communication. Each (tensor, box)
has one writer. `coverage_error` returns None only for boxes that are disjoint and hold every element. `copy_overlap`
writes exactly the bytes that both shards hold.
Failure behaviour: none; the caller passes boxes of one global tensor.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format.chunking import Box, run_start

Bytes = npt.NDArray[np.uint8]
Part = tuple[tuple[int, ...], tuple[int, ...]]
"""A box: offset and size in each dimension."""


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


def overlaps(source: Box, target: Box, item_bytes: int, start: int, length: int) -> bool:
    """Whether `length` bytes from byte `start` of shard `source` hold any element of shard `target`."""
    return any(True for _ in _common(source, target, item_bytes, start, length))


def offset_in(source: Box, target: Box, item_bytes: int, start: int, length: int) -> int | None:
    """The byte offset in shard `target` at which `length` bytes from byte `start` of shard `source` lie contiguously.

    None if `target` does not hold all of them, or not contiguously.
    """
    if source == target:
        return start
    from_, to = run_start(source, item_bytes), run_start(target, item_bytes)
    if from_ is None or to is None:
        return None
    at = from_ + start - to
    return at if 0 <= at <= math.prod(target.local) * item_bytes - length else None


def copy_overlap(
    source: Box, target: Box, item_bytes: int, start: int, payload: memoryview, memory: memoryview | bytearray
) -> None:
    """Copy the part of `payload` that belongs to shard `target` into `memory`.

    `payload` holds the bytes of `source` from byte `start` on. `memory` holds all of `target`, row-major.
    """
    into = np.frombuffer(memory, np.uint8)
    source_bytes = np.frombuffer(payload, np.uint8)
    if source == target:
        np.copyto(into[start : start + len(source_bytes)], source_bytes)
        return
    grid = into.reshape((*target.local, item_bytes))
    for offset, extent, from_, to in overlap_blocks(source, target, item_bytes, start, len(source_bytes)):
        np.copyto(grid[to], source_bytes[offset : offset + math.prod(extent)].reshape(extent)[from_])


def overlap_blocks(
    source: Box, target: Box, item_bytes: int, start: int, length: int
) -> Iterator[tuple[int, tuple[int, ...], _Slices, _Slices]]:
    """The overlap of a byte range of `source` with `target`, as strided blocks.

    Each block is a tuple of four values:

    - the offset of the block's box in the byte range,
    - the extents of the box, with the bytes of an element last,
    - the slices of the box that belong to `target`,
    - the slices of `target` that they go to.
    """
    offset = 0
    for (_, extent), slices in _walk(source, target, item_bytes, start, length):
        if slices is not None:
            yield offset, extent, *slices
        offset += math.prod(extent)


_Slices = tuple[slice, ...]


def _common(source: Box, target: Box, item_bytes: int, start: int, length: int) -> Iterator[tuple[_Slices, _Slices]]:
    return (found for _, found in _walk(source, target, item_bytes, start, length) if found is not None)


def _walk(
    source: Box, target: Box, item_bytes: int, start: int, length: int
) -> Iterator[tuple[Part, tuple[_Slices, _Slices] | None]]:
    """Every box of the byte range, with its overlap with the target: slices of the box, and slices of the target."""
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


def coverage_error(boxes: Sequence[Box]) -> str | None:
    """The first error in these shards of one tensor, as text, or None. At least one box; all of one global shape.

    Boxes are sorted along one dimension after another, so a thousand shards need about a thousand comparisons.
    """
    full = [box for box in boxes if 0 not in box.local]
    pair = _overlap(full, 0)
    if pair is not None:
        return f"shards at {list(pair[0].offset)} and {list(pair[1].offset)} overlap"
    covered, elements = sum(math.prod(box.local) for box in full), math.prod(boxes[0].shape)
    return None if covered == elements else f"its shards hold {covered} of {elements} elements"


def _overlap(boxes: Sequence[Box], dim: int) -> tuple[Box, Box] | None:
    if len(boxes) < 2:
        return None
    if dim == len(boxes[0].shape):
        return boxes[0], boxes[1]
    same: dict[tuple[int, int], list[Box]] = defaultdict(list)
    for box in boxes:
        same[box.offset[dim], box.local[dim]].append(box)
    edges = sorted(same)
    if any(a + n > b for (a, n), (b, _) in itertools.pairwise(edges)):
        return next((pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])), None)
    pairs = (_overlap(group, dim + 1) for group in same.values())
    return next((pair for pair in pairs if pair is not None), None)


Held = tuple[str, int, Sequence[int]]
"""Name, size in bytes, and the ranks that hold these bytes, ascending."""


def assign_writers(tensors: Iterable[Held]) -> dict[str, int]:
    """The rank that writes each tensor, balanced by bytes. The largest tensors are assigned first.

    A rank may leave out tensors that it does not hold.
    """
    groups: dict[Sequence[int], list[tuple[int, str]]] = defaultdict(list)
    for name, nbytes, ranks in tensors:
        groups[ranks if isinstance(ranks, range) else tuple(ranks)].append((-nbytes, name))
    writers: dict[str, int] = {}
    for ranks, members in groups.items():
        loads = [(0, rank) for rank in sorted(ranks)]
        for negative, name in sorted(members):
            load, writers[name] = loads[0]
            heapq.heapreplace(loads, (load - negative, writers[name]))
    return writers
