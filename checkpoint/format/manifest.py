"""A rank's manifest: its tensors, the chunks of the tensors, the packs that hold the chunks, and the Python values.

Invariant: a manifest that `decode` returned is consistent. The spans of every tensor add up to its bytes, and every
span lies in its chunk. Every chunk lies in a pack, and no two chunks of a pack overlap. Readers first compare the
manifest with its BLAKE3 digest in the decision.

The rows are excluded from Python's garbage collector (`gc=False`). They hold plain values only, and creating thousands
of them would trigger collections of the trainer's whole heap.

Failure behaviour: `UnsupportedError` for a newer version. `CorruptionError`, which names the manifest and the entry,
for everything else. Sizes are checked before memory is allocated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

import msgspec
import zstandard

from headrace.checkpoint.format import chunking, names, own_digest
from headrace.checkpoint.format.chunking import CHUNK_BYTES, DIGEST_BYTES, Box, digest
from headrace.checkpoint.format.documents import VERSION, Base, newer
from headrace.checkpoint.format.metadata import Value, flaw_of
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.sharding import coverage_error
from headrace.dataio.core.errors import CapacityError, CorruptionError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES, MIB, format_bytes

MAX_BYTES = JSON_DOCUMENT_BYTES
"""The maximum size of a manifest's object, in bytes. A conditional write accepts no more."""
MAX_RAW_BYTES = 64 * MIB
"""The maximum size of a decompressed manifest, in bytes: half a million tensors, or two terabytes of state, per rank.
"""
PACK_BYTES = 256 * MIB
"""The maximum number of payload bytes in a pack."""
RAW, ZSTD = 0, 1
PLANES = {2: 2, 3: 4, 4: 8}
"""Byte-plane codecs, each with its element width in bytes (note 0011)."""
DELTAS = {5: 2, 6: 3}
"""Codecs of a chunk that is stored as a difference, each with the codec of the difference itself (note 0016)."""
CODECS = {RAW, ZSTD, *PLANES, *DELTAS}
WITH_PLANES, WITH_DELTAS = 2, 3
"""Versions of manifests and packs with such chunks. Others keep version 1, so that older readers can read them."""
WITH_VALUES = 4
"""The version of manifests that are compressed, or have a tree that begins with `NEWER_TREE` (note 0028)."""
NEWEST = WITH_VALUES
NEWER_TREE = b"\x92\xa1N"
"""The first bytes of a tree with kinds of values that readers of versions up to 3 do not know."""
_NAME_BYTES = 4096


