"""`index` makes a dataset from existing tars without copying them.

Purpose: read each shard once from beginning to end, describe its samples, and write index parts and a version
elsewhere. Shards outside the dataset are mounted (`headrace.dataio.shards.versions.mounting`). Shards below the dataset
keep their keys.

Invariants:

* `index` makes one pass over each shard (`tar_pass`). Memory is bounded by four read-ahead windows, the rows of one
  shard and the rows of one index part. Disk space is bounded by the members that are set aside for probing. Neither
  depends on the size of a shard.
* Keys are WebDataset's keys. With `keys="shard"`, the shard's own path comes first. Use it for collections whose sample
  numbers start again in every shard.
* The index describes the bytes that were read. A shard whose size or time changes during indexing stops the indexing.
* Nothing is visible before the version document, which is written last.

Failure behaviour: a sample that cannot be used is skipped. A shard that is damaged, compressed or missing, or that
holds something that a shard must not hold, is skipped as a whole. Both are reported with the shard, the reason and the
offset. With `strict`, they are errors. Equal keys in two shards raise `UsageError`. An existing dataset raises
`ConflictError`. A store that stays unreachable ends the indexing, since a dataset that silently lacks shards would be
worse.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset, use_or_open
from headrace.dataio.shards.in_place import patterns as found_by
from headrace.dataio.shards.in_place.tally import IndexProgress, ShardAt, Tally, UniqueKeys
from headrace.dataio.shards.in_place.tar_pass import Pass
from headrace.dataio.shards.ingest.pool import ProbePool
from headrace.dataio.shards.ingest.report import PackReport, Skipped
from headrace.dataio.shards.query.parts import PartWriter
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions.mounting import mount_of
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX, Mounts
from headrace.dataio.store.open import open_store

__all__ = ["IndexProgress", "index"]

_SHARD_FAULTS = (CorruptionError, UnsupportedError, NotFoundError)

Keys = Literal["member", "shard"]


def index(
    patterns: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    name: str | None = None,
    strict: bool = False,
    keys: Keys = "member",
    progress: Callable[[IndexProgress], None] | None = None,
    workers: int | None = None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Make version 1 of a dataset at `url` from the WebDataset tars that match `patterns`, and open it.

    Args:
        patterns: one or more patterns (`headrace.dataio.shards.in_place.patterns`).
        url: where to write the dataset, or an open store.
        name: the dataset's name. By default, it is derived from `url`.
        strict: raise the error of the first sample or shard that cannot be used, rather than skip it.
        keys: "member" takes WebDataset's keys. "shard" puts the shard's path in front of them.
        progress: a function that is called during the indexing.
        workers: the number of probing processes. The default is one per core.
        source_options: options for the shards' stores, unless they are directories. The version records all options
            except secrets, so readers need their own credentials.
        storage_options: options for the dataset's store, as for `open_store`. Not with an open store.

    Returns:
        The dataset. Its `report` lists what was indexed and what was skipped.

    Raises:
        NotFoundError: no shard matches a pattern.
        UnsupportedError: a pattern is a command rather than an address.
        UsageError: two samples have the same key, or there is nothing to index.
        ConflictError: a dataset exists at `url`.
        TransientError: a shard changes during the indexing, or a store cannot be reached.
    """
    if keys not in ("member", "shard"):
        raise UsageError(
            f"keys must be 'member' or 'shard', not {keys!r}", hint="'shard' puts the shard's path in front"
        )
    listed = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    with contextlib.ExitStack() as undo:
        store, owned = use_or_open(url, storage_options)
        if owned:
            undo.enter_context(store)
        versions.refuse_existing(store)
        found = found_by.find(listed, lambda root: _open_source(root, source_options or {}))
        undo.callback(found.close)
        shards, mounted = _places(found, store)
        indexer = _Indexer(store, shards, Tally(found, strict, progress, [s.size for s in shards]), keys == "shard")
        report = indexer.run(name, tuple(mount_of(s.location) for s in mounted.values()), workers)
        whole = Mounts(store, mounted, owns_base=owned) if mounted else store
        dataset = Dataset(whole, 1)
        dataset.report, dataset.owns_store = report, whole is not url
        undo.pop_all()
    _close_unmounted(found, mounted)
    return dataset


