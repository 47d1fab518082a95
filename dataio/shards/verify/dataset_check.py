"""`verify` checks that every stored byte of a dataset version is unchanged, and that samples of its media decode.

Purpose: check documents, index parts and shards, in this order. Each is checked against the digests that the objects
before it hold. With a second copy, repair damaged objects and check them again.

Invariants:

* Shards are streamed. Memory is a few windows of a few megabytes per thread, one index part, and the rows of a shard.
* Nothing is written without `repair`.
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

import heapq
import itertools
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import xxhash

from headrace.dataio.core.errors import CorruptionError, DeadlineError, UsageError
from headrace.dataio.shards.dataset import use_or_open
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.verify.metadata_check import (
    check_documents,
    check_index,
    check_pages,
    find_orphans,
    with_repair,
)
from headrace.dataio.shards.verify.repair import NotRepairable, check_copy, repair_shard
from headrace.dataio.shards.verify.report import LISTED, Finding, ObjectReport, VerifyProgress, VerifyReport, report
from headrace.dataio.shards.verify.shard_check import IndexedMember, ShardCheck, check_shard
from headrace.dataio.shards.versions import tags
from headrace.dataio.shards.versions.documents import Shard, VersionDocument
from headrace.dataio.shards.versions.mounting import with_mounts
from headrace.dataio.shards.workers import jobs
from headrace.dataio.shards.workers.jobs import decode_sample
from headrace.dataio.shards.workers.worker_pool import WorkerPool, worker_count
from headrace.dataio.store.base import Store

__all__ = ["Finding", "ObjectReport", "VerifyProgress", "VerifyReport", "verify"]

_ROWS_PER_READ = 1024
_MAX_THREADS = 8
MAX_SAMPLES = 1_000_000
"""The largest number of samples that `decode` may name. A share has no such limit."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%?)")


