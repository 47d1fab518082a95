"""`pack` and `append` turn media files into a version of a dataset.

Purpose: gather the inputs, make a plan, pack its units on this machine or on many machines, store the index, and
publish the version.

Invariants:

* Nothing is visible before the version document, which is written last. If a packer crashes, the objects that it stored
  remain, but no version names them.
* If the same call is made again after an interruption, it continues after the last finished unit. The result is byte
  for byte equal to that of an uninterrupted run. If the version exists already, the call only opens it.
* The same input gives the same shards, byte for byte, under the same names, and the same index. A shard's name holds
  its unit and a digest of its contents. Concurrent packers therefore never overwrite each other's shards with other
  bytes, and exactly one of them publishes the version.
* Memory is bounded, except for the names of all files. The packer holds the metadata of two units, the rows of one
  index part and a few megabytes of file contents.
* Temporary files (from recipes, tars and remote inputs) take disk space for one unit, in `TMPDIR`.
* The index describes the bytes that were stored. If a file changes after it was described and before it is stored,
  `pack` raises `TransientError`.

Failure behaviour: a file that cannot be packed is skipped and reported with its reason. With `strict`, it is an error.
`pack` raises `ConflictError` if a dataset exists already. `append` raises it if the dataset already has one of the
keys. If no file is usable, both raise `UsageError`.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset, use_or_open
from headrace.dataio.shards.ingest import plan
from headrace.dataio.shards.ingest.grouping import Group, Grouping, check_grouping
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS, Columns
from headrace.dataio.shards.ingest.plan_run import InputReporter, PlanRun, check_new_keys
from headrace.dataio.shards.ingest.report import PackReport, Progress, Skipped
from headrace.dataio.shards.ingest.source_stores import SourceStores
from headrace.dataio.shards.ingest.sources import Gathered, gather
from headrace.dataio.shards.ingest.unit_packer import pack_task
from headrace.dataio.shards.media.messages import TEXT_BYTES, Recipe, check_recipe, check_text_field
from headrace.dataio.shards.units.engine import RunReport, find_engine
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Store

__all__ = ["Columns", "PackReport", "Progress", "Recipe", "Skipped", "append", "pack"]

_UNCHANGED = Recipe()

_crash_after_index = crashpoints.declare("pack.index-stored", "shards and index are stored; there is no version yet")
_crash_after_version = crashpoints.declare("pack.version-stored", "the version exists; the call has not returned")

Sources = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]


def pack(
    sources: Sources,
    url: str | os.PathLike[str] | Store,
    *,
    shard_bytes: int = 256 * limits.MIB,
    strict: bool = False,
    captions: Mapping[str, str] | None = None,
    columns: Columns = DEFAULT_COLUMNS,
    group: Grouping = "stem",
    recipe: Recipe = _UNCHANGED,
    text_field: str | None = None,
    engine: str = "local",
    progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
    name: str | None = None,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Write media files into tar shards with an index, as version 1 of a new dataset at `url`, and open it.

    `headrace.dataio.shards.ingest.sources` explains which files become a sample, and what its key is.

    Args:
        sources: files, folders, globs, manifests (CSV, TSV, JSON lines, Parquet), Parquet files with embedded media and
            WebDataset tars. They are local paths or URLs (`s3://bucket/folder`).
        url: where to write the dataset, or an open store.
        shard_bytes (int): the size limit of a shard in bytes. The default is 256 MiB. The packer closes a shard before
            the sample that would exceed it, and at the end of each unit of the plan
            (`headrace.dataio.shards.ingest.plan`).
        strict (bool): raise the error of the first file that cannot be packed. By default, the file is skipped.
        captions: texts by sample key. The packer stores each as the sample's `.txt` file, if the sample has none. None
            adds no text.
        columns (Columns): the names of the columns in manifests and in Parquet files with embedded media. The default
            is `path`, `key` and `caption`.
        group (str): which files are one sample: "stem" (the default), "dot" or "folder"
            (`headrace.dataio.shards.ingest.grouping`).
        recipe (Recipe): how to re-encode media, copy them into another container, or split them. By default, the files
            stay as they are.
        text_field (str): the field of the samples' JSON that holds the text of samples without a `.txt`. None means
            "caption".
        engine (str): where the work runs: "local" (the default) or "ray".
        progress: a function that is called with a `Progress` when a group of files is finished. None reports nothing.
        workers (int): the number of processes. None means one for each core of this machine, or of the Ray cluster.
        name (str): the dataset's name. None derives it from `url`.
        source_options: options for the stores of the sources, as for `open_store`.
        storage_options: options for the dataset's store, as for `open_store`. Not with an open store.

    Returns:
        The dataset. Its `report` lists what was packed and what was skipped.

    Raises:
        NotFoundError: a source or the bucket does not exist.
        UsageError: two samples have the same key, or there is nothing to pack.
        ConflictError: another dataset exists at `url`.

    Example:
        >>> with pack(folder, f"{scratch}/new", captions={"tone": "a sine wave"}, workers=1) as dataset:
        ...     [(sample.key, sample.text) for sample in dataset]
        [('tone', 'a sine wave')]
    """
    job = _PackJob(
        shard_bytes=shard_bytes,
        strict=strict,
        captions=captions or {},
        columns=columns,
        group=group,
        recipe=recipe,
        text_field=text_field,
        engine=engine,
        progress=progress,
        workers=workers,
        source_options=source_options,
    )
    with job.stores:
        return _with_dataset(url, storage_options, lambda store: job.pack(store, sources, name))


