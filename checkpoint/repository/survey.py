"""Lists the steps and the unfinished attempts of a repository, from COMMITs and decisions.

Invariant: manifests and packs are not read, so the cost depends on the number of steps and not on the number of ranks.
Decisions of older versions lack totals; the manifests of those steps are read. A survey writes the missing COMMIT of a
complete attempt. To find out whether a lease has expired, it writes a lease of its own and deletes it again. Its time of
modification is the time by the store's clock. A survey changes nothing else.
Failure behaviour: damage is put into the report. Transient errors and refused access are raised. Without write access,
leases are compared with this machine's clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import (
    VERSION,
    Base,
    Commit,
    Decision,
    Lease,
    StepName,
    Totals,
    encode,
    read,
    this_process,
)
from headrace.checkpoint.format.group import Tally
from headrace.checkpoint.format.metadata import Metadata
from headrace.checkpoint.repository import commit, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.fetch import open_step
from headrace.checkpoint.repository.inventory import SeenLease, many
from headrace.checkpoint.repository.lease import DEFAULT_LIFE
from headrace.checkpoint.repository.retention import is_over
from headrace.checkpoint.repository.timeline import Segment
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import (
    AccessDeniedError,
    CorruptionError,
    HeadraceError,
    NotFoundError,
    UnsupportedError,
)
from headrace.dataio.store.base import Store

_BATCH, _MAX_BATCH = 64, 4096
"""The number of steps whose documents `newest_first` reads together: first, and at most. It doubles each time."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A damaged or missing object.

    `what` is one sentence; `hits` names the steps and tensors that need the object.
    """

    object: str
    what: str
    hits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepLine:
    """One committed step. Byte counts are sums over all ranks.

    `seconds`: from the beginning of the save to its commit, by the clocks of two processes; 0 if the step was saved by an
    older version. `description`: the digest of its description, or "". `stall`: seconds for which `save` blocked rank 0; None
    if they were not recorded.
    """

    run: str
    timeline: int
    step: int
    attempt: str
    current: bool
    committed: float
    world_size: int
    tensors: int
    bytes_state: int
    bytes_written: int
    seconds: float = 0.0
    metadata: Metadata = field(default_factory=dict)
    description: str = ""
    stall: float | None = None

    @property
    def base(self) -> Base:
        """The step as other documents name it."""
        return Base(self.timeline, self.step, self.attempt)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An attempt that is not a step. `state` is "in progress", "abandoned", "aborted", "lost" or "removed"."""

    run: str
    timeline: int
    step: int
    attempt: str
    state: str


@dataclass(slots=True)
class Report:
    """The result of a survey or a check.

    `clean`: no problem was found. After a check that read all data, every committed step can then be restored bit for
    bit.
    """

    steps: list[StepLine] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    packs: int = 0
    chunks: int = 0
    bytes_read: int = 0
    unreferenced: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.problems


@dataclass(slots=True)
class _SurveyedStep:
    """What was read of one step. `base` is None if the step has no committed attempt or was removed."""

    step: StepName
    base: Base | None = None
    commit: Commit | None = None
    totals: Totals | None = None
    decision: Decision | None = None
    unfinished: list[Unfinished] = field(default_factory=list)
    problem: Problem | None = None


def survey(store: Store, run: str | None = None, clock: Clock = SYSTEM_CLOCK) -> Report:
    """List all steps and attempts of the repository, or of one run."""
    if repository.read_repo(store) is None:
        raise NotFoundError(f"no checkpoint repository at {store.location.url}", hint="check the URL")
    runs = repository.runs(store)
    if run is not None and run not in runs:
        raise NotFoundError(f"no run {run!r} at {store.location.url}", hint=f"there are: {', '.join(runs) or 'none'}")
    report = Report()
    now = _StoreTime(store, runs[0] if runs else "", clock)
    for name in runs if run is None else [run]:
        _survey_run(store, name, report, now)
    return report


