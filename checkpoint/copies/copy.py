"""`copy` copies steps of a run, or of all runs, to another repository. `RunCopier` does it again for a run that grows.

Invariant: a step at the destination is complete or invisible. The latest step of the copied run is the latest of the
source's run, as far as it is copied. Tags are set after the steps that they name.
Failure behaviour: the error of the first step that cannot be copied is raised. Earlier steps stay. The same call
continues.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.checkpoint.copies.identity import TimelineCopier
from headrace.checkpoint.copies.index import ChunkIndex
from headrace.checkpoint.copies.step import RemovedThereError, Route, Sent, StepCopier, require_same
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import commit, tag_records, tags, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.inventory import many
from headrace.checkpoint.repository.lease import DEFAULT_LIFE
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import ConflictError, NotFoundError, UsageError
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store

COPIED, PRESENT, REMOVED_HERE, REMOVED_THERE = (
    "copied",
    "present",
    "removed at the destination",
    "removed at the source",
)
MOST_WORKERS = 16


@dataclass(frozen=True, slots=True)
class Selection:
    """Which steps to copy: these numbers, the newest `last`, or all (both None). `tags`: also tagged steps, and tags."""

    steps: tuple[int, ...] | None = None
    last: int | None = None
    tags: bool = False


@dataclass(frozen=True, slots=True)
class StepCopy:
    """The outcome of one step.

    - `state`: "copied", "present", "removed at the destination" or "removed at the source".
    - `attempt`: its attempt at the destination; "" if it was not copied.
    - `bytes_sent`: stored bytes that were written, without manifests. `bytes_found`: bytes that the destination had.
    """

    run: str
    timeline: int
    step: int
    state: str
    attempt: str = ""
    bytes_sent: int = 0
    bytes_found: int = 0
    chunks_sent: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class CopyReport:
    """The outcome of a copy. `tags`: names of the tags that were set."""

    steps: list[StepCopy] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)

    @property
    def bytes_sent(self) -> int:
        return sum(each.bytes_sent for each in self.steps)


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """The progress of one step: bytes of its chunks that are at the destination, and of all its chunks so far."""

    run: str
    step: int
    bytes: int
    bytes_total: int | None


Progress = Callable[[CopyProgress], object]


def copy(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    *,
    run: str | None = None,
    as_run: str | None = None,
    steps: Sequence[int] | None = None,
    last: int | None = None,
    tags: bool = False,
    workers: int = 2,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> CopyReport:
    """Copy steps to another repository, or to another run of the same one.

    Chunks that the run has at the destination are not sent again. A copy that was interrupted continues. Savers, readers
    and collectors may work at both ends.

    Args:
        source (str | os.PathLike[str] | Store): The repository to copy from: a path, `s3://bucket/prefix`, or a `Store`.
        destination (str | os.PathLike[str] | Store): The repository to copy to. It is created if it is missing.
        run (str | None): The run to copy. Default: None, every run.
        as_run (str | None): The name of the run at the destination; needs `run`. Default: the same name.
        steps (Sequence[int] | None): The numbers of the steps to copy; needs `run`. Default: all of the current branch.
        last (int | None): Copy only the newest `last` steps. Default: None.
        tags (bool): Also copy steps that have a tag, and the tags. Default: False.
        workers (int): The number of packs that are copied at a time, from 1 to 16. Default: 2.
        progress (Progress | None): Called with a `CopyProgress` after each chunk. Default: None.
        storage_options (Mapping[str, Any] | None): Options of both stores, as for `open_store`. Default: None.

    Returns:
        CopyReport: The outcome of each step.

    Raises:
        NotFoundError: There is no such run or step at the source.
        ConflictError: The destination has a run of this name with other content.
        CorruptionError: A chunk is damaged at the source. Its step is not committed.
        CapacityError: The destination is full. The same call continues later.

    Example:
        >>> import tempfile, torch
        >>> from headrace.checkpoint import Checkpointer
        >>> folder, mirror = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> with Checkpointer(folder, run="exp42", sidecar=None) as checkpointer:
        ...     _ = checkpointer.save(1, {"weight": torch.ones(4)}).result(timeout=60)
        >>> [(each.step, each.state) for each in copy(folder, mirror, run="exp42").steps]
        [(1, 'copied')]
    """
    if run is None and (as_run is not None or steps is not None):
        raise UsageError("as_run and steps need run", hint="name the run to copy")
    if steps is not None and last is not None:
        raise UsageError("both steps and last are given", hint="give one of them")
    selection = Selection(tuple(steps) if steps is not None else None, last, tags)
    with contextlib.ExitStack() as stack:

        def opened(where: str | os.PathLike[str] | Store) -> Store:
            if isinstance(where, Store):
                return where
            return stack.enter_context(open_store(where, storage_options=storage_options))

        report = CopyReport()
        copiers = run_copiers(opened(source), opened(destination), run, as_run, workers=workers, progress=progress)
        for copier in copiers:
            report.steps += copier.copy(selection)
            report.tags += copier.tags_set
        return report


def run_copiers(
    source: Store,
    store: Store,
    run: str | None = None,
    as_run: str | None = None,
    *,
    workers: int = 2,
    progress: Progress | None = None,
    life: float = DEFAULT_LIFE,
    clock: Clock = SYSTEM_CLOCK,
) -> list[RunCopier]:
    """The copiers of a run, or of all runs. Creates the repository at the destination if it is missing."""
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"workers={workers!r:.20} is out of range", hint=f"give 1 to {MOST_WORKERS}")
    if repository.read_repo(source) is None:
        raise NotFoundError(f"no checkpoint repository at {source.location.url}", hint="check the URL of the source")
    found = repository.runs(source) if run is None else [names.check_run(run)]
    if run is not None and not timeline.numbers(source, run):
        raise repository.missing(source, run)
    pairs = [(each, names.check_run(as_run) if as_run is not None else each) for each in found]
    if source.location.url == store.location.url and any(one == other for one, other in pairs):
        raise UsageError("a run cannot be copied onto itself", hint="give another destination, or --as another name")
    repository.ensure_repo(store, clock)
    return [
        RunCopier(Route(source, one, store, other), workers=workers, progress=progress, life=life, clock=clock)
        for one, other in pairs
    ]


class RunCopier:
    """Copies steps of one run. `copy` can be called again, when the run has grown.

    Args:
        route: The run, and where it is copied to.
        workers: The number of packs that are copied at a time.
        progress: Called with a `CopyProgress` after each chunk.
        life: The lifetime of leases in seconds.
        clock: The clock.
    """

    def __init__(
        self,
        route: Route,
        *,
        workers: int = 2,
        progress: Progress | None = None,
        life: float = DEFAULT_LIFE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.route, self._progress, self._clock = route, progress, clock
        self._timelines = TimelineCopier(route.source, route.source_run, route.store, route.run)
        self._index = ChunkIndex()
        self._steps = StepCopier(route, self._index, workers=workers, life=life, clock=clock, report=self._report)
        self._step = 0
        self._done: dict[tuple[int, int], Base] = {}
        self._removed = set[tuple[int, int]]()
        self._is_loaded = False
        self.tags_set: list[str] = []

    def copy(self, selection: Selection) -> Iterator[StepCopy]:
        """Copy the selected steps, oldest first, and yield the outcome of each."""
        self.tags_set = []
        selected = self._select(selection)
        self._timelines.copy()  # after the selection, so that no step is copied before its timeline
        new = [base for base in selected if (base.timeline, base.step) not in self._done.keys() | self._removed]
        states = list(many(self._state, new))
        if any(found is None and not is_removed for _, found, is_removed in states):
            self._load_index()
        for base, found, is_removed in states:
            if is_removed:
                self._removed.add((base.timeline, base.step))
                yield self._outcome(base, REMOVED_HERE)
            elif found is not None:
                require_same(self.route, base, found)
                self._done[base.timeline, base.step] = found
                yield replace(self._outcome(base, PRESENT), attempt=found.attempt)
            else:
                yield self._copy(base, is_named=selection.steps is not None)
        if selection.tags:
            self._copy_tags()

    def _select(self, selection: Selection) -> list[Base]:
        source, run = self.route.source, self.route.source_run
        if selection.steps is not None:
            found = [repository.find(source, run, step) for step in selection.steps]
            bases = [base for base in found if base is not None]
        else:
            bases = list(itertools.islice(repository.visible(source, run), selection.last))
        if selection.tags:
            bases += [tag.base for tag in self._tags() if tag_records.exists(source, tag)]
        return sorted(set(bases), key=lambda base: (base.timeline, base.step))

    def _tags(self) -> Iterator[tags.Tag]:
        return (tag for tag in tags.all_tags(self.route.source) if tag.run == self.route.source_run)

    def _state(self, base: Base) -> tuple[Base, Base | None, bool]:
        """The step, the step of this number at the destination, and whether that was removed."""
        store, run = self.route.store, self.route.run
        found = repository.recognise(store, run, base.timeline, base.step)
        removed = found is None and commit.find_commit(store, names.commit(run, base.timeline, base.step)) is not None
        return base, found, removed

    def _load_index(self) -> None:
        """Index what the destination has, once. Steps that this object copies are indexed when they are committed."""
        if not self._is_loaded:
            self._index.load(self.route.store, self.route.run, self._existing())
            self._is_loaded = True

    def _existing(self) -> Iterator[Base]:
        """The steps of the run at the destination, newest first."""
        store, run = self.route.store, self.route.run
        for number in reversed(timeline.numbers(store, run)):
            for at in timeline.steps_newest_first(store, run, number):
                found = repository.recognise(store, run, number, at)
                if found is not None:
                    yield found

    def _copy(self, base: Base, *, is_named: bool) -> StepCopy:
        self._step, began = base.step, self._clock.monotonic()
        try:
            copied, sent, is_new = self._steps.copy(base)
        except RemovedThereError:
            self._removed.add((base.timeline, base.step))
            return self._outcome(base, REMOVED_HERE)
        except NotFoundError:
            if is_named or not repository.is_removed(self.route.source, self.route.source_run, base):
                raise
            return self._outcome(base, REMOVED_THERE)
        self._done[base.timeline, base.step] = copied
        return replace(
            self._outcome(base, COPIED if is_new else PRESENT),
            attempt=copied.attempt,
            bytes_sent=sent.bytes_sent,
            bytes_found=sent.bytes_found,
            chunks_sent=sent.chunks_sent,
            seconds=self._clock.monotonic() - began,
        )

    def _outcome(self, base: Base, state: str) -> StepCopy:
        return StepCopy(self.route.run, base.timeline, base.step, state)

    def _copy_tags(self) -> None:
        """Set the tags of copied steps. A tag of another run at the destination is not moved."""
        store, run = self.route.store, self.route.run
        existing = {tag.name: tag for tag in tags.all_tags(store)}
        for tag in self._tags():
            base, current = self._done.get((tag.timeline, tag.step)), existing.get(tag.name)
            if base is None or (current is not None and (current.run, current.base) == (run, base)):
                continue
            if current is not None and current.run != run:
                raise ConflictError(
                    f"tag {tag.name} is step {current.step} of run {current.run} at {store.location.url}",
                    hint="untag it there, or copy without --tags",
                )
            tags.tag(store, tag.name, run, msgspec.structs.replace(base, run=""), move=True, clock=self._clock)
            self.tags_set.append(tag.name)

    def _report(self, sent: Sent) -> None:
        if self._progress is not None:
            done = CopyProgress(self.route.run, self._step, sent.bytes_found + sent.bytes_sent, sent.bytes_total)
            self._progress(done)
