"""How tensors are cut into chunks, and where each tensor lies in the staging arena.

- A chunk is at most 4 MiB. Chunk boundaries lie on a grid of the *global* tensor, so the same weights give the same
  chunks under another sharding.
- A shard that is one contiguous range of the tensor's row-major bytes uses the grid of those bytes.
- A shard that is cut in an inner dimension (columns) is stored in bands of that dimension. Each band has its own grid.
  The width of a band depends only on the global shape and the dimension. So every rank that holds a whole band cuts it
  into the same chunks.
- Small tensors share the chunks of one common stream, which comes first in the arena.

Invariant: the pieces of a shard are in order, without gaps or overlaps. The same list of tensors always gives the
same layout. Large tensors start on 4 KiB boundaries, so packs are written from the arena without a copy. A tensor has
at most `2 * _MOST` bands.
Failure behaviour: `nbytes` raises `CorruptionError` for impossible sizes. Everything else is a pure function that
does not fail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import KIB, MIB

CHUNK_BYTES = 4 * MIB
"""Size of the chunks of large tensors. It is also the maximum size of any chunk."""
FINE_CHUNK_BYTES = 1 * MIB
"""Size of the chunks of tensors below `FINE_BELOW`, and of the stream of small tensors.

With a finer grid, more chunks stay the same after resharding.
"""
FINE_BELOW = 128 * MIB
"""A limit on the size of the *global* tensor, in bytes.

A tensor of this size has 32 chunks or more, and another world size cuts only a few of them.
"""
SMALL_BELOW = 64 * KIB
"""Tensors smaller than this share the chunks of the small stream."""
DIGEST_BYTES = 32


def digest(payload: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(payload).digest()


class Box(msgspec.Struct, frozen=True, gc=False):
    """A shard of a global tensor: `local` elements from `offset` in each dimension of `shape`.

    A save creates thousands of these rows. They are excluded from Python's garbage collector (`gc=False`), because they
    would otherwise trigger collections of the trainer's whole heap during the save.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    def overlaps(self, other: Box) -> bool:
        """Whether both shards have an element in common."""
        edges = zip(self.offset, self.local, other.offset, other.local, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in edges)

    def common(self, other: Box) -> int:
        """The number of elements that both shards have."""
        edges = zip(self.offset, self.local, other.offset, other.local, strict=True)
        return math.prod(max(min(a + n, b + m) - max(a, b), 0) for a, n, b, m in edges)


def whole(shape: Sequence[int]) -> Box:
    """The box of a tensor that is not sharded."""
    size = tuple(shape)
    return Box(size, (0,) * len(size), size)


def cut_dim(box: Box) -> int:
    """The last dimension in which the shard is smaller than the tensor; 0 if it is the whole tensor."""
    return next((d for d in reversed(range(len(box.shape))) if box.local[d] != box.shape[d]), 0)


def run_start(box: Box, item_bytes: int) -> int | None:
    """The byte of the global tensor at which the shard begins; None if the shard is not contiguous in it."""
    if box.local == box.shape:
        return 0  # a fast path: most tensors are whole, and planning a save calls this several times for each
    if any(n != 1 for n in box.local[: cut_dim(box)]):
        return None
    at = 0
    for offset, n in zip(box.offset, box.shape, strict=True):
        at = at * n + offset
    return at * item_bytes


def chunk_bytes(tensor_bytes: int) -> int:
    """The chunk size of a global tensor of this size."""
    return FINE_CHUNK_BYTES if tensor_bytes < FINE_BELOW else CHUNK_BYTES


def cut(size: int, step: int, phase: int = 0) -> Iterator[tuple[int, int]]:
    """(start, length) of the pieces of [0, size) cut where `phase + position` is a multiple of `step`."""
    start = 0
    while start < size:
        length = min(step - (phase + start) % step, size - start)
        yield start, length
        start += length


ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 50


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor of this type and shape."""
    total = math.prod(shape) * ITEM_BYTES[dtype]
    if len(shape) > MAX_DIMENSIONS or total > MAX_TENSOR_BYTES:
        raise CorruptionError(f"a tensor of shape {list(shape)[:8]} and type {dtype} is too large to be valid")
    return total


_MOST = 128
_RUN_BYTES = 256


def bands(box: Box, item_bytes: int) -> tuple[Box, ...]:
    """The bands in which the shard is stored; only the shard itself if it is contiguous in the global tensor."""
    dim = cut_dim(box)
    if 0 in box.local or run_start(box, item_bytes) is not None:
        return (box,)
    start, stop = box.offset[dim], box.offset[dim] + box.local[dim]
    return tuple(_with(box, dim, at, n) for at, n in _steps(start, stop, width(box.shape, dim, item_bytes)))


def inside(band: Box, shard: Box) -> tuple[slice, ...]:
    """The slices of the shard's own array that make up the band."""
    edges = zip(band.offset, shard.offset, band.local, strict=True)
    return tuple(slice(at - origin, at - origin + n) for at, origin, n in edges)