class Span(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`length` bytes from byte `start` of chunk number `chunk` of the manifest's table."""

    chunk: int
    start: int
    length: int


class Chunk(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`raw` bytes with this BLAKE3 digest, stored as `stored` bytes at `offset` of pack number `pack` of the table."""

    digest: bytes
    pack: int
    offset: int
    stored: int
    raw: int
    codec: int = RAW


class PackName(msgspec.Struct, array_like=True, frozen=True, gc=False, order=True):
    """The pack `packs/<attempt>/<name>.pack`."""

    attempt: str
    name: str

    @property
    def key(self) -> str:
        return names.pack(self.attempt, self.name)


class Tensor(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A shard of a tensor: `local` elements from `offset` of the global `shape`. `spans` hold its row-major bytes.

    With `replicated` the tensor belongs to all ranks, and their manifests hold each element once. Otherwise the tensor
    is whole and belongs to this rank.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    replicated: bool
    spans: tuple[Span, ...]

    @property
    def box(self) -> Box:
        return Box(self.shape, self.offset, self.local)

    @property
    def nbytes(self) -> int:
        return chunking.nbytes(self.dtype, self.local)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a step.

    `tree`: a document of `headrace.checkpoint.state.tree`. `replicas`: the digest of the data that must be equal on all
    ranks. `links`: for each chunk that is a difference, its number and the number of its base, which is a chunk of this
    table, too. `metadata`: the step's metadata. `description`: the digest of the step's description, or "". Only rank 0's
    manifest has them.
    """

    version: int = VERSION
    nonce: str = msgspec.field(default_factory=names.new_id)
    run: str
    timeline: int
    step: int
    attempt: str
    rank: int
    world_size: int
    created: float
    bases: tuple[Base, ...]
    packs: tuple[PackName, ...]
    chunks: tuple[Chunk, ...]
    tensors: tuple[Tensor, ...]
    tree: bytes
    replicas: bytes
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    links: tuple[tuple[int, int], ...] = ()
    metadata: dict[str, Value] = {}
    description: str = ""


class _Head(msgspec.Struct):
    version: int
    zstd: bytes = b""


class _Compressed(msgspec.Struct, frozen=True):
    """The object of a manifest that would be larger than `MAX_BYTES` without compression."""

    version: int
    zstd: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def version_for(codecs: Iterable[int], tree: bytes = b"") -> int:
    """The lowest version that supports chunks with these codecs and this tree."""
    if tree.startswith(NEWER_TREE):
        return WITH_VALUES
    kinds = set(codecs)
    if kinds & DELTAS.keys():
        return WITH_DELTAS
    return WITH_PLANES if kinds & PLANES.keys() else VERSION


def encodings(manifest: Manifest) -> dict[int, tuple[int, int]]:
    """By codec, (raw, stored) bytes of the chunks that the manifest's own attempt wrote."""
    sizes: dict[int, tuple[int, int]] = {}
    for chunk in manifest.chunks:
        if manifest.packs[chunk.pack].attempt == manifest.attempt:
            raw, stored = sizes.get(chunk.codec, (0, 0))
            sizes[chunk.codec] = raw + chunk.raw, stored + chunk.stored
    return sizes


def encode(manifest: Manifest) -> bytes:
    """Encode the manifest, compressed if it is large; `CapacityError` if it is too large even then."""
    raw = _encoder.encode(manifest)
    data = own_digest.append(raw)
    if len(data) > MAX_BYTES and len(raw) <= MAX_RAW_BYTES:
        raw = _encoder.encode(msgspec.structs.replace(manifest, version=WITH_VALUES))
        frame = zstandard.ZstdCompressor(level=1).compress(raw)
        data = own_digest.append(_encoder.encode(_Compressed(WITH_VALUES, frame)))
    if len(data) > MAX_BYTES:
        raise CapacityError(
            f"the manifest of rank {manifest.rank} would have {format_bytes(len(raw))}, {format_bytes(len(data))} compressed; "
            f"at most {format_bytes(MAX_RAW_BYTES)}, {format_bytes(MAX_BYTES)} compressed",
            hint="spread the state over more ranks, or combine small tensors",
        )
    return data


def decode(data: bytes, key: str, expected_digest: bytes | None = None) -> Manifest:
    """Decode and check the manifest in the object `key`.

    The given digest is compared first. If none is given, the manifest's own digest is compared, if it has one.
    """
    if expected_digest is None:
        own_digest.check(data, key)
    elif digest(data) != expected_digest:
        raise CorruptionError(
            f"{key} is damaged: its digest is not the one in the decision", hint="run `headrace ckpt check`"
        )
    try:
        head = msgspec.msgpack.decode(data, type=_Head)
        if not VERSION <= head.version <= NEWEST:
            raise newer(key, head.version, NEWEST)
        with gc_paused():
            manifest = _decoder.decode(_decompressed(head.zstd) if head.zstd else data)
            _check_identity(manifest, key)
            _check_chunks(manifest)
            _check_links(manifest)
            _check_tensors(manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, zstandard.ZstdError, _Invalid) as error:
        raise CorruptionError(f"{key} is not a valid manifest: {error}", hint="run `headrace ckpt check`") from None
    return manifest


def _decompressed(frame: bytes) -> bytes:
    size = zstandard.frame_content_size(frame)
    _require(0 < size <= MAX_RAW_BYTES, f"it would have {size} bytes")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)


class _Invalid(Exception):
    """An error inside a manifest. `decode` raises it as `CorruptionError`."""


def _require(condition: bool, flaw: str) -> None:
    if not condition:
        raise _Invalid(flaw)


class Rows(Protocol):
    """Tensors, with the chunks and the packs that they name by number."""

    @property
    def packs(self) -> tuple[PackName, ...]: ...
    @property
    def chunks(self) -> tuple[Chunk, ...]: ...
    @property
    def tensors(self) -> tuple[Tensor, ...]: ...


def check_rows(rows: Rows, what: str) -> None:
    """Raise `CorruptionError` if these rows are inconsistent. `what` names them in the message."""
    try:
        _check_packs(rows.packs)
        _check_chunks(rows)
        _check_tensors(rows)
    except _Invalid as error:
        raise CorruptionError(f"{what}: {error}") from None


def _check_identity(manifest: Manifest, key: str) -> None:
    m = manifest
    _require(names.is_id(m.attempt), "its attempt is not an id")
    _require(0 <= m.rank < m.world_size, f"rank {m.rank} is not below world size {m.world_size}")
    _require(names.manifest(m.run, m.timeline, m.step, m.attempt, m.rank) == key, "it belongs to another key")
    _check_packs(m.packs)
    if flaw := flaw_of(m.metadata, m.description):
        raise _Invalid(flaw)


def _check_packs(packs: Iterable[PackName]) -> None:
    for pack in packs:
        _require(names.is_id(pack.attempt) and names.is_pack_name(pack.name), f"bad pack name {pack.name!r:.60}")


def _check_chunks(rows: Rows) -> None:
    digests: set[bytes] = set()
    packs = len(rows.packs)
    for i, c in enumerate(rows.chunks):
        flaw = ""
        if len(c.digest) != DIGEST_BYTES or c.digest in digests:
            flaw = "has a bad or repeated digest"
        elif not 0 <= c.pack < packs:
            flaw = f"names pack {c.pack} of {packs}"
        elif c.codec not in CODECS:
            flaw = f"has the unknown codec {c.codec}"
        elif not (0 < c.raw <= CHUNK_BYTES and 0 < c.stored <= c.raw):
            flaw = "has impossible sizes"
        elif c.codec == RAW and c.stored != c.raw:
            flaw = "is raw but of two sizes"
        elif not 0 <= c.offset <= PACK_BYTES - c.stored:
            flaw = "lies outside of a pack"
        if flaw:
            raise _Invalid(f"chunk {i} {flaw}")
        digests.add(c.digest)
    check_disjoint((c.pack, c.offset, c.stored) for c in rows.chunks)


def _check_links(manifest: Manifest) -> None:
    chunks, based = manifest.chunks, set()
    for chunk, base in manifest.links:
        _require(0 <= chunk < len(chunks) and 0 <= base < len(chunks), f"a link from chunk {chunk} to {base}")
        kinds = chunks[chunk].codec in DELTAS and chunks[base].codec not in DELTAS
        _require(
            kinds and chunks[chunk].raw == chunks[base].raw, f"chunk {chunk} cannot be a difference from chunk {base}"
        )
        based.add(chunk)
    differences = {i for i, c in enumerate(chunks) if c.codec in DELTAS}
    _require(based == differences, "a chunk is a difference, and its base is not named")


def check_disjoint(ranges: Iterable[tuple[int, int, int]]) -> None:
    """Raise `_Invalid` if (pack, offset, length) ranges overlap."""
    last_pack, end = -1, 0
    for pack, offset, length in sorted(ranges):
        _require(pack != last_pack or offset >= end, f"chunks overlap at byte {offset} of pack {pack}")
        last_pack, end = pack, offset + length


def _check_tensors(rows: Rows) -> None:
    tensors, chunks = rows.tensors, rows.chunks
    for t in tensors:
        try:
            _check_tensor(t, chunks)
        except (_Invalid, CorruptionError) as error:
            raise _Invalid(f"tensor {t.name!r:.200}: {error}") from None
    if len({t.name for t in tensors}) == len(tensors):
        return
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for t in tensors:
        by_name[t.name].append(t)
    for name, same in by_name.items():
        places = {(t.offset, t.local) for t in same if t.replicated}
        _require(len(same) == 1 or len(places) == len(same), f"tensor {name!r:.200} is listed twice")


def _check_tensor(t: Tensor, chunks: tuple[Chunk, ...]) -> None:
    """Check one tensor.

    This runs for every tensor at every restore, so messages are formatted only if there is an error.
    """
    if (flaw := _flaw(t)) is not None:
        raise _Invalid(flaw)
    covered = 0
    for span in t.spans:
        if not 0 <= span.chunk < len(chunks):
            raise _Invalid(f"chunk {span.chunk} of {len(chunks)}")
        if span.start < 0 or span.length <= 0 or span.start + span.length > chunks[span.chunk].raw:
            raise _Invalid(f"a span outside of chunk {span.chunk}")
        covered += span.length
    full_size = chunking.nbytes(t.dtype, t.shape)
    expected = full_size if t.local == t.shape else t.nbytes
    if covered != expected:
        raise _Invalid(f"{expected} bytes, but spans of {covered}")


def _flaw(t: Tensor) -> str | None:
    if len(t.name) > _NAME_BYTES:
        return "the name is too long"
    if t.dtype not in chunking.ITEM_BYTES:
        return f"unknown type {t.dtype!r:.60}"
    if not len(t.shape) == len(t.offset) == len(t.local):
        return "shape, offset and local shape differ in length"
    if t.local == t.shape and not any(t.offset) and min(t.shape, default=0) >= 0:
        return None  # a fast path: most tensors are whole
    for n, at, length in zip(t.shape, t.offset, t.local, strict=True):
        if at < 0 or length < 0 or at + length > n:
            return "the shard lies outside of the tensor"
    return None if t.replicated or t.local == t.shape else "one rank's own tensor, but only a part of it"


def check_shards(manifests: Iterable[Manifest]) -> str | None:
    """Describe a mismatch between the ranks' shards of replicated tensors in a step's manifests; None if there is none.

    Only the boxes of each manifest stay in memory.
    """
    first: dict[str, Box] = {}
    shards: dict[str, list[Box]] = {}
    kinds: dict[str, str] = {}
    for manifest in manifests:
        for tensor in manifest.tensors:
            if tensor.replicated:
                box = tensor.box
                earlier = first.setdefault(tensor.name, box)
                if earlier is not box:
                    shards.setdefault(tensor.name, [earlier]).append(box)
                elif box.local != box.shape:  # most tensors are whole, and have one shard
                    shards[tensor.name] = [box]
                if kinds.setdefault(tensor.name, tensor.dtype) != tensor.dtype:
                    return f"shards of tensor {tensor.name!r:.200} differ in type"
    for name, boxes in shards.items():
        mismatch = (
            "its shards differ in shape" if any(b.shape != boxes[0].shape for b in boxes) else coverage_error(boxes)
        )
        if mismatch is not None:
            return f"tensor {name!r:.200}: {mismatch}"
    return None
