"""Bitmaps of the rows of an index part that remain after a removal or a filter.

Purpose: removing samples and saving a filter change no shard and no index part. They add one object with bitmaps.
Invariants: bit i of a bitmap (least significant first) stands for row i. A bitmap is compressed with zlib. One object
holds the bitmaps of all parts that a version changed. The version document names the range, the digest and the count of
each.
Failure behaviour: `CorruptionError` if the bytes do not match the digest, or the number of rows does not match the
version document. At most one byte more than the bitmap's size is unpacked.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.index.digests import digest
from headrace.dataio.shards.versions.documents import IndexPart, Kept
from headrace.dataio.store.base import Store

Rows = npt.NDArray[np.uint32]
"""Row numbers of one part, in ascending order."""


def encode(rows: Rows, of: int) -> bytes:
    """The compressed bitmap of `rows` in a part with `of` rows."""
    bits = np.zeros(of, np.bool_)
    bits[rows] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes(), 6)


def decode(data: bytes, of: int, count: int, name: str) -> Rows:
    """The rows of a bitmap that `encode` made. Errors name it `name`. There must be `count` rows."""
    size = (of + 7) // 8
    try:
        unpacked = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise CorruptionError(f"{name}: the rows that are left cannot be unpacked: {error}") from error
    bits = np.unpackbits(np.frombuffer(unpacked, np.uint8), bitorder="little")
    rows = np.flatnonzero(bits).astype(np.uint32)
    if len(unpacked) != size or len(rows) != count or (count and rows[-1] >= of):
        raise CorruptionError(f"{name}: the rows that are left are not the {count} of {of} that the version names")
    return rows


def load(store: Store, part: IndexPart, name: str) -> Rows | None:
    """Read the rows of `part` that remain. None means all rows."""
    kept = part.kept
    if kept is None:
        return None
    data = bytearray(kept.size)
    try:
        store.get_into(kept.key, kept.offset, memoryview(data))
    except (NotFoundError, RangeError) as error:
        raise CorruptionError(f"{name}: {kept.key} is missing or short: {error.message}") from error
    if digest(bytes(data)) != kept.digest:
        raise CorruptionError(f"{name}: the digest of the rows that are left, in {kept.key}, does not match")
    return decode(bytes(data), part.rows, kept.rows, name)


def store_all(store: Store, changed: Sequence[tuple[IndexPart, Rows, int]]) -> list[IndexPart]:
    """Store the bitmaps of changed parts in one new object, and return the parts that refer to it.

    Each item of `changed` is a part, the rows that remain, and the total bytes of their members.
    """
    if not changed:
        return []
    pieces = [encode(rows, part.rows) for part, rows, _ in changed]
    data = b"".join(pieces)
    key, offset, made = f"index/{digest(data)[:32]}.kept", 0, list[IndexPart]()
    store.put(key, data)
    for piece, (part, rows, size) in zip(pieces, changed, strict=True):
        kept = Kept(key=key, offset=offset, size=len(piece), digest=digest(piece), rows=len(rows), bytes=size)
        made.append(_with(part, kept))
        offset += len(piece)
    return made


def _with(part: IndexPart, kept: Kept) -> IndexPart:
    return msgspec.structs.replace(part, kept=kept)
