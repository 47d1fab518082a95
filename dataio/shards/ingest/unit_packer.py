"""Packs units of a plan: prepares their groups and stores their shards.

Purpose: `pack_task` describes the packing of units for an engine (`headrace.dataio.shards.units.engine`). Worker
processes read the media.

Invariants:

* A shard is named by its unit and a digest of its contents. The packer closes it before the sample that would exceed
  the size limit.
* The packer does not send a shard that is already stored under its name.
* The index rows describe the bytes that were stored. If a file changes after it was described and before it is stored,
  the packer raises `TransientError`.
* Memory is bounded by the rows of the unit that is being packed, and by the groups that the workers prepare.

Failure behaviour: a group that cannot be prepared goes into the unit's `skipped`. With `strict`, its error is raised. A
full scratch folder raises `CapacityError`, and skips no sample.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import blake3
import msgspec
import xxhash

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import (
    CapacityError,
    NotFoundError,
    TransientError,
)
from headrace.dataio.core.files import scratch_folder
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.grouping import Group
from headrace.dataio.shards.ingest.plan import PackedUnit, PackUnit, Settings
from headrace.dataio.shards.ingest.probe_pool import ProbePool, scratch_folder_of
from headrace.dataio.shards.ingest.report import Skipped, skip_error
from headrace.dataio.shards.ingest.source_stores import SourceStores
from headrace.dataio.shards.media.messages import Clip, Failure, FileInfo, PrepareResult
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.shards.units.engine import RemoteTask, Step, Task, UnitRunner, check_shareable
from headrace.dataio.shards.units.journal import Done
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Location, Store
from headrace.dataio.store.open import open_location

_READ_BYTES = 1 * limits.MIB
_log = get_logger(__name__)

_crash_after_shard = crashpoints.declare("pack.shard-stored", "shards are stored, and nothing refers to them")


def pack_task(store: Store, settings: Settings, stores: SourceStores) -> Task[PackUnit, PackedUnit]:
    """Return the task that packs units into `store`. `stores` are the stores of the inputs."""

    @contextlib.contextmanager
    def opener(workers: int | None) -> Iterator[_PackRunner]:
        with ProbePool(workers, stores=stores) as pool:
            yield _PackRunner(store, settings, pool)

    def remote() -> RemoteTask[PackUnit, PackedUnit]:
        check_shareable(store.location)
        stores.check_shareable()
        return RemoteTask(_open_remote, msgspec.msgpack.encode(_RemoteSettings(store.location, settings)))

    return Task("pack", PackUnit, opener, remote)


class _RemoteSettings(msgspec.Struct, frozen=True):
    store: Location
    settings: Settings


@contextlib.contextmanager
def _open_remote(settings: bytes) -> Iterator[_PackRunner]:
    task_settings = msgspec.msgpack.decode(settings, type=_RemoteSettings)
    with open_location(task_settings.store) as store, SourceStores() as stores, ProbePool(1, stores=stores) as pool:
        yield _PackRunner(store, task_settings.settings, pool)


class _PackRunner(UnitRunner[PackUnit, PackedUnit]):
    """Packs units one after the other. Meanwhile, the workers of `pool` prepare the next groups."""

    def __init__(self, store: Store, settings: Settings, pool: ProbePool) -> None:
        self._store, self._settings, self._pool = store, settings, pool

    def run(self, units: Iterator[PackUnit], step: Step) -> Iterator[tuple[PackUnit, PackedUnit]]:
        """Pack units in order. `step` is called after each group."""
        ahead, behind = itertools.tee(units)
        owners = ((unit, position) for unit in behind for position in range(len(unit.groups)))
        groups = (group for unit in ahead for group in unit.groups)
        writer: _ShardWriter | None = None
        with scratch_folder("headrace-pack-") as scratch:
            prepared = self._pool.prepare(groups, self._settings.recipe, scratch, self._settings.text_field)
            for (unit, position), (group, outcome) in zip(owners, prepared, strict=True):
                if position == 0:
                    writer = _ShardWriter(
                        store=self._store, number=unit.number, settings=self._settings, scratch=scratch
                    )
                assert writer is not None
                samples = writer.add(group, outcome)
                step(Done(1, group.bytes, samples, isinstance(outcome, Failure)))
                if position == len(unit.groups) - 1:
                    yield unit, writer.finish()


@dataclass(frozen=True, slots=True)
class _Pending:
    """A sample that waits until its shard is full."""

    key: str
    clip: Clip

    @property
    def files(self) -> tuple[FileInfo, ...]:
        return self.clip.described.files


class _ShardWriter:
    """Collects the samples of one unit into shards, and stores each shard when it is full."""

    def __init__(self, *, store: Store, number: int, settings: Settings, scratch: str) -> None:
        self._store, self._number, self._settings, self._scratch = store, number, settings, scratch
        self._pending: list[_Pending] = []
        self._pending_bytes = len(tar.END)
        self._folders: list[str] = []
        self._shards: list[Shard] = []
        self._samples: list[Sample] = []
        self._skipped: list[Skipped] = []
        self._notes: list[str] = []
        self._files = self._groups = self._bytes = 0

    def add(self, group: Group, outcome: PrepareResult) -> int:
        """Add the outcome of one group, and return the number of its samples, which a later call may store."""
        self._groups += 1
        self._bytes += group.bytes
        folder = scratch_folder_of(group, self._settings.recipe, self._scratch)
        if isinstance(outcome, Failure):
            shutil.rmtree(folder, ignore_errors=True)
            if outcome.scratch_full:
                raise CapacityError(
                    f"the scratch folder {self._scratch} is full: {outcome.reason}",
                    hint="free space, or name another folder with TMPDIR; the same command continues from here",
                )
            self._skip(Skipped(outcome.path, outcome.code, outcome.reason))
            return 0
        for clip in outcome.clips:
            self._add(f"{group.key}{clip.suffix}", clip)
        if folder:
            self._folders.append(folder)
        self._files += len(group.files)
        return len(outcome.clips)

    def _skip(self, item: Skipped) -> None:
        if self._settings.strict:
            raise skip_error(item)
        _log.info("skipped %s: %s", item.path, item.reason)
        self._skipped.append(item)

    def _add(self, key: str, clip: Clip) -> None:
        size = sum(tar.member_bytes(f"{key}.{file.ext}", file.size) for file in clip.described.files)
        if self._pending and self._pending_bytes + size > self._settings.shard_bytes:
            self._store_shard()
        self._pending.append(_Pending(key, clip))
        self._pending_bytes += size
        self._notes += [f"{key}: {note}" for note in clip.described.notes]

    def finish(self) -> PackedUnit:
        """Store the last shard, and return the result of the unit."""
        if self._pending:
            self._store_shard()
        self._drop_folders()
        return PackedUnit(
            shards=tuple(self._shards),
            samples=tuple(self._samples),
            skipped=tuple(self._skipped),
            notes=tuple(self._notes),
            files=self._files,
            groups=self._groups,
            bytes=self._bytes,
        )

    def _store_shard(self) -> None:
        members = [(f"{item.key}.{file.ext}", file) for item in self._pending for file in item.files]
        layouts, size = tar.layout((name, file.size) for name, file in members)
        content = msgspec.msgpack.encode([(name, file.size, file.xxh3) for name, file in members])
        if self._settings.salt:
            content += f"version {self._settings.salt}".encode()
        key = f"shards/{self._number:08}-{blake3.blake3(content).hexdigest()[:16]}.tar"
        if not _is_stored(self._store, key, size):
            self._store.put_multipart(key, tar.stream(layouts, (_read_unchanged(file) for _, file in members)))
        _crash_after_shard()
        self._shards.append(Shard(key=key, size=size, samples=len(self._pending)))
        self._add_rows(key, iter(layouts))
        self._pending, self._pending_bytes = [], len(tar.END)
        self._drop_folders()

    def _drop_folders(self) -> None:
        """Delete the temporary files of groups that are stored.

        The group that is being added keeps its files, since some of its clips may not be stored yet.
        """
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = []

    def _add_rows(self, shard: str, layouts: Iterator[tar.MemberLayout]) -> None:
        for item in self._pending:
            described = item.clip.described
            sample = Sample(
                id=len(self._samples),
                key=item.key,
                shard=shard,
                members=tuple(
                    Member(file.ext, next(layouts).offset, file.size, file.xxh3, file.pieces) for file in item.files
                ),
                duration=described.duration,
                video=described.video,
                audio=described.audio,
                text=described.text,
                fields=json.loads(described.fields),
                videos=described.videos,
            )
            self._samples.append(sample)


def _is_stored(store: Store, key: str, size: int) -> bool:
    try:
        return store.stat(key).size == size
    except NotFoundError:
        return False


def _read_unchanged(file_info: FileInfo) -> Iterator[bytes]:
    hasher = xxhash.xxh3_64()
    try:
        with open(file_info.path, "rb", buffering=0) as file:
            chunk_bytes = min(_READ_BYTES, file_info.size + 1)
            while chunk := file.read(chunk_bytes):
                hasher.update(chunk)
                yield chunk
    except OSError as error:
        raise _changed(file_info, f"cannot be read any more: {error.strerror or error}") from error
    if hasher.intdigest() != file_info.xxh3:
        raise _changed(file_info, "changed while it was being packed")


def _changed(file_info: FileInfo, problem: str) -> TransientError:
    return TransientError(f"{file_info.path} {problem}", hint="pack again when nothing writes to the input")
