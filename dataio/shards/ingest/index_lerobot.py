"""Makes a dataset over a LeRobot data set, whose videos stay where they are.

Purpose: each episode becomes one sample (`headrace.dataio.shards.ingest.lerobot_samples`). Its rows are written to the
dataset, and its videos are windows of the long files of the data set.

Invariants:

* A run that is repeated continues after the last recorded unit, and its result is equal, byte for byte, to that of an
  uninterrupted run.
* Nothing is visible before the version document, which is written last.
* `follow` reads only episodes that no earlier version has. A session of LeRobot writes its episodes to new files, so
  the files of older episodes stay as they are.

Failure behaviour: an episode that cannot be used is skipped, and the report names the reason. Metadata that break a
rule raise `CorruptionError`, and nothing is indexed. An existing dataset raises `ConflictError`, unless it is followed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from headrace.dataio.core import crashpoints, limits
from headrace.dataio.core.errors import ConflictError, CorruptionError, UsageError
from headrace.dataio.shards.ingest.file_units import is_changed
from headrace.dataio.shards.ingest.index_files import FileMemory, FileOptions, Indexed, beside_other_writers
from headrace.dataio.shards.ingest.lerobot import INFO, is_lerobot, read_info
from headrace.dataio.shards.ingest.lerobot_episodes import Episode, read_episodes
from headrace.dataio.shards.ingest.lerobot_plan import LeRobotPlan, LeRobotUnit, lerobot_plan, stat_of
from headrace.dataio.shards.ingest.lerobot_samples import EpisodeSettings, key_of
from headrace.dataio.shards.ingest.lerobot_units import lerobot_task
from headrace.dataio.shards.ingest.linked_folder import open_source
from headrace.dataio.shards.ingest.manifests import EXTENSIONS
from headrace.dataio.shards.ingest.patterns import prefix_in
from headrace.dataio.shards.ingest.plan import journal_of
from headrace.dataio.shards.ingest.plan_run import InputReporter, PlanRun, check_new_keys
from headrace.dataio.shards.ingest.report import PackReport, Progress, Skipped
from headrace.dataio.shards.ingest.source_stores import FileStat, is_url
from headrace.dataio.shards.ingest.sources import Gathered
from headrace.dataio.shards.media.container import KNOWN_EXTENSIONS
from headrace.dataio.shards.media.messages import TEXT_FIELD
from headrace.dataio.shards.query import views
from headrace.dataio.shards.query.open_index import OpenIndex
from headrace.dataio.shards.units.engine import RunReport, find_engine
from headrace.dataio.shards.units.journal import Done
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history
from headrace.dataio.shards.versions.mounting import JOINED_MOUNT, mount_of, with_mounts
from headrace.dataio.store.base import Store, path_of_url
from headrace.dataio.store.mounts import PREFIX

__all__ = ["LeRobotIndexer", "is_lerobot_source"]

_crash_after_index = crashpoints.declare("lerobot.stored", "shards and index are stored; there is no version yet")
_crash_after_version = crashpoints.declare("lerobot.version-stored", "the version exists; the call has not returned")
_FILES = KNOWN_EXTENSIONS | EXTENSIONS | {"tar"}
"""A URL with one of these extensions is that of a file."""
_LOOKUPS = 4096


def is_lerobot_source(sources: Sequence[str], source_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether `sources` is one folder that has a LeRobot data set. A pattern, or the name of a file, is not."""
    if len(sources) != 1:
        return False
    (source,) = sources
    if is_url(source):
        last = source.rpartition("/")[2]
        if set("*?[]{}") & set(source) or "::" in source or last.rpartition(".")[2].lower() in _FILES:
            return False
    elif not os.path.isfile(os.path.join(_local(source), *INFO.split("/"))):
        return False
    source_files = open_source(source, source_options)
    with source_files.store:
        return is_lerobot(source_files.named)


