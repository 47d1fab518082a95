"""The units in which `verify` checks shards: their bytes, their repair, and the decoding of chosen samples.

Purpose: `shard_task` describes the work for an engine. `largest_chosen_hash` decides which samples are decoded.

Invariants:

* A unit is one shard. In a dataset with very many shards, it is a run of adjacent shards
  (`headrace.dataio.shards.units.journal.divide`).
* Whether a sample is decoded depends only on the hash of its key and on one limit, so it does not depend on the unit.
* A shard is repaired only if the whole index is intact, because its contents are not known otherwise.

Failure behaviour: damage is a finding. Transient errors are raised. `stop` closes the decoding processes, because a
sample may take minutes to decode.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import xxhash

from headrace.dataio.core.errors import CorruptionError, DeadlineError, UsageError
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner
from headrace.dataio.shards.units.journal import Done, Record, Unit, divide
from headrace.dataio.shards.verify.joined_check import check_any_shard
from headrace.dataio.shards.verify.metadata_check import with_repair
from headrace.dataio.shards.verify.remote import VersionStores, local_threads, open_stores, stores_of
from headrace.dataio.shards.verify.repair import NotRepairable, repair_shard
from headrace.dataio.shards.verify.report import Finding, ObjectReport, report
from headrace.dataio.shards.verify.shard_check import IndexedMember, ShardCheck
from headrace.dataio.shards.versions.documents import Shard, VersionDocument
from headrace.dataio.shards.workers import jobs
from headrace.dataio.shards.workers.jobs import decode_sample
from headrace.dataio.shards.workers.worker_pool import WorkerPool
from headrace.dataio.store.base import Store

_ROWS_PER_READ = 1024
MAX_SAMPLES = 1_000_000
"""The largest number of samples that `decode` may name. A share has no such limit."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%?)")

Ranges = tuple[tuple[int, int], ...]
"""Numbers of samples, as ranges (first, after the last)."""


class ShardUnit(Unit, frozen=True):
    """Shards, by their numbers in the version, and the numbers of the samples of each."""

    shards: tuple[int, ...]
    samples: tuple[Ranges, ...]


class CheckedShards(Record, frozen=True):
    """The reports of the shards of one unit. `bytes` are the sizes of the shards in the version document."""

    reports: tuple[ObjectReport, ...]
    bytes: int

    @property
    def done(self) -> Done:
        """The work of the unit."""
        return Done(len(self.reports), self.bytes, 0, sum(bool(one.found) for one in self.reports))


class ShardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that apply to every unit.

    `largest_hash` is the result of `largest_chosen_hash`. `complete` says whether the whole index is intact.
    `without_pages` are the numbers of the index parts whose pages are wrong.
    """

    largest_hash: int
    complete: bool
    without_pages: tuple[int, ...]


def shard_units(document: VersionDocument, samples: Sequence[Sequence[tuple[int, int]]]) -> list[ShardUnit]:
    """Divide the shards into units. `samples` gives the numbers of each shard's samples."""
    runs = divide([shard.size for shard in document.shards], unit_bytes=1, unit_items=1)
    return [
        ShardUnit(number, tuple(run), tuple(tuple(samples[shard]) for shard in run)) for number, run in enumerate(runs)
    ]


