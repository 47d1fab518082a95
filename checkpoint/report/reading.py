"""Reads what a report shows, with a limited number of requests.

Purpose: `read_report` reads the newest steps of the runs, their timelines, attempts that failed, tags and published
names. Each run gets the same share of the steps, newest first.
Invariants:

- At most `steps` steps are read, with at most `MOST_RUNS`, `MOST_TIMELINES`, `MOST_TAGS` and `MOST_NAMES` of the others.
  What is left out is counted.
- No pack is read. Manifests are read only if the steps have at most `MOST_MANIFESTS` together.
- Nothing is written, except as `survey` does.

Failure behaviour: `NotFoundError` if there is no repository or no such run. Damage of a step is put into the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import StepName, Timeline
from headrace.checkpoint.publishing import records
from headrace.checkpoint.publishing.records import TAG_PREFIX, Published, WithdrawnError
from headrace.checkpoint.repository import commit, survey, tag_records, timeline
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.inventory import many
from headrace.checkpoint.repository.step_usage import usage_of
from headrace.checkpoint.repository.survey import Problem, StepLine, Unfinished
from headrace.checkpoint.repository.tag_records import Tag
from headrace.checkpoint.repository.timeline import Segment
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UsageError
from headrace.dataio.core.redact import redact
from headrace.dataio.store.base import Store

DEFAULT_STEPS, MOST_STEPS = 500, 10_000
MOST_RUNS = 100
MOST_TIMELINES = 100
"""The maximum number of timelines of one run."""
MOST_TAGS, MOST_NAMES, MOST_VERSIONS, MOST_REASONS = 200, 50, 8, 100
MOST_MANIFESTS = 2000
"""With more manifests, sizes are those of the decisions: written and deduplicated bytes, not shared and unique ones."""
_FAILED = ("aborted", "abandoned", "lost")


@dataclass(slots=True)
class TimelineRow:
    """One timeline. `parent`, `fork`: the timeline and the step at which it begins; None for a fresh start.

    `count`: number of its steps that have objects, committed or not. `followed`: whether readers follow it.
    """

    number: int
    created: float
    parent: int | None
    fork: int | None
    count: int
    followed: bool = False


@dataclass(slots=True)
class Size:
    """Stored bytes of a step: those that only it names among the steps of the report, and all others."""

    unique: int
    shared: int


@dataclass(slots=True)
class Failure:
    """An attempt that is not a step. `state`: "aborted", "abandoned" or "lost". `began`: seconds since the epoch."""

    timeline: int
    step: int
    attempt: str
    state: str
    began: float
    reason: str = ""


@dataclass(slots=True)
class RunReport:
    """One run. `steps` are sorted by timeline and step. `sizes` has their sizes by (timeline, step), if they were read.

    `hidden_steps`, `hidden_timelines`: numbers of those that were not read. `in_progress`: attempts that may still be
    committed.
    """

    run: str
    timelines: list[TimelineRow] = field(default_factory=list)
    steps: list[StepLine] = field(default_factory=list)
    sizes: dict[tuple[int, int], Size] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    in_progress: int = 0
    hidden_steps: int = 0
    hidden_timelines: int = 0


@dataclass(slots=True)
class Versions:
    """A published name: its newest versions, newest first, and the number of all that are kept."""

    name: str
    newest: list[Published]
    kept: int


@dataclass(slots=True)
class RepositoryReport:
    """What the page shows. `url` has no secrets. `created`: when the report was made, in seconds since the epoch."""

    url: str
    created: float
    runs: list[RunReport]
    tags: list[Tag]
    published: list[Versions]
    problems: list[Problem]
    hidden_runs: int = 0


def read_report(
    store: Store, run: str | None = None, *, steps: int = DEFAULT_STEPS, clock: Clock = SYSTEM_CLOCK
) -> RepositoryReport:
    """Read the repository, or one run.

    Args:
        store (Store): The repository.
        run (str | None): The run. Default: None, the first 100 runs by name.
        steps (int): The largest number of steps to read, of all runs together. Default: 500.
        clock (Clock): The clock. Default: the system's.

    Returns:
        RepositoryReport: What was read.

    Raises:
        NotFoundError: There is no repository, or no such run.
        UsageError: `steps` is not between 1 and 10,000.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError(f"--steps {steps}: give a whole number from 1 to {MOST_STEPS}")
    if repository.read_repo(store) is None:
        raise NotFoundError(f"no checkpoint repository at {redact(store.location.url)}", hint="check the URL")
    listed = _runs(store, run)
    report = RepositoryReport(redact(store.location.url), clock.time(), [], [], [], [], max(len(listed) - MOST_RUNS, 0))
    branches, known = dict[str, list[Segment]](), dict[str, list[StepName]]()
    for name in listed[:MOST_RUNS]:
        row, branches[name], known[name] = _timelines(store, name, report.problems)
        report.runs.append(row)
    chosen = _chosen(known, steps)
    found = survey.survey_steps(store, chosen, branches, clock)
    report.problems += found.problems
    for each in report.runs:
        each.hidden_steps = len(known[each.run]) - len(chosen[each.run])
        each.steps = sorted(
            (line for line in found.steps if line.run == each.run), key=lambda line: (line.timeline, line.step)
        )
        each.in_progress = sum(one.run == each.run and one.state == "in progress" for one in found.unfinished)
    _add_failures(store, report.runs, found.unfinished)
    _add_sizes(store, report.runs)
    shown = {each.run for each in report.runs}
    report.tags = [tag for tag in tag_records.newest(store, MOST_TAGS, TAG_PREFIX) if tag.run in shown]
    report.published = _published(store, shown, report.problems)
    return report


