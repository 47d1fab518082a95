"""`index` makes a dataset from existing tars without copying them.

Purpose: read each shard once from beginning to end, describe its samples, and write index parts and a version
elsewhere. Shards outside the dataset are mounted (`headrace.dataio.shards.versions.mounting`). Shards below the dataset
keep their keys.

Invariants:

* `index` makes one pass over each shard (`tar_scanner`). Memory is bounded by four read-ahead windows, the samples of
  one shard and the samples of one index part. Disk space is bounded by the members that are copied for probing
  (`tar_scanner.SPOOL_BYTES`). Neither depends on the size of a shard.
* Keys are WebDataset's keys. With `keys="shard"`, the shard's path is put in front of them. Use it for collections
  whose sample numbers start again in every shard.
* The index describes the bytes that were read. If a shard's size or modification time changes during indexing, `index`
  raises `TransientError`.
* Nothing is visible before the version document, which is written last.

Failure behaviour: a sample that cannot be used is skipped. A shard that is damaged, compressed or missing, or that
holds a member that a shard must not hold, is skipped completely. The report gives the reason, and the offset if there
is one. With `strict`, the first of them raises its error. Equal keys in two shards raise `UsageError`. An existing
dataset raises `ConflictError`. If a store cannot be reached, indexing stops, because the dataset would otherwise lack
shards.
"""

from __future__ import annotations

import array
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import xxhash

from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UnsupportedError, UsageError
from headrace.dataio.shards.dataset import Dataset, use_or_open
from headrace.dataio.shards.ingest.patterns import FoundShards, find, prefix_in
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import PackReport, Skipped
from headrace.dataio.shards.ingest.tar_scanner import (
    IndexProgress,
    IndexReporter,
    SourceShard,
    TarScanner,
)
from headrace.dataio.shards.query.part_writer import PartWriter
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
        patterns: one or more patterns (`headrace.dataio.shards.ingest.patterns`).
        url: where to write the dataset, or an open store.
        name (str): the dataset's name. None derives it from `url`.
        strict (bool): raise the error of the first sample or shard that cannot be used. By default, it is skipped.
        keys (str): "member" (the default) takes WebDataset's keys. "shard" puts the shard's path in front of them.
        progress: a function that is called with an `IndexProgress` while the shards are read. None reports nothing.
        workers (int): the number of probing processes. None means one per core.
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

    Example:
        >>> with index(f"{tars}/*.tar", f"{scratch}/indexed", workers=1) as dataset:
        ...     list(dataset.keys)
        ['tone']
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
        found = find(listed, lambda root: _open_source(root, source_options or {}))
        undo.callback(found.close)
        shards, mounted = _source_shards(found, store)
        reporter = IndexReporter(found=found, strict=strict, progress=progress, sizes=[s.size for s in shards])
        indexer = _Indexer(store=store, shards=shards, reporter=reporter, prefix_keys=keys == "shard")
        report = indexer.run(name, tuple(mount_of(s.location) for s in mounted.values()), workers)
        dataset_store = Mounts(store, mounted, owns_base=owned) if mounted else store
        dataset = Dataset(dataset_store, 1)
        dataset.report, dataset.owns_store = report, dataset_store is not url
        undo.pop_all()
    _close_unmounted(found, mounted)
    return dataset


def _open_source(root: str, options: Mapping[str, Any]) -> Store:
    return open_store(root, storage_options=options if "://" in root else {})


def _close_unmounted(found: FoundShards, mounted: Mapping[str, Store]) -> None:
    for source in found.sources:
        if source.store not in mounted.values():
            source.store.close()


def _source_shards(found: FoundShards, store: Store) -> tuple[list[SourceShard], dict[str, Store]]:
    """Return all shards, sorted by their keys in the dataset, and the stores to mount for them."""
    shards, mounted = list[SourceShard](), dict[str, Store]()
    for source in found.sources:
        prefix = prefix_in(source.store.location, store.location)
        if prefix is None:
            mount = mount_of(source.store.location)
            mounted[mount.name], prefix = source.store, f"{PREFIX}{mount.name}/"
        shards += [
            SourceShard(key=prefix + s.key, store=source.store, store_key=s.key, size=s.size, modified=s.modified)
            for s in source.shards
        ]
    return sorted({s.key: s for s in shards}.values(), key=lambda s: s.key), mounted