def survey_steps(
    store: Store,
    chosen: Mapping[str, list[StepName]],
    branches: Mapping[str, Sequence[Segment]],
    clock: Clock = SYSTEM_CLOCK,
) -> Report:
    """List only these steps of each run, and their attempts. Nothing is read of other steps.

    `branches`: the newest branch of each run, which decides which steps are current.
    """
    report = Report()
    now = _StoreTime(store, next(iter(chosen), ""), clock)
    for run, steps in chosen.items():
        outcomes = list(many(partial(_survey_step, store, run, now), steps))
        _add(run, outcomes, _current_of(outcomes, branches.get(run, ())), report)
    return report


def _current_of(outcomes: Iterable[_SurveyedStep], segments: Iterable[Segment]) -> set[Base]:
    """The steps that readers see, if no other steps exist. `segments`: the newest branch, newest first.

    Of two steps with one number, readers see that of the newer timeline.
    """
    listed: dict[int, list[Base]] = {}
    for each in outcomes:
        if each.base is not None:
            listed.setdefault(each.base.timeline, []).append(each.base)
    current: dict[int, Base] = {}
    for segment in segments:
        for base in listed.get(segment.timeline, ()):
            if segment.upto is None or base.step <= segment.upto:
                current.setdefault(base.step, base)
    return set(current.values())


def _survey_run(store: Store, run: str, report: Report, now: Callable[[], float]) -> None:
    for number in timeline.lost(store, run):
        steps = timeline.steps(store, run, number)
        hits = tuple(f"{run}/{number}/{at}" for at in steps if store.exists(names.commit(run, number, at)))
        problem = "it is missing, although the timeline has objects"
        report.problems.append(Problem(names.timeline(run, number), problem, hits))
    listed = [
        StepName(number, at) for number in timeline.numbers(store, run) for at in timeline.steps(store, run, number)
    ]
    outcomes = list(many(partial(_survey_step, store, run, now), listed))
    _add(run, outcomes, _current(store, run, outcomes, report), report)


def _add(run: str, outcomes: Sequence[_SurveyedStep], current: Container[Base], report: Report) -> None:
    for outcome in outcomes:
        report.unfinished += outcome.unfinished
        if outcome.problem is not None:
            report.problems.append(outcome.problem)
        elif outcome.base is not None and outcome.totals is not None and outcome.decision is not None:
            report.steps.append(
                _line(run, outcome.base, outcome.totals, outcome.decision, outcome.commit, outcome.base in current)
            )


def _current(store: Store, run: str, outcomes: list[_SurveyedStep], report: Report) -> set[Base]:
    """The steps of the newest branch."""
    bases = {each.step: each.base for each in outcomes if each.base is not None}
    removed = {each.step for each in outcomes if each.commit is not None and each.commit.tombstone}
    try:
        return set(repository.visible(store, run, removed, known_steps=bases))
    except (CorruptionError, UnsupportedError) as error:
        report.problems.append(Problem(names.timelines(run), error.message, (f"run {run}",)))
        return set()


def _survey_step(store: Store, run: str, now: Callable[[], float], step: StepName) -> _SurveyedStep:
    number, at, outcome = step.timeline, step.step, _SurveyedStep(step)
    try:
        outcome.commit = _commit_of(store, run, number, at)
        if outcome.commit is not None and not outcome.commit.tombstone:
            outcome.base = Base(number, at, outcome.commit.attempt)
        for attempt_id in timeline.attempts(store, run, number, at):
            if outcome.base is None or attempt_id != outcome.base.attempt:
                state = _state(store, Attempt(run, number, at, attempt_id, 0), outcome, now)
                outcome.unfinished.append(Unfinished(run, number, at, attempt_id, state))
        if outcome.base is not None:
            outcome.decision, outcome.totals = _totals(store, run, outcome.base)
    except (CorruptionError, UnsupportedError, NotFoundError) as error:
        if not repository.has_tombstone(store, run, number, at):
            label = f"step {at} of run {run}, timeline {number}"
            outcome.problem = Problem(names.step(run, number, at), error.message, (label,))
    return outcome


def _commit_of(store: Store, run: str, number: int, at: int) -> Commit | None:
    """The step's COMMIT, which may be a tombstone. If the step has only a complete attempt, it is written first."""
    key = names.commit(run, number, at)
    found = commit.find_commit(store, key)
    if found is None and repository.recognise(store, run, number, at) is not None:
        found = commit.find_commit(store, key)
    return found


