"""The versions of a dataset, newest first.

Invariant: there is one entry for every existing version. Documents are read one at a time.
Failure behaviour: errors of `versions.load` and `tags.read` pass through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import tags
from headrace.dataio.store.base import Store


@dataclass(frozen=True)
class Entry:
    """One version. `trunk` is False for a saved view, which readers never open by default."""

    version: int
    parent: int | None
    trunk: bool
    message: str
    created: str
    samples: int
    digest: str
    lineage: versions.Lineage | None
    tags: tuple[str, ...]


def history(store: Store) -> Iterator[Entry]:
    """Yield the versions from the newest to the oldest."""
    named = dict[int, list[str]]()
    for name in tags.names(store):
        named.setdefault(tags.read(store, name).version, []).append(name)
    for number in reversed(versions.list_versions(store)):
        document, digest = versions.load(store, number)
        yield Entry(
            version=number,
            parent=document.parent,
            trunk=document.trunk == number,
            message=document.message,
            created=document.created,
            samples=document.samples,
            digest=digest,
            lineage=document.lineage,
            tags=tuple(named.get(number, ())),
        )