def width(shape: Sequence[int], dim: int, item_bytes: int) -> int:
    """The number of indices of dimension `dim` in a band.

    It is a power of two, chosen so that a band has about the size of a fine chunk.
    """
    inner = math.prod(shape[dim + 1 :]) * item_bytes
    column = math.prod(shape[:dim]) * inner
    least = max(FINE_CHUNK_BYTES, column * shape[dim] // _MOST) // column
    return int(1 << max(least, -(-_RUN_BYTES // inner), 1).bit_length() - 1)


def pieces(box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) of every chunk, in the shard's own bytes."""
    size = math.prod(box.local) * item_bytes
    if not size:
        return
    start = run_start(box, item_bytes)
    if start is None:
        start = run_start(_in_its_band(box, item_bytes), item_bytes)
    yield from cut(size, chunk_bytes(math.prod(box.shape) * item_bytes), start or 0)


def _in_its_band(box: Box, item_bytes: int) -> Box:
    """The shard in the coordinates of the band that contains it, as if the band were the tensor.

    A shard that spans several bands is returned unchanged.
    """
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


ALIGN = 4096
SMALL_ALIGN = 16
"""Elements of the widest type start at multiples of their size."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor shard to be saved.

    `replicated`: the tensor belongs to all ranks, and one rank writes each part of it.
    """

    name: str
    dtype: str
    box: Box
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.box.local)


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of tensors in the arena.

    Tensor i has `sizes[i]` bytes from `offsets[i]` on. Bytes [0, small_bytes) are the small stream. `total`: the number
    of bytes from the start of the first tensor to the end of the last.
    """

    offsets: tuple[int, ...]
    small_bytes: int
    total: int
    sizes: tuple[int, ...] = ()


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A range of arena bytes that becomes one chunk."""

    at: int
    length: int


class PieceSpan(msgspec.Struct, frozen=True, gc=False):
    """`length` bytes from byte `start` of piece number `piece`."""

    piece: int
    start: int
    length: int


def in_bands(specs: Sequence[TensorSpec], tensors: Sequence[Any]) -> tuple[list[TensorSpec], list[Any]]:
    """Replace shards that are cut in an inner dimension by their bands, and slice `tensors` in the same way."""
    all_bands, parts = [], []
    for spec, tensor in zip(specs, tensors, strict=True):
        bands = banded([spec])
        all_bands += bands
        parts += [tensor[inside(band.box, spec.box)] for band in bands] if len(bands) > 1 else [tensor]
    return all_bands, parts


def banded(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The specs, with the bands of shards that are cut in an inner dimension."""
    return [
        TensorSpec(spec.name, spec.dtype, box, spec.replicated)
        for spec in specs
        for box in bands(spec.box, ITEM_BYTES[spec.dtype])
    ]


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Lay out `specs` in the arena: small tensors first, then large ones, each in the given order."""
    sizes = [spec.nbytes for spec in specs]
    offsets = [0] * len(specs)
    end = 0
    large: list[int] = []
    for i, size in enumerate(sizes):
        if size >= SMALL_BELOW:
            large.append(i)
            continue
        offsets[i] = end = -(-end // SMALL_ALIGN) * SMALL_ALIGN
        end += size
    small_bytes = end
    for i in large:
        offsets[i] = end = _round_up(end, ALIGN)
        end += sizes[i]
    return Layout(tuple(offsets), small_bytes, end, tuple(sizes))


def is_small(nbytes: int) -> bool:
    """Whether a tensor of this size lies in the small stream."""
    return nbytes < SMALL_BELOW


def cut_all(specs: Sequence[TensorSpec], layout: Layout) -> tuple[list[Piece], list[tuple[PieceSpan, ...]]]:
    """All chunks of the arena, and for each tensor the parts of chunks that make up its bytes."""
    all_pieces = [Piece(start, length) for start, length in cut(layout.small_bytes, FINE_CHUNK_BYTES)]
    spans: list[tuple[PieceSpan, ...]] = []
    for spec, at, size in zip(specs, layout.offsets, layout.sizes, strict=True):
        if is_small(size):
            spans.append(_small_spans(at, size))
            continue
        pieces_of_tensor = [Piece(at + start, length) for start, length in pieces(spec.box, ITEM_BYTES[spec.dtype])]
        first = len(all_pieces)
        spans.append(tuple(PieceSpan(first + i, 0, piece.length) for i, piece in enumerate(pieces_of_tensor)))
        all_pieces += pieces_of_tensor
    return all_pieces, spans


def gaps(pieces: Sequence[Piece], spans: Iterable[Iterable[PieceSpan]]) -> dict[int, int]:
    """The bytes of pieces that belong to no tensor, by the number of the piece. Pieces without such bytes are left out."""
    rest = dict(enumerate(piece.length for piece in pieces))
    for span in (each for own in spans for each in own):
        rest[span.piece] -= span.length
    return {number: length for number, length in rest.items() if length}


def _small_spans(at: int, nbytes: int) -> tuple[PieceSpan, ...]:
    piece, inside = divmod(at, FINE_CHUNK_BYTES)
    if 0 < nbytes <= FINE_CHUNK_BYTES - inside:
        return (PieceSpan(piece, inside, nbytes),)  # a fast path: few tensors reach into the next chunk
    cuts = cut(nbytes, FINE_CHUNK_BYTES, at)
    return tuple(PieceSpan(*divmod(at + start, FINE_CHUNK_BYTES), length) for start, length in cuts)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
