"""Deduplication: which chunks are stored already, and which can be stored as differences from those of a base step.

The saver reads only the manifests of the base steps. If the ranks divided the work in the same way for the base, a rank
reads only its own manifest. Otherwise, it reads the manifests of all ranks. If the process committed the base itself, it
knows the digest of its rank's manifest, and perhaps has the encoded manifest. It then reads no decision and no group.
Invariants:

* A chunk is left out only if the base is committed and no collector is about to remove it. The lease must name the base
  *before* that check.
* In a job that commits in groups, the process that writes the decision makes this check for all ranks. So a process
  that committed the base itself does not repeat the check. If the base was removed, the process that writes the decision
  aborts the attempt. Each rank then makes the check in its next save.
* A pack of a removed step is referenced only if at least a quarter of its bytes is needed. So a step keeps at most four
  times the bytes that it needs.
* The base of a difference is never a difference itself. The new manifest names the base's pack, which protects it.

Failure behaviour: a base that is missing, pending deletion or damaged is not used. This costs only space, and it is
logged. The exception is the base of a job that commits in groups, as the second invariant says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.checkpoint.format import codec, names
from headrace.checkpoint.format.chunking import Box, PieceSpan, TensorSpec
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import PACK_BYTES, Chunk, Manifest, PackName, Tensor
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.saving.plan import OwnManifest
from headrace.dataio.core.errors import CorruptionError, HeadraceError, NotFoundError, UnsupportedError
from headrace.dataio.core.log import get_logger, warn_first, warn_once
from headrace.dataio.store.base import Store

LEAST_SHARE = 4
"""A pack of a removed step is referenced only if at least this fraction (1/n) of its bytes is needed."""
_log = get_logger(__name__)


Shard = tuple[str, str, Box, int]


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A chunk in a pack of an earlier attempt."""

    pack: PackName
    chunk: Chunk
    base: Stored | None = None
    """The base, if the chunk is a difference."""

    @property
    def whole(self) -> Stored:
        """The base of a difference, else the chunk itself. It can be read alone."""
        return self.base or self


@dataclass(slots=True)
class KnownChunks:
    """Stored chunks by digest, and the base steps that name them."""

    chunks: dict[bytes, Stored] = field(default_factory=dict)
    bases: list[Base] = field(default_factory=list)
    own: dict[bytes, int] = field(default_factory=dict)
    """Stored bytes, by digest, of chunks that an earlier worker of the same save stored. They count as written."""
    shards: dict[Shard, tuple[Stored, ...]] = field(default_factory=dict)
    """The chunks of each shard of the bases that consists of whole chunks."""


def shard_of(rank: int, tensor: Tensor | TensorSpec) -> Shard:
    """The key under which chunks of two steps correspond. A tensor that is not replicated includes its rank."""
    return tensor.name, tensor.dtype, tensor.box, -1 if tensor.replicated else rank


def load(
    store: Store,
    run: str,
    bases: Sequence[Base],
    *,
    rank: int = 0,
    world_size: int = 1,
    replicas: bytes = b"",
    own: OwnManifest | None = None,
) -> KnownChunks:
    """Load the chunks that `rank` may leave out.

    The caller's lease must already name `bases`. `replicas`: see `Manifest`. `own`: see `PutPlan`.
    """
    known = KnownChunks()
    pending: set[tuple[str, int, int]] | None = None
    for base in bases:
        try:
            own_manifest = _own_manifest(store, base, run, rank, own, world_size, replicas)
            if own_manifest is None or not names.is_grouped(world_size):
                pending = repository.pending_deletes(store) if pending is None else pending
                if not _may_reference(store, run, base, pending):
                    continue
            if own_manifest is not None:
                _add((own_manifest,), known)
            else:
                _add(fetch.manifests_like(store, base.of(run).run, base, rank, world_size, replicas), known)
            known.bases.append(base)
        except (NotFoundError, CorruptionError, UnsupportedError) as error:
            message = "step %d cannot be used for deduplication; all chunks are written: %s"
            warn_first(_log, "node", message, base.step, error)
    _drop_sparse_packs(store, run, known)
    return known


def _own_manifest(
    store: Store, base: Base, run: str, rank: int, committed_here: OwnManifest | None, world_size: int, replicas: bytes
) -> Manifest | None:
    """The rank's manifest of the base.

    None if this process did not commit the base last, or if the ranks now divide the work differently.
    """
    if committed_here is None or committed_here.attempt != base.attempt:
        return None
    manifest = fetch.manifest_of(store, base.of(run).run, base, rank, committed_here.digest, committed_here.data)
    alike = manifest.world_size == world_size and (world_size == 1 or (replicas and manifest.replicas == replicas))
    return manifest if alike else None


