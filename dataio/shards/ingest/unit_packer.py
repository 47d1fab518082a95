"""Packs units of a plan: prepares their groups, stores their shards and records them.

Purpose: `pack_units` packs units in this process, whose worker processes read the media. An engine (`find_engine`) runs
it for all units of a plan, either on this machine or on a Ray cluster.

Invariants:

* A shard is named by its unit and a digest of its contents. The packer closes it before the sample that would exceed
  the size limit.
* The packer does not send a shard that is already stored under its name.
* The index rows describe the bytes that were stored. If a file changes after it was described and before it is stored,
  the packer raises `TransientError`.
* An engine packs and records every unit that it is given, in any order. The dataset does not depend on the engine.

Failure behaviour: a group that cannot be prepared goes into the unit's `skipped`. With `strict`, its error is raised. A
full scratch folder raises `CapacityError`, and skips no sample. The records of finished units remain after an error. An
unknown engine raises `UsageError`. An engine that is not installed raises `UnsupportedError`.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import blake3
import msgspec
import xxhash

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import (
    CapacityError,
    NotFoundError,
    TransientError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards import tar
from headrace.dataio.shards.ingest.plan import Journal, PackedUnit, Settings, Step, Unit
from headrace.dataio.shards.ingest.probe_pool import ProbePool, scratch_folder_of
from headrace.dataio.shards.ingest.report import Skipped, WorkerReport, skip_error
from headrace.dataio.shards.ingest.source_stores import SourceStores
from headrace.dataio.shards.ingest.sources import Group
from headrace.dataio.shards.media.messages import Clip, Failure, FileInfo, PrepareResult
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store

_READ_BYTES = 1 * limits.MIB
_log = get_logger(__name__)

_crash_after_shard = crashpoints.declare("pack.shard-stored", "shards are stored, and nothing refers to them")
_crash_after_unit = crashpoints.declare(
    "pack.unit-sealed", "a unit's shards are stored and recorded; there is no version yet"
)


def pack_units(
    store: Store,
    journal: Journal,
    units: Sequence[Unit],
    settings: Settings,
    pool: ProbePool,
    scratch: str,
    step: Callable[[int, int, int], None],
) -> Iterator[tuple[Unit, PackedUnit]]:
    """Pack and record units one after the other. Meanwhile, the workers prepare the next groups.

    `scratch` is a folder for temporary files. `step` is called after each group with 1, the group's bytes, and whether
    it was skipped.
    """
    owners = ((unit, position) for unit in units for position in range(len(unit.groups)))
    groups = (group for unit in units for group in unit.groups)
    writer: _ShardWriter | None = None
    for (unit, position), (group, outcome) in zip(owners, pool.prepare(groups, settings.recipe, scratch), strict=True):
        if position == 0:
            writer = _ShardWriter(store=store, number=unit.number, settings=settings, scratch=scratch)
        assert writer is not None
        writer.add(group, outcome)
        step(1, group.bytes, isinstance(outcome, Failure))
        if position == len(unit.groups) - 1:
            packed = writer.finish()
            journal.write(unit.number, packed)
            _crash_after_unit()
            yield unit, packed


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

    def add(self, group: Group, outcome: PrepareResult) -> None:
        """Add the outcome of one group. Its samples may be stored by a later call."""
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
            return
        for clip in outcome.clips:
            self._add(f"{group.key}{clip.suffix}", clip)
        if folder:
            self._folders.append(folder)
        self._files += len(group.files)

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
            while chunk := file.read(_READ_BYTES):
                hasher.update(chunk)
                yield chunk
    except OSError as error:
        raise _changed(file_info, f"cannot be read any more: {error.strerror or error}") from error
    if hasher.intdigest() != file_info.xxh3:
        raise _changed(file_info, "changed while it was being packed")


def _changed(file_info: FileInfo, what: str) -> TransientError:
    return TransientError(f"{file_info.path} {what}", hint="pack again when nothing writes to the input")


# --- engines

Engine = Callable[
    [Store, Journal, Sequence[Unit], Settings, int | None, str, Step, SourceStores], Sequence[WorkerReport]
]


def run_local(
    store: Store,
    journal: Journal,
    units: Sequence[Unit],
    settings: Settings,
    workers: int | None,
    scratch: str,
    step: Step,
    stores: SourceStores,
) -> Sequence[WorkerReport]:
    """Pack on this machine. `workers` processes read the media, by default one per core."""
    started = time.monotonic()
    with ProbePool(workers, stores=stores) as pool:
        for _ in pack_units(store, journal, units, settings, pool, scratch, step):
            pass
    groups = [group for unit in units for group in unit.groups]
    size = sum(group.bytes for group in groups)
    return (WorkerReport(socket.gethostname(), len(groups), size, time.monotonic() - started),)


def find_engine(name: str) -> Engine:
    """Return the engine with this name, "local" or "ray"."""
    if name == "local":
        return run_local
    if name == "ray":
        try:
            from headrace.dataio.shards.ingest import ray_engine
        except ImportError as error:
            raise UnsupportedError(
                f"the engine ray cannot be used: {error}", hint="pip install 'headrace[ray]'"
            ) from error
        engine: Engine = ray_engine.run
        return engine
    raise UsageError(f"there is no engine {name!r}", hint="the engines are local and ray")
