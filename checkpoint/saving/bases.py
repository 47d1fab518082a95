"""The chunks that new ones may be stored as differences from: those at the same place of the same shard, in a base step.

Invariant: what is named here is committed, leased and can be read alone; its pack and chunk go into the manifest of whoever leans
on it, so it lives as long as that does. It is read from the store when it is needed, one chunk for each thread that hashes.
Failure behaviour: a base that cannot be read is no base: the chunk is stored whole. Said once.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.checkpoint.format import codec
from headrace.checkpoint.format.chunking import PieceSpan, TensorSpec
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.dedup import Known, Stored, shard_of
from headrace.dataio.core.errors import HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store

_log = get_logger(__name__)


class Bases:
    """By number of piece."""

    def __init__(
        self, store: Store, known: Known, rank: int, specs: Sequence[TensorSpec], spans: Sequence[Sequence[PieceSpan]]
    ) -> None:
        self._store = store
        self._of: dict[int, Stored] = {}
        for spec, own in zip(specs, spans, strict=True):
            before = known.shards.get(shard_of(rank, spec), ())
            if len(before) == len(own):
                for span, stored in zip(own, before, strict=True):
                    self._add(known, span, stored.whole)

    def of(self, piece: int) -> Stored | None:
        """What this piece may lean on."""
        return self._of.get(piece)

    def read(self, piece: int) -> memoryview | None:
        """The bytes of that, None when they cannot be had."""
        base = self._of[piece]
        try:
            found = fetch.read_one(self._store, base.pack.key, base.chunk)
        except HeadraceError as error:
            warn_once(_log, f"a chunk to lean on could not be read, what leans on it is stored whole: {error}")
            return None
        if found is None:
            warn_once(_log, f"{base.pack.key} is damaged: what leans on it is stored whole")
        return found

    def link(self, piece: int) -> codec.Link:
        """What the chunk says of its base."""
        base = self._of[piece]
        c = base.chunk
        return codec.Link(c.digest, base.pack.attempt, base.pack.name, c.offset, c.stored, c.raw, c.codec)

    def _add(self, known: Known, span: PieceSpan, base: Stored) -> None:
        if span.start == 0 and span.length == base.chunk.raw and base.chunk.digest in known.chunks:
            self._of[span.piece] = base
