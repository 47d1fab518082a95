"""Which chunks are stored already: the tables of the base step's manifests, and nothing else.

Invariant: a chunk is left out of the new packs only if the base is committed, not condemned by a collector, and named in
the lease that was written *before* that was checked; so no collector can remove what the new step leans on.
Failure behaviour: a base that is gone, condemned or damaged is not used, which costs space and nothing else; it is logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from checkpoint.format import names
from checkpoint.format.documents import Base
from checkpoint.format.manifest import Chunk, PackName
from checkpoint.repository import commit
from checkpoint.repository import steps as repository
from dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from dataio.core.log import get_logger
from dataio.store.contract import Store

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk in a pack of an earlier attempt."""

    pack: PackName
    chunk: Chunk


@dataclass(slots=True)
class Known:
    """Stored chunks by digest, and the bases that they come from."""

    chunks: dict[bytes, Stored] = field(default_factory=dict)
    bases: list[Base] = field(default_factory=list)
    own: dict[bytes, int] = field(default_factory=dict)
    """Those that an earlier carrier of the same save stored, and their stored bytes: they count as written."""


def load(store: Store, run: str, bases: Sequence[Base]) -> Known:
    """What may be left out. The caller's lease already names `bases`."""
    known = Known()
    if not bases:
        return known
    going = repository.condemned(store)
    for base in bases:
        if (run, base.timeline, base.step) in going:
            _log.info("step %d is being collected and is not used as a base", base.step)
            continue
        try:
            _add(store, run, base, known)
        except (NotFoundError, CorruptionError, UnsupportedError) as error:
            _log.warning("step %d cannot serve as a base, everything is written anew: %s", base.step, error)
    return known


def _add(store: Store, run: str, base: Base, known: Known) -> None:
    found = commit.find_commit(store, names.commit(run, base.timeline, base.step))
    if found is None or found.tombstone or found.attempt != base.attempt:
        return
    for manifest in repository.open_step(store, run, base).manifests:
        for chunk in manifest.chunks:
            known.chunks.setdefault(chunk.digest, Stored(manifest.packs[chunk.pack], chunk))
    known.bases.append(base)
