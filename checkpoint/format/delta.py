"""Chunks stored as their difference from another chunk, the *base*: XOR, then the bytes of elements by place, then zstd.

What training has hardly changed since the base was stored differs from it in few bits, so the XOR is mostly zeros: bf16
weights of one step before come to an eighth, of ten steps before to a quarter or a half.
Stored are a length of two bytes, the `Link` to the base (msgpack) and the compressed difference, so whoever has the chunk
knows what else it takes. The base is never a difference itself: a chain has one link. The manifest of a step with such a
chunk also names the base's chunk and pack, which protects them.
Invariant: `decode` returns what was encoded only if it is given the base's very bytes; who calls it checks the digest.
Failure behaviour: None for what cannot be read; sizes are bounded before anything is allocated.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format import codec, names, ulid
from headrace.checkpoint.format.chunk import CHUNK_BYTES, DIGEST_BYTES
from headrace.checkpoint.format.manifest import CODECS, DELTAS, PACK_BYTES
from headrace.dataio.store.base import Buffer

_LENGTH = struct.Struct("<H")
_LINK_BYTES = 512


class Link(msgspec.Struct, array_like=True, frozen=True):
    """The base: `raw` bytes with this digest, stored as `stored` bytes at `offset` of the pack `packs/<attempt>/<name>.pack`."""

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


def encode(payload: Buffer, base: Buffer, link: Link, kind: int) -> bytes:
    """What is stored of `payload`; the base has as many bytes."""
    head = msgspec.msgpack.encode(link)
    return _LENGTH.pack(len(head)) + head + compressed(payload, base, kind)


def compressed(payload: Buffer, base: Buffer, kind: int) -> bytes:
    """The difference alone."""
    return codec.encode(_xor(payload, base).data, DELTAS[kind])


def link_of(stored: memoryview) -> Link | None:
    """The base that a stored chunk names, None for damage."""
    if len(stored) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(stored)
    if length > _LINK_BYTES:
        return None
    try:
        link = _decoder.decode(stored[_LENGTH.size : _LENGTH.size + length])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return link if _is_sound(link) else None


def decode(stored: memoryview, base: memoryview, raw: int, kind: int) -> memoryview | None:
    """The bytes that were encoded, if the base is right."""
    (length,) = _LENGTH.unpack_from(stored)
    difference = codec.plain(stored[_LENGTH.size + length :], DELTAS[kind], raw)
    if difference is None or len(difference) != raw or len(base) != raw:
        return None
    return _xor(difference, base).data


def _is_sound(link: Link) -> bool:
    place = 0 < link.stored <= link.raw <= CHUNK_BYTES and 0 <= link.offset <= PACK_BYTES - link.stored
    named = ulid.is_ulid(link.attempt) and names.is_pack_name(link.name) and len(link.digest) == DIGEST_BYTES
    return place and named and link.codec in CODECS and link.codec not in DELTAS


def _xor(one: Buffer, other: Buffer) -> npt.NDArray[np.uint8]:
    a, b = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    whole = len(a) - len(a) % 8
    out = np.empty_like(a)
    np.bitwise_xor(a[:whole].view(np.uint64), b[:whole].view(np.uint64), out=out[:whole].view(np.uint64))
    np.bitwise_xor(a[whole:], b[whole:], out=out[whole:])
    return out
