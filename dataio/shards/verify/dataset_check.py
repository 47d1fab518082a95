"""`verify` checks that every stored byte of a dataset version is unchanged, and that samples of its media decode.

Purpose: check documents, index parts and shards, in this order. Each is checked against the digests that the objects
before it hold. With a second copy, repair damaged objects and check them again.

Invariants:

* Index parts and shards are checked in units (`headrace.dataio.shards.units.engine`), on this machine or on many.
  Shards are streamed. Memory is a few windows of a few megabytes per thread, an index part, and the rows of a unit.
* Nothing is written to the dataset without `repair`.
* With a journal, a run that was interrupted continues after its last finished unit, and gives the same report. A unit
  with damage is always checked again, so a repair between the runs is seen. An object that was repaired just before the
  interruption is reported as intact.
* Every run on a version decodes the same samples, on every machine, because the choice depends only on the hashes of
  the keys. A share such as 1% chooses each sample by its own hash, so the choice is the same in later versions. A
  number chooses the samples with the smallest hashes, so new samples in a later version may replace some of them.
  Memory is proportional to that number.

What is checked:

* `dataset.json`, and the documents of all versions and tags, each against its own digest;
* the version's index parts and bitmaps, against the digests in its document; their rows, order and unique keys;
* the size, the headers and the end of every shard;
* every member's checksum;
* with `decode`, that the chosen samples decode to the end as the index says.

Failure behaviour: damage is a finding, not an error. If the version's own document is damaged and not repaired, there
is nothing to check against, and `verify` raises `CorruptionError`. Without a dataset, it raises `NotFoundError`. It
also raises transient errors.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from importlib.metadata import version as package_version
from typing import Any

import blake3
import msgspec

from headrace.dataio.shards.dataset import use_or_open
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.units.engine import Engine, find_engine, run_units
from headrace.dataio.shards.units.journal import Done, JournalFolder
from headrace.dataio.shards.verify.metadata_check import check_bitmaps, check_documents, check_pages, find_orphans
from headrace.dataio.shards.verify.part_units import CheckedParts, IndexCheck, combine_parts, part_task, part_units
from headrace.dataio.shards.verify.repair import bitmaps_by_object, check_copy
from headrace.dataio.shards.verify.report import LISTED, Finding, ObjectReport, VerifyProgress, VerifyReport
from headrace.dataio.shards.verify.shard_units import (
    CheckedShards,
    ShardSettings,
    largest_chosen_hash,
    parse_amount,
    shard_task,
    shard_units,
)
from headrace.dataio.shards.versions import tags
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.shards.versions.mounting import with_mounts
from headrace.dataio.shards.workers.worker_pool import worker_count
from headrace.dataio.store.base import Store

__all__ = ["Finding", "ObjectReport", "VerifyProgress", "VerifyReport", "verify"]

FORMAT = 1
"""The format of the journal's records. Another format is another plan."""


