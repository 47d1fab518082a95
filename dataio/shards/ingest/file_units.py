"""The units of an `index` run over files that stay where they are. A unit is one joined shard.

Purpose: `file_units` divides the groups of files into units. `file_task` describes the work for an engine
(`headrace.dataio.shards.units.engine`): read every file once, describe the samples, and store the list of the unit's
objects (`headrace.dataio.store.joined`).

Invariants:

* The plan depends only on the names, sizes and times of the files, the settings and the library versions.
* A unit has at most `UNIT_OBJECTS` files and `UNIT_BYTES` bytes, or one larger sample.
* Files that Headrace makes (the JSON of a manifest's row, a caption) lie in one object, the first of the list.
* An object that belongs to two samples is in the list twice, because the index requires that samples begin at different
  offsets. The samples of a unit are in the order of their first offsets.
* The rows describe the bytes that were read. A file whose size or time is then another is left out.

Failure behaviour: a group that cannot be described, or whose files changed, goes into the record's `skipped`. With
`strict`, its error is raised. A full scratch folder raises `CapacityError`, and skips no sample.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import blake3
import msgspec

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import CapacityError, TransientError
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.plan import PackedUnit, encode_group
from headrace.dataio.shards.ingest.probe_pool import ProbePool, scratch_folder_of
from headrace.dataio.shards.ingest.report import Skipped, skip_error
from headrace.dataio.shards.ingest.source_stores import FileStat, SourceStores, is_url
from headrace.dataio.shards.media.messages import Description, Failure, PrepareResult, Recipe
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner, check_shareable
from headrace.dataio.shards.units.journal import Done, Unit
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.joined import LIST_OBJECTS, JoinedObject, write_files, write_list
from headrace.dataio.store.open import open_location

FORMAT = 1
UNIT_OBJECTS = 256
UNIT_BYTES = 256 * limits.MIB
MAX_FILES = LIST_OBJECTS - 1
"""The most files of one sample. One object of a list is for the files that Headrace makes."""
TIME_TOLERANCE = 1.0
"""The seconds by which the times of a remote object may differ. A listing gives more digits than a request."""
_UNCHANGED = Recipe()
_log = get_logger(__name__)

_crash_after_list = crashpoints.declare("files.list-stored", "a list of objects is stored, and nothing refers to it")


class FileSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that apply to every unit.

    `text_field` is the field of the samples' JSON that holds their text. `first` is the number of the first joined
    shard.
    """

    strict: bool = False
    text_field: str | None = None
    first: int = 0


class FileUnit(Unit, frozen=True):
    """The groups of one unit. `keys` are the keys of each group's files in the dataset's store."""

    groups: tuple[Group, ...]
    keys: tuple[tuple[str, ...], ...]


def file_units(groups: Sequence[Group], keys: Mapping[str, str]) -> list[FileUnit]:
    """Divide the groups into units. `keys` maps the path of each file to its key in the dataset's store."""
    return [
        FileUnit(number, run, tuple(tuple(keys[path] for _, path in group.files) for group in run))
        for number, run in enumerate(_runs(groups))
    ]


def _runs(groups: Sequence[Group]) -> Iterator[tuple[Group, ...]]:
    run, files, size = list[Group](), 0, 0
    for group in groups:
        if run and (files + len(group.files) >= UNIT_OBJECTS or size + group.bytes > UNIT_BYTES):
            yield tuple(run)
            run, files, size = [], 0, 0
        run.append(group)
        files, size = files + len(group.files), size + group.bytes
    if run:
        yield tuple(run)


def plan_name(units: Sequence[FileUnit], settings: FileSettings, *, follow: bool) -> str:
    """Return the name of the plan. Equal plans have equal names."""
    versions = [version("headrace"), version("av")]
    hasher = blake3.blake3(msgspec.json.encode(["index-files", FORMAT, follow, settings, versions]))
    for unit in units:
        for group, keys in zip(unit.groups, unit.keys, strict=True):
            hasher.update(encode_group(group))
            hasher.update(msgspec.msgpack.encode(keys))
    return hasher.hexdigest()[:32]