def append(
    sources: Sources,
    url: str | os.PathLike[str] | Store,
    *,
    shard_bytes: int = 256 * limits.MIB,
    strict: bool = False,
    captions: Mapping[str, str] | None = None,
    columns: Columns = DEFAULT_COLUMNS,
    group: Grouping = "stem",
    recipe: Recipe = _UNCHANGED,
    text_field: str | None = None,
    engine: str = "local",
    progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
    message: str = "",
    source_options: Mapping[str, Any] | None = None,
    trust_mounts: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:
    """Add media files to the dataset at `url` as its next version, and open that version.

    `pack` explains the arguments that both functions have. The existing samples stay as they are, and the new samples
    come after them. Concurrent calls of `append` all succeed, one after the other.

    Args:
        message (str): the message of the new version. By default, it gives the number of samples.
        trust_mounts (bool): let the dataset refer to other locations, as for `Dataset`. The default is False.

    Returns:
        The new version of the dataset, with a `report`.

    Raises:
        ConflictError: the dataset already has one of the keys. Remove the old sample first.
        NotFoundError: there is no dataset at `url`.

    Example:
        >>> pack(folder, f"{scratch}/set", workers=1).close()
        >>> with append(more, f"{scratch}/set", workers=1) as dataset:
        ...     dataset.version, list(dataset.keys)
        (2, ['tone', 'chord'])
    """
    job = _PackJob(
        shard_bytes=shard_bytes,
        strict=strict,
        captions=captions or {},
        columns=columns,
        group=group,
        recipe=recipe,
        text_field=text_field,
        engine=engine,
        progress=progress,
        workers=workers,
        source_options=source_options,
    )
    with job.stores:
        return _with_dataset(
            url, storage_options, lambda store: job.append(store, sources, message, trust_mounts), trust_mounts
        )


def _with_dataset(
    url: str | os.PathLike[str] | Store,
    storage_options: Mapping[str, Any] | None,
    make_version: Callable[[Store], tuple[PackReport, int]],
    trust_mounts: bool = False,
) -> Dataset:
    store, owned = use_or_open(url, storage_options)
    try:
        report, version = make_version(store)
        dataset = Dataset(store, version, trust_mounts=trust_mounts)
    except BaseException:
        if owned:
            store.close()
        raise
    dataset.report = report
    dataset.owns_store = dataset.owns_store or owned
    return dataset


class _PackJob:
    """One call of `pack` or `append`."""

    def __init__(
        self,
        *,
        shard_bytes: int,
        strict: bool,
        captions: Mapping[str, str],
        columns: Columns,
        group: Grouping,
        recipe: Recipe,
        text_field: str | None,
        engine: str,
        progress: Callable[[Progress], None] | None,
        workers: int | None,
        source_options: Mapping[str, Any] | None,
    ) -> None:
        if shard_bytes < 1:
            raise UsageError(
                f"shard_bytes must be positive, not {shard_bytes}", hint="give a size in bytes, such as 256 << 20"
            )
        worker_count(workers)
        self._recipe, self._grouping = check_recipe(recipe), check_grouping(group)
        self._settings = plan.Settings(
            shard_bytes=shard_bytes, recipe=recipe, strict=strict, text_field=check_text_field(text_field)
        )
        self._captions, self._columns, self._progress, self._workers = captions, columns, progress, workers
        self._engine, self.stores = find_engine(engine), SourceStores(source_options)
        self._started = time.monotonic()

    def pack(self, store: Store, sources: Sources, name: str | None) -> tuple[PackReport, int]:
        """Make version 1 of the dataset."""
        history.refuse_checkpoints(store)
        gathered = self._gather(sources, store)
        reporter = InputReporter(gathered, self._settings.strict, self._progress)
        runner = self._runner(store, gathered, append=False)
        if history.list_versions(store):
            published = runner.published()
            if published is not None:
                return self._finish(runner, reporter, RunReport(0, ()), published)
            history.refuse_existing(
                store, "add to it with `headrace pack --append` (`append` in Python), or pack elsewhere"
            )
        name = name or history.name_of(store)
        if not gathered.groups:
            raise _nothing_to_pack(gathered)
        history.claim(store, name)
        runner.journal.begin(0)
        settings = self._settings
        run = runner.run(pack_task(store, settings, self.stores), self._engine, self._workers, reporter)
        shards, parts = runner.index(0, partial(_nothing_to_pack, gathered))
        document = versions.new_document(name, shards, parts, version=1, parent=None, message="packed")
        _crash_after_index()
        history.publish(store, document)
        _crash_after_version()
        return self._finish(runner, reporter, run, document)

    def append(self, store: Store, sources: Sources, message: str, trust_mounts: bool) -> tuple[PackReport, int]:
        """Make the next version of the dataset."""
        newest, _ = history.load(store)
        gathered = self._gather(sources, store)
        reporter = InputReporter(gathered, self._settings.strict, self._progress)
        if not gathered.groups:
            raise _nothing_to_pack(gathered)
        runner = self._runner(store, gathered, append=True)
        published = runner.published()
        if published is not None:
            return self._finish(runner, reporter, RunReport(0, ()), published)
        if self._recipe.split is None:
            check_new_keys(store, newest, {group.key for group in gathered.groups}, trust_mounts)
        settings = msgspec.structs.replace(self._settings, salt=runner.journal.begin(newest.version))
        run = runner.run(pack_task(store, settings, self.stores), self._engine, self._workers, reporter)
        shards, parts = runner.index(len(newest.index), partial(_nothing_to_pack, gathered))
        _crash_after_index()

        def build(base: versions.VersionDocument) -> versions.VersionDocument:
            check_new_keys(store, base, runner.keys, trust_mounts)
            return versions.new_document(
                base.name,
                versions.joined(base.shards, shards),
                versions.joined(base.index, parts),
                version=base.version + 1,
                parent=base.version,
                message=message or f"appended {limits.counted(len(runner.keys), 'sample')}",
                mounts=base.mounts,
                lineage=versions.Lineage(operation="append"),
            )

        document = history.commit(store, build)
        _crash_after_version()
        return self._finish(runner, reporter, run, document)

    def _gather(self, sources: Sources, store: Store) -> Gathered:
        gathered = gather(
            [sources] if isinstance(sources, str | os.PathLike) else sources,
            self._columns,
            self.stores,
            store.location.url,
            self._grouping,
        )
        sample_keys = {group.key for group in gathered.groups}
        for key, text in self._captions.items():
            if key not in sample_keys:
                raise UsageError(
                    f"there is a caption for {key!r}, but no such sample", hint="give the captions by sample key"
                )
            if len(text.encode()) > TEXT_BYTES:
                raise UsageError(
                    f"the caption of {key!r} is larger than {limits.format_bytes(TEXT_BYTES)}", hint="shorten it"
                )
        if not self._captions:
            return gathered
        return dataclasses.replace(gathered, groups=tuple(self._captioned(group) for group in gathered.groups))

    def _runner(self, store: Store, gathered: Gathered, *, append: bool) -> PlanRun[plan.PackUnit]:
        return PlanRun(
            store=store,
            journal=plan.journal_of(store, plan.digest(gathered.groups, self._settings, append)),
            units=plan.units(gathered.groups, self._settings),
            text_field=self._settings.text_field,
        )

    def _captioned(self, group: Group) -> Group:
        return dataclasses.replace(group, caption=self._captions.get(group.key, group.caption))

    def _finish(
        self,
        runner: PlanRun[plan.PackUnit],
        reporter: InputReporter,
        run: RunReport,
        document: versions.VersionDocument,
    ) -> tuple[PackReport, int]:
        report = runner.report(reporter, run, time.monotonic() - self._started)
        runner.journal.delete()
        return report, document.version


def _nothing_to_pack(gathered: Gathered, skipped: Sequence[Skipped] = ()) -> UsageError:
    ignored, skipped = gathered.ignored, skipped or gathered.skipped
    why, hint = "no media files were found", "give media files, or folders of them; files below DST are left out"
    if ignored:
        why = f"none of {limits.counted(len(ignored), 'file')} is media (such as {ignored[0]})"
        hint = "give media files; write other files (latents, features) to tars, and use `headrace index` on them"
        if ignored[0].endswith(".parquet"):
            hint = (
                "name tables, or match them with a quoted glob such as 'folder/*.parquet'; in folders they are ignored"
            )
    if skipped:
        hint = "give media files, or folders of them"
        all_of_them = f"all {len(skipped)} candidates were skipped; " if len(skipped) > 1 else ""
        why = f"{all_of_them}{skipped[0].path}: {skipped[0].reason}"
    return UsageError(f"there is nothing to pack: {why}", hint=hint)
