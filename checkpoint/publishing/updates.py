"""Update objects: the changed blocks of a version, each as a difference from the version before.

An object holds the stored blocks one after the other, then a table: for each block its tensor, its number, the form,
the range in the object, and the first 16 bytes of the BLAKE3 of the stored bytes. The record of the version names the
table's offset and digest. So a rank reads the blocks that it needs, and checks each of them.

Invariant: nothing depends on an update. If it is missing or damaged, a subscriber reads the step.
Failure behaviour: `CorruptionError` that names the object; `NotFoundError` if it was deleted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
import zstandard
from blake3 import blake3

from headrace.checkpoint.format import names
from headrace.checkpoint.publishing.records import Published, Stored, folder
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, MAX_TABLE_BYTES, Weights
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CorruptionError, RangeError
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Store

_DIGEST_BYTES = 16
_READ_BYTES = 16 * MIB
"""Bytes of blocks that are read in one call."""
_GAP_BYTES = 64 * KIB


class UpdateRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One changed block. `tensor`: its number in the table of the new version. `how`: see `difference`."""

    tensor: int
    block: int
    how: int
    offset: int
    stored: int
    digest: bytes


EncodedBlock = tuple[int, int, int, bytes]
"""Tensor, block, how it is stored, and its bytes."""


def store_update(store: Store, name: str, blocks: Iterable[EncodedBlock], clock: Clock) -> Stored:
    """Store an update of the published `name`. `blocks` are encoded while others are uploaded."""
    rows, end, table = list[UpdateRow](), 0, b""

    def parts() -> Iterator[bytes]:
        nonlocal end, table
        for tensor, block, how, data in blocks:
            rows.append(UpdateRow(tensor, block, how, end, len(data), _digest(data)))
            end += len(data)
            yield data
        table = zstandard.ZstdCompressor(level=3).compress(msgspec.msgpack.encode(rows))
        yield table

    key = f"update-{names.new_id(clock)}"
    size = store.put_multipart(f"{folder(name)}{key}", parts())
    return Stored(key, size, blake3(table).hexdigest(), end)


class Update:
    """The table of an update, and access to its blocks.

    Args:
        store: the repository.
        record: a version that has an update.
        weights: the table of that version.
    """

    def __init__(self, store: Store, record: Published, weights: Weights) -> None:
        assert record.update is not None
        self._store, self._key = store, record.key_of(record.update)
        self.rows = self._load(record.update, weights)

    def _load(self, stored: Stored, weights: Weights) -> list[UpdateRow]:
        size = stored.size - stored.table
        if not 0 < size <= MAX_TABLE_BYTES:
            raise CorruptionError(f"{self._key} has a table of {size} bytes")
        buffer = bytearray(size)
        self._read(stored.table, memoryview(buffer))
        while blake3(buffer).hexdigest() != stored.digest:
            if not self._store.invalidate(self._key):
                raise CorruptionError(f"the table of {self._key} does not have the digest that its record names")
            self._read(stored.table, memoryview(buffer))
        try:
            if not 0 <= zstandard.frame_content_size(buffer) <= MAX_TABLE_BYTES:
                raise CorruptionError(f"the table of {self._key} is larger than {MAX_TABLE_BYTES} bytes")
            table = zstandard.ZstdDecompressor().decompress(buffer, max_output_size=MAX_TABLE_BYTES)
            rows = _decoder(sum(tensor.blocks for tensor in weights.tensors)).decode(table)
        except (zstandard.ZstdError, msgspec.MsgspecError, RecursionError) as error:
            raise CorruptionError(f"{self._key} has no readable table: {error}") from error
        for row in rows:
            self._check(row, stored.table, weights)
        if len({(row.tensor, row.block) for row in rows}) < len(rows):
            raise CorruptionError(f"the table of {self._key} names a block twice")
        return rows

    def _read(self, offset: int, buffer: memoryview) -> None:
        try:
            self._store.get_into(self._key, offset, buffer)
        except RangeError as error:
            raise CorruptionError(f"{self._key} is shorter than its record says") from error

    def _check(self, row: UpdateRow, end: int, weights: Weights) -> None:
        known = 0 <= row.tensor < len(weights.tensors) and 0 <= row.block < weights.tensors[row.tensor].blocks
        inside = row.offset >= 0 and 0 <= row.stored <= 2 * BLOCK_BYTES and row.offset + row.stored <= end
        if not known or not inside:
            raise CorruptionError(f"the table of {self._key} contradicts itself")

    def read(self, rows: Sequence[UpdateRow]) -> Iterator[tuple[UpdateRow, memoryview]]:
        """Read these blocks, which are in the order of their offsets, and check their digests."""
        for batch in _batches(rows):
            start, end = batch[0].offset, batch[-1].offset + batch[-1].stored
            buffer = memoryview(bytearray(end - start))
            blocks = [buffer[row.offset - start : row.offset - start + row.stored] for row in batch]
            self._read(start, buffer)
            while wrong := next((r for r, data in zip(batch, blocks, strict=True) if _digest(data) != r.digest), None):
                if not self._store.invalidate(self._key):
                    raise CorruptionError(f"{self._key}: {wrong.stored} bytes at {wrong.offset} have another digest")
                self._read(start, buffer)
            yield from zip(batch, blocks, strict=True)


def _decoder(most: int) -> msgspec.msgpack.Decoder[list[UpdateRow]]:
    """A decoder of at most so many rows. It compares the number with the limit before it allocates memory."""
    return msgspec.msgpack.Decoder(Annotated[list[UpdateRow], msgspec.Meta(max_length=most)])


def _digest(data: bytes | memoryview) -> bytes:
    return blake3(data).digest(_DIGEST_BYTES)


def _batches(rows: Sequence[UpdateRow]) -> Iterator[list[UpdateRow]]:
    """Divide the rows into runs that one read covers."""
    batch = list[UpdateRow]()
    for row in rows:
        if batch:
            gap = row.offset - (batch[-1].offset + batch[-1].stored)
            if not 0 <= gap <= _GAP_BYTES or row.offset + row.stored - batch[0].offset > _READ_BYTES:
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def stored_bytes(rows: Iterable[UpdateRow]) -> int:
    """Stored bytes of these rows."""
    return sum(row.stored for row in rows)