class LeRobotIndexer:
    """Makes versions over the LeRobot data set at `source`. It is a context manager.

    It closes the store of the data set, unless a result takes it over (`Indexed.mounted`). `bad` has the episodes that
    earlier calls could not use (`lerobot_plan`), and `lists` the objects of the shards that they read. `follow` uses
    both and adds to them.
    """

    def __init__(
        self,
        source: str,
        store: Store,
        options: FileOptions,
        bad: dict[int, FileStat] | None = None,
        lists: FileMemory | None = None,
    ) -> None:
        self._store, self._options, self._engine = store, options, find_engine(options.engine)
        self._bad, self._lists = {} if bad is None else bad, lists or FileMemory()
        self._files = open_source(source, options.source_options)
        self._source = self._files.store
        try:
            self._info = read_info(self._files.named)
        except BaseException:
            self._source.close()
            raise
        prefix = prefix_in(self._source.location, store.location)
        mount = mount_of(self._source.location)
        self._mount = mount if prefix is None else None
        self._prefix = f"{PREFIX}{mount.name}/" if prefix is None else prefix
        self._given_away = False

    def __enter__(self) -> LeRobotIndexer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._given_away:
            self._source.close()

    def index(self, name: str | None) -> Indexed:
        """Make version 1."""
        started, store = time.monotonic(), self._store
        plan = self._plan(read_episodes(self._files.named, self._info), follow=False)
        run, reporter = self._run(plan), _EpisodeReporter(plan, self._options.strict, self._options.progress)
        if history.list_versions(store):
            published = run.published()
            if published is not None:
                return self._finish(run, reporter, RunReport(len(plan.units), ()), published.version, started)
            history.refuse_existing(store, "add to it with `headrace index --follow`, or give an empty folder")
        if not plan.units:
            raise _nothing(plan.missing)
        name = name or history.name_of(store)
        history.claim(store, name)
        run.journal.begin(0)
        result = self._run_units(run, reporter, 0)
        shards, parts = run.index(0, lambda skipped: _nothing((*plan.missing, *skipped)))
        document = versions.new_document(
            name, shards, parts, version=1, parent=None, message="indexed in place", mounts=self._mounts()
        )
        _crash_after_index()
        history.publish(store, document)
        _crash_after_version()
        indexed = self._finish(run, reporter, result, 1, started)
        self._remember(plan, indexed.report.skipped)
        return indexed

    def follow(self, message: str = "") -> Indexed:
        """Add the new episodes as the next version. If there are none, return the newest version.

        If another writer makes a version meanwhile that has some of the episodes, look again what is new.
        """
        return beside_other_writers(self._store, lambda: self._follow(message))

    def _follow(self, message: str) -> Indexed:
        started, store = time.monotonic(), self._store
        newest, _ = history.load(store)
        changed = self._changed(newest)
        plan = self._plan(self._new_episodes(newest), follow=True)
        run, reporter = self._run(plan), _EpisodeReporter(plan, self._options.strict, self._options.progress)
        if not plan.units:
            return self._indexed(_no_report(plan.missing, started, changed), newest.version)
        published = run.published()
        if published is not None:
            return self._finish(run, reporter, RunReport(len(plan.units), ()), published.version, started, changed)
        existing = history.list_versions(store)
        try:
            report, version = self._add(run, reporter, newest, message, started)
        except _NothingNewError as error:
            report, version = _no_report((*plan.missing, *error.skipped), started), newest.version
        except (ConflictError, CorruptionError):
            if history.list_versions(store) != existing:
                run.journal.delete()  # of another plan: this one has episodes that now exist
            raise
        run.journal.delete()
        self._remember(plan, report.skipped)
        return self._indexed(dataclasses.replace(report, changed=changed), version)

    def _changed(self, document: versions.VersionDocument) -> tuple[str, ...]:
        """Name the files of the version's episodes that have another size or time than when they were indexed."""
        base = self._store
        store, owned = with_mounts(base, document, False, {}, self._options.trust_mounts, self._mounts())
        try:
            listed = self._lists.read_lists(store, document)
        finally:
            if owned and store is not base:
                store.close()
        found, root = list[str](), self._source.location.url.rstrip("/")
        for file in self._source.list():
            before, now = listed.get(self._prefix + file.key), FileStat(file.size, round(file.modified * 1e9))
            if before is not None and is_changed(f"{root}/{file.key}", before, now):
                found.append(f"{root}/{file.key}: it changed after it was indexed, so its episodes cannot be read")
        return tuple(found)

    def _add(
        self,
        run: PlanRun[LeRobotUnit],
        reporter: InputReporter,
        newest: versions.VersionDocument,
        message: str,
        started: float,
    ) -> tuple[PackReport, int]:
        """Index the new episodes, and make the next version of them."""
        base, _ = history.load(self._store, run.journal.begin(newest.version))
        result = self._run_units(run, reporter, len(base.shards))
        shards, parts = run.index(len(base.index), _NothingNewError)
        report = run.report(reporter, result, time.monotonic() - started)  # before another follower deletes the journal
        _crash_after_index()
        document = self._commit(run, shards, parts, message)
        _crash_after_version()
        return report, document.version

    def _remember(self, plan: LeRobotPlan, skipped: Sequence[Skipped]) -> None:
        """Remember the episodes that cannot be used, so that `follow` does not read them again."""
        bad = {item.path.rpartition(": ")[2] for item in skipped}
        for unit in plan.units if bad else ():
            files = {one.key: one for one in (*unit.videos, *unit.data)}
            for episode in unit.episodes():
                if key_of(episode) in bad:
                    self._bad[episode.index] = stat_of(episode, files)

    def _commit(
        self,
        run: PlanRun[LeRobotUnit],
        shards: Sequence[versions.Shard],
        parts: Sequence[versions.IndexPart],
        message: str,
    ) -> versions.VersionDocument:
        def build(base: versions.VersionDocument) -> versions.VersionDocument:
            check_new_keys(self._store, base, run.keys, self._options.trust_mounts, self._mounts())
            every = {mount.name: mount for mount in (*base.mounts, *self._mounts())}
            return versions.new_document(
                base.name,
                versions.joined(base.shards, shards),
                versions.joined(base.index, parts),
                version=base.version + 1,
                parent=base.version,
                message=message or f"indexed {limits.counted(len(run.keys), 'new episode')}",
                mounts=tuple(every[name] for name in sorted(every)),
                lineage=versions.Lineage(operation="append"),
            )

        return history.commit(self._store, build)

    def _plan(self, episodes: Iterable[Episode], *, follow: bool) -> LeRobotPlan:
        settings = [self._settings(0), follow]
        bad = self._bad if follow else None
        return lerobot_plan(self._files.named, self._info, episodes, settings, self._files.key, bad)

    def _settings(self, first: int) -> EpisodeSettings:
        return EpisodeSettings(
            cameras=self._info.cameras,
            fps=self._info.fps,
            robot=self._info.robot,
            prefix=self._prefix,
            first=first,
            strict=self._options.strict,
            text_field=self._options.text_field or TEXT_FIELD,
        )

    def _run(self, plan: LeRobotPlan) -> PlanRun[LeRobotUnit]:
        journal = journal_of(self._store, plan.name)
        return PlanRun(store=self._store, journal=journal, units=plan.units, text_field=self._options.text_field)

    def _run_units(self, run: PlanRun[LeRobotUnit], reporter: InputReporter, first: int) -> RunReport:
        task = lerobot_task(self._source, self._store, self._settings(first))
        return run.run(task, self._engine, self._options.workers, reporter)

    def _mounts(self) -> tuple[versions.Mount, ...]:
        mounts = [JOINED_MOUNT] if self._mount is None else [JOINED_MOUNT, self._mount]
        return tuple(sorted(mounts, key=lambda mount: mount.name))

    def _new_episodes(self, document: versions.VersionDocument) -> Iterator[Episode]:
        """Yield the episodes that no row of the version's index parts has, also of samples that were removed."""
        parts = tuple(replace(part, bitmap=None) for part in document.index)
        whole = replace(document, index=parts, samples=sum(part.rows for part in parts))
        index = OpenIndex(self._store, whole)
        episodes = read_episodes(self._files.named, self._info)
        while batch := {key_of(one): one for one in itertools.islice(episodes, _LOOKUPS)}:
            *_, missing = views.rows_with_keys(index, set(batch))
            yield from (one for key, one in batch.items() if key in missing)

    def _finish(
        self,
        run: PlanRun[LeRobotUnit],
        reporter: InputReporter,
        result: RunReport,
        version: int,
        started: float,
        changed: tuple[str, ...] = (),
    ) -> Indexed:
        report = run.report(reporter, result, time.monotonic() - started)
        run.journal.delete()
        return self._indexed(dataclasses.replace(report, changed=changed), version)

    def _indexed(self, report: PackReport, version: int) -> Indexed:
        self._given_away = self._mount is not None
        return Indexed(report, version, {} if self._mount is None else {self._mount.name: self._source})


