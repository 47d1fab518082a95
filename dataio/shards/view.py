"""Views: a version's samples narrowed by conditions.

Purpose: what `Dataset.where` knows beyond the version: which rows are left, and the name of that choice. `Opened` is
what a dataset is to those who work on it, so that they need not know who holds it.
Invariant: the digest names the version's document, the conditions and the chosen rows, so equal digests mean equal
samples.
Failure behaviour: that of `query`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import blake3
import msgspec

from headrace.dataio.shards.query import conditions as query
from headrace.dataio.shards.query.kept import Rows
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.versions.documents import Lineage, Source, VersionDocument
from headrace.dataio.store.base import Store


@dataclass(frozen=True)
class View:
    """`rows` and `bytes` part by part: the rows that are left, and the bytes of their members."""

    index: OpenIndex
    rows: Sequence[Rows]
    bytes: Sequence[int]
    lineage: Lineage
    ids: str
    """BLAKE3 of the chosen rows."""

    @property
    def total_bytes(self) -> int:
        """Bytes of the samples' members."""
        return sum(self.bytes)

    @property
    def digest(self) -> str:
        """BLAKE3 of the version's digest, the conditions and the rows."""
        source = self.lineage.sources[0]
        named = msgspec.json.encode([source.digest, self.lineage.where, self.ids])
        return str(blake3.blake3(named).hexdigest())

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a view adds to its version's fingerprint."""
        source = self.lineage.sources[0]
        return {"of": source.digest, "where": list(self.lineage.where), "ids": self.ids}


class Opened(Protocol):
    """What is made of an open dataset, a version or a view of one, is made of this much of it."""

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
    """The view of those samples of `dataset`, itself a version or a view, that meet `condition`."""
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