def file_task(store: Store, settings: FileSettings, stores: SourceStores) -> Task[FileUnit, PackedUnit]:
    """Return the task that indexes units into `store`. `stores` are the stores of the files."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_FileRunner]:
        with ProbePool(workers, stores=stores, check=_ChangeCheck(stores)) as pool:
            yield _FileRunner(store, settings, pool)

    def remote() -> RemoteTask[FileUnit, PackedUnit]:
        check_shareable(store.location)
        stores.check_shareable()
        return RemoteTask(_open_remote, msgspec.msgpack.encode(_RemoteSettings(store.location, settings)))

    return Task("index", FileUnit, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    store: Location
    settings: FileSettings


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_FileRunner]:
    task_settings = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with (
        open_location(task_settings.store) as store,
        SourceStores() as stores,
        ProbePool(1, stores=stores, check=_ChangeCheck(stores)) as pool,
    ):
        yield _FileRunner(store, task_settings.settings, pool)


@dataclass(frozen=True, slots=True)
class _ChangeCheck:
    """Compares the files of a group, after they were read, with what they were when they were found."""

    stores: SourceStores

    def __call__(self, group: Group) -> Failure | None:
        for (_, path), size, time in zip(group.files, group.sizes, group.times, strict=True):
            now = self._stat(path)
            if now is None or is_changed(path, FileStat(size, time), now):
                return Failure(path, TransientError.code, "it changed while it was indexed; index it again later")
        return None

    def _stat(self, path: str) -> FileStat | None:
        if is_url(path):
            return self.stores.stat_many([path]).get(path)
        try:
            info = os.stat(path)
        except OSError:
            return None
        return FileStat(info.st_size, info.st_mtime_ns)


def is_changed(path: str, before: FileStat, now: FileStat) -> bool:
    """Return whether a file has another size or time than before."""
    tolerance = TIME_TOLERANCE * 1e9 if is_url(path) else 1e6
    return now.size != before.size or abs(now.modified_ns - before.modified_ns) > tolerance


class _FileRunner(UnitRunner[FileUnit, PackedUnit]):
    """Indexes units one after the other. Meanwhile, the workers of `pool` read the next groups."""

    def __init__(self, store: Store, settings: FileSettings, pool: ProbePool) -> None:
        self._store, self._settings, self._pool = store, settings, pool

    def run(self, units: Iterator[FileUnit], step: Step) -> Iterator[tuple[FileUnit, PackedUnit]]:
        """Index units in order. `step` is called after each group."""
        ahead, behind = itertools.tee(units)
        owners = ((unit, position) for unit in behind for position in range(len(unit.groups)))
        groups = (group for unit in ahead for group in unit.groups)
        writer: _ListWriter | None = None
        with scratch_folder("headrace-index-") as scratch:
            prepared = self._pool.prepare(groups, scratch=scratch, text_field=self._settings.text_field)
            for (unit, position), (group, outcome) in zip(owners, prepared, strict=True):
                if position == 0:
                    writer = _ListWriter(self._store, unit.number, self._settings)
                assert writer is not None
                samples = writer.add(group, unit.keys[position], outcome, scratch)
                step(Done(1, group.bytes, samples, not samples))
                if position == len(unit.groups) - 1:
                    yield unit, writer.finish()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A described group. `made` are the contents of the files that Headrace made for it, by extension."""

    group: Group
    keys: tuple[str, ...]
    described: Description
    made: Mapping[str, bytes]


