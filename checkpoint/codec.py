"""Chunk payloads: stored raw, or as zstd when that was asked for and pays.

Invariant: `unpack` returns exactly the bytes whose digest the chunk carries, or None: a wrong digest, a bad frame and a
wrong length are the same to the caller, who fetches once more and then gives up.
Failure behaviour: None, as said; never damaged bytes, never more than `raw` bytes of memory.
"""

from __future__ import annotations

import zstandard

from checkpoint.chunk import digest
from checkpoint.manifest import RAW, ZSTD
from dataio.store.contract import Buffer

COMPRESSIONS = ("none", "zstd")
_WORTH = 0.97
"""A chunk that zstd does not make at least this much smaller is stored raw, which costs nothing to read."""


def pack(payload: memoryview, compression: str) -> tuple[Buffer, int]:
    """(what to store, its codec)."""
    if compression == "zstd":
        small = zstandard.ZstdCompressor(level=1).compress(payload)
        if len(small) < _WORTH * len(payload):
            return small, ZSTD
    return payload, RAW


def unpack(stored: memoryview, codec: int, raw: int, expected_digest: bytes) -> memoryview | None:
    """The chunk's bytes when they are the right ones."""
    payload = stored
    if codec == ZSTD:
        try:
            size = zstandard.frame_content_size(stored)
            if size != raw:
                return None
            payload = memoryview(zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw))
        except zstandard.ZstdError:
            return None
    good = len(payload) == raw and digest(payload) == expected_digest
    return payload if good else None
