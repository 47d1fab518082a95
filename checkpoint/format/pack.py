"""Packs: objects that hold many chunks, up to 256 MiB of payload.

Layout:

- the chunks, each on a 4 KiB boundary,
- the footer: a table of the chunks (msgpack),
- a trailer of 64 bytes: magic, version, offset and length of the footer, and the BLAKE3 digest of everything from the
  footer on.
Invariant: a pack is written once, as a stream from the memory of its chunks, and never changed.
Failure behaviour: `read_table` raises `CorruptionError`, which names the pack, if footer, trailer or length are not as
written. Readers check the payload chunk by chunk.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import msgspec

from headrace.checkpoint.format.chunking import ALIGN, CHUNK_BYTES, DIGEST_BYTES, digest
from headrace.checkpoint.format.documents import VERSION, newer
from headrace.checkpoint.format.manifest import CODECS, NEWEST, PACK_BYTES, RAW, version_for
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.core.limits import KIB, MIB
from headrace.dataio.store.base import Buffer, Store

MAGIC = b"MLRPACK\0"
_HEAD = struct.Struct("<8sQQQ")
TRAILER_BYTES = _HEAD.size + DIGEST_BYTES
_FOOTER_BYTES = 16 * MIB
_ZEROS = bytes(ALIGN)
_TAIL_BYTES = 64 * KIB
"""The number of bytes at the end of a pack that are read at once. Most tables are shorter."""


class Entry(msgspec.Struct, array_like=True, frozen=True):
    """One chunk of the pack: `stored` bytes at `offset` that give `raw` bytes with this digest."""

    digest: bytes
    offset: int
    stored: int
    raw: int
    codec: int = RAW


@dataclass(frozen=True, slots=True)
class NewChunk:
    """A chunk to be packed. `payload`: the bytes to store, raw or compressed."""

    digest: bytes
    payload: Buffer
    raw: int
    codec: int = RAW


_encoder = msgspec.msgpack.Encoder()
_table = msgspec.msgpack.Decoder(tuple[Entry, ...])


Took = Callable[[int, float], None]
"""Called with the bytes that the store took, and the seconds that the writer waited for it."""


def write(
    store: Store, key: str, chunks: Iterable[NewChunk], packed: Callable[[Entry], None], took: Took | None = None
) -> int:
    """Write one pack with as many of `chunks` as fit, and call `packed` for each. Returns the object's size."""
    parts = _parts(iter(chunks), packed)
    if took is None:
        return store.put_multipart(key, parts)
    timed = _Timed(parts, took)
    size = store.put_multipart(key, timed)
    timed.returned()
    return size


def write_all(
    store: Store,
    name_of: Callable[[int], str],
    chunks: Iterator[NewChunk],
    packed: Callable[[int, Entry], None],
    took: Took | None = None,
) -> Iterator[int]:
    """Write packs number 0, 1, ... until `chunks` is empty, yielding each one's size once it is stored."""
    for number, first in enumerate(chunks):
        yield write(store, name_of(number), chain([first], chunks), partial(packed, number), took)


class _Timed:
    """Iterates over the parts of a pack. Reports to `took` how long the store took for each part and for the end."""

    def __init__(self, parts: Iterator[Buffer], took: Took) -> None:
        self._parts, self._took, self._handed_over = parts, took, (0, time.perf_counter())

    def __iter__(self) -> Iterator[Buffer]:
        for part in self._parts:
            self._handed_over = len(part), time.perf_counter()
            yield part
            self._took(len(part), time.perf_counter() - self._handed_over[1])
        self._handed_over = 0, time.perf_counter()

    def returned(self) -> None:
        """Report the time from the last part to the end of the upload."""
        self._took(0, time.perf_counter() - self._handed_over[1])


def _parts(chunks: Iterator[NewChunk], packed: Callable[[Entry], None]) -> Iterator[Buffer]:
    at, table = 0, []
    for chunk in chunks:
        if at % ALIGN:
            yield memoryview(_ZEROS)[: ALIGN - at % ALIGN]
            at += ALIGN - at % ALIGN
        entry = Entry(chunk.digest, at, len(chunk.payload), chunk.raw, chunk.codec)
        yield chunk.payload
        table.append(entry)
        packed(entry)
        at += entry.stored
        if at > PACK_BYTES - CHUNK_BYTES - ALIGN:
            break
    footer = _encoder.encode(table)
    version = version_for(entry.codec for entry in table)
    head = _HEAD.pack(MAGIC, version, at, len(footer))
    yield footer + head + digest(footer + head)


def read_table(store: Store, key: str, size: int | None = None) -> tuple[Entry, ...]:
    """Read and check a stored pack's table: its chunks are in order, without overlaps, inside the payload.

    `size` is the object's size in bytes, if the caller knows it. Then most tables take one request.
    """
    try:
        size = store.stat(key).size if size is None else size
        if size < TRAILER_BYTES:
            raise _damaged(key, f"{size} bytes are too few")
        begin = max(0, size - _TAIL_BYTES)
        end = _read(store, key, begin, size - begin)
    except NotFoundError:
        raise CorruptionError(f"{key} is missing", hint="the steps that need it cannot be restored") from None
    tail = end[-TRAILER_BYTES:]
    magic, version, at, length = _HEAD.unpack_from(tail)
    if magic != MAGIC:
        raise _damaged(key, "it does not end in a trailer")
    if at + length + TRAILER_BYTES != size or length > _FOOTER_BYTES:
        raise _damaged(key, "its trailer does not fit its length")
    footer = end[at - begin : at - begin + length] if at >= begin else _read(store, key, at, length)
    if digest(footer + tail[: _HEAD.size]) != tail[_HEAD.size :]:
        raise _damaged(key, "the footer does not match its digest")
    if not VERSION <= version <= NEWEST:
        raise newer(key, version, NEWEST)
    return _checked(key, footer, at)


def _checked(key: str, footer: bytes, payload_bytes: int) -> tuple[Entry, ...]:
    try:
        table = _table.decode(footer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(key, f"the footer cannot be read: {error}") from None
    end = 0
    for i, e in enumerate(table):
        sizes = 0 < e.raw <= CHUNK_BYTES and 0 < e.stored <= e.raw and e.codec in CODECS
        if not sizes or len(e.digest) != DIGEST_BYTES or not end <= e.offset <= payload_bytes - e.stored:
            raise _damaged(key, f"entry {i} of the footer is impossible")
        end = e.offset + e.stored
    return table


def _read(store: Store, key: str, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    store.get_into(key, offset, memoryview(buffer))
    return bytes(buffer)


def _damaged(key: str, why: str) -> CorruptionError:
    return CorruptionError(f"{key} is damaged: {why}", hint="run `headrace ckpt check` to see which steps need it")
