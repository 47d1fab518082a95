"""Where tensors are cut into chunks, and the digest of a chunk.

Invariant: the cuts of a tensor shard lie on the grid of the *global* tensor whenever the shard is one run of its row-major
bytes (sharded in the first dimension, or whole), so that the same weights give the same chunks under another sharding.
The pieces of a shard are in order, without gaps or overlaps. Small tensors share the chunks of one common stream.
Failure behaviour: none; these are pure functions of their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from dataio.core.limits import KIB, MIB

CHUNK_BYTES = 4 * MIB
"""Chunks of large shards; also the most that any chunk may hold."""
FINE_CHUNK_BYTES = 1 * MIB
"""Chunks of shards below `FINE_BELOW`, and of the stream of small tensors: a finer grid survives resharding better."""
FINE_BELOW = 16 * MIB
SMALL_BELOW = 64 * KIB
"""Tensors smaller than this share the chunks of the small stream."""
DIGEST_BYTES = 32


def digest(payload: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(payload).digest()


@dataclass(frozen=True, slots=True)
class Box:
    """A shard of a global tensor: `local` elements from `offset` in each dimension of `shape`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]

    def overlaps(self, other: Box) -> bool:
        """Whether both hold a common element of the same global tensor."""
        edges = zip(self.offset, self.local, other.offset, other.local, strict=True)
        return all(max(a, b) < min(a + n, b + m) for a, n, b, m in edges)


def whole(shape: Sequence[int]) -> Box:
    """The box of a tensor that is not sharded."""
    return Box(tuple(shape), (0,) * len(shape), tuple(shape))


def grid_start(box: Box, item_bytes: int) -> int:
    """The byte of the global tensor at which the shard begins, or 0 when the shard is not one run of its bytes."""
    if not box.shape or any(n != m for n, m in zip(box.local[1:], box.shape[1:], strict=True)):
        return 0
    return box.offset[0] * math.prod(box.shape[1:]) * item_bytes


def chunk_bytes(shard_bytes: int) -> int:
    """The grid for a shard of this size."""
    return FINE_CHUNK_BYTES if shard_bytes < FINE_BELOW else CHUNK_BYTES


def pieces(box: Box, item_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, length) in the shard's own bytes of every chunk of the shard."""
    size = math.prod(box.local) * item_bytes
    yield from cut(size, chunk_bytes(size), grid_start(box, item_bytes))


def cut(size: int, step: int, phase: int = 0) -> Iterator[tuple[int, int]]:
    """(start, length) of the pieces of [0, size) cut where `phase + position` is a multiple of `step`."""
    start = 0
    while start < size:
        length = min(step - (phase + start) % step, size - start)
        yield start, length
        start += length
