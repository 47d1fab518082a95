"""How the bytes of a chunk are stored: raw, zstd, byte planes with zstd, or the difference from another chunk.

- *Byte planes*: the first bytes of all elements come first, then all second bytes, and so on. Floating-point numbers
  compress better in this order, because signs and exponents of neighbours are similar.
- *Difference*: XOR with a base chunk, then byte planes and zstd. A difference of bf16 weights from those of one step
  earlier takes about an eighth of their size. The stored bytes are a length of two bytes, the `Link` to the base
  (msgpack) and the compressed difference. The base is never a difference itself. The manifest also names the base's
  chunk and pack, which protects both from retention.

`headrace.checkpoint.saving.compression` chooses the codec.
Invariant: `unpack` returns the bytes whose BLAKE3 digest the chunk carries, or None. Digests are of the raw bytes.
Callers of `decode_difference` compare the digest themselves.
Failure behaviour: functions return None for a wrong digest, a damaged frame or a wrong length. Sizes are checked before
memory is allocated.
"""

from __future__ import annotations

import struct
import threading

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import CHUNK_BYTES, DIGEST_BYTES, digest
from headrace.checkpoint.format.manifest import CODECS, DELTAS, PACK_BYTES, PLANES, RAW, ZSTD
from headrace.dataio.store.base import Buffer

COMPRESSIONS = ("none", "zstd", "auto", "delta")
NAMES = {RAW: "raw", ZSTD: "zstd"} | {kind: f"planes{width}+zstd" for kind, width in PLANES.items()}
NAMES |= {kind: f"xor+{NAMES[inner]}" for kind, inner in DELTAS.items()}
"""Names of the codecs in reports."""
WORTH = 0.97
"""A chunk whose compressed size is not below this fraction is stored raw, because raw chunks need no decompression."""


class _Contexts(threading.local):
    """zstd's compressor and decompressor, created once for each thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(payload: memoryview, kind: int) -> tuple[Buffer, int]:
    """Encode a chunk. Returns (bytes to store, codec): with `kind`, or raw if compression gains too little."""
    if kind == RAW:
        return payload, RAW
    small = compress(payload, kind)
    return (small, kind) if len(small) < WORTH * len(payload) else (payload, RAW)


def compress(payload: Buffer, kind: int) -> bytes:
    """Compress the payload with this codec, even if the result is not smaller."""
    source: Buffer = payload if kind == ZSTD else _to_planes(np.frombuffer(payload, np.uint8), PLANES[kind]).data
    return _contexts.compressor.compress(source)


def unpack(stored: memoryview, codec: int, raw: int, expected_digest: bytes) -> memoryview | None:
    """Decode a chunk; None unless its bytes match the digest."""
    payload = stored if codec == RAW else decompress(stored, codec, raw)
    good = payload is not None and len(payload) == raw and digest(payload) == expected_digest
    return payload if good else None


def decompress(stored: memoryview, codec: int, raw: int) -> memoryview | None:
    """Decompress to `raw` bytes, without comparing a digest; None for a damaged frame."""
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
    """[b0 b1 c0 c1 ... rest] -> [b0 c0 ... b1 c1 ... rest]; `rest`: bytes after the last whole element."""
    whole_bytes = len(flat) - len(flat) % width
    out = np.empty_like(flat)
    np.copyto(out[:whole_bytes].reshape(width, -1), flat[:whole_bytes].reshape(-1, width).T)
    out[whole_bytes:] = flat[whole_bytes:]
    return out


def _from_planes(planes: npt.NDArray[np.uint8], width: int) -> npt.NDArray[np.uint8]:
    whole_bytes = len(planes) - len(planes) % width
    out = np.empty_like(planes)
    np.copyto(out[:whole_bytes].reshape(-1, width), planes[:whole_bytes].reshape(width, -1).T)
    out[whole_bytes:] = planes[whole_bytes:]
    return out


_LENGTH = struct.Struct("<H")
_LINK_BYTES = 512


class Link(msgspec.Struct, array_like=True, frozen=True):
    """The base: `raw` bytes with this digest.

    They are stored as `stored` bytes at `offset` of the pack `packs/<attempt>/<name>.pack`.
    """

    digest: bytes
    attempt: str
    name: str
    offset: int
    stored: int
    raw: int
    codec: int

    @property
    def pack(self) -> str:
        return names.pack(self.attempt, self.name)


_decoder = msgspec.msgpack.Decoder(Link)


def encode_difference(payload: Buffer, base: Buffer, link: Link, kind: int) -> bytes:
    """Encode `payload` as a difference from `base`, which has the same number of bytes."""
    head = msgspec.msgpack.encode(link)
    return _LENGTH.pack(len(head)) + head + compress_difference(payload, base, kind)


def compress_difference(payload: Buffer, base: Buffer, kind: int) -> bytes:
    """Compress the difference alone, without the link."""
    return compress(_xor(payload, base).data, DELTAS[kind])


def link_of(stored: memoryview) -> Link | None:
    """The link to the base in a stored difference; None if it is damaged."""
    if len(stored) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(stored)
    if length > _LINK_BYTES:
        return None
    try:
        link = _decoder.decode(stored[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return link if _is_valid(link) else None


def relink(stored: memoryview, link: Link) -> bytes:
    """A stored difference with another link: the same base, stored at another place."""
    (length,) = _LENGTH.unpack_from(stored)
    head = msgspec.msgpack.encode(link)
    return _LENGTH.pack(len(head)) + head + bytes(stored[_LENGTH.size + length :])


def decode_difference(stored: memoryview, base: memoryview, raw: int, kind: int) -> memoryview | None:
    """Decode a difference, without comparing a digest; None if it is damaged or the base has the wrong length."""
    (length,) = _LENGTH.unpack_from(stored)
    difference = decompress(stored[_LENGTH.size + length :], DELTAS[kind], raw)
    if difference is None or len(difference) != raw or len(base) != raw:
        return None
    return _xor(difference, base).data


def _is_valid(link: Link) -> bool:
    place = 0 < link.stored <= link.raw <= CHUNK_BYTES and 0 <= link.offset <= PACK_BYTES - link.stored
    named = names.is_id(link.attempt) and names.is_pack_name(link.name) and len(link.digest) == DIGEST_BYTES
    return place and named and link.codec in CODECS and link.codec not in DELTAS


def _xor(first: Buffer, second: Buffer) -> npt.NDArray[np.uint8]:
    a, b = np.frombuffer(first, np.uint8), np.frombuffer(second, np.uint8)
    whole_bytes = len(a) - len(a) % 8
    out = np.empty_like(a)
    np.bitwise_xor(
        a[:whole_bytes].view(np.uint64), b[:whole_bytes].view(np.uint64), out=out[:whole_bytes].view(np.uint64)
    )
    np.bitwise_xor(a[whole_bytes:], b[whole_bytes:], out=out[whole_bytes:])
    return out
