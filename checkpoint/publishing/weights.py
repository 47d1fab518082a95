"""The table of a published version: name, dtype and shape of each tensor, and the digest of each of its blocks.

A block is `BLOCK_BYTES` of the row-major bytes of a tensor; its last block may be shorter. The table is stored as
msgpack with zstd.
Invariant: a reader compares the digest of the stored bytes with that of the record, and checks sizes before it allocates
memory. A publisher stores only tables that a reader accepts.
Failure behaviour: `CorruptionError` that names the object.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated

import msgspec
import zstandard
from blake3 import blake3

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import DIGEST_BYTES, ITEM_BYTES, MAX_DIMENSIONS, MAX_TENSOR_BYTES, Box, whole
from headrace.checkpoint.publishing.records import Published, Stored, folder
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CapacityError, CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

BLOCK_BYTES = 1 * MIB
MAX_TABLE_BYTES = 256 * MIB
MAX_TENSORS = 1_000_000
_MAX_NAME = 4096


class TensorBlocks(msgspec.Struct, frozen=True, array_like=True):
    """A published tensor. `digests`: the BLAKE3 of its blocks, one after the other."""

    name: str
    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    digests: bytes

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.item

    @property
    def blocks(self) -> int:
        return -(-self.nbytes // BLOCK_BYTES)

    @property
    def box(self) -> Box:
        return whole(self.shape)

    def size_of(self, block: int) -> int:
        """Bytes of a block."""
        return min(BLOCK_BYTES, self.nbytes - block * BLOCK_BYTES)

    def digest_of(self, block: int) -> bytes:
        """The digest of a block."""
        return self.digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

    def same_form(self, other: TensorBlocks) -> bool:
        """Whether both tensors have the same dtype and shape."""
        return (self.dtype, self.shape) == (other.dtype, other.shape)


class Weights(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All tensors of a version, sorted by name."""

    tensors: Annotated[tuple[TensorBlocks, ...], msgspec.Meta(max_length=MAX_TENSORS)]

    @cached_property
    def by_name(self) -> dict[str, TensorBlocks]:
        return {tensor.name: tensor for tensor in self.tensors}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def changed_blocks(self, old: Weights) -> dict[str, list[int]]:
        """The blocks of each tensor that differ from those of `old`, by name. Tensors without a change are left out."""
        changed = dict[str, list[int]]()
        for tensor in self.tensors:
            before = old.by_name.get(tensor.name)
            if before is None or not before.same_form(tensor):
                changed[tensor.name] = list(range(tensor.blocks))
            elif before.digests != tensor.digests:
                changed[tensor.name] = [n for n in range(tensor.blocks) if before.digest_of(n) != tensor.digest_of(n)]
        return changed


_decoder = msgspec.msgpack.Decoder(Weights)


def store_weights(store: Store, name: str, weights: Weights, clock: Clock) -> Stored:
    """Store the table of a version of `name`."""
    data = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(weights))
    stored = Stored(f"weights-{names.new_id(clock)}", len(data), blake3(data).hexdigest())
    decode_weights(data, f"the table of {name}")
    store.put(f"{folder(name)}{stored.key}", data)
    return stored


def load_weights(store: Store, record: Published) -> Weights:
    """Read and check the table of a version."""
    key = record.key_of(record.weights)
    while blake3(data := _get(store, key)).hexdigest() != record.weights.digest:
        if not store.invalidate(key):
            raise CorruptionError(f"{key} does not have the digest that its record names", hint="publish again")
    return decode_weights(data, key)


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key, max_bytes=MAX_TABLE_BYTES)
    except CapacityError as error:
        raise CorruptionError(f"{key} is larger than {MAX_TABLE_BYTES} bytes", hint="publish again") from error


def decode_weights(data: bytes, key: str) -> Weights:
    """Decode and check a table. Errors call it `key`."""
    try:
        if not 0 <= zstandard.frame_content_size(data) <= MAX_TABLE_BYTES:
            raise CorruptionError(f"{key} is larger than {MAX_TABLE_BYTES} bytes")
        weights = _decoder.decode(zstandard.ZstdDecompressor().decompress(data, max_output_size=MAX_TABLE_BYTES))
    except (zstandard.ZstdError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptionError(f"{key} is not a table of weights: {error}", hint="publish again") from error
    previous = ""
    for tensor in weights.tensors:
        valid = (
            previous < tensor.name
            and len(tensor.name) <= _MAX_NAME
            and tensor.dtype in ITEM_BYTES
            and all(side >= 0 for side in tensor.shape)
            and math.prod(side or 1 for side in tensor.shape)
            <= MAX_TENSOR_BYTES  # PyTorch refuses more, also with a side of 0
            and len(tensor.digests) == tensor.blocks * DIGEST_BYTES
        )
        if not valid:
            raise CorruptionError(f"{key}: the entry of {tensor.name!r:.200} contradicts itself", hint="publish again")
        previous = tensor.name
    return weights