class _EpisodeReporter(InputReporter):
    """Counts finished episodes for `progress`."""

    def __init__(self, plan: LeRobotPlan, strict: bool, progress: Callable[[Progress], None] | None) -> None:
        self._episodes = self._finished = self._read = 0
        super().__init__(Gathered((), plan.missing, ()), strict, None)
        self._report = progress
        self._episodes = sum(unit.count for unit in plan.units)
        self._total = sum(unit.size for unit in plan.units)

    def step(self, done: Done) -> None:
        """Add finished episodes."""
        self._finished += done.items
        self._read += done.bytes
        self._skips += done.skipped
        if self._report is not None:
            self._report(Progress(self._finished, self._episodes, self._read, self._total, self._skips))


class _NothingNewError(UsageError):
    """No new episode can be used."""

    def __init__(self, skipped: Sequence[Skipped]) -> None:
        super().__init__("there is nothing new")
        self.skipped = skipped


def _nothing(skipped: Sequence[Skipped]) -> UsageError:
    why = f"{skipped[0].path}: {skipped[0].reason}" if skipped else "it has no episodes"
    return UsageError(
        f"there is nothing to index: {why}", hint="give the folder of a LeRobot data set, the one with meta"
    )


def _no_report(skipped: tuple[Skipped, ...], started: float, changed: tuple[str, ...] = ()) -> PackReport:
    return PackReport(
        files=0,
        samples=0,
        shards=0,
        bytes=0,
        seconds=time.monotonic() - started,
        skipped=skipped,
        ignored=(),
        notes=(),
        changed=changed,
    )


def _local(source: str) -> str:
    return path_of_url(source) if source.lower().startswith("file://") else source
