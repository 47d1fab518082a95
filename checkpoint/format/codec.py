"""Chunk payloads: raw, zstd, or the bytes of each element's places together (*planes*) and then zstd. Differences from another
chunk are in `headrace.checkpoint.format.delta`.

Floating-point numbers whose bytes lie together by place (all first bytes, then all second, ...) compress better: the places
with sign and exponent hardly differ from element to element, those of the mantissa are noise. Chosen by
`headrace.checkpoint.saving.choose`.
Invariant: `unpack` returns exactly the bytes whose digest the chunk carries, or None: a wrong digest, a bad frame and a
wrong length are the same to the caller, who fetches once more and then gives up. Digests are of the raw bytes.
Failure behaviour: None, as said; never damaged bytes, never more than twice `raw` bytes of memory.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from headrace.checkpoint.format.chunk import digest
from headrace.checkpoint.format.manifest import DELTAS, PLANES, RAW, ZSTD
from headrace.dataio.store.base import Buffer

COMPRESSIONS = ("none", "zstd", "auto", "delta")
NAMES = {RAW: "raw", ZSTD: "zstd"} | {kind: f"planes{width}+zstd" for kind, width in PLANES.items()}
NAMES |= {kind: f"xor+{NAMES[inner]}" for kind, inner in DELTAS.items()}
"""What people call the codecs."""
WORTH = 0.97
"""A chunk that is not made at least this much smaller is stored raw, which costs nothing to read."""


class _Contexts(threading.local):
    """zstd's state, made once for each thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(payload: memoryview, kind: int) -> tuple[Buffer, int]:
    """(what to store, its codec): `kind`, or raw where that is not worth it."""
    if kind == RAW:
        return payload, RAW
    small = encode(payload, kind)
    return (small, kind) if len(small) < WORTH * len(payload) else (payload, RAW)


def encode(payload: Buffer, kind: int) -> bytes:
    """The payload by this codec, whether it is worth it or not."""
    source: Buffer = payload if kind == ZSTD else _to_planes(np.frombuffer(payload, np.uint8), PLANES[kind]).data
    return _contexts.compressor.compress(source)


def unpack(stored: memoryview, codec: int, raw: int, expected_digest: bytes) -> memoryview | None:
    """The chunk's bytes when they are the right ones."""
    payload = stored if codec == RAW else plain(stored, codec, raw)
    good = payload is not None and len(payload) == raw and digest(payload) == expected_digest
    return payload if good else None


def plain(stored: memoryview, codec: int, raw: int) -> memoryview | None:
    """What was compressed, of `raw` bytes; not yet compared with any digest."""
    try:
        if zstandard.frame_content_size(stored) != raw:
            return None
        out = _contexts.decompressor.decompress(stored, max_output_size=raw)
    except zstandard.ZstdError:
        return None
    if codec in PLANES and len(out) == raw:
        return _from_planes(np.frombuffer(out, np.uint8), PLANES[codec]).data
    return memoryview(out)


def _to_planes(flat: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    """[b0 b1 c0 c1 ... rest] -> [b0 c0 ... b1 c1 ... rest]; `rest` are bytes beyond whole elements."""
    whole = len(flat) - len(flat) % width
    out = np.empty_like(flat)
    np.copyto(out[:whole].reshape(width, -1), flat[:whole].reshape(-1, width).T)
    out[whole:] = flat[whole:]
    return out


def _from_planes(planes: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    whole = len(planes) - len(planes) % width
    out = np.empty_like(planes)
    np.copyto(out[:whole].reshape(-1, width), planes[:whole].reshape(width, -1).T)
    out[whole:] = planes[whole:]
    return out