def verify(
    url: str | os.PathLike[str] | Store,
    version: int | str | None = None,
    *,
    decode: str | int = "0",
    repair: str | os.PathLike[str] | Store | None = None,
    engine: str = "local",
    workers: int | None = None,
    journal: str | os.PathLike[str] | Store | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
    trust_mounts: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> VerifyReport:
    """Check that every stored byte of a dataset version is unchanged, and report the damage.

    Args:
        url (str | os.PathLike[str] | Store): The dataset: its URL, or an open store.
        version (int | str | None): A version number or a tag. None checks the newest version. Default: None.
        decode (str | int): How many samples to decode to their end: a share such as "1%", or a number. Every run
            chooses the same samples. Default: "0".
        repair (str | os.PathLike[str] | Store | None): A second copy of the dataset. Damaged objects are replaced from
            it if they are intact there, and checked again. Default: None, which writes nothing.
        engine (str): Where the work runs: "local" or "ray". Default: "local".
        workers (int | None): The number of shards to read at once, and of decoding processes. Default: one for each
            core of this machine, at most 8, or one for each core of the Ray cluster.
        journal (str | os.PathLike[str] | Store | None): A folder or URL for the journal of the run. If the same call is
            made again after an interruption, it continues after the last finished unit. The Ray engine needs it, and
            every machine must be able to write it. Default: None, which records nothing.
        progress (Callable[[VerifyProgress], None] | None): A function that is called during the check. Default: None.
        trust_mounts (bool): As for `Dataset`. Default: False.
        storage_options (Mapping[str, Any] | None): Options of the stores of the dataset and the copy, as for
            `open_store`. Not with an open store. Default: None.

    Returns:
        VerifyReport: A report for each object. `damaged` lists those with faults.

    Raises:
        NotFoundError: There is no dataset at the URL.
        CorruptionError: The version document is damaged, so there is nothing to check against.
        TransientError: A store cannot be reached.

    Example:
        >>> report = verify(clips, decode="100%", workers=1)
        >>> report.samples, len(report.damaged)
        (4, 0)
    """
    worker_count(workers)
    chosen = find_engine(engine)
    with ExitStack() as stack:
        store = _opened(url, storage_options, stack)
        copy = None if repair is None else _opened(repair, storage_options, stack)
        check = _DatasetCheck(
            store=store,
            copy=copy,
            engine=chosen,
            workers=workers,
            journal=stack.enter_context(JournalFolder(journal)),
            progress=progress,
        )
        return check.run(version, str(decode), storage_options or {}, trust_mounts, stack)


def _opened(url: str | os.PathLike[str] | Store, storage_options: Mapping[str, Any] | None, stack: ExitStack) -> Store:
    store, owned = use_or_open(url, storage_options)
    return stack.enter_context(store) if owned else store


class _DatasetCheck:
    """One run of `verify`: the state that its steps share."""

    def __init__(
        self,
        *,
        store: Store,
        copy: Store | None,
        engine: Engine,
        workers: int | None,
        journal: JournalFolder,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._store, self._copy = store, copy
        self._engine, self._workers, self._journal = engine, workers, journal
        self._progress = progress
        self._done = VerifyProgress(0, 0, 0, 0, 0)

    def run(
        self, version: int | str | None, decode: str, options: Mapping[str, Any], trust_mounts: bool, stack: ExitStack
    ) -> VerifyReport:
        started = time.monotonic()
        parse_amount(decode)  # reject a wrong amount before any read
        if self._copy is not None:
            check_copy(self._store, self._copy)
        objects = check_documents(self._store, self._copy)
        document, digest = tags.load(self._store, version)
        mounted, owned = with_mounts(self._store, document, False, options, trust_mounts)
        if owned:
            stack.enter_context(mounted)
        self._store = mounted
        objects += check_pages(mounted, self._copy, document)
        plan = self._plan(digest, decode)
        index = self._index(document, plan)
        shards, resumed = self._shards(document, index, decode, plan)
        orphans = find_orphans(self._store, document)
        self._journal.delete()
        return VerifyReport(
            url=self._store.location.url,
            name=document.name,
            version=document.version,
            digest=digest,
            samples=document.samples,
            objects=(*objects, *index.reports, *shards),
            orphans=tuple(orphans[:LISTED]),
            orphans_found=len(orphans),
            seconds=time.monotonic() - started,
            resumed=index.resumed + resumed,
        )

    def _plan(self, digest: str, decode: str) -> str:
        """Return the name of the plan. A run of another plan does not use the records of this one."""
        copy = None if self._copy is None else self._copy.location.url
        plan = ["verify", FORMAT, package_version("headrace"), self._store.location.url, digest, decode, copy]
        return blake3.blake3(msgspec.json.encode(plan)).hexdigest()[:32]

    def _index(self, document: VersionDocument, plan: str) -> IndexCheck:
        """Check the bitmaps here, and the index parts in units."""
        bitmaps = {
            key: check_bitmaps(self._store, self._copy, key, document) for key in bitmaps_by_object(document.index)
        }
        units = part_units(document, {key for key, bitmap_report in bitmaps.items() if not bitmap_report.found})
        journal = self._journal.open(f"{plan}/parts", CheckedParts)
        task = part_task(self._store, self._copy, document)
        run = run_units(
            task,
            journal,
            units,
            engine=self._engine,
            workers=self._workers,
            step=lambda _: None,
            reuse=lambda record: not record.done.skipped,
        )
        records = journal.records(len(units))
        parts = [checked for record in records for checked in record.parts]
        return combine_parts(self._store, document, parts, list(bitmaps.values()), run.resumed)

    def _shards(
        self, document: VersionDocument, index: IndexCheck, decode: str, plan: str
    ) -> tuple[list[ObjectReport], int]:
        total = sum(shard.size for shard in document.shards)
        self._done = VerifyProgress(0, total, 0, len(document.shards), 0)
        keys: Callable[[], Iterable[str]] = (lambda: _keys(index.opened)) if index.complete else (lambda: ())
        settings = ShardSettings(
            largest_hash=largest_chosen_hash(decode, keys),
            complete=index.complete,
            without_pages=index.without_pages,
        )
        units = shard_units(document, index.numbers_by_shard(document))
        journal = self._journal.open(f"{plan}/shards", CheckedShards)
        run = run_units(
            shard_task(self._store, self._copy, document, settings),
            journal,
            units,
            engine=self._engine,
            workers=self._workers,
            step=self._step,
            reuse=lambda record: not record.done.skipped,
        )
        return [report for record in journal.records(len(units)) for report in record.reports], run.resumed

    def _step(self, done: Done) -> None:
        d = self._done
        self._done = VerifyProgress(
            d.bytes + done.bytes, d.bytes_total, d.shards + done.items, d.shards_total, d.damaged + done.skipped
        )
        if self._progress is not None:
            self._progress(self._done)


def _keys(opened: OpenIndex) -> Iterator[str]:
    for table in opened.tables(["key"]):
        for chunk in table["key"].iterchunks():
            yield from (key.as_py() for key in chunk)
