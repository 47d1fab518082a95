"""Runs the units of a LeRobot data set, on this machine or on many.

Invariants: a unit reads its files, stores the objects of its joined shard, and returns its samples as its record. Units
run in order in each process, so that a video that two units share is read once there. A unit that runs twice stores
equal objects.

Failure behaviour: that of `headrace.dataio.shards.ingest.lerobot_samples`. A store with secrets in its options raises
`UnsupportedError` with an engine for other machines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from headrace.dataio.core import crashpoints
from headrace.dataio.shards.ingest.lerobot_plan import LeRobotUnit
from headrace.dataio.shards.ingest.lerobot_samples import EpisodeIndexer, EpisodeSettings
from headrace.dataio.shards.ingest.plan import PackedUnit
from headrace.dataio.shards.ingest.probe_pool import ProbePool
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner, check_shareable
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_location

_crash_after_list = crashpoints.declare("lerobot.listed", "the list of a joined shard is stored, without a record")


def lerobot_task(source: Store, target: Store, settings: EpisodeSettings) -> Task[LeRobotUnit, PackedUnit]:
    """Return the task that indexes units of the data set in `source`, and stores their shards in `target`."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_Runner]:
        with ProbePool(workers) as pool, EpisodeIndexer(source, target, settings, pool) as indexer:
            yield _Runner(indexer)

    def remote() -> RemoteTask[LeRobotUnit, PackedUnit]:
        check_shareable(source.location, target.location)
        remote_settings = _RemoteSettings(source.location, target.location, settings)
        return RemoteTask(_open_remote, msgspec.msgpack.encode(remote_settings))

    return Task("index", LeRobotUnit, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    source: Location
    target: Location
    settings: EpisodeSettings


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_Runner]:
    given = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with (
        open_location(given.source) as source,
        open_location(given.target) as target,
        ProbePool(1) as pool,
        EpisodeIndexer(source, target, given.settings, pool) as indexer,
    ):
        yield _Runner(indexer)


class _Runner(UnitRunner[LeRobotUnit, PackedUnit]):
    """Indexes units one after the other."""

    def __init__(self, indexer: EpisodeIndexer) -> None:
        self._indexer = indexer

    def run(self, units: Iterator[LeRobotUnit], step: Step) -> Iterator[tuple[LeRobotUnit, PackedUnit]]:
        """Index units in order. `step` is called after each."""
        for unit in units:
            found = self._indexer.index(unit)
            _crash_after_list()
            samples = tuple(found.samples)
            shards = (Shard(key=found.shard, size=found.size, samples=len(samples)),) if samples else ()
            record = PackedUnit(
                shards=shards,
                samples=samples,
                skipped=tuple(found.skipped),
                notes=tuple(found.notes),
                files=len(unit.videos) + len(unit.data) if samples else 0,
                groups=unit.count,
                bytes=unit.size,
            )
            step(record.done)
            yield unit, record
