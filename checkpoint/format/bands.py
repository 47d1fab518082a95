"""Shards that are cut in an inner dimension (columns), as bands on a grid of the global tensor, and the chunks of any shard.

The bytes of a column shard are not one run of the global tensor, so chunks that are cut from its own first byte all change with
the number of ranks. So such a shard is stored as several: a band is `width` indices of the cut dimension, from a multiple of
`width` on, and all of the other dimensions; each is an entry of the manifest of its own, which the format has always allowed.
`width` depends on the global tensor and the dimension alone: whoever holds a whole band makes the same chunks of it.
Invariant: the bands of a shard are disjoint and make it up; one that is not cut in an inner dimension is its own only band.
A tensor has at most `2 * _MOST` bands, and a band's runs of bytes are no shorter than half of `_RUN_BYTES` where the tensor
has such, so that copying them into the arena stays cheap.
Failure behaviour: none; these are pure functions of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from headrace.checkpoint.format.chunk import FINE_CHUNK_BYTES, Box, chunk_bytes, cut, cut_dim, run_start

_MOST = 128
_RUN_BYTES = 256


def bands(box: Box, item_bytes: int) -> tuple[Box, ...]:
    """The shards in which this one is stored."""
    dim = cut_dim(box)
    if 0 in box.local or run_start(box, item_bytes) is not None:
        return (box,)
    start, stop = box.offset[dim], box.offset[dim] + box.local[dim]
    return tuple(_with(box, dim, at, n) for at, n in _steps(start, stop, width(box.shape, dim, item_bytes)))


def inside(band: Box, shard: Box) -> tuple[slice, ...]:
    """Where the band lies in the shard's own array."""
    edges = zip(band.offset, shard.offset, band.local, strict=True)
    return tuple(slice(at - origin, at - origin + n) for at, origin, n in edges)


def width(shape: Sequence[int], dim: int, item_bytes: int) -> int:
    """How many indices of dimension `dim` a band has: a power of two, for bands of about a fine chunk."""
    inner = math.prod(shape[dim + 1 :]) * item_bytes
    column = math.prod(shape[:dim]) * inner
    wanted = max(FINE_CHUNK_BYTES, column * shape[dim] // _MOST) // column
    return int(1 << max(wanted, -(-_RUN_BYTES // inner), 1).bit_length() - 1)


def pieces(box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) in the shard's own bytes of every chunk of the shard."""
    size = math.prod(box.local) * item_bytes
    if not size:
        return
    start = run_start(box, item_bytes)
    if start is None:
        start = run_start(_in_its_band(box, item_bytes), item_bytes)
    yield from cut(size, chunk_bytes(math.prod(box.shape) * item_bytes), start or 0)


def _in_its_band(box: Box, item_bytes: int) -> Box:
    """The shard in the coordinates of the band that holds it, as if that were a tensor; itself where several do."""
    dim = cut_dim(box)
    step = width(box.shape, dim, item_bytes)
    first = box.offset[dim] // step * step
    if box.offset[dim] + box.local[dim] > first + step:
        return box
    shape, offset = list(box.shape), list(box.offset)
    shape[dim], offset[dim] = min(step, box.shape[dim] - first), box.offset[dim] - first
    return Box(tuple(shape), tuple(offset), box.local)


def _steps(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start + at, n) for at, n in cut(stop - start, step, start))


def _with(box: Box, dim: int, at: int, n: int) -> Box:
    offset, local = list(box.offset), list(box.local)
    offset[dim], local[dim] = at, n
    return Box(box.shape, tuple(offset), tuple(local))
