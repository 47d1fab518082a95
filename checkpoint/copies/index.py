"""The chunks that the destination has, and the steps there that name them.

Invariant: an entry names a chunk in a pack, and a step whose manifest named it there. The caller's lease must name the
step, and the step must be found to exist after that, before the chunk is referenced.
Memory: at most `MOST` entries, of about 350 bytes each. The newest steps are indexed first. A full index forgets chunks
that the steps copied last do not name.
Failure behaviour: a step that cannot be read is not indexed, which costs only space. It is logged.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import PACK_BYTES, Manifest, PackName
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.saving.dedup import Stored, is_sparse
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store

MOST = 300_000
"""The maximum number of indexed chunks: 0.3 to 1.2 TB of distinct data, and 100 MiB of memory."""
_log = get_logger(__name__)


class ChunkIndex:
    """Chunks by digest, each with the number of the newest indexed step that names it."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._chunks: dict[bytes, tuple[Stored, int]] = {}
        self._steps: list[Base | None] = []
        self._sizes: dict[PackName, int] = {}
        self._lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        return len(self._chunks) >= self._most

    def load(self, store: Store, run: str, steps: Iterable[Base]) -> None:
        """Index these steps, newest first, until the index is full. `Base.run` is "" for `run`."""
        for base in steps:
            if self.is_full:
                return
            if any(known is not None and known.attempt == base.attempt for known in self._steps):
                continue
            try:
                number = self.begin(base)
                sealed = fetch.sealed(store, base.of(run).run, base)
                digests = fetch.digests_of(store, sealed, range(sealed.attempt.world_size))
                for manifest in fetch.read_manifests(store, sealed, digests):
                    self.add(manifest, number, newest=False)
            except (CorruptionError, NotFoundError, UnsupportedError) as error:
                self.drop(base)
                _log.warning("step %d at the destination is not used for deduplication: %s", base.step, error)

    def begin(self, base: Base) -> int:
        """Add a step, and return its number."""
        with self._lock:
            self._steps.append(base)
            return len(self._steps) - 1

    def add(self, manifest: Manifest, number: int, *, newest: bool = True) -> None:
        """Index the chunks of a manifest of step `number`. `newest`: it replaces entries of other steps."""
        stored = [Stored(manifest.packs[chunk.pack], chunk) for chunk in manifest.chunks]
        for chunk, base in manifest.links:
            stored[chunk] = Stored(stored[chunk].pack, stored[chunk].chunk, stored[base])
        with self._lock:
            for each in stored:
                digest = each.chunk.digest
                if newest:
                    self._chunks.pop(digest, None)  # the chunk is now the last to be forgotten
                    if self.is_full:
                        del self._chunks[next(iter(self._chunks))]
                    self._chunks[digest] = each, number
                elif not self.is_full:
                    self._chunks.setdefault(digest, (each, number))

    def get(self, digest: bytes) -> tuple[Stored, Base] | None:
        """A chunk and the step that names it; None if the chunk is not indexed."""
        found = self._chunks.get(digest)
        base = None if found is None else self._steps[found[1]]
        return None if found is None or base is None else (found[0], base)

    def drop(self, base: Base) -> None:
        """Forget a step that was removed, with the chunks that no newer step is known to name."""
        with self._lock:
            gone = {number for number, each in enumerate(self._steps) if each == base}
            for number in gone:
                self._steps[number] = None
            self._chunks = {digest: each for digest, each in self._chunks.items() if each[1] not in gone}

    def sparse_packs(self, store: Store, found: Iterable[Stored]) -> set[PackName]:
        """Packs of steps that are not indexed, of which these chunks are less than a quarter.

        As a save does, a copy does not keep such a pack alive.
        """
        live = {base.attempt for base in self._steps if base is not None}
        needed: dict[PackName, int] = defaultdict(int)
        for stored in found:
            for each in {stored, stored.whole}:
                if each.pack.attempt not in live:
                    needed[each.pack] += each.chunk.stored
        few = {pack for pack, size in needed.items() if is_sparse(size, PACK_BYTES)}
        return {pack for pack in few if is_sparse(needed[pack], self._size(store, pack))}

    def _size(self, store: Store, pack: PackName) -> int:
        if pack not in self._sizes:
            try:
                self._sizes[pack] = store.stat(pack.key).size
            except NotFoundError:
                return PACK_BYTES
        return self._sizes[pack]