class _ListWriter:
    """Collects the samples of one unit, and stores the list of their objects."""

    def __init__(self, store: Store, number: int, settings: FileSettings) -> None:
        self._store, self._number, self._settings = store, settings.first + number, settings
        self._pending, self._skipped = list[_Pending](), list[Skipped]()
        self._groups = self._bytes = 0

    def add(self, group: Group, keys: tuple[str, ...], outcome: PrepareResult, scratch: str) -> int:
        """Add the outcome of one group, and return the number of its samples."""
        self._groups += 1
        self._bytes += group.bytes
        folder = scratch_folder_of(group, _UNCHANGED, scratch)
        try:
            if isinstance(outcome, Failure):
                self._skip(outcome, scratch)
                return 0
            described = outcome.clips[0].described
            self._pending.append(_Pending(group, keys, described, _made_files(group, described)))
            return 1
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _skip(self, failure: Failure, scratch: str) -> None:
        if failure.scratch_full:
            raise CapacityError(
                f"the scratch folder {scratch} is full: {failure.reason}",
                hint="free space, or name another folder with TMPDIR; the same command continues from here",
            )
        item = Skipped(failure.path, failure.code, failure.reason)
        if self._settings.strict:
            raise skip_error(item)
        _log.info("skipped %s: %s", item.path, item.reason)
        self._skipped.append(item)

    def finish(self) -> PackedUnit:
        """Store the list, and return the result of the unit."""
        shards, samples = tuple[Shard, ...](), tuple[Sample, ...]()
        if self._pending:
            shards, samples = self._store_list()
        return PackedUnit(
            shards=shards,
            samples=samples,
            skipped=tuple(self._skipped),
            notes=tuple(f"{item.group.key}: {note}" for item in self._pending for note in item.described.notes),
            files=sum(len(item.group.files) for item in self._pending),
            groups=self._groups,
            bytes=self._bytes,
        )

    def _store_list(self) -> tuple[tuple[Shard, ...], tuple[Sample, ...]]:
        objects = list[JoinedObject]()
        if made := b"".join(data for item in self._pending for data in item.made.values()):
            objects.append(write_files(self._store, self._number, made))
        for item in self._pending:
            for key, size, time in zip(item.keys, item.group.sizes, item.group.times, strict=True):
                objects.append(JoinedObject(key=key, size=size, modified=time / 1e9))
        shard, size = write_list(self._store, self._number, objects)
        _crash_after_list()
        samples = sorted(self._samples(shard, len(made)), key=lambda sample: sample.members[0].offset)
        numbered = (msgspec.structs.replace(sample, id=number) for number, sample in enumerate(samples))
        return (Shard(key=shard, size=size, samples=len(samples)),), tuple(numbered)

    def _samples(self, shard: str, at: int) -> Iterator[Sample]:
        """Yield the samples. `at` is the offset of the first file that Headrace did not make."""
        made_at = 0
        for item in self._pending:
            described, offsets = item.described, dict[str, int]()
            for (ext, _), size in zip(item.group.files, item.group.sizes, strict=True):
                offsets[ext], at = at, at + size
            for ext, data in item.made.items():
                offsets[ext], made_at = made_at, made_at + len(data)
            members = [Member(f.ext, offsets[f.ext], f.size, f.xxh3, f.pieces) for f in described.files]
            yield Sample(
                id=0,
                key=item.group.key,
                shard=shard,
                members=tuple(sorted(members, key=lambda member: (member.offset, member.length))),
                duration=described.duration,
                video=described.video,
                audio=described.audio,
                text=described.text,
                fields=json.loads(described.fields),
                videos=described.videos,
            )


def _made_files(group: Group, described: Description) -> dict[str, bytes]:
    """Read the files that Headrace made for a group: the JSON of a manifest's row, and its caption."""
    own = {ext for ext, _ in group.files}
    made = dict[str, bytes]()
    for file in described.files:
        from_fields = file.ext == "json" and group.fields is not None
        if from_fields or (file.ext == "txt" and "txt" not in own):
            with open(file.path, "rb") as opened:
                made[file.ext] = opened.read()
    return made
