"""`index` makes a dataset over media files where they lie, and `follow` adds the files that are new.

Purpose: gather the files, make a plan, describe its units on this machine or on many, and publish a version. A unit
becomes one joined shard: a list of the objects that hold its files (`headrace.dataio.store.joined`). No file is copied
or rewritten. Files that Headrace makes itself (from the rows of manifests) are stored in the dataset.

Invariants:

* Every file is read once, from beginning to end, and remote files are copied to a scratch folder for that. Disk space
  is bounded by the files of the samples that are read at the same time. Memory is bounded, except for the names of all
  files.
* If the same call is made again after an interruption, it continues after the last finished unit. The result is byte
  for byte equal to that of an uninterrupted run. If the version exists already, the call only opens it.
* Nothing is visible before the version document, which is written last.
* `follow` takes the samples whose keys no version of the dataset had. It changes no stored object. Several followers
  can run at the same time, and each sample is added once.
* A sample that was removed is not added again while its shard is in the dataset. A row of a manifest is an exception if
  all samples of its index part were removed.

Failure behaviour: a file that cannot be used is skipped and reported, with its sample. With `strict`, it is an error. A
file that changes while it is read is skipped, and the next `follow` takes it. Files that changed after they were
indexed are reported, and their samples stay as they are. Equal keys raise `UsageError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import ConflictError, CorruptionError, UsageError
from headrace.dataio.shards.ingest.file_units import (
    FileSettings,
    FileUnit,
    file_task,
    file_units,
    is_changed,
    plan_name,
)
from headrace.dataio.shards.ingest.grouping import Group, Grouping
from headrace.dataio.shards.ingest.manifests import DEFAULT_COLUMNS, Columns
from headrace.dataio.shards.ingest.placement import Placement, place
from headrace.dataio.shards.ingest.plan import PackedUnit
from headrace.dataio.shards.ingest.plan_run import InputReporter, PlanRun, check_new_keys
from headrace.dataio.shards.ingest.report import PackReport, Progress, Skipped
from headrace.dataio.shards.ingest.source_stores import FileStat, SourceStores
from headrace.dataio.shards.ingest.sources import Gathered, gather
from headrace.dataio.shards.query import views
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.units.engine import RunReport, Task, find_engine
from headrace.dataio.shards.units.journal import StoredJournal
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import JOINED_MOUNT, mount_of, with_mounts
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import SHARD_PREFIX
from headrace.dataio.store.mounts import Mounts
from headrace.dataio.store.open import open_store

_crash_after_index = crashpoints.declare(
    "files.index-stored", "lists and index are stored; there is no new version yet"
)
_crash_after_version = crashpoints.declare("files.version-stored", "the version exists; the call has not returned")

OWN_FOLDERS = ("files", "index", "joined", "packing", "shards", "tags", "versions", "dataset.json")
"""The objects of a dataset. They are no sources, even if the files lie in the same folder."""
FOLLOW_TRIES = 16
"""The lost races against other followers after which a pass of `follow` fails."""
_LIST_READS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """The options of `index` that apply to files (`headrace.dataio.shards.ingest.index.index`)."""

    strict: bool = False
    columns: Columns = DEFAULT_COLUMNS
    group: Grouping = "stem"
    text_field: str | None = None
    engine: str = "local"
    progress: Callable[[Progress], None] | None = None
    workers: int | None = None
    source_options: Mapping[str, Any] | None = None
    trust_mounts: bool = False


@dataclasses.dataclass(frozen=True)
class FileMemory:
    """What calls of `follow` found, for later calls on the same dataset.

    `bad` holds the size and time of each file that cannot be used. It is not read again while it stays the same.
    `objects` holds those of each object in the lists of `shards`. These lists are not read again.
    """

    bad: dict[str, FileStat] = dataclasses.field(default_factory=dict)
    objects: dict[str, FileStat] = dataclasses.field(default_factory=dict)
    shards: set[str] = dataclasses.field(default_factory=set)

    def read_lists(self, store: Store, document: versions.VersionDocument) -> Mapping[str, FileStat]:
        """Return the size and the time of each object in the lists of a version, by key."""
        joined = store.joined if isinstance(store, Mounts) else None
        keys = [shard.key for shard in document.shards if shard.key.startswith(SHARD_PREFIX)]
        new = [key[len(SHARD_PREFIX) :] for key in keys if key not in self.shards]
        if joined is None or not new:
            return self.objects
        with ThreadPoolExecutor(_LIST_READS, "lists") as threads:
            for listed in threads.map(joined.objects, new):
                for one in listed.objects:
                    self.objects[one.key] = FileStat(one.size, round((one.modified or 0.0) * 1e9))
        self.shards.update(keys)
        return self.objects


@dataclasses.dataclass(frozen=True)
class Indexed:
    """The result of a run: its report, the version, and the stores to mount for it."""

    report: PackReport
    version: int
    mounted: Mapping[str, Store]


def beside_other_writers(store: Store, follow: Callable[[], Indexed]) -> Indexed:
    """Call `follow`, and call it again whenever another writer has made a version meanwhile."""
    for _ in range(FOLLOW_TRIES - 1):
        before = history.list_versions(store)
        try:
            return follow()
        except (ConflictError, CorruptionError):  # the other one may have deleted the journal, too
            if history.list_versions(store) == before:
                raise
    return follow()


class FileIndexer:
    """Makes versions over the files that `sources` match. It is a context manager.

    `memory` holds what earlier calls found. `follow` uses it and adds to it.
    """

    def __init__(
        self, sources: Sequence[str], store: Store, options: FileOptions, memory: FileMemory | None = None
    ) -> None:
        self._sources, self._store, self._options = sources, store, options
        self._engine, self._stores = find_engine(options.engine), SourceStores(options.source_options)
        self._memory = memory or FileMemory()

    def __enter__(self) -> FileIndexer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()

    def index(self, name: str | None) -> Indexed:
        """Make version 1."""
        started, store = time.monotonic(), self._store
        gathered = self._gather()
        placed, gathered = self._place(gathered, ())
        with _closing_on_error(placed):
            reporter = self._reporter(gathered)
            run = self._plan(placed, follow=False)
            if history.list_versions(store):
                published = run.published()
                if published is not None:
                    return self._finish(run, reporter, RunReport(0, ()), started, placed)
                history.refuse_existing(store, "add to it with `headrace index --follow`, or give an empty folder")
            if not gathered.groups:
                raise _nothing_to_index(gathered)
            name = name or history.name_of(store)
            history.claim(store, name)
            run.journal.begin(0)
            result = run.run(self._task(0), self._engine, self._options.workers, reporter)
            shards, parts = run.index(0, lambda skipped: _nothing_to_index(gathered, skipped))
            mounts = _mounts_of(placed)
            document = versions.new_document(
                name, shards, parts, version=1, parent=None, message="indexed in place", mounts=mounts
            )
            _crash_after_index()
            history.publish(store, document)
            _crash_after_version()
            return self._finish(run, reporter, result, started, placed)

    def follow(self, message: str = "") -> Indexed:
        """Add the new files as the next version. If there are none, return the newest version.

        If another writer makes a version meanwhile that has some of the samples, look again what is new.
        """
        return beside_other_writers(self._store, lambda: self._follow(message))

    def _follow(self, message: str) -> Indexed:
        started, store = time.monotonic(), self._store
        newest, _ = history.load(store)
        placed, gathered = self._place(self._gather(), newest.mounts)
        with _closing_on_error(placed):
            changed, placed = self._without_known(placed, newest)
            gathered = dataclasses.replace(gathered, groups=placed.groups)
            reporter = self._reporter(gathered)
            if not placed.groups:
                report = _empty_report(gathered, (), changed, time.monotonic() - started)
                return Indexed(report, newest.version, placed.mounted)
            run = self._plan(placed, follow=True)
            published = run.published()
            if published is not None:
                report = run.report(reporter, RunReport(0, ()), time.monotonic() - started)
                run.journal.delete()
                return Indexed(dataclasses.replace(report, changed=changed), published.version, placed.mounted)
            existing = history.list_versions(store)
            try:
                report, version = self._add(run, reporter, newest, message, _mounts_of(placed), started)
            except _NothingNewError as error:
                report, version = _empty_report(gathered, error.skipped, (), time.monotonic() - started), newest.version
            except (ConflictError, CorruptionError):
                if history.list_versions(store) != existing:
                    run.journal.delete()  # of another plan: this one has samples that now exist
                raise
            run.journal.delete()
            self._remember(report.skipped, placed)
            return Indexed(dataclasses.replace(report, changed=changed), version, placed.mounted)

    def _add(
        self,
        run: PlanRun[FileUnit],
        reporter: InputReporter,
        newest: versions.VersionDocument,
        message: str,
        mounts: Sequence[versions.Mount],
        started: float,
    ) -> tuple[PackReport, int]:
        """Index the new groups, and make the next version of them."""
        base, _ = history.load(self._store, run.journal.begin(newest.version))
        result = run.run(self._task(len(base.shards)), self._engine, self._options.workers, reporter)
        shards, parts = run.index(len(base.index), _NothingNewError)
        # made before the commit, since another follower of the same files may delete the journal after it
        report = run.report(reporter, result, time.monotonic() - started)
        _crash_after_index()
        document = self._commit(run, shards, parts, mounts, message)
        _crash_after_version()
        return report, document.version

    def _commit(
        self,
        run: PlanRun[FileUnit],
        shards: Sequence[versions.Shard],
        parts: Sequence[versions.IndexPart],
        mounts: Sequence[versions.Mount],
        message: str,
    ) -> versions.VersionDocument:
        def build(base: versions.VersionDocument) -> versions.VersionDocument:
            check_new_keys(self._store, base, run.keys, self._options.trust_mounts, mounts)
            every = {mount.name: mount for mount in (*base.mounts, *mounts)}
            return versions.new_document(
                base.name,
                versions.joined(base.shards, shards),
                versions.joined(base.index, parts),
                version=base.version + 1,
                parent=base.version,
                message=message or f"indexed {limits.counted(len(run.keys), 'new sample')}",
                mounts=tuple(every[name] for name in sorted(every)),
                lineage=versions.Lineage(operation="append"),
            )

        return history.commit(self._store, build)

    # the inputs

    def _gather(self) -> Gathered:
        url = self._store.location.url.rstrip("/")
        own = [f"{url}/{name}" for name in OWN_FOLDERS]
        return gather(self._sources, self._options.columns, self._stores, own, self._options.group, in_place=True)

    def _place(self, gathered: Gathered, mounts: Sequence[versions.Mount]) -> tuple[Placement, Gathered]:
        placed = place(gathered.groups, self._store, mounts, self._open)
        skipped = sorted((*gathered.skipped, *placed.skipped), key=lambda item: item.path)
        return placed, dataclasses.replace(gathered, groups=placed.groups, skipped=tuple(skipped))

    def _open(self, root: str) -> Store:
        return open_store(root, storage_options=self._options.source_options if "://" in root else {})

    def _reporter(self, gathered: Gathered) -> InputReporter:
        return InputReporter(gathered, self._options.strict, self._options.progress)

    def _plan(self, placed: Placement, *, follow: bool) -> PlanRun[FileUnit]:
        settings, units = self._settings(0), file_units(placed.groups, placed.keys)
        folder = f"packing/{plan_name(units, settings, follow=follow)}"
        journal = StoredJournal(self._store, folder, PackedUnit)
        return PlanRun(store=self._store, journal=journal, units=units, text_field=settings.text_field)

    def _settings(self, first: int) -> FileSettings:
        return FileSettings(strict=self._options.strict, text_field=self._options.text_field, first=first)

    def _task(self, first: int) -> Task[FileUnit, PackedUnit]:
        return file_task(self._store, self._settings(first), self._stores)

    # following

    def _without_known(
        self, placed: Placement, document: versions.VersionDocument
    ) -> tuple[tuple[str, ...], Placement]:
        """Return the files that changed after they were indexed, and the groups that are new."""
        base, named = self._store, _mounts_of(placed)
        store, owned = with_mounts(base, document, False, {}, self._options.trust_mounts, named)
        try:
            listed = self._memory.read_lists(store, document)
            keys = _keys_ever(store, document, {group.key for group in placed.groups})
        finally:
            if owned and store is not base:
                store.close()
        changed, new = list[str](), list[Group]()
        for group in placed.groups:
            known = [placed.keys[path] in listed for _, path in group.files]
            if group.key in keys or (all(known) and group.caption is None and group.fields is None):
                changed += _changes(group, placed.keys, listed)
            elif any(self._memory.bad.get(path) != stat for path, stat in _stats(group)):
                new.append(group)
        return tuple(changed), dataclasses.replace(placed, groups=tuple(new))

    def _remember(self, skipped: Sequence[Skipped], placed: Placement) -> None:
        """Remember the files of groups that cannot be used."""
        bad = {item.path for item in skipped}
        for group in placed.groups:
            if not bad.isdisjoint(path for _, path in group.files):
                self._memory.bad.update(_stats(group))

    def _finish(
        self, run: PlanRun[FileUnit], reporter: InputReporter, result: RunReport, started: float, placed: Placement
    ) -> Indexed:
        report = run.report(reporter, result, time.monotonic() - started)
        run.journal.delete()
        return Indexed(report, 1, placed.mounted)


class _NothingNewError(UsageError):
    """No new file can be used."""

    def __init__(self, skipped: Sequence[Skipped]) -> None:
        super().__init__("there is nothing new")
        self.skipped = skipped


@contextlib.contextmanager
def _closing_on_error(placed: Placement) -> Iterator[None]:
    try:
        yield
    except BaseException:
        placed.close()
        raise


def _empty_report(
    gathered: Gathered, skipped: Sequence[Skipped], changed: tuple[str, ...], seconds: float
) -> PackReport:
    return PackReport(
        files=0,
        samples=0,
        shards=0,
        bytes=0,
        seconds=seconds,
        skipped=(*gathered.skipped, *skipped),
        ignored=gathered.ignored,
        notes=(),
        changed=changed,
    )


def _mounts_of(placed: Placement) -> tuple[versions.Mount, ...]:
    mounts = [JOINED_MOUNT, *(mount_of(store.location) for store in placed.mounted.values())]
    return tuple(sorted(mounts, key=lambda mount: mount.name))


def _stats(group: Group) -> list[tuple[str, FileStat]]:
    rows = zip(group.files, group.sizes, group.times, strict=True)
    return [(path, FileStat(size, modified)) for (_, path), size, modified in rows]


def _keys_ever(store: Store, document: versions.VersionDocument, keys: set[str]) -> set[str]:
    """Return those of `keys` that a row of the version's index parts has, also if the sample was removed."""
    parts = tuple(msgspec.structs.replace(part, bitmap=None) for part in document.index)
    whole = msgspec.structs.replace(document, index=parts, samples=sum(part.rows for part in parts))
    *_, missing = views.rows_with_keys(OpenIndex(store, whole), keys)
    return keys - missing