def verify(
    url: str | os.PathLike[str] | Store,
    version: int | str | None = None,
    *,
    decode: str | int = "0",
    repair: str | os.PathLike[str] | Store | None = None,
    workers: int | None = None,
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
        workers (int | None): The number of shards to read at once. Default: one for each core, at most 8.
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
    with ExitStack() as stack:
        store = _opened(url, storage_options, stack)
        copy = None if repair is None else _opened(repair, storage_options, stack)
        threads = worker_count(workers, min(_MAX_THREADS, os.cpu_count() or 1))
        pool = stack.enter_context(WorkerPool(jobs.COMMAND, jobs.HELLO, threads))
        check = _DatasetCheck(store=store, copy=copy, pool=pool, threads=threads, progress=progress)
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
        pool: WorkerPool,
        threads: int,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        self._store, self._copy, self._pool, self._threads = store, copy, pool, threads
        self._progress, self._lock = progress, threading.Lock()
        self._done = VerifyProgress(0, 0, 0, 0, 0)
        self._stopped = False

    def run(
        self, version: int | str | None, decode: str, options: Mapping[str, Any], trust_mounts: bool, stack: ExitStack
    ) -> VerifyReport:
        started = time.monotonic()
        chooser = sample_chooser(decode, lambda: ())  # reject a wrong amount before any read
        if self._copy is not None:
            check_copy(self._store, self._copy)
        objects = check_documents(self._store, self._copy)
        document, digest = tags.load(self._store, version)
        mounted, owned = with_mounts(self._store, document, False, options, trust_mounts)
        if owned:
            stack.enter_context(mounted)
        self._store = mounted
        objects += check_pages(mounted, self._copy, document)
        opened = OpenIndex(mounted, document)
        parts, good, opened = check_index(mounted, self._copy, document, opened)
        objects += parts
        if all(good):
            chooser = sample_chooser(decode, lambda: _keys(opened))
        shards = self._shards(document, _rows(opened, good), chooser, all(good))
        orphans = find_orphans(self._store, document)
        return VerifyReport(
            url=self._store.location.url,
            name=document.name,
            version=document.version,
            digest=digest,
            samples=document.samples,
            objects=tuple(objects + shards),
            orphans=tuple(orphans[:LISTED]),
            orphans_found=len(orphans),
            seconds=time.monotonic() - started,
        )

    def _shards(
        self,
        document: VersionDocument,
        rows: Iterator[Sample],
        chosen: Callable[[str], bool],
        complete: bool,
    ) -> list[ObjectReport]:
        total = sum(shard.size for shard in document.shards)
        self._done = VerifyProgress(0, total, 0, len(document.shards), 0)
        reports, in_flight = list[ObjectReport](), deque[Future[ObjectReport]]()
        with ThreadPoolExecutor(self._threads, "verify") as threads:
            try:
                for shard, samples in _with_rows(document.shards, rows):
                    in_flight.append(threads.submit(self._shard, shard, samples, chosen, complete))
                    while len(in_flight) > 2 * self._threads:
                        reports.append(in_flight.popleft().result())
                reports += [future.result() for future in in_flight]
            except BaseException:
                self._stopped = True
                for future in in_flight:
                    future.cancel()
                self._pool.close()  # a sample may take minutes to decode, and its result is no longer needed
                raise
        return reports

    def _shard(
        self, shard: Shard, samples: Sequence[Sample], chosen: Callable[[str], bool], complete: bool
    ) -> ObjectReport:
        wanted = [IndexedMember(s.key, m.ext, m.offset, m.length, m.xxh3, m.pieces) for s in samples for m in s.members]
        check = check_shard(self._store, shard, wanted, self._step)
        repaired, unrepaired = False, ""
        if (check.bad_offsets or not check.intact) and self._copy is not None:
            try:
                if not complete:
                    raise NotRepairable("the index is damaged, so the contents of the shard are not known")
                repair_shard(self._store, self._copy, shard, wanted, check)
                repaired, check = True, check_shard(self._store, shard, wanted)
            except NotRepairable as error:
                unrepaired = str(error)
        decoded = self._decode(samples, check, chosen)
        made = report("shard", shard.key, check.findings, bytes=check.bytes, members=check.members, decoded=decoded)
        self._report_progress(0, 1, bool(check.findings))
        return with_repair(made, repaired, unrepaired)

    def _decode(self, samples: Sequence[Sample], check: ShardCheck, chosen: Callable[[str], bool]) -> int:
        """Decode the chosen samples whose bytes are intact, and add their faults to `check`."""
        decodable = [
            s
            for s in samples
            if (s.video or s.audio) and chosen(s.key) and not any(m.offset in check.bad_offsets for m in s.members)
        ]
        if decodable:
            with ThreadPoolExecutor(min(self._threads, len(decodable)), "decode") as threads:
                for sample, faults in zip(decodable, threads.map(self._faults, decodable), strict=True):
                    check.findings += [Finding(code="decode", message=fault, key=sample.key) for fault in faults]
        return len(decodable)

    def _faults(self, sample: Sample) -> tuple[str, ...]:
        try:
            return decode_sample(self._store, sample, self._pool)
        except (CorruptionError, DeadlineError) as error:
            return (error.message,)

    def _step(self, size: int) -> None:
        if self._stopped:
            raise CancelledError
        self._report_progress(size, 0, 0)

    def _report_progress(self, size: int, shards: int, damaged: int) -> None:
        with self._lock:
            d = self._done
            self._done = VerifyProgress(
                d.bytes + size, d.bytes_total, d.shards + shards, d.shards_total, d.damaged + damaged
            )
            if self._progress is not None:
                self._progress(self._done)


def _with_rows(shards: Sequence[Shard], rows: Iterator[Sample]) -> Iterator[tuple[Shard, list[Sample]]]:
    """Yield every shard with its samples. Both are in the order of the version."""
    runs = itertools.groupby(rows, key=lambda sample: sample.shard)
    run = next(runs, None)
    for shard in shards:
        samples = list[Sample]()
        while run is not None and run[0] == shard.key:
            samples += run[1]
            run = next(runs, None)
        yield shard, samples


def _rows(opened: OpenIndex, good: Sequence[bool]) -> Iterator[Sample]:
    """Yield the samples of the intact parts in order, reading `_ROWS_PER_READ` rows at a time."""
    for part, intact in enumerate(good):
        if not intact:
            continue
        end = int(opened.ends[part])
        for start in range(int(opened.ends[part - 1]) if part else 0, end, _ROWS_PER_READ):
            yield from opened.samples(range(start, min(start + _ROWS_PER_READ, end)))


def _keys(opened: OpenIndex) -> Iterator[str]:
    for table in opened.tables(["key"]):
        for chunk in table["key"].iterchunks():
            yield from (key.as_py() for key in chunk)


# --- choosing samples


def sample_chooser(amount: str, keys: Callable[[], Iterable[str]]) -> Callable[[str], bool]:
    """Return a function of a sample's key that returns whether the sample is chosen.

    `amount` is a share such as `2.5%`, or a number. `keys` returns all keys. It is called only for a number.
    """
    match = _AMOUNT.fullmatch(amount.strip())
    share = float(match[1]) if match else 0.0
    if match is None or (match[2] and share > 100) or (not match[2] and ("." in match[1] or share > MAX_SAMPLES)):
        raise UsageError(
            f"{amount!r} is not a number or share of samples to decode",
            hint=f"write 1%, or a number up to {MAX_SAMPLES}",
        )
    if match[2]:
        limit = int(share / 100 * 2**64)
    else:
        smallest = heapq.nsmallest(int(share), map(_hash, keys()))
        limit = smallest[-1] + 1 if smallest else 0
    return lambda key: _hash(key) < limit


def _hash(key: str) -> int:
    return int(xxhash.xxh3_64_intdigest(key.encode()))
