"""`index` makes a dataset from existing tars without copying them, and adds new tars to it.

Purpose: read each shard once from beginning to end, on this machine or on many, describe its samples, and write index
parts and a version elsewhere. Shards outside the dataset are mounted (`headrace.dataio.shards.versions.mounting`).
Shards below the dataset keep their keys.

Invariants:

* `index` makes one pass over each shard (`tar_scanner`). Memory is bounded by four read-ahead windows, the samples of
  one unit and of one index part, and 8 bytes for each of the first `unique_keys.MAX_HASHES` keys. Disk space is bounded by the
  members that are copied for probing (`tar_scanner.SPOOL_BYTES`), and the keys if there are more. Neither depends on
  the size of a shard.
* If the same call is made again after an interruption, it continues after the last finished unit (`index_units`). The
  result is byte for byte equal to that of an uninterrupted run. If the version exists already, the call only opens it.
* Keys are WebDataset's keys. With `keys="shard"`, the shard's path is put in front of them. Use it for collections
  whose sample numbers start again in every shard.
* Nothing is visible before the version document, which is written last.
* With `follow`, the shards that the newest version does not have become the next version. Nothing stored changes.

Failure behaviour: a sample that cannot be used is skipped. A shard that is damaged, compressed or missing, or that
holds a member that a shard must not hold, is skipped completely. The report gives the reason, and the offset if there
is one. With `strict`, the first of them raises its error. Equal keys in two shards raise `UsageError`. An existing
dataset raises `ConflictError`. If a store cannot be reached, indexing stops, because the dataset would otherwise lack
shards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from headrace.dataio.core import crashpoints
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.imports import MissingExtraError
from headrace.dataio.core.limits import counted
from headrace.dataio.shards.dataset import Dataset, use_or_open
from headrace.dataio.shards.ingest.index_units import IndexedUnit, IndexSettings, index_plan, index_task
from headrace.dataio.shards.ingest.patterns import FoundShards, find, prefix_in
from headrace.dataio.shards.ingest.plan_run import check_new_keys
from headrace.dataio.shards.ingest.report import PackReport, Skipped, no_text_notes, skip_error
from headrace.dataio.shards.ingest.tar_scanner import SourceShard
from headrace.dataio.shards.ingest.unique_keys import UniqueKeys
from headrace.dataio.shards.media.messages import check_text_field
from headrace.dataio.shards.query.part_writer import PartWriter
from headrace.dataio.shards.units.engine import Engine, RunReport, find_engine, run_units
from headrace.dataio.shards.units.journal import Done, Journal
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import mount_of, with_mounts
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX, Mounts
from headrace.dataio.store.open import open_store

__all__ = ["IndexProgress", "index"]

_crash_after_index = crashpoints.declare("index.stored", "the index is stored; there is no version yet")
_crash_after_version = crashpoints.declare("index.version-stored", "the version exists; the call has not returned")

Keys = Literal["member", "shard"]
Bad = dict[str, tuple[int, float]]
"""The sizes and the times of shards that cannot be used, by key."""


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """The progress of indexing.

    `shards` counts the finished shards and `bytes` the bytes read. `samples` counts the samples of finished shards.
    `skipped` counts skipped samples and shards.
    """

    shards: int
    shards_total: int
    bytes: int
    bytes_total: int
    samples: int
    skipped: int


def index(
    patterns: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    url: str | os.PathLike[str] | Store,
    *,
    name: str | None = None,
    strict: bool = False,
    keys: Keys = "member",
    text_field: str | None = None,
    engine: str = "local",
    progress: Callable[[IndexProgress], None] | None = None,
    workers: int | None = None,
    follow: bool = False,
    bad: Bad | None = None,
    trust_mounts: bool = False,
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
        text_field (str): the field of the samples' JSON that holds the text of samples without a `.txt`. None means
            "caption".
        engine (str): where the work runs: "local" (the default) or "ray".
        progress: a function that is called with an `IndexProgress` while the shards are read. None reports nothing.
        workers (int): the number of probing processes. None means one per core of this machine, or of the Ray cluster.
        follow (bool): if there is a dataset, add the shards that it does not have as its next version. The default is
            False.
        bad: with `follow`, the sizes and times of shards that could not be used. They are not read again while they
            stay the same. The call adds others. None reads all of them.
        trust_mounts (bool): with `follow`, let the dataset refer to other locations, as for `Dataset`. The default is
            False.
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
    worker_count(workers)
    chosen = find_engine(engine)
    listed = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    settings = IndexSettings(strict=strict, prefix_keys=keys == "shard", text_field=check_text_field(text_field))
    with contextlib.ExitStack() as undo:
        store, owned = use_or_open(url, storage_options)
        if owned:
            undo.enter_context(store)
        history.refuse_checkpoints(store)
        found_shards = find(listed, lambda root: _open_source(root, source_options or {}))
        undo.callback(found_shards.close)
        shards, mounted = _source_shards(found_shards, store)
        mounts = tuple(mount_of(s.location) for s in mounted.values())
        is_new = not (follow and history.list_versions(store))
        base = None if is_new else history.load(store)[0]
        changed = tuple[str, ...]()
        if base is not None:
            shards, changed = _new_shards(shards, base, {} if bad is None else bad)
        indexer = _Indexer(
            store=store, found_shards=found_shards, shards=shards, settings=settings, progress=progress, base=base
        )
        if base is not None:
            report, version = indexer.follow(mounts, chosen, workers, trust_mounts)
            if bad is not None:
                bad.update(
                    {s.key: (s.size, s.modified) for s in shards if s.url in {one.path for one in report.skipped}}
                )
        else:
            published = indexer.published() if history.list_versions(store) else None
            if published is None:
                history.refuse_existing(
                    store, "add to it with `headrace index --follow`, or give an empty folder or prefix"
                )
            report, version = published or indexer.run(name, mounts, chosen, workers), 1
        dataset_store = Mounts(store, mounted, owns_base=owned) if mounted else store
        document, _ = history.load(store, version)
        opened, _ = with_mounts(dataset_store, document, owned, {}, trust_mounts)
        dataset = Dataset(opened, version, trust_mounts=trust_mounts)
        dataset.report, dataset.owns_store = dataclasses.replace(report, changed=changed), opened is not url
        undo.pop_all()
    _close_unmounted(found_shards, mounted)
    return dataset


def _new_shards(
    shards: Sequence[SourceShard], base: versions.VersionDocument, bad: Bad
) -> tuple[list[SourceShard], tuple[str, ...]]:
    """Return the shards that version `base` does not have, without `bad`, and describe those that changed."""
    sizes, new, changed = base.shard_sizes(), list[SourceShard](), list[str]()
    for shard in shards:
        if shard.key not in sizes:
            if bad.get(shard.key) != (shard.size, shard.modified):
                new.append(shard)
        elif sizes[shard.key] != shard.size:
            changed.append(f"{shard.url}: it had {sizes[shard.key]} bytes when it was indexed, and has {shard.size}")
    return new, tuple(changed)


def _open_source(root: str, options: Mapping[str, Any]) -> Store:
    return open_store(root, storage_options=options if "://" in root else {})


def _close_unmounted(found_shards: FoundShards, mounted: Mapping[str, Store]) -> None:
    for source in found_shards.sources:
        if source.store not in mounted.values():
            source.store.close()


def _source_shards(found_shards: FoundShards, store: Store) -> tuple[list[SourceShard], dict[str, Store]]:
    """Return all shards, sorted by their keys in the dataset, and the stores to mount for them."""
    shards, mounted = list[SourceShard](), dict[str, Store]()
    for source in found_shards.sources:
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
    """Runs the units of the plan, merges their records into index parts, and finally writes the version."""

    def __init__(
        self,
        *,
        store: Store,
        found_shards: FoundShards,
        shards: Sequence[SourceShard],
        settings: IndexSettings,
        progress: Callable[[IndexProgress], None] | None,
        base: versions.VersionDocument | None = None,
    ) -> None:
        self._store, self._found_shards, self._settings, self._base = store, found_shards, settings, base
        self._plan = index_plan(shards, settings)
        self._journal = self._plan.journal(store)
        self._reporter = _IndexReporter(shards, progress, len(found_shards.missing))
        self._merged = _MergedRecords(store, self._journal, shards, 0 if base is None else len(base.index))
        self._began = time.monotonic()
        if settings.strict and found_shards.missing:
            raise skip_error(found_shards.missing[0])

    def published(self) -> PackReport | None:
        """Return the report of the version that an earlier call made from the same plan, or None."""
        if not self._journal.done() >= set(range(len(self._plan.units))):
            return None
        document, _ = history.load(self._store, 1)
        indexed = [shard for record in self._journal.records(len(self._plan.units)) for shard in record.shards]
        if not indexed or tuple(indexed) != tuple(document.shards):
            return None
        for number in range(len(self._plan.units)):
            self._merged.add_counts(number)
        return self._finish(RunReport(len(self._plan.units), ()))

    def run(
        self, name: str | None, mounts: tuple[versions.Mount, ...], engine: Engine, workers: int | None
    ) -> PackReport:
        """Make the version and return the report."""
        name = name or history.name_of(self._store)
        history.claim(self._store, name)
        run, parts = self._index(engine, workers)
        if not self._merged.shards:
            self._journal.delete()  # the same call would fail again
            raise self._nothing_to_index()
        _crash_after_index()
        document = versions.new_document(
            name,
            tuple(self._merged.shards),
            parts,
            version=1,
            parent=None,
            message="indexed in place",
            mounts=self._used(mounts),
        )
        history.publish(self._store, document)
        _crash_after_version()
        return self._finish(run)

    def follow(
        self, mounts: tuple[versions.Mount, ...], engine: Engine, workers: int | None, trust_mounts: bool
    ) -> tuple[PackReport, int]:
        """Make the next version, and return the report and its number. Without new samples, there is no new version."""
        assert self._base is not None
        run, parts = self._index(engine, workers)
        if not self._merged.shards:
            return self._finish(run), self._base.version
        _crash_after_index()

        def build(base: versions.VersionDocument) -> versions.VersionDocument:
            check_new_keys(self._store, base, self._merged.keys, trust_mounts, mounts)
            every = {mount.name: mount for mount in (*base.mounts, *self._used(mounts))}
            return versions.new_document(
                base.name,
                versions.joined(base.shards, tuple(self._merged.shards)),
                versions.joined(base.index, parts),
                version=base.version + 1,
                parent=base.version,
                message=f"indexed {counted(len(self._merged.shards), 'new shard')}",
                mounts=tuple(every[name] for name in sorted(every)),
                lineage=versions.Lineage(operation="append"),
            )

        document = history.commit(self._store, build)
        _crash_after_version()
        return self._finish(run), document.version

    def _index(self, engine: Engine, workers: int | None) -> tuple[RunReport, tuple[versions.IndexPart, ...]]:
        try:
            task = index_task([source.store for source in self._found_shards.sources], self._settings)
            run = run_units(
                task,
                self._journal,
                self._plan.units,
                engine=engine,
                workers=workers,
                step=self._reporter.step,
                recorded=self._merged.recorded,
            )
            return run, self._merged.close()
        except MissingExtraError:
            raise
        except UsageError:
            self._journal.delete()  # the same call would fail again
            raise

    def _used(self, mounts: tuple[versions.Mount, ...]) -> tuple[versions.Mount, ...]:
        used = {shard.key.split("/")[1] for shard in self._merged.shards if shard.key.startswith(PREFIX)}
        return tuple(sorted((mount for mount in mounts if mount.name in used), key=lambda mount: mount.name))

    def _nothing_to_index(self) -> UsageError:
        problem = next(iter([*self._found_shards.missing, *self._merged.skipped]), None)
        why = (
            f"{problem.path}: {problem.reason.removeprefix(f'{problem.path}: ')}"
            if problem
            else "the shards hold no samples"
        )
        return UsageError(f"there is nothing to index: {why}", hint="give tar shards with members called <key>.<ext>")

    def _finish(self, run: RunReport) -> PackReport:
        merged = self._merged
        report = PackReport(
            files=merged.members,
            samples=sum(shard.samples for shard in merged.shards),
            shards=len(merged.shards),
            bytes=sum(shard.size for shard in merged.shards),
            seconds=time.monotonic() - self._began,
            skipped=(*self._found_shards.missing, *merged.skipped),
            ignored=self._found_shards.ignored,
            notes=(*merged.notes, *no_text_notes(self._settings.text_field, merged.has_text)),
            resumed=run.resumed,
            workers=run.workers,
        )
        self._journal.delete()
        return report


class _MergedRecords:
    """Reads the records of finished units in the order of the plan, checks their keys, and stores index parts.

    A unit is merged once it and all units before it are recorded, so equal keys are found while the others still run.
    """

    def __init__(
        self, store: Store, journal: Journal[IndexedUnit], shards: Sequence[SourceShard], first_part: int
    ) -> None:
        self._store, self.keys = store, set[str]()
        self._journal, self._parts, self._unique_keys = journal, PartWriter(store, first_part), UniqueKeys(shards)
        self._keeps_keys = first_part > 0
        self._numbers = {shard.key: number for number, shard in enumerate(shards)}
        self._waiting, self._next, self.has_text = set[int](), 0, False
        self.shards, self.skipped, self.notes, self.members = list[versions.Shard](), list[Skipped](), list[str](), 0

    def recorded(self, number: int) -> None:
        """Note that this unit has a record, and merge all units that are next."""
        self._waiting.add(number)
        while self._next in self._waiting:
            self._waiting.remove(self._next)
            self._merge(self.add_counts(self._next))
            self._next += 1

    def add_counts(self, number: int) -> IndexedUnit:
        """Add the record of a unit to the counts, and return it."""
        (record,) = self._journal.records(1, number)
        self.shards += record.shards
        self.skipped += record.skipped
        self.notes += record.notes
        self.members += record.members
        self.has_text = self.has_text or any(sample.text is not None for sample in record.samples)
        return record

    def _merge(self, record: IndexedUnit) -> None:
        rows = iter(record.samples)
        for shard in record.shards:
            keys = [row.key for row in itertools.islice(rows, shard.samples)]
            self._unique_keys.add(self._numbers[shard.key], keys)
            if self._keeps_keys:
                self.keys.update(keys)
        self._parts.add(record.samples)

    def close(self) -> tuple[versions.IndexPart, ...]:
        """Check that keys are unique, store the last part and return all parts."""
        self._unique_keys.check()
        parts = tuple(self._parts.close())
        if not self._unique_keys.holds_all:
            self._unique_keys.check_stored(lambda: self._keys_and_shards(parts))
        return parts

    def _keys_and_shards(self, parts: Sequence[versions.IndexPart]) -> Iterator[Any]:
        """Yield a table of the keys and shards of each stored part."""
        from headrace.dataio.shards.query.tables import PartReader

        sizes = {shard.key: shard.size for shard in self.shards}
        for part in parts:
            yield PartReader(self._store, part, sizes).read(["key", "shard"])


class _IndexReporter:
    """Counts finished work for `progress`."""

    def __init__(
        self, shards: Sequence[SourceShard], progress: Callable[[IndexProgress], None] | None, missing: int
    ) -> None:
        self._done, self._progress = Done(skipped=missing), progress
        self._shards_total, self._bytes_total = len(shards), sum(shard.size for shard in shards)

    def step(self, done: Done) -> None:
        """Add finished work."""
        self._done = self._done.plus(done)
        if self._progress is not None:
            shards, size, samples, skipped = self._done
            self._progress(IndexProgress(shards, self._shards_total, size, self._bytes_total, samples, skipped))