def _open_source(root: str, options: Mapping[str, Any]) -> Store:
    return open_store(root, storage_options=options if "://" in root else {})


def _close_unmounted(found: found_by.Found, mounted: Mapping[str, Store]) -> None:
    for source in found.sources:
        if source.store not in mounted.values():
            source.store.close()


def _places(found: found_by.Found, store: Store) -> tuple[list[ShardAt], dict[str, Store]]:
    """Return all shards, sorted by their keys in the dataset, and the stores to mount for them."""
    shards, mounted = list[ShardAt](), dict[str, Store]()
    for source in found.sources:
        prefix = found_by.below(source.store.location, store.location)
        if prefix is None:
            mount = mount_of(source.store.location)
            mounted[mount.name], prefix = source.store, f"{PREFIX}{mount.name}/"
        shards += [ShardAt(prefix + s.key, source.store, s.key, s.size, s.modified) for s in source.shards]
    return sorted({s.key: s for s in shards}.values(), key=lambda s: s.key), mounted


class _Indexer:
    """Reads the shards one after the other, writes index parts, and finally writes the version."""

    def __init__(self, store: Store, shards: Sequence[ShardAt], tally: Tally, prefixed: bool) -> None:
        self._store, self._shards, self._tally, self._prefixed = store, shards, tally, prefixed
        self._parts = PartWriter(store, 0)
        self._used: list[versions.Shard] = []
        self._unique = UniqueKeys(shards)

    def run(self, name: str | None, mounts: tuple[versions.Mount, ...], workers: int | None) -> PackReport:
        name = name or versions.name_of(self._store)
        versions.claim(self._store, name)
        with ProbePool(workers) as pool:
            for number, shard in enumerate(self._shards):
                self._tally.shards += 1
                self._add(shard, number, self._rows_of(shard, pool))
                self._tally.done += shard.size
                self._tally.step(0)
        self._unique.check()
        if not self._used:
            raise self._nothing()
        parts = tuple(self._parts.close())
        used = {shard.key.split("/")[1] for shard in self._used if shard.key.startswith(PREFIX)}
        document = versions.new_document(
            name,
            tuple(self._used),
            parts,
            version=1,
            parent=None,
            message="indexed in place",
            mounts=tuple(sorted((m for m in mounts if m.name in used), key=lambda m: m.name)),
        )
        versions.publish(self._store, document)
        return self._tally.report(document)

    def _nothing(self) -> UsageError:
        first = next(iter(self._tally.skipped), None)
        why = f"{first.path}: {first.reason.removeprefix(f'{first.path}: ')}" if first else "the shards hold no samples"
        return UsageError(f"there is nothing to index: {why}", hint="give tar shards with members called <key>.<ext>")

    def _rows_of(self, shard: ShardAt, pool: ProbePool) -> list[Sample]:
        """Return the samples of one shard by offset. A faulty shard has none."""
        skipped, members, notes = len(self._tally.skipped), self._tally.members, len(self._tally.notes)
        samples = self._tally.samples
        try:
            rows = Pass(shard, self._tally, self._prefixed).rows(pool)
            after = shard.store.stat(shard.inner)
            if (after.size, after.modified) != (shard.size, shard.modified):
                raise TransientError(
                    f"{shard.url} changed while it was indexed", hint="index again when nothing writes to it"
                )
            return rows
        except _SHARD_FAULTS as error:
            if self._tally.strict:
                raise
            del self._tally.skipped[skipped:], self._tally.notes[notes:]  # only the shard's fault counts
            self._tally.members, self._tally.samples = members, samples
            self._tally.skip(Skipped(shard.url, error.code, str(error)))
            return []

    def _add(self, shard: ShardAt, number: int, rows: list[Sample]) -> None:
        if not rows:
            return
        self._unique.add(number, [row.key for row in rows])
        self._used.append(versions.Shard(key=shard.key, size=shard.size, samples=len(rows)))
        self._parts.add(rows)