class _Indexer:
    """Reads the shards one after the other, writes index parts, and finally writes the version."""

    def __init__(
        self, *, store: Store, shards: Sequence[SourceShard], reporter: IndexReporter, prefix_keys: bool
    ) -> None:
        self._store, self._shards, self._reporter, self._prefix_keys = store, shards, reporter, prefix_keys
        self._parts = PartWriter(store, 0)
        self._indexed: list[versions.Shard] = []
        self._unique_keys = UniqueKeys(shards)

    def run(self, name: str | None, mounts: tuple[versions.Mount, ...], workers: int | None) -> PackReport:
        name = name or versions.name_of(self._store)
        versions.claim(self._store, name)
        with ProbePool(workers) as pool:
            for number, shard in enumerate(self._shards):
                self._reporter.shards += 1
                self._add(shard, number, self._scan(shard, pool))
                self._reporter.done += shard.size
                self._reporter.step(0)
        self._unique_keys.check()
        if not self._indexed:
            raise self._nothing_to_index()
        parts = tuple(self._parts.close())
        used = {shard.key.split("/")[1] for shard in self._indexed if shard.key.startswith(PREFIX)}
        document = versions.new_document(
            name,
            tuple(self._indexed),
            parts,
            version=1,
            parent=None,
            message="indexed in place",
            mounts=tuple(sorted((m for m in mounts if m.name in used), key=lambda m: m.name)),
        )
        versions.publish(self._store, document)
        return self._reporter.report(document)

    def _nothing_to_index(self) -> UsageError:
        first = next(iter(self._reporter.skipped), None)
        why = f"{first.path}: {first.reason.removeprefix(f'{first.path}: ')}" if first else "the shards hold no samples"
        return UsageError(f"there is nothing to index: {why}", hint="give tar shards with members called <key>.<ext>")

    def _scan(self, shard: SourceShard, pool: ProbePool) -> list[Sample]:
        """Return the samples of one shard, ordered by offset. A damaged shard is skipped, and returns no samples."""
        before = self._reporter.counts()
        try:
            samples = TarScanner(shard, self._reporter, self._prefix_keys).scan(pool)
            after = shard.store.stat(shard.store_key)
            if (after.size, after.modified) != (shard.size, shard.modified):
                raise TransientError(
                    f"{shard.url} changed while it was indexed", hint="index again when nothing writes to it"
                )
            return samples
        except _SHARD_FAULTS as error:
            if self._reporter.strict:
                raise
            self._reporter.reset_to(before)  # the report names the shard, not its samples
            self._reporter.skip(Skipped(shard.url, error.code, str(error)))
            return []

    def _add(self, shard: SourceShard, number: int, samples: list[Sample]) -> None:
        if not samples:
            return
        self._unique_keys.add(number, [row.key for row in samples])
        self._indexed.append(versions.Shard(key=shard.key, size=shard.size, samples=len(samples)))
        self._parts.add(samples)


class UniqueKeys:
    """Finds equal keys in two shards.

    It holds the 8-byte hash of each key, and checks whenever the number of samples has doubled.
    """

    def __init__(self, shards: Sequence[SourceShard]) -> None:
        self._shards = shards
        self._hashes, self._ends = array.array("Q"), list[tuple[int, int]]()
        self._next_check = 2

    def add(self, shard: int, keys: Sequence[str]) -> None:
        self._hashes.extend(xxhash.xxh3_64_intdigest(key.encode()) for key in keys)
        self._ends.append((len(self._hashes), shard))
        if len(self._ends) > 1 and len(self._hashes) >= self._next_check:
            self.check()
            self._next_check = 2 * len(self._hashes)

    def check(self) -> None:
        """Raise `UsageError` if the hashes of two keys are equal."""
        hashes = np.frombuffer(self._hashes, np.uint64) if self._hashes else np.empty(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if len(same):
            first, second = (self._shard_of(int(order[same[0] + i])) for i in (0, 1))
            raise UsageError(
                f"{first.url} and {second.url} hold samples of the same key",
                hint="keys='shard' (--keys shard) puts the shard's path in front of every key",
            )

    def _shard_of(self, position: int) -> SourceShard:
        return self._shards[next(shard for end, shard in self._ends if position < end)]
