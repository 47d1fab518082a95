"""Which rows of an index part are left: bitmaps, as small as the part's row count allows.

Purpose: removing samples and saving a filter change no shard and no index part; they add one object with bitmaps.
Invariants: bit i of a bitmap (least significant first) stands for row i; it is stored compressed by zlib. One object holds
the bitmaps of all parts that a version changed, each named by its range, its digest and its count.
Failure behaviour: `CorruptionError` for bytes that are not those of the digest, or do not count what the version says;
nothing larger than the bitmap is ever unpacked.
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
"""Row numbers of one part, rising."""


def encode(rows: Rows, of: int) -> bytes:
    """The stored form of `rows` of a part with `of` rows."""
    bits = np.zeros(of, np.bool_)
    bits[rows] = True
    return zlib.compress(np.packbits(bits, bitorder="little").tobytes(), 6)


def decode(data: bytes, of: int, count: int, name: str) -> Rows:
    """The rows that `encode` was given, of which there are `count`."""
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
    """The rows of `part` that are left; None for all."""
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
    """The parts with only these rows left, whose members have so many bytes; their bitmaps go into one new object."""
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
