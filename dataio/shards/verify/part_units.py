"""The units in which `verify` checks the index: each checks the digest, the rows and the pages of index parts.

Purpose: `part_task` describes the work for an engine. `combine_parts` compares the results of the units with each
other: the order of the parts, and the uniqueness of keys.

Invariants:

* A damaged part is replaced from the copy, if there is one, before its rows are read.
* The rows of a part are read only if its bytes and its bitmap are intact.
* The record of a part also says how many samples of each shard it holds, so that shards are checked without reading the
  whole index again.

Failure behaviour: damage is a finding. Transient errors are raised.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.query.open_index import OpenIndex, Position
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner
from headrace.dataio.shards.units.journal import Done, Record, Unit, divide
from headrace.dataio.shards.verify.metadata_check import check_part
from headrace.dataio.shards.verify.remote import VersionStores, local_threads, open_stores, stores_of
from headrace.dataio.shards.verify.report import Finding, ObjectReport, report
from headrace.dataio.shards.versions.documents import VersionDocument
from headrace.dataio.store.base import Store


class PartUnit(Unit, frozen=True):
    """Index parts, by their numbers in the version. `readable` says for each whether its bitmap is intact."""

    parts: tuple[int, ...]
    readable: tuple[bool, ...]


class CheckedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one part.

    `first` and `last` are the positions of its rows, `runs` the samples of each shard in turn (position of the shard,
    samples). `fault` is the first problem of its rows, and `wrong_pages` that of its pages.
    """

    report: ObjectReport
    good: bool
    first: Position | None = None
    last: Position | None = None
    runs: tuple[tuple[int, int], ...] = ()
    fault: str = ""
    wrong_pages: str = ""


class CheckedParts(Record, frozen=True):
    """The results of one unit."""

    parts: tuple[CheckedPart, ...]

    @property
    def done(self) -> Done:
        """The work of the unit."""
        damaged = sum(bool(one.report.found or one.fault or not one.good) for one in self.parts)
        return Done(len(self.parts), sum(one.report.bytes for one in self.parts), 0, damaged)


def part_units(document: VersionDocument, good_bitmaps: Collection[str]) -> list[PartUnit]:
    """Divide the index parts into units. `good_bitmaps` are the objects of bitmaps that are intact."""
    readable = [part.bitmap is None or part.bitmap.key in good_bitmaps for part in document.index]
    runs = divide([part.size for part in document.index], unit_bytes=1, unit_items=1)
    return [PartUnit(number, tuple(run), tuple(readable[part] for part in run)) for number, run in enumerate(runs)]


def part_task(store: Store, copy: Store | None, document: VersionDocument) -> Task[PartUnit, CheckedParts]:
    """Return the task that checks index parts."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_PartRunner]:
        yield _PartRunner(store, copy, document, local_threads(workers))

    def remote() -> RemoteTask[PartUnit, CheckedParts]:
        return RemoteTask(_open_remote, msgspec.msgpack.encode(stores_of(store, copy, document)))

    return Task("verify", PartUnit, opener, remote)


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_PartRunner]:
    with open_stores(msgspec.msgpack.decode(settings, type=VersionStores)) as (store, copy, document):
        yield _PartRunner(store, copy, document, 1)


class _PartRunner(UnitRunner[PartUnit, CheckedParts]):
    """Checks parts one after the other."""

    def __init__(self, store: Store, copy: Store | None, document: VersionDocument, threads: int) -> None:
        self._store, self._copy, self._document, self.threads = store, copy, document, threads
        self._opened = OpenIndex(store, document)

    def run(self, units: Iterator[PartUnit], step: Step) -> Iterator[tuple[PartUnit, CheckedParts]]:
        """Check the parts of units in order."""
        for unit in units:
            parts = tuple(self._check(*one) for one in zip(unit.parts, unit.readable, strict=True))
            yield unit, CheckedParts(parts)

    def _check(self, part: int, readable: bool) -> CheckedPart:
        part_report = check_part(self._store, self._copy, self._document.index[part])
        if part_report.found or not readable:
            return CheckedPart(report=part_report, good=False)
        try:
            rows = self._opened.check_part(part)
            runs = tuple(self._opened.shard_runs(part))
        except CorruptionError as error:
            return CheckedPart(report=part_report, good=True, fault=error.message)
        if rows.wrong_pages:
            page_report = report("index", part_report.object, [Finding(code="pages", message=rows.wrong_pages)])
            part_report = msgspec.structs.replace(part_report, findings=page_report.findings, found=page_report.found)
        return CheckedPart(
            report=part_report, good=True, first=rows.first, last=rows.last, runs=runs, wrong_pages=rows.wrong_pages
        )


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """The result for the whole index.

    Attributes:
        reports: the reports of the parts, of the bitmaps, and of the index as a whole.
        parts: the results of the parts, in order.
        opened: the index for looking up samples, which reads parts with wrong pages from their row groups.
        without_pages: the numbers of these parts.
        resumed: the number of units that an earlier run had checked.
    """

    reports: list[ObjectReport]
    parts: list[CheckedPart]
    opened: OpenIndex
    without_pages: tuple[int, ...]
    resumed: int

    @property
    def complete(self) -> bool:
        """Whether the samples of all parts can be read."""
        return all(one.good for one in self.parts)

    def numbers_by_shard(self, document: VersionDocument) -> list[list[tuple[int, int]]]:
        """Return for each shard the numbers of its samples, as ranges (first, after the last).

        Samples of parts that cannot be read are left out.
        """
        ranges: list[list[tuple[int, int]]] = [[] for _ in document.shards]
        for number, part in enumerate(self.parts):
            at = int(self.opened.ends[number - 1]) if number else 0
            for shard, samples in part.runs:
                ranges[shard].append((at, at + samples))
                at += samples
        return ranges


def combine_parts(
    store: Store, document: VersionDocument, parts: list[CheckedPart], bitmaps: list[ObjectReport], resumed: int
) -> IndexCheck:
    """Compare the results of the parts with each other."""
    reports = [one.report for one in parts] + bitmaps
    opened = OpenIndex(store, document)
    wrong = tuple(number for number, one in enumerate(parts) if one.wrong_pages)
    if parts and all(one.good for one in parts):
        fault = _first_fault(opened, parts)
        if fault:
            reports.append(report("index", "the index as a whole", [Finding(code="order", message=fault)]))
    if wrong:
        index = [
            msgspec.structs.replace(part, pages=None) if number in wrong else part
            for number, part in enumerate(document.index)
        ]
        opened = OpenIndex(store, msgspec.structs.replace(document, index=tuple(index)))
    return IndexCheck(reports, parts, opened, wrong, resumed)


def _first_fault(opened: OpenIndex, parts: Sequence[CheckedPart]) -> str:
    """Return the first problem of the index as a whole: the rows, the order of the parts, or repeated keys."""
    previous: Position | None = None
    try:
        for part in parts:
            if part.fault:
                return part.fault
            if part.first is not None:
                opened.check_follows(previous, part.first)
                previous = part.last
        opened.check_keys()
    except CorruptionError as error:
        return error.message
    return ""