def _changes(group: Group, keys: Mapping[str, str], listed: Mapping[str, FileStat]) -> list[str]:
    """Describe what changed in the files of a sample that the dataset has."""
    found = list[str]()
    for path, stat in _stats(group):
        before = listed.get(keys[path])
        if before is None:
            found.append(f"{path}: a new file of the sample {group.key!r}, which the dataset has already")
        elif is_changed(path, before, stat):
            found.append(f"{path}: it changed after it was indexed as a file of the sample {group.key!r}")
    return found


def _nothing_to_index(gathered: Gathered, skipped: Sequence[Skipped] = ()) -> UsageError:
    skipped = skipped or gathered.skipped
    why, hint = "no media files were found", "give media files, or folders of them, or tars"
    if gathered.ignored:
        why = f"none of {limits.counted(len(gathered.ignored), 'file')} is media (such as {gathered.ignored[0]})"
        if gathered.ignored[0].endswith(".parquet"):
            hint = "name manifests, or match them with a quoted glob; `headrace pack` takes tables with embedded media"
    if skipped:
        all_of_them = f"all {len(skipped)} candidates were skipped; " if len(skipped) > 1 else ""
        why = f"{all_of_them}{skipped[0].path}: {skipped[0].reason}"
    return UsageError(f"there is nothing to index: {why}", hint=hint)


__all__ = ["FileIndexer", "FileOptions", "Indexed"]
