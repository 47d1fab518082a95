"""Stores a staged arena in packs: hashes pieces, skips known chunks, compresses new ones, and builds the manifest.

Invariant: pieces are taken from the arena in order, each once. A chunk is stored once per attempt. A chunk that a base
has is referenced in the base's pack. At most `_AHEAD` chunks are hashed ahead of the store. The stored bytes are those
that were hashed. The trainer can still write to the arena, so each piece is hashed again once the store has it.
Failure behaviour: errors of the store are raised. If the arena was changed, `CorruptionError` is raised before a
manifest names the chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from headrace.checkpoint.format import chunking, pack
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.manifest import Chunk, PackName
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.repository.fetch import in_order
from headrace.checkpoint.saving import compression, dedup
from headrace.checkpoint.saving.dedup import DeltaBases
from headrace.checkpoint.saving.plan import Event, Progress, PutPlan
from headrace.checkpoint.saving.progress import ProgressFile, add_stored
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

_THREADS = 2
_AHEAD = 8
"""Chunks hashed ahead of the upload."""
_IN_FLIGHT_BYTES = 32 * MIB
"""The number of bytes that the store may still be reading when it asks for more.

They are compared later, or when the pack is stored.
"""

_in_pack = declare("ckpt.in-pack", "a pack is partly sent: there is no such object yet")
_first_pack = declare("ckpt.first-pack", "one pack is stored: invisible, and garbage once the lease has expired")


class ArenaBytes(Protocol):
    """A staged arena.

    It is a memoryview of all of it, or an object such as `SlicedState` that returns each piece once, in order.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, at: slice, /) -> memoryview: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """The manifest's data about tensors, packs and chunks.

    `spans`: by spec. `digests`: by piece. `known`: the chunks that were stored before.
    """

    specs: list[chunking.TensorSpec]
    spans: list[tuple[chunking.PieceSpan, ...]]
    tables: Tables
    digests: list[bytes]
    known: dedup.KnownChunks


@dataclass(slots=True)
class Tables:
    """The manifest's tables while they are built, and the bytes written and deduplicated.

    `gaps`: bytes of a chunk between small tensors, by its digest. They belong to no tensor, so neither number counts
    them.
    """

    packs: dict[PackName, int] = field(default_factory=dict)
    chunks: list[Chunk] = field(default_factory=list)
    number: dict[bytes, int] = field(default_factory=dict)
    references: dict[bytes, dedup.Stored] = field(default_factory=dict)
    """The base of each chunk that is a difference, by the chunk's digest."""
    links: list[tuple[int, int]] = field(default_factory=list)
    gaps: dict[bytes, int] = field(default_factory=dict)
    written: int = 0
    deduplicated: int = 0

    def count_written(self, digest: bytes, stored: int, raw: int) -> None:
        """Count a chunk that this save stored, as at most the bytes of its tensors."""
        self.written += min(stored, raw - self.gaps.get(digest, 0))

    def count_deduplicated(self, digest: bytes, raw: int) -> None:
        """Count a chunk that was stored already."""
        self.deduplicated += raw - self.gaps.get(digest, 0)

    def add(self, name: PackName, entry: pack.Entry | Chunk) -> None:
        self.number[entry.digest] = len(self.chunks)
        at = self.packs.setdefault(name, len(self.packs))
        self.chunks.append(Chunk(entry.digest, at, entry.offset, entry.stored, entry.raw, entry.codec))
        if (base := self.references.get(entry.digest)) is not None:
            if base.chunk.digest not in self.number:
                self.add(base.pack, base.chunk)
            self.links.append((self.number[entry.digest], self.number[base.chunk.digest]))


def upload(
    arena: ArenaBytes, plan: PutPlan, emit: Callable[[Event], None], store: Store, progress: ProgressFile
) -> Stored:
    """Hash every piece of the arena and store the new chunks."""
    with gc_paused():
        specs = [tensor.spec() for tensor in plan.tensors]
        layout = chunking.lay_out(specs)
        pieces, spans = chunking.cut_all(specs, layout)
    known = dedup.load(
        store,
        plan.run,
        plan.bases,
        rank=plan.rank,
        world_size=plan.world_size,
        replicas=plan.replicas,
        own=plan.own_manifest,
    )
    codecs = _codecs(store, plan, known, specs, layout, spans)
    add_stored(known, progress.stored(store, plan))
    work = _Upload(plan, emit, progress, known, sum(piece.length for piece in pieces), chunking.gaps(pieces, spans))
    took = codecs.upload.took if codecs is not None else None
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="headrace-hash") as pool:
        check = _ArenaCheck(arena, pool, plan.step)
        hashed = zip(pieces, _hashed(pool, arena, pieces, known, codecs), strict=True)
        for nth, _ in enumerate(pack.write_all(store, work.key_of, work.new_chunks(hashed, check), work.packed, took)):
            check.require()
            progress.checked(work.key_of(nth))
            _first_pack()
    return Stored(specs, spans, work.tables, work.digests, known)


