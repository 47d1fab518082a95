"""The units of an `index` run. A unit is a run of adjacent shards that one process reads and describes.

Purpose: `index_plan` divides the shards into units. `index_task` describes the work for an engine
(`headrace.dataio.shards.units.engine`).

Invariants:

* The plan depends only on the names, sizes and times of the shards, the settings and the library versions.
* A unit has at most `UNIT_SHARDS` shards and `UNIT_BYTES` bytes, or one larger shard. Both limits grow in
  datasets with very many shards (`headrace.dataio.shards.units.journal.divide`).
* A unit stores nothing but its record, which holds the rows of its samples. Memory grows only with these rows.
* The record describes the bytes that were read. If a shard's size or modification time changes meanwhile, the unit
  raises `TransientError`.

Failure behaviour: a shard that is damaged, compressed or missing goes into the record's `skipped`. With `strict`, it
raises its error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version

import blake3
import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, TransientError, UnsupportedError
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.ingest.report import Skipped
from headrace.dataio.shards.ingest.tar_scanner import SourceShard, TarScanner
from headrace.dataio.shards.sample import Sample
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner, check_shareable
from headrace.dataio.shards.units.journal import Done, Record, StoredJournal, Unit, divide
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_location

FORMAT = 1
UNIT_BYTES = 32 * limits.MIB
UNIT_SHARDS = 16
_SHARD_FAULTS = (CorruptionError, UnsupportedError, NotFoundError)
_log = get_logger(__name__)


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that apply to every unit. `text_field` is the field of the samples' JSON that holds their text."""

    strict: bool
    prefix_keys: bool
    text_field: str | None = None


class _ShardToIndex(msgspec.Struct, frozen=True):
    """A tar: its key in the dataset, the URL of its store, its key there, and its size and time when it was found."""

    key: str
    root: str
    store_key: str
    size: int
    modified: float


class IndexUnit(Unit, frozen=True):
    """The shards of one unit, and its number in the plan."""

    shards: tuple[_ShardToIndex, ...]


class IndexedUnit(Record, frozen=True, kw_only=True):
    """The result of indexing one unit.

    `shards` are those with samples, and `samples` their rows, in order. `members` counts the members of the samples.
    `inputs` and `bytes` count all shards of the unit.
    """

    shards: tuple[Shard, ...]
    samples: tuple[Sample, ...]
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    members: int
    inputs: int
    bytes: int

    @property
    def done(self) -> Done:
        """The work of the unit."""
        return Done(self.inputs, self.bytes, len(self.samples), len(self.skipped))


class IndexPlan(msgspec.Struct, frozen=True):
    """The units of an `index` run, and the name of the plan. Equal plans have equal names."""

    name: str
    units: tuple[IndexUnit, ...]

    def journal(self, store: Store) -> StoredJournal[IndexedUnit]:
        """Return the journal of this plan in the dataset's own store."""
        return StoredJournal(store, f"packing/{self.name}", IndexedUnit)


def index_plan(shards: Sequence[SourceShard], settings: IndexSettings) -> IndexPlan:
    """Divide the shards into units."""
    inputs = [_ShardToIndex(s.key, s.store.location.url, s.store_key, s.size, s.modified) for s in shards]
    hasher = blake3.blake3(msgspec.json.encode(["index", FORMAT, settings, version("headrace"), version("av")]))
    for entry in inputs:
        hasher.update(msgspec.msgpack.encode(entry))
    runs = divide([s.size for s in shards], unit_bytes=UNIT_BYTES, unit_items=UNIT_SHARDS)
    units = (IndexUnit(number, tuple(inputs[i] for i in run)) for number, run in enumerate(runs))
    return IndexPlan(hasher.hexdigest()[:32], tuple(units))


def index_task(sources: Sequence[Store], settings: IndexSettings) -> Task[IndexUnit, IndexedUnit]:
    """Return the task that indexes units whose shards are in the stores `sources`."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_IndexRunner]:
        with ProbePool(workers) as pool:
            yield _IndexRunner({store.location.url: store for store in sources}, settings, pool)

    def remote() -> RemoteTask[IndexUnit, IndexedUnit]:
        locations = tuple(store.location for store in sources)
        check_shareable(*locations)
        return RemoteTask(_open_remote, msgspec.msgpack.encode(_RemoteSettings(locations, settings)))

    return Task("index", IndexUnit, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    sources: tuple[Location, ...]
    settings: IndexSettings


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_IndexRunner]:
    task_settings = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with contextlib.ExitStack() as stack:
        sources = {at.url: stack.enter_context(open_location(at)) for at in task_settings.sources}
        pool = stack.enter_context(ProbePool(1))
        yield _IndexRunner(sources, task_settings.settings, pool)


class _IndexRunner(UnitRunner[IndexUnit, IndexedUnit]):
    """Reads the shards of units one after the other. The workers of `pool` describe the samples."""

    def __init__(self, sources: Mapping[str, Store], settings: IndexSettings, pool: ProbePool) -> None:
        self._sources, self._settings, self._pool = sources, settings, pool

    def run(self, units: Iterator[IndexUnit], step: Step) -> Iterator[tuple[IndexUnit, IndexedUnit]]:
        """Index units in order."""
        for unit in units:
            yield unit, self._index(unit, step)

    def _index(self, unit: IndexUnit, step: Step) -> IndexedUnit:
        shards, samples = list[Shard](), list[Sample]()
        skipped, notes, members = list[Skipped](), list[str](), 0
        settings = self._settings
        for entry in unit.shards:
            shard = SourceShard(entry.key, self._sources[entry.root], entry.store_key, entry.size, entry.modified)
            scanner = TarScanner(
                shard,
                strict=settings.strict,
                prefix_keys=settings.prefix_keys,
                step=step,
                text_field=settings.text_field,
            )
            try:
                shard_samples = self._scan(shard, scanner)
            except _SHARD_FAULTS as error:
                if settings.strict:
                    raise
                _log.info("skipped %s: %s", shard.url, error)
                skipped.append(Skipped(shard.url, error.code, str(error)))  # the shard, not its samples
                step(Done(1, entry.size - scanner.bytes, 0, 1))
                continue
            if shard_samples:
                shards.append(Shard(key=entry.key, size=entry.size, samples=len(shard_samples)))
            samples += shard_samples
            skipped += scanner.skipped
            notes += scanner.notes
            members += scanner.members
            step(Done(1, entry.size - scanner.bytes, len(shard_samples), len(scanner.skipped)))
        return IndexedUnit(
            shards=tuple(shards),
            samples=tuple(samples),
            skipped=tuple(skipped),
            notes=tuple(notes),
            members=members,
            inputs=len(unit.shards),
            bytes=sum(entry.size for entry in unit.shards),
        )

    def _scan(self, shard: SourceShard, scanner: TarScanner) -> list[Sample]:
        samples = scanner.scan(self._pool)
        current = shard.store.stat(shard.store_key)
        if (current.size, current.modified) != (shard.size, shard.modified):
            raise TransientError(
                f"{shard.url} changed while it was indexed", hint="index again when no other process writes to it"
            )
        return samples