def _may_reference(store: Store, run: str, base: Base, pending: set[tuple[str, int, int]]) -> bool:
    """Whether the base is committed and no collector is about to remove it."""
    at = base.of(run)
    if (at.run, at.timeline, at.step) in pending:
        _log.info("step %d of run %s is being collected and is not used as a base", at.step, at.run)
        return False
    return repository.is_committed(store, at.run, base)


def _drop_sparse_packs(store: Store, run: str, known: KnownChunks) -> None:
    base_attempts = {base.attempt for base in known.bases}
    needed_bytes: dict[PackName, int] = defaultdict(int)
    for stored in known.chunks.values():
        if stored.pack.attempt not in base_attempts:
            needed_bytes[stored.pack] += stored.chunk.stored
    sparse = {pack for pack, size in needed_bytes.items() if is_sparse(size, PACK_BYTES)}
    sparse = {pack for pack in sparse if is_sparse(needed_bytes[pack], _size(store, pack.key))}
    if not sparse:
        return
    runs = {run, *(base.run or run for base in known.bases)}
    removed = {attempt for attempt in {pack.attempt for pack in sparse} if _is_of_removed_step(store, runs, attempt)}
    pending = {pack for pack in sparse if pack.attempt in removed}
    known.chunks = {
        name: stored
        for name, stored in known.chunks.items()
        if stored.pack not in pending and stored.whole.pack not in pending
    }
    known.shards = {
        shard: chunks
        for shard, chunks in known.shards.items()
        if not any(stored.pack in pending or stored.whole.pack in pending for stored in chunks)
    }


def is_sparse(needed_bytes: int, size: int) -> bool:
    """Whether a pack of `size` bytes is too large to be kept for `needed_bytes` of them."""
    return needed_bytes * LEAST_SHARE < size


def _size(store: Store, key: str) -> int:
    try:
        return store.stat(key).size
    except NotFoundError:  # a restore of the step reports the missing pack
        return 0


def _is_of_removed_step(store: Store, runs: Iterable[str], attempt: str) -> bool:
    """Whether the attempt's step was removed. A step that is not found counts as not removed."""
    for run in sorted(runs):
        at = repository.step_of_attempt(store, run, attempt)
        if at is not None:
            return not repository.is_committed(store, run, Base(at.timeline, at.step, attempt))
    return False


def _add(manifests: Sequence[Manifest], known: KnownChunks) -> None:
    for manifest in manifests:
        stored = [Stored(manifest.packs[chunk.pack], chunk) for chunk in manifest.chunks]
        for chunk, on in manifest.links:
            stored[chunk] = Stored(stored[chunk].pack, stored[chunk].chunk, stored[on])
        for stored_chunk in stored:
            known.chunks.setdefault(stored_chunk.chunk.digest, stored_chunk)
        for tensor in manifest.tensors:
            if all(span.start == 0 and span.length == manifest.chunks[span.chunk].raw for span in tensor.spans):
                chunks = tuple(stored[span.chunk] for span in tensor.spans)
                known.shards.setdefault(shard_of(manifest.rank, tensor), chunks)


class DeltaBases:
    """The base chunk of each piece, by piece number, for pieces that may be stored as differences."""

    def __init__(
        self,
        store: Store,
        known: KnownChunks,
        *,
        rank: int,
        specs: Sequence[TensorSpec],
        spans: Sequence[Sequence[PieceSpan]],
    ) -> None:
        self._store = store
        self._of: dict[int, Stored] = {}
        for spec, own_spans in zip(specs, spans, strict=True):
            before = known.shards.get(shard_of(rank, spec), ())
            if len(before) == len(own_spans):
                for span, stored in zip(own_spans, before, strict=True):
                    self._add(known, span, stored.whole)

    def of(self, piece: int) -> Stored | None:
        """The base of this piece; None if the piece has none."""
        return self._of.get(piece)

    def read(self, piece: int) -> memoryview | None:
        """Read the bytes of the piece's base; None if they cannot be read."""
        base = self._of[piece]
        try:
            payload = fetch.read_one(self._store, base.pack.key, base.chunk)
        except HeadraceError as error:
            warn_once(
                _log,
                f"a base chunk could not be read; chunks are stored whole instead of as differences from it: {error}",
            )
            return None
        if payload is None:
            warn_once(_log, f"{base.pack.key} is damaged: chunks are stored whole instead of as differences from it")
        return payload

    def link(self, piece: int) -> codec.Link:
        """The link to the base that is stored with the difference."""
        base = self._of[piece]
        c = base.chunk
        return codec.Link(c.digest, base.pack.attempt, base.pack.name, c.offset, c.stored, c.raw, c.codec)

    def _add(self, known: KnownChunks, span: PieceSpan, base: Stored) -> None:
        if span.start == 0 and span.length == base.chunk.raw and base.chunk.digest in known.chunks:
            self._of[span.piece] = base