def shard_task(
    store: Store, copy: Store | None, document: VersionDocument, settings: ShardSettings
) -> Task[ShardUnit, CheckedShards]:
    """Return the task that checks shards."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_ShardRunner]:
        threads = local_threads(workers)
        with WorkerPool(jobs.COMMAND, jobs.HELLO, threads) as pool:
            yield _ShardRunner(store=store, copy=copy, document=document, settings=settings, pool=pool, threads=threads)

    def remote() -> RemoteTask[ShardUnit, CheckedShards]:
        remote_settings = _RemoteSettings(stores_of(store, copy, document), settings)
        return RemoteTask(_open_remote, msgspec.msgpack.encode(remote_settings))

    return Task("verify", ShardUnit, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    stores: VersionStores
    settings: ShardSettings


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_ShardRunner]:
    remote_settings = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with (
        open_stores(remote_settings.stores) as (store, copy, document),
        WorkerPool(jobs.COMMAND, jobs.HELLO, 1) as pool,
    ):
        yield _ShardRunner(
            store=store, copy=copy, document=document, settings=remote_settings.settings, pool=pool, threads=1
        )


class _ShardRunner(UnitRunner[ShardUnit, CheckedShards]):
    """Checks the shards of units. The processes of `pool` decode samples."""

    def __init__(
        self,
        *,
        store: Store,
        copy: Store | None,
        document: VersionDocument,
        settings: ShardSettings,
        pool: WorkerPool,
        threads: int,
    ) -> None:
        self._store, self._copy, self._document, self._settings = store, copy, document, settings
        self._pool, self.threads = pool, threads
        parts = [
            msgspec.structs.replace(part, pages=None) if number in settings.without_pages else part
            for number, part in enumerate(document.index)
        ]
        self._index = OpenIndex(store, msgspec.structs.replace(document, index=tuple(parts)))

    def run(self, units: Iterator[ShardUnit], step: Step) -> Iterator[tuple[ShardUnit, CheckedShards]]:
        """Check the shards of units in order."""
        for unit in units:
            shards = [self._document.shards[number] for number in unit.shards]
            reports = tuple(
                self._check(shard, self._samples(ranges), step)
                for shard, ranges in zip(shards, unit.samples, strict=True)
            )
            yield unit, CheckedShards(reports, sum(shard.size for shard in shards))

    def stop(self) -> None:
        """Close the decoding processes."""
        self._pool.close()

    def _samples(self, ranges: Ranges) -> list[Sample]:
        return list(
            itertools.chain.from_iterable(
                self._index.samples(range(at, min(at + _ROWS_PER_READ, end)))
                for start, end in ranges
                for at in range(start, end, _ROWS_PER_READ)
            )
        )

    def _check(self, shard: Shard, samples: Sequence[Sample], step: Step) -> ObjectReport:
        members = [
            IndexedMember(s.key, m.ext, m.offset, m.length, m.xxh3, m.pieces) for s in samples for m in s.members
        ]
        check = check_any_shard(self._store, shard, members, lambda size: step(Done(bytes=size)))
        repaired, unrepaired = False, ""
        if (check.bad_offsets or not check.intact) and self._copy is not None:
            try:
                if not self._settings.complete:
                    raise NotRepairable("the index is damaged, so the contents of the shard are not known")
                repair_shard(self._store, self._copy, shard, members, check)
                repaired, check = True, check_any_shard(self._store, shard, members)
            except NotRepairable as error:
                unrepaired = str(error)
        decoded = self._decode(samples, check)
        shard_report = report(
            "shard", shard.key, check.findings, bytes=check.bytes, members=check.members, decoded=decoded
        )
        step(Done(1, 0, 0, bool(check.findings)))
        return with_repair(shard_report, repaired, unrepaired)

    def _decode(self, samples: Sequence[Sample], check: ShardCheck) -> int:
        """Decode the chosen samples whose bytes are intact, and add their faults to `check`."""
        decodable = [
            s
            for s in samples
            if (s.video or s.audio)
            and key_hash(s.key) <= self._settings.largest_hash
            and not any(m.offset in check.bad_offsets for m in s.members)
        ]
        if decodable:
            with ThreadPoolExecutor(min(self.threads, len(decodable)), "decode") as threads:
                for sample, faults in zip(decodable, threads.map(self._faults, decodable), strict=True):
                    check.findings += [Finding(code="decode", message=fault, key=sample.key) for fault in faults]
        return len(decodable)

    def _faults(self, sample: Sample) -> tuple[str, ...]:
        try:
            return decode_sample(self._store, sample, self._pool)
        except (CorruptionError, DeadlineError) as error:
            return (error.message,)


# --- choosing samples


@dataclass(frozen=True, slots=True)
class Amount:
    """The samples to decode: a number of samples, or a share of them as the largest hash of a chosen key (-1: none)."""

    number: int
    largest_hash: int


def parse_amount(amount: str) -> Amount:
    """Parse a share such as `2.5%`, or a number of samples."""
    match = _AMOUNT.fullmatch(amount.strip())
    value = float(match[1]) if match else 0.0
    if match is None or (match[2] and value > 100) or (not match[2] and ("." in match[1] or value > MAX_SAMPLES)):
        raise UsageError(
            f"{amount!r} is not a number or share of samples to decode",
            hint=f"write 1%, or a number up to {MAX_SAMPLES}",
        )
    return Amount(0, int(value / 100 * 2**64) - 1) if match[2] else Amount(int(value), -1)


def largest_chosen_hash(amount: str, keys: Callable[[], Iterable[str]]) -> int:
    """Return the largest hash of a chosen key (`key_hash`), or -1 if none is chosen.

    `amount` is a share such as `2.5%`, or a number. `keys` returns all keys. It is called only for a number.
    """
    parsed = parse_amount(amount)
    if not parsed.number:
        return parsed.largest_hash
    return max(heapq.nsmallest(parsed.number, map(key_hash, keys())), default=-1)


def key_hash(key: str) -> int:
    """Return the hash by which samples are chosen."""
    return int(xxhash.xxh3_64_intdigest(key.encode()))
