"""Views: a version's samples narrowed by conditions.

Purpose: `View` holds the rows that `Dataset.where` selected and their digest. `Opened` is the interface of an open
dataset for the modules that operate on it, so that they do not import `Dataset`.
Invariant: the digest covers the version's document, the conditions and the selected rows. So equal digests mean equal
samples.
Failure behaviour: errors of `query.conditions` pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import blake3
import msgspec

from headrace.dataio.shards.query import conditions as query
from headrace.dataio.shards.query.open_index import OpenIndex, RowNumbers
from headrace.dataio.shards.versions.documents import Lineage, Source, VersionDocument
from headrace.dataio.store.base import Store


@dataclass(frozen=True)
class View:
    """The selected rows of each part (`rows`), and the total bytes of their members (`bytes`)."""

    index: OpenIndex
    rows: Sequence[RowNumbers]
    bytes: Sequence[int]
    lineage: Lineage
    ids: str
    """BLAKE3 of the selected rows."""

    @property
    def total_bytes(self) -> int:
        """The total bytes of the samples' members."""
        return sum(self.bytes)

    @property
    def digest(self) -> str:
        """BLAKE3 of the version's digest, the conditions and the rows."""
        source = self.lineage.sources[0]
        named = msgspec.json.encode([source.digest, self.lineage.where, self.ids])
        return str(blake3.blake3(named).hexdigest())

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The entries that a view adds to its version's fingerprint."""
        source = self.lineage.sources[0]
        return {"of": source.digest, "where": list(self.lineage.where), "ids": self.ids}


class Opened(Protocol):
    """The interface of an open version or view that operations on datasets use."""

    @property
    def url(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def store(self) -> Store: ...
    @property
    def document(self) -> VersionDocument: ...
    @property
    def index(self) -> OpenIndex: ...
    @property
    def trust_mounts(self) -> bool: ...
    @property
    def view(self) -> View | None: ...
    def __len__(self) -> int: ...


def narrow(dataset: Opened, condition: str) -> View:
    """Make a view of the samples of `dataset` (a version or a view) that meet `condition`."""
    found = list(query.matching(dataset.index, dataset.document, condition))
    rows = [rows for rows, _ in found]
    hasher = blake3.blake3()
    for chosen in rows:
        hasher.update(len(chosen).to_bytes(8, "little"))
        hasher.update(chosen.astype("<u4").tobytes())
    source, before = Source(name=dataset.name, version=dataset.version, digest=dataset.digest), tuple[str, ...]()
    if dataset.view is not None:
        source, before = dataset.view.lineage.sources[0], dataset.view.lineage.where
    lineage = Lineage(operation="where", sources=(source,), where=(*before, condition))
    opened = OpenIndex(dataset.store, dataset.document, rows)
    return View(opened, rows, [size for _, size in found], lineage, str(hasher.hexdigest()))