def _runs(store: Store, run: str | None) -> list[str]:
    if run is None:
        return repository.runs(store, MOST_RUNS + 1)
    if not names.is_run(run) or not timeline.numbers(store, run):
        raise repository.missing(store, names.check_run(run))
    return [run]


def _timelines(store: Store, run: str, problems: list[Problem]) -> tuple[RunReport, list[Segment], list[StepName]]:
    """The run's timelines, its newest branch, and all steps that have objects, newest first."""
    numbers = timeline.numbers(store, run)
    report = RunReport(run, hidden_timelines=max(len(numbers) - MOST_TIMELINES, 0))
    documents, steps = dict[int, Timeline](), list[StepName]()
    for number in reversed(numbers[-MOST_TIMELINES:]):
        try:
            documents[number] = document = timeline.read_timeline(store, run, number)
        except CorruptionError as error:
            problems.append(Problem(names.timeline(run, number), error.message, (f"run {run}",)))
            continue
        ascending = list(timeline.steps(store, run, number))
        steps += (StepName(number, at) for at in reversed(ascending))
        parent = document.parent
        row = TimelineRow(number, document.created, None, None, len(ascending))
        if parent is not None:
            row.parent, row.fork = parent.timeline, parent.step
        report.timelines.insert(0, row)
    followed = timeline.followed(store, run)
    for row in report.timelines:
        row.followed = row.number == followed
    return report, timeline.segments(_ancestors(documents, followed)), steps


def _ancestors(documents: Mapping[int, Timeline], number: int) -> list[Timeline]:
    """The timeline and its ancestors, newest first, as far as they were read."""
    chain = list[Timeline]()
    while (document := documents.get(number)) is not None:
        chain.append(document)
        number = 0 if document.parent is None else document.parent.timeline
    return chain


def _chosen(known: Mapping[str, Sequence[StepName]], limit: int) -> dict[str, list[StepName]]:
    """At most `limit` steps: one of each run in turn, newest first."""
    in_turns = ((run, at) for row in zip_longest(*known.values()) for run, at in zip(known, row, strict=True) if at)
    chosen: dict[str, list[StepName]] = {run: [] for run in known}
    for run, at in islice(in_turns, limit):
        chosen[run].append(at)
    return chosen


def _add_failures(store: Store, runs: Sequence[RunReport], unfinished: Sequence[Unfinished]) -> None:
    newest = sorted((one for one in unfinished if one.state in _FAILED), key=lambda one: one.attempt, reverse=True)
    aborted = [one for one in newest if one.state == "aborted"][:MOST_REASONS]
    reasons = dict(many(partial(_reason, store), aborted))
    by_name = {each.run: each for each in runs}
    for one in newest:
        began, reason = names.time_of(one.attempt), reasons.get(one.attempt, "")
        by_name[one.run].failures.append(Failure(one.timeline, one.step, one.attempt, one.state, began, reason))


def _reason(store: Store, one: Unfinished) -> tuple[str, str]:
    with suppress(CorruptionError):
        decision = commit.find_decision(store, names.decision(one.run, one.timeline, one.step, one.attempt))
        if decision is not None:
            return one.attempt, redact(decision.reason)
    return one.attempt, ""


def _add_sizes(store: Store, runs: Sequence[RunReport]) -> None:
    """Add up shared and unique bytes, unless that takes too many requests."""
    lines = [line for each in runs for line in each.steps]
    if sum(max(line.world_size, 1) for line in lines) > MOST_MANIFESTS:
        return
    by_name = {each.run: each for each in runs}
    for usage in usage_of(store, lines):
        by_name[usage.run].sizes[usage.timeline, usage.step] = Size(usage.unique, usage.shared)


def _published(store: Store, runs: set[str], problems: list[Problem]) -> list[Versions]:
    found = list[Versions]()
    for name in islice(records.published_names(store), MOST_NAMES):
        numbers = sorted(records.listed(store, name)[0], reverse=True)
        newest = list[Published]()
        for number in numbers[:MOST_VERSIONS]:
            try:
                newest.append(records.read_record(store, name, number))
            except WithdrawnError:  # older versions ended with it
                break
            except NotFoundError:  # its publisher deleted it
                continue
            except CorruptionError as error:
                problems.append(Problem(records.key_of(name, number), error.message))
        if newest and newest[0].run in runs:
            found.append(Versions(name, newest, len(numbers)))
    return found
