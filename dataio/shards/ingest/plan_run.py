"""Runs the plan of `pack`, `append` or `index` over files, and makes the index of a version from its records.

Invariants: a run that is repeated continues after the last recorded unit. The index parts are stored in the order of
the plan. Memory holds the keys of all samples, and the rows of one unit and of one index part.

Failure behaviour: if no unit has samples, the journal is deleted and `index` raises the caller's error, since the same
call would fail again. Errors of the stores pass through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from headrace.dataio.core.errors import ConflictError, UsageError
from headrace.dataio.shards.ingest.plan import PackedUnit
from headrace.dataio.shards.ingest.report import PackReport, Progress, Skipped, no_text_notes, skip_error
from headrace.dataio.shards.ingest.sources import Gathered
from headrace.dataio.shards.query import views
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.query.part_writer import PartWriter
from headrace.dataio.shards.units.engine import Engine, RunReport, Task, run_units
from headrace.dataio.shards.units.journal import Done, StoredJournal, Unit
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import with_mounts
from headrace.dataio.store.base import Store

U = TypeVar("U", bound=Unit)


class PlanRun(Generic[U]):
    """Runs the units of a plan, and makes the index and the report from their records."""

    def __init__(
        self,
        *,
        store: Store,
        journal: StoredJournal[PackedUnit],
        units: Sequence[U],
        text_field: str | None,
    ) -> None:
        self.store, self.journal, self.units, self._text_field = store, journal, units, text_field
        self.keys: set[str] = set()

    def published(self) -> versions.VersionDocument | None:
        """Return the document of the version that an earlier call made from the same plan, or None."""
        if not self.units or not self.journal.done() >= set(range(len(self.units))):
            return None
        document, _ = history.load(self.store)
        published_shards = {shard.key for shard in document.shards}
        shards = [shard.key for packed in self.journal.records(len(self.units)) for shard in packed.shards]
        return document if shards and published_shards.issuperset(shards) else None

    def run(self, task: Task[U, PackedUnit], engine: Engine, workers: int | None, reporter: InputReporter) -> RunReport:
        """Run the units that the journal has no record of."""
        return run_units(task, self.journal, self.units, engine=engine, workers=workers, step=reporter.step)

    def index(self, first_part: int, nothing: Callable[[Sequence[Skipped]], UsageError]) -> tuple[Any, Any]:
        """Store the index parts of all units, in order. Return all shards and all index parts."""
        shards, parts = list[versions.Shard](), PartWriter(self.store, first_part)
        for packed in self.journal.records(len(self.units)):
            shards += packed.shards
            self.keys |= {sample.key for sample in packed.samples}
            parts.add(packed.samples)
        stored = parts.close()
        if not shards:
            skipped = [item for packed in self.journal.records(len(self.units)) for item in packed.skipped]
            self.journal.delete()
            raise nothing(skipped)
        return tuple(shards), tuple(stored)

    def report(self, reporter: InputReporter, run: RunReport, seconds: float) -> PackReport:
        """Build the report from the records."""
        files = samples = shards = size = 0
        skipped, notes, has_text = list(reporter.skipped), list[str](), False
        for packed in self.journal.records(len(self.units)):
            files += packed.files
            samples += len(packed.samples)
            shards += len(packed.shards)
            size += sum(shard.size for shard in packed.shards)
            skipped += packed.skipped
            notes += packed.notes
            has_text = has_text or any(sample.text is not None for sample in packed.samples)
        return PackReport(
            files=files,
            samples=samples,
            shards=shards,
            bytes=size,
            seconds=seconds,
            skipped=tuple(skipped),
            ignored=reporter.gathered.ignored,
            notes=(*notes, *no_text_notes(self._text_field, has_text)),
            resumed=run.resumed,
            workers=run.workers,
        )


class InputReporter:
    """Counts finished groups for `progress`. With `strict`, raises the error of the first input that was skipped."""

    def __init__(self, gathered: Gathered, strict: bool, progress: Callable[[Progress], None] | None) -> None:
        self.gathered, self.skipped, self._progress = gathered, gathered.skipped, progress
        self._groups = self._bytes = 0
        self._skips = len(gathered.skipped)
        self._total = sum(group.bytes for group in gathered.groups)
        if strict and gathered.skipped:
            raise skip_error(gathered.skipped[0])

    def step(self, done: Done) -> None:
        """Add finished groups, their bytes and the skipped groups to the counts."""
        self._groups += done.items
        self._bytes += done.bytes
        self._skips += done.skipped
        if self._progress is not None:
            total = len(self.gathered.groups)
            self._progress(Progress(self._groups, total, self._bytes, self._total, self._skips))


def check_new_keys(
    store: Store,
    base: versions.VersionDocument,
    keys: set[str],
    trust_mounts: bool,
    named_mounts: Sequence[versions.Mount] = (),
) -> None:
    """Raise `ConflictError` if version `base` has one of `keys`."""
    mounted, owned = with_mounts(store, base, False, {}, trust_mounts, named_mounts)
    try:
        *_, missing = views.rows_with_keys(OpenIndex(mounted, base), keys)
    finally:
        if owned and mounted is not store:
            mounted.close()
    existing = sorted(keys.difference(missing))
    if existing:
        more = f" and {len(existing) - 1} more of these keys" if len(existing) > 1 else ""
        raise ConflictError(
            f"{store.location.url} version {base.version} already has the sample {existing[0]!r}{more}",
            hint="remove those samples first, or give the new ones other keys",
        )
