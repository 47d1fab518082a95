"""Where each tensor lies in the staging arena: a pure function of the list of tensors.

Invariant: tensors do not overlap; the small ones come first, one after another, as one stream from byte 0; the others
start on 4 KiB boundaries, so that packs can be written from the arena without copying. The same list gives the same
layout, which is why the arena is laid out once and reused.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.checkpoint.format import bands, dtypes
from headrace.checkpoint.format.chunk import FINE_CHUNK_BYTES, SMALL_BELOW, Box, cut

ALIGN = 4096
SMALL_ALIGN = 16
"""Elements of the widest type start at multiples of their size."""


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """One tensor shard to be saved. `replicated`: every rank holds the same bytes, one of them writes them."""

    name: str
    dtype: str
    box: Box
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return dtypes.nbytes(self.dtype, self.box.local)


@dataclass(frozen=True, slots=True)
class Layout:
    """`offsets[i]` is where tensor i starts; the small stream is [0, small_bytes); `total` bytes in all."""

    offsets: tuple[int, ...]
    small_bytes: int
    total: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A run of arena bytes that becomes one chunk."""

    at: int
    length: int


class PieceSpan(msgspec.Struct, frozen=True, gc=False):
    """`length` bytes from byte `start` of piece number `piece`."""

    piece: int
    start: int
    length: int


def in_bands(specs: Sequence[TensorSpec], tensors: Sequence[Any]) -> tuple[list[TensorSpec], list[Any]]:
    """The same shards, those that are cut in an inner dimension as their bands; `tensors` are sliced likewise."""
    made, parts = [], []
    for spec, tensor in zip(specs, tensors, strict=True):
        found = bands.bands(spec.box, dtypes.ITEM_BYTES[spec.dtype])
        made += [TensorSpec(spec.name, spec.dtype, box, spec.replicated) for box in found]
        parts += [tensor[bands.inside(box, spec.box)] for box in found] if len(found) > 1 else [tensor]
    return made, parts


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Places for `specs`, in their order."""
    sizes = [spec.nbytes for spec in specs]
    offsets = [0] * len(specs)
    end = small_bytes = 0
    for small in (True, False):
        for i, size in enumerate(sizes):
            if is_small(size) == small:
                offsets[i] = end = _up(end, SMALL_ALIGN if small else ALIGN)
                end += size
        if small:
            small_bytes = end
    return Layout(tuple(offsets), small_bytes, end)


def is_small(nbytes: int) -> bool:
    """Whether a tensor of this size lies in the small stream."""
    return nbytes < SMALL_BELOW


def cut_all(specs: Sequence[TensorSpec], layout: Layout) -> tuple[list[Piece], list[list[PieceSpan]]]:
    """All chunks of the arena, and for each tensor the runs of chunks that make up its bytes."""
    found = [Piece(start, length) for start, length in cut(layout.small_bytes, FINE_CHUNK_BYTES)]
    spans: list[list[PieceSpan]] = []
    for spec, at in zip(specs, layout.offsets, strict=True):
        if is_small(size := spec.nbytes):
            spans.append(list(_small_spans(at, size)))
            continue
        own = [Piece(at + start, length) for start, length in bands.pieces(spec.box, dtypes.ITEM_BYTES[spec.dtype])]
        spans.append([PieceSpan(len(found) + i, 0, piece.length) for i, piece in enumerate(own)])
        found += own
    return found, spans


def _small_spans(at: int, nbytes: int) -> Iterator[PieceSpan]:
    for start, length in cut(nbytes, FINE_CHUNK_BYTES, at):
        piece, inside = divmod(at + start, FINE_CHUNK_BYTES)
        yield PieceSpan(piece, inside, length)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
