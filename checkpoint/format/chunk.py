"""Where tensors are cut into chunks, and the digest of a chunk.

Invariant: the cuts of a tensor shard lie on the grid of the *global* tensor, and how fine that is depends on the global
tensor alone, so that the same weights give the same chunks under another sharding. A shard that is one run of the tensor's
row-major bytes (sharded in the first dimension, or whole) lies on the grid of those bytes; one that is cut in an inner
dimension is stored in bands of that dimension (`headrace.checkpoint.format.bands`), each of which has a grid of its own.
The pieces of a shard are in order, without gaps or overlaps. Small tensors share the chunks of one common stream.
Failure behaviour: none; these are pure functions of their arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from blake3 import blake3

from headrace.dataio.core.limits import KIB, MIB

CHUNK_BYTES = 4 * MIB
"""Chunks of large tensors; also the most that any chunk may hold."""
FINE_CHUNK_BYTES = 1 * MIB
"""Chunks of tensors below `FINE_BELOW`, and of the stream of small tensors: a finer grid survives resharding better."""
FINE_BELOW = 128 * MIB
"""Bytes of the *global* tensor. From here on it has 32 chunks or more, of which another number of ranks cuts a few."""
SMALL_BELOW = 64 * KIB
"""Tensors smaller than this share the chunks of the small stream."""
DIGEST_BYTES = 32


def digest(payload: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3, 32 bytes."""
    return blake3(payload).digest()


class Box(msgspec.Struct, frozen=True, gc=False):
    """A shard of a global tensor: `local` elements from `offset` in each dimension of `shape`.

    As other rows of which a save makes thousands it is no business of the garbage collector (`gc=False`), whose look through the
    trainer's whole heap they would otherwise bring on, in the middle of the save.
    """

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


def cut_dim(box: Box) -> int:
    """The last dimension in which the shard is not the whole tensor; 0 when it is."""
    return next((d for d in reversed(range(len(box.shape))) if box.local[d] != box.shape[d]), 0)


def run_start(box: Box, item_bytes: int) -> int | None:
    """The byte of the global tensor at which the shard begins; None when the shard is not one run of its bytes."""
    if box.local == box.shape:
        return 0  # most are whole, and planning a save asks of each several times
    if any(n != 1 for n in box.local[: cut_dim(box)]):
        return None
    at = 0
    for offset, n in zip(box.offset, box.shape, strict=True):
        at = at * n + offset
    return at * item_bytes


def chunk_bytes(tensor_bytes: int) -> int:
    """The grid of a global tensor of this size."""
    return FINE_CHUNK_BYTES if tensor_bytes < FINE_BELOW else CHUNK_BYTES


def cut(size: int, step: int, phase: int = 0) -> Iterator[tuple[int, int]]:
    """(start, length) of the pieces of [0, size) cut where `phase + position` is a multiple of `step`."""
    start = 0
    while start < size:
        length = min(step - (phase + start) % step, size - start)
        yield start, length
        start += length
