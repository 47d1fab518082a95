"""Finds which parts of two tensors differ, from the digests of their chunks, without reading data.

The bytes of a tensor are in *spaces*. All shards that are one range of the global tensor share one space: the bytes of
the global tensor. A shard that is cut in an inner dimension (a band of columns) is a space of its own. In each space, a
piece is a range of bytes that lies in one chunk. Two tensors are compared piece by piece, on the common refinement of
both lists of pieces. So two world sizes, or two meshes, are compared without reading what they share.

Invariant: parts that are not returned are equal, because they are the same bytes of chunks with the same digest. The
returned parts cover every other element once.
Failure behaviour: pure functions. `parts` returns None if the spaces of both tensors differ, for example rows and
columns. The caller then reads blocks of the global tensor (`blocks`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from headrace.checkpoint import sharding
from headrace.checkpoint.format.chunking import ITEM_BYTES, Box, nbytes, run_start, whole
from headrace.checkpoint.format.manifest import Chunk, Rows, Tensor
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.chunk_reader import Saved

BLOCK_BYTES = 16 << 20
"""The size of the blocks that are read where chunks cannot be compared, in bytes, unless one element is larger."""
Space = tuple[tuple[int, ...], tuple[int, ...]] | None
"""None for the bytes of the global tensor; otherwise offset and size of a shard that is a space of its own."""
Key = tuple[str, int]
"""Name of a tensor and the rank that it belongs to; -1 if it belongs to the whole job."""


class Piece(NamedTuple):
    """Bytes [start, stop) of a space. They are bytes of a chunk, from byte `inside` on, in the pack with key `pack`."""

    start: int
    stop: int
    chunk: Chunk
    pack: str
    inside: int


class Part(NamedTuple):
    """`length` bytes of both tensors that may differ: a chunk on each side, and where the bytes begin in it."""

    a: Piece
    b: Piece
    at_a: int
    at_b: int
    length: int


@dataclass(frozen=True, slots=True)
class Found:
    """The parts that may differ, and the number of bytes that are known to be equal."""

    parts: list[Part]
    equal_bytes: int


def tensors_of(step: Step) -> dict[Key, Saved]:
    """Every tensor of a step. Tensors of rank 0 alone have rank -1, as those of all ranks."""
    shared: dict[str, list[tuple[Rows, Tensor]]] = defaultdict(list)
    for manifest in step.manifests:
        for tensor in manifest.tensors:
            if tensor.replicated:
                shared[tensor.name].append((manifest, tensor))
    found = {(name, -1): Saved(name, rows[0][1].dtype, rows[0][1].shape, tuple(rows)) for name, rows in shared.items()}
    for manifest in step.manifests:
        for tensor in manifest.tensors:
            if not tensor.replicated:
                key = tensor.name, manifest.rank if manifest.rank or (tensor.name, -1) in found else -1
                found[key] = Saved(tensor.name, tensor.dtype, tensor.shape, ((manifest, tensor),))
    return found


def parts(a: Saved, b: Saved) -> Found | None:
    """The parts of two tensors of the same type and shape that may differ; None if their spaces differ."""
    ours, theirs = _spaces(a), _spaces(b)
    if ours.keys() != theirs.keys():
        return None
    differing: list[Part] = []
    equal = 0
    for space, pieces in ours.items():
        covered = 0
        for part in _refined(pieces, theirs[space]):
            covered += part.length
            if part.a.chunk.digest == part.b.chunk.digest and part.at_a == part.at_b:
                equal += part.length
            else:
                differing.append(part)
        if covered != _size(pieces) or covered != _size(theirs[space]):
            return None
    return Found(differing, equal)


def remaining(a: Saved, b: Saved) -> list[tuple[Box, int, int]]:
    """The pieces of `a`, as box, first byte and length, that `b` does not have with the same digest at the same place."""
    theirs = {(space, *piece[:2], piece.chunk.digest, piece.inside) for space, piece in _pieces(b)}
    item = ITEM_BYTES[a.dtype]
    left = []
    for box, at, piece, space in _with_boxes(a, item):
        if (space, *piece[:2], piece.chunk.digest, piece.inside) not in theirs:
            left.append((box, at, piece.stop - piece.start))
    return left


def blocks(shape: tuple[int, ...], item_bytes: int, most: int = BLOCK_BYTES) -> Iterator[Box]:
    """Boxes of at most `most` bytes that cover a tensor of this shape."""
    if 0 in shape:
        return
    yield from (Box(shape, offset, local) for offset, local in _cut(shape, max(most // item_bytes, 1)))


def blocks_to_read(a: Saved, b: Saved) -> Iterator[Box]:
    """The blocks of two tensors that may differ. If most of their pieces are not the same, these are all blocks."""
    item, left = ITEM_BYTES[a.dtype], remaining(a, b)
    reads_all = 2 * sum(length for _, _, length in left) > size_of(a)
    for block in blocks(a.shape, item):
        if reads_all or _overlap(block, left, item):
            yield block


def _overlap(block: Box, left: list[tuple[Box, int, int]], item_bytes: int) -> bool:
    """Whether a block has an element of any of these pieces."""
    return any(
        box.overlaps(block) and sharding.overlaps(box, block, item_bytes, at, length) for box, at, length in left
    )


def _cut(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if math.prod(shape) <= most:
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    if inner <= most:
        rows = most // inner
        for at in range(0, shape[0], rows):
            yield (at, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - at), *shape[1:])
        return
    for at in range(shape[0]):
        yield from (((at, *offset), (1, *local)) for offset, local in _cut(shape[1:], most))


def _spaces(saved: Saved) -> dict[Space, list[Piece]]:
    spaces: dict[Space, list[Piece]] = defaultdict(list)
    for space, piece in _pieces(saved):
        spaces[space].append(piece)
    for pieces in spaces.values():
        pieces.sort(key=lambda piece: piece.start)
    return spaces


def _pieces(saved: Saved) -> Iterator[tuple[Space, Piece]]:
    return ((space, piece) for _, _, piece, space in _with_boxes(saved, ITEM_BYTES[saved.dtype]))


def _with_boxes(saved: Saved, item: int) -> Iterator[tuple[Box, int, Piece, Space]]:
    for rows, tensor in saved.shards:
        box = tensor.box
        if 0 in box.local and 0 in box.shape:
            continue
        begin = run_start(box, item) if 0 not in box.local else None
        space: Space = None if begin is not None else (box.offset, box.local)
        at = 0
        for span in tensor.spans:
            chunk = rows.chunks[span.chunk]
            start = (begin or 0) + at
            yield box, at, Piece(start, start + span.length, chunk, rows.packs[chunk.pack].key, span.start), space
            at += span.length


def _size(pieces: list[Piece]) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def _refined(ours: list[Piece], theirs: list[Piece]) -> Iterator[Part]:
    """The common refinement of two sorted lists of pieces."""
    i = j = 0
    while i < len(ours) and j < len(theirs):
        a, b = ours[i], theirs[j]
        start, stop = max(a.start, b.start), min(a.stop, b.stop)
        if start < stop:
            yield Part(a, b, a.inside + start - a.start, b.inside + start - b.start, stop - start)
        if a.stop <= b.stop:
            i += 1
        if b.stop <= a.stop:
            j += 1


def size_of(saved: Saved) -> int:
    """The size of the global tensor in bytes."""
    return nbytes(saved.dtype, saved.shape)


def elements_of(saved: Saved) -> int:
    """The number of elements of the global tensor."""
    return math.prod(whole(saved.shape).local)