def _totals(store: Store, run: str, base: Base) -> tuple[Decision, Totals]:
    """The step's decision, and its totals, without packs and other attempts if they come from its manifests.

    The manifests are read if the decision has no totals.
    """
    decision = read(store, names.decision(run, base.timeline, base.step, base.attempt), Decision)
    if decision.totals is not None:
        return decision, decision.totals
    manifests = open_step(store, run, base).manifests
    tally = Tally(base.attempt, len(manifests))
    for manifest in manifests:
        tally.add(manifest)
    return decision, Totals(
        ranks=tally.ranks,
        tensors=tally.tensors,
        packs=0,
        attempts=(),
        bytes_state=tally.bytes_state,
        bytes_written=tally.bytes_written,
        bytes_deduplicated=tally.bytes_deduplicated,
    )


def _line(
    run: str, base: Base, totals: Totals, decision: Decision, committed: Commit | None, current: bool
) -> StepLine:
    when = committed.committed if committed is not None else 0.0
    return StepLine(
        run,
        base.timeline,
        base.step,
        base.attempt,
        current,
        when,
        totals.ranks,
        totals.tensors,
        totals.bytes_state,
        totals.bytes_written,
        max(when - names.time_of(base.attempt), 0.0) if when else 0.0,
        decision.values(),
        decision.description,
        decision.stall(),
    )


def newest_first(store: Store, run: str) -> Iterator[StepLine]:
    """The steps of the run's newest branch, newest first. They are read in batches, as they are asked for."""
    yielded, size = set[int](), _BATCH
    for segment in timeline.branch(store, run):
        steps = timeline.steps_newest_first(store, run, segment.timeline, segment.upto)
        unseen = (at for at in steps if at not in yielded)
        while batch := list(islice(unseen, size)):
            size = min(2 * size, _MAX_BATCH)
            for line in many(partial(_line_at, store, run, segment.timeline), batch):
                yielded.add(line.step)
                yield line


def _line_at(store: Store, run: str, number: int, at: int) -> StepLine | None:
    """The line of a step; None if it is not committed, or if a collection has removed it."""
    try:
        committed = _commit_of(store, run, number, at)
        if committed is None or committed.tombstone:
            return None
        base = Base(number, at, committed.attempt)
        decision, totals = _totals(store, run, base)
    except (CorruptionError, NotFoundError):
        if repository.has_tombstone(store, run, number, at):
            return None
        raise
    return _line(run, base, totals, decision, committed, current=True)


def _state(store: Store, attempt: Attempt, outcome: _SurveyedStep, now: Callable[[], float]) -> str:
    if outcome.base is not None:
        return "lost"
    if outcome.commit is not None:
        return "removed"
    if store.exists(attempt.decision_key):
        return "aborted"
    for info in store.list(names.leases_of(attempt.id)):
        with suppress(NotFoundError):
            if not is_over(SeenLease(info.key, read(store, info.key, Lease), info.modified), now()):
                return "in progress"
    return "abandoned"


class _StoreTime:
    """The time by the store's clock, which also gives the leases their times. It is read at the first call."""

    def __init__(self, store: Store, run: str, clock: Clock) -> None:
        self._store, self._run, self._clock = store, run, clock
        self._lock = threading.Lock()
        self._now: float | None = None

    def __call__(self) -> float:
        with self._lock:
            if self._now is None:
                self._now = self._read()
            return self._now

    def _read(self) -> float:
        attempt = names.new_id(self._clock)
        key, life = names.lease(attempt), DEFAULT_LIFE
        lease = Lease(
            version=VERSION,
            attempt=attempt,
            run=self._run,
            timeline=0,
            step=0,
            bases=(),
            until=self._clock.time() + life,
            life=life,
            process=this_process(),
        )
        try:
            self._store.put(key, encode(lease))
            return self._store.stat(key).modified
        except (AccessDeniedError, UnsupportedError):
            return self._clock.time()
        finally:
            with suppress(HeadraceError):  # a lease that is not deleted expires
                self._store.delete_many([key])