def _codecs(
    store: Store,
    plan: PutPlan,
    known: dedup.KnownChunks,
    specs: list[chunking.TensorSpec],
    layout: chunking.Layout,
    spans: list[tuple[chunking.PieceSpan, ...]],
) -> compression.CodecChooser | None:
    """The codecs of this save; None if all chunks are stored raw."""
    if plan.compression == "none":
        return None
    return compression.CodecChooser(
        plan.compression,
        specs=specs,
        layout=layout,
        spans=spans,
        upload=compression.UploadSpeed(plan.upload_hint),
        threads=_THREADS,
        bases=DeltaBases(store, known, rank=plan.rank, specs=specs, spans=spans)
        if plan.compression == "delta"
        else None,
    )


_Hashed = tuple[pack.NewChunk, dedup.Stored | None, int]
"""A piece as a chunk, the base of a difference, and the fingerprint for `_ArenaCheck`."""


@dataclass(slots=True)
class _Upload:
    """The chunks of one upload, and the manifest's tables that result from them. `total`: bytes of all pieces.

    `gaps`: the bytes of a piece that belong to no tensor, by its number.
    """

    plan: PutPlan
    emit: Callable[[Event], None]
    progress: ProgressFile
    known: dedup.KnownChunks
    total: int
    gaps: dict[int, int]
    tables: Tables = field(default_factory=Tables)
    digests: list[bytes] = field(default_factory=list)

    def new_chunks(
        self, hashed: Iterable[tuple[chunking.Piece, _Hashed]], check: _ArenaCheck
    ) -> Iterator[pack.NewChunk]:
        """The chunks that must be stored. The digests of all chunks are recorded, and the progress is reported."""
        done = reported = 0
        for piece, (chunk, base, fingerprint) in hashed:
            if gap := self.gaps.get(len(self.digests)):
                self.tables.gaps[chunk.digest] = max(gap, self.tables.gaps.get(chunk.digest, 0))
            self.digests.append(chunk.digest)
            if base is not None and chunk.digest not in self.tables.number:
                self.tables.references[chunk.digest] = base
            if _is_new(chunk, self.known, self.tables):
                check.sent(piece, fingerprint)
                yield chunk
            done += chunk.raw
            if done == self.total or done - reported >= max(self.total // 100, 4 * MIB):
                reported = done
                self.emit(Progress(done, self.total))

    def packed(self, nth: int, entry: pack.Entry) -> None:
        """Record that a chunk is written into pack number `nth`."""
        name = self.progress.name(self.plan, nth)
        self.tables.add(name, entry)
        self.tables.count_written(entry.digest, entry.stored, entry.raw)
        self.progress.packing(name, entry)
        _in_pack()

    def key_of(self, nth: int) -> str:
        """The key of pack number `nth`."""
        return self.progress.name(self.plan, nth).key


class _ArenaCheck:
    """Checks that the pieces were not changed between hashing and storing.

    If the trainer wrote to the arena during the save, the committed step could not be restored. So each piece is hashed
    again (XXH3-64) at a time when the store has read it. A state in slices is not checked: no other process can reach
    its memory.
    """

    def __init__(self, arena: ArenaBytes, pool: Executor, step: int) -> None:
        self._arena, self._pool, self._step = arena if isinstance(arena, memoryview) else None, pool, step
        self._waiting: deque[tuple[chunking.Piece, int]] = deque()
        self._bytes = 0
        self._checks: deque[Future[None]] = deque()

    def sent(self, piece: chunking.Piece, fingerprint: int) -> None:
        """Record that this piece is sent next; `fingerprint` is its fingerprint."""
        if self._arena is None:
            return
        self._waiting.append((piece, fingerprint))
        self._bytes += piece.length
        while self._bytes > _IN_FLIGHT_BYTES:
            self._submit()
        while len(self._checks) > _AHEAD:
            self._checks.popleft().result()

    def require(self) -> None:
        """Check all pieces that were sent; raise `CorruptionError` if one has changed.

        The store must have all of them.
        """
        while self._waiting:
            self._submit()
        while self._checks:
            self._checks.popleft().result()

    def _submit(self) -> None:
        piece, fingerprint = self._waiting.popleft()
        self._bytes -= piece.length
        self._checks.append(self._pool.submit(self._compare, piece, fingerprint))

    def _compare(self, piece: chunking.Piece, fingerprint: int) -> None:
        assert self._arena is not None
        if _fingerprint(self._arena[piece.at : piece.at + piece.length]) != fingerprint:
            raise CorruptionError(
                f"step {self._step} is not saved: its staged copy was changed while it was stored, within {piece.length} bytes "
                f"from {piece.at} on",
                hint="find the code in the trainer that writes to the memory file headrace-arena; earlier steps are unchanged",
            )


_fingerprint = xxhash.xxh3_64_intdigest


def _is_new(chunk: pack.NewChunk, known: dedup.KnownChunks, tables: Tables) -> bool:
    """Whether the chunk must be stored. A chunk that is stored already is added to the tables."""
    if chunk.digest in tables.number:
        tables.count_deduplicated(chunk.digest, chunk.raw)
        return False
    stored = known.chunks.get(chunk.digest)
    if stored is None:
        return True
    if stored.base is not None:
        tables.references[chunk.digest] = stored.base
    tables.add(stored.pack, stored.chunk)
    if (own := known.own.get(chunk.digest)) is not None:
        tables.count_written(chunk.digest, own, chunk.raw)
    else:
        tables.count_deduplicated(chunk.digest, chunk.raw)
    return False


def _hashed(
    pool: Executor,
    arena: ArenaBytes,
    pieces: Sequence[chunking.Piece],
    known: dedup.KnownChunks,
    codecs: compression.CodecChooser | None,
) -> Iterator[_Hashed]:
    """Yield each piece as a chunk, in order, with the base of a difference and the fingerprint for `_ArenaCheck`.

    Threads hash the pieces a few chunks ahead, and compress those that are new. Without `codecs`, chunks are stored
    raw.
    """

    def work(numbered: tuple[int, chunking.Piece]) -> _Hashed:
        number, piece = numbered
        payload = arena[piece.at : piece.at + piece.length]
        # first, so that every later change is detected
        fingerprint = _fingerprint(payload) if isinstance(arena, memoryview) else 0
        name = digest(payload)
        if name in known.chunks:
            return pack.NewChunk(name, payload, piece.length), None, fingerprint
        if codecs is None:
            return pack.NewChunk(name, payload, piece.length), None, fingerprint
        packed = codecs.pack(number, payload)
        return pack.NewChunk(name, packed.stored, piece.length, packed.kind), packed.base, fingerprint

    return in_order(pool, work, enumerate(pieces), _AHEAD)


def manifest_of(plan: PutPlan, stored: Stored, clock: Clock) -> manifests.Manifest:
    """The rank's manifest."""
    tables, digests = stored.tables, stored.digests
    with gc_paused():
        tensors = tuple(
            manifests.Tensor(
                spec.name,
                spec.dtype,
                spec.box.shape,
                spec.box.offset,
                spec.box.local,
                spec.replicated,
                tuple(manifests.Span(tables.number[digests[s.piece]], s.start, s.length) for s in own),
            )
            for spec, own in zip(stored.specs, stored.spans, strict=True)
        )
    return manifests.Manifest(
        version=manifests.version_for((chunk.codec for chunk in tables.chunks), plan.tree),
        run=plan.run,
        timeline=plan.timeline,
        step=plan.step,
        attempt=plan.attempt,
        rank=plan.rank,
        world_size=plan.world_size,
        created=clock.time(),
        bases=tuple(stored.known.bases),
        packs=tuple(tables.packs),
        chunks=tuple(tables.chunks),
        tensors=tensors,
        tree=plan.tree,
        replicas=plan.replicas,
        bytes_state=plan.bytes_state,
        bytes_written=tables.written,
        bytes_deduplicated=tables.deduplicated,
        links=tuple(tables.links),
        metadata=plan.metadata,
        description=plan.description,
    )
