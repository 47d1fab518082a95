"""Lists the steps of a repository and finds one: by number, by tag, or the latest.

Invariant: a step exists if its COMMIT names an attempt and is not a tombstone. A reader that finds an attempt whose
decision is "commit" writes its COMMIT before it answers.
Failure behaviour: `UnsupportedError` for a newer format and for a checkpoint in DCP's own files. `CorruptionError` for
unreadable documents. The text of `MissingStepError` names runs, files or timelines that exist. If a reader has no write
access, it logs this once, and finds only steps that have a COMMIT.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import islice
from types import MappingProxyType

from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import (
    FORMAT_SUFFIX,
    Base,
    Commit,
    PendingDelete,
    Repo,
    StepName,
    encode,
    read,
)
from headrace.checkpoint.repository import commit, tag_records, timeline
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.timeline import Segment
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import AccessDeniedError, CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store

_log = get_logger(__name__)

_LISTED = 20_000
"""The maximum number of runs that are listed for an error or a warning."""
_SHOWN = 8
_OF_DCP = ".metadata"
_OF_DATASET = "dataset.json"
_LOOKS = 20
"""The maximum number of searches for the latest step. A search is repeated if a newer step appeared during it."""

_repo_created = declare("ckpt.repo-created", "an empty repository")


class MissingStepError(NotFoundError, FileNotFoundError):
    """A run or a step does not exist.

    It is also a `FileNotFoundError`, because frameworks catch that error.
    """


def read_repo(store: Store) -> Repo | None:
    """The repository's own document; None if there is no repository yet."""
    try:
        repo = read(store, names.REPO, Repo)
    except NotFoundError:
        return None
    if not repo.format.endswith(FORMAT_SUFFIX):
        raise UnsupportedError(f"{store.location.url} holds {repo.format!r:.60}, not a checkpoint repository")
    return repo


def ensure_repo(store: Store, clock: Clock = SYSTEM_CLOCK) -> Repo:
    """Return the repository's document.

    If it is missing, create it, after a check that the store supports conditional writes.
    """
    repo = read_repo(store)
    if repo is not None:
        return repo
    _refuse_dataset(store)
    from headrace.dataio.store.probe import require_preconditions

    require_preconditions(store, "")
    store.put_if_absent(names.REPO, encode(Repo(id=names.new_id(clock), created=clock.time())))
    _repo_created()
    repo = read_repo(store)
    if repo is None:
        raise CorruptionError(
            f"{names.REPO} was written, but cannot be read", hint="check that the store is strongly consistent"
        )
    return repo


def runs(store: Store, limit: int | None = None) -> list[str]:
    """Names of all runs that have a timeline. With `limit`, only this many names are listed."""
    folders = islice(store.list_folders(names.RUNS), limit)
    return [run for run in folders if names.is_run(run) and timeline.numbers(store, run)]


def recognise(store: Store, run: str, number: int, at: int) -> Base | None:
    """The attempt that is this step, or None.

    If the step has only a complete attempt, its COMMIT is written first.
    """
    document = commit.find_commit(store, names.commit(run, number, at))
    if document is not None:
        return _base_of(document, number)
    recognised = (
        _recognise_attempt(store, Attempt(run, number, at, attempt, 0))
        for attempt in timeline.attempts(store, run, number, at)
    )
    return next((base for base in recognised if base is not None), None)


def _recognise_attempt(store: Store, attempt: Attempt) -> Base | None:
    try:
        return _base_of(commit.recognise(store, attempt), attempt.timeline)
    except AccessDeniedError:
        warn_once(
            _log,
            f"{store.location.url} is read-only for this process: complete attempts without COMMIT stay invisible",
            "job",
        )
        return None


def _base_of(document: Commit | None, number: int) -> Base | None:
    return None if document is None or document.tombstone else Base(number, document.step, document.attempt)


def visible(
    store: Store,
    run: str,
    removed: Container[StepName] = (),
    branch: Iterable[Segment] | None = None,
    known_steps: Mapping[StepName, Base] = MappingProxyType({}),
) -> Iterator[Base]:
    """Steps of the run's newest branch, newest first.

    `removed`: steps that are known to be tombstones and are skipped. `branch`: the branch, if the caller has read it
    already. `known_steps`: committed steps that the caller has read already.
    """
    yielded: set[int] = set()
    for segment in timeline.branch(store, run) if branch is None else branch:
        for at in timeline.steps_newest_first(store, run, segment.timeline, segment.upto):
            name = StepName(segment.timeline, at)
            if at in yielded or name in removed:
                continue
            base = known_steps.get(name) or recognise(store, run, segment.timeline, at)
            if base is not None:
                yielded.add(at)
                yield base


def find(store: Store, run: str, step: int | str | Base) -> Base | None:
    """Find a step of the run.

    `step` is a number, `latest`, a tag (`tag:NAME`) or one attempt (a `Base`). A number is looked up in the newest
    branch; a tag or an attempt may be in any timeline. `latest` returns None if the run has no step. Otherwise a
    missing step raises `NotFoundError`.
    """
    repo = read_repo(store)
    if isinstance(step, Base):
        if not is_step(store, run, step):
            raise NotFoundError(
                f"step {step.step} of timeline {step.timeline} of run {run} does not exist, or is another attempt",
                hint="it was never committed, or retention removed it; `headrace ckpt ls` lists the steps",
            )
        return step
    if isinstance(step, str) and step.startswith(tag_records.PREFIX):
        return tag_records.step_of(store, run, step.removeprefix(tag_records.PREFIX))
    if step == "latest":
        if repo is None:
            _require_nothing(store)
            return None
        return _latest(store, run)
    if isinstance(step, str):
        raise UsageError(
            f"{step!r:.200} is not a step", hint=f'give its number or "latest"; a tag is given by tag={step!r:.100}'
        )
    step = names.check_step(step)
    for segment in timeline.branch(store, run):
        if segment.upto is None or step <= segment.upto:
            base = recognise(store, run, segment.timeline, step)
            if base is not None:
                return base
    if repo is None:
        _require_nothing(store)
    raise missing(store, run, step)


def step_or_tag(step: int | str, tag: str | None) -> int | str:
    """Combine a caller's arguments `step` and `tag` into the step that `find` takes; `UsageError` if both are given.

    A `step` such as "tag:best" is refused, so that there is one way to name a tag.
    """
    if isinstance(step, str) and step.startswith(tag_records.PREFIX):
        raise UsageError(
            f"{step!r:.200} is not a step", hint=f"name a tag by tag={step.removeprefix(tag_records.PREFIX)!r:.100}"
        )
    if tag is None:
        return step
    if step != "latest":
        raise UsageError(f"both step {step!r:.100} and tag {tag!r:.100} are given", hint="give one of them")
    return f"{tag_records.PREFIX}{tag}"


def _refuse_dataset(store: Store) -> None:
    """Raise `UsageError` if a dataset is stored here, because its objects and the repository's would be mixed."""
    if store.exists(_OF_DATASET):
        raise UsageError(
            f"{store.location.url} holds a dataset, not checkpoints",
            hint="give an empty directory or prefix for the checkpoints",
        )


def _require_nothing(store: Store) -> None:
    """Raise if there is no repository document, although runs, a DCP checkpoint or a dataset exist here.

    This function reads the document again, because another process may have created it after the caller read it.
    """
    _refuse_dataset(store)
    if next(iter(store.list(names.RUNS)), None) is not None and read_repo(store) is None:
        raise CorruptionError(f"{names.REPO} is missing although there are runs at {store.location.url}")
    if store.exists(_OF_DCP):
        raise UnsupportedError(
            f"{store.location.url} holds a checkpoint in torch.distributed.checkpoint's own format, not a repository",
            hint="load it with dcp.load(state, checkpoint_id=...), or give the repository's URL",
        )


def missing(store: Store, run: str, step: int | None = None) -> MissingStepError:
    """The error for a missing step. With `step` None, the run has no step at all.

    If the run does not exist either, the message lists runs that exist.
    """
    problem = f"run {run} has no step" if step is None else f"run {run} has no step {step}"
    if read_repo(store) is None:
        where = f"there is no checkpoint repository at {store.location.url}{_other_files(store)}"
        return MissingStepError(f"{problem}: {where}", hint="check the URL")
    numbers = timeline.numbers(store, run)
    if not numbers:
        return MissingStepError(f"{problem}: {_no_such_run(store, run)}", hint="check the run's name")
    if step is None:
        return MissingStepError(f"{problem} yet", hint="`headrace ckpt ls` lists runs and steps")
    others = [n for n in numbers if timeline.is_decided(store, run, n, step)]
    where = f"; it is in the abandoned timeline {others[-1]}" if others else _newest_steps(store, run)
    return MissingStepError(f"{problem}{where}", hint="`headrace ckpt ls` lists the steps")


def warn_of_mistakes(store: Store, run: str) -> None:
    """Warn if the run has no step, but other runs or files exist: its name or the URL may be mistyped."""
    if read_repo(store) is None:
        if files := _other_files(store):
            _log.warning(
                "run %s starts without a step: there is no checkpoint repository at %s%s",
                run,
                store.location.url,
                files,
            )
    elif not timeline.numbers(store, run) and runs(store, _LISTED):
        _log.warning("run %s starts without a step: %s", run, _no_such_run(store, run))


def _no_such_run(store: Store, run: str) -> str:
    """Text that lists the existing runs, those with the most similar names first."""
    other_runs = sorted(runs(store, _LISTED), key=lambda other: -SequenceMatcher(None, run, other).ratio())
    if not other_runs:
        return f"there are no runs at {store.location.url}"
    more = ", ..." if len(other_runs) > _SHOWN else ""
    return f"there is no such run at {store.location.url}; there are: {', '.join(other_runs[:_SHOWN])}{more}"


def _newest_steps(store: Store, run: str) -> str:
    """Text that lists the newest steps of the run."""
    newest = [str(base.step) for base in islice(visible(store, run), _SHOWN + 1)]
    more = ", ..." if len(newest) > _SHOWN else ""
    return f"; its newest steps are {', '.join(newest[:_SHOWN])}{more}" if newest else ""


def _other_files(store: Store) -> str:
    """Text that lists a few objects at this location; "" if there are none."""
    keys = [info.key for info in islice(store.list(""), _SHOWN + 1)]
    if not keys:
        return ""
    more = ", ..." if len(keys) > _SHOWN else ""
    return f", but other files: {', '.join(keys[:_SHOWN])}{more}"


def _latest(store: Store, run: str) -> Base | None:
    """The newest step of the newest branch, at one point in time.

    If the newest step that has objects is committed, it is the latest step: no newer step existed when its folder was
    listed. But a newer timeline may have replaced its own before that, so timelines are listed again. Otherwise the
    search takes many requests. In the meantime, newer steps may be committed, and a collection may remove the newest
    listed step before this function reads it. The search would then return an older step, or none. So it is repeated
    until no newer step has appeared.
    """
    number = timeline.followed(store, run)
    first = next(timeline.steps_newest_first(store, run, number), None) if number else None
    if first is not None and (latest := recognise(store, run, number, first)) is not None:
        newest = max(timeline.numbers(store, run), default=0)
        if newest == number or timeline.followed(store, run) == number:
            return latest
    before = _newest_decided(store, run)
    for _ in range(_LOOKS):
        latest = next(visible(store, run), None)
        after = _newest_decided(store, run)
        if before == after:
            break
        before = after
    if latest is None:
        _warn_of_hidden_steps(store, run)
    return latest


def _newest_decided(store: Store, run: str) -> tuple[int, int]:
    """(timeline, step) of the newest step that has a COMMIT, a tombstone or a decision; step -1 if there is none."""
    number = timeline.followed(store, run)
    steps = timeline.steps_newest_first(store, run, number) if number else ()
    return number, next((at for at in steps if timeline.is_decided(store, run, number, at)), -1)


def _warn_of_hidden_steps(store: Store, run: str) -> None:
    """Warn if the run has no latest step although older timelines have steps. The user may want one of those."""
    numbers = timeline.numbers(store, run)
    with_steps = [n for n in numbers[:-1] if _has_commit(store, run, n)]
    if with_steps:
        _log.warning(
            "run %s starts without a step: its newest timeline, %s, has no step and no parent; timelines %s have steps. To"
            " continue from one of those, restore it by a tag, or into another run (`headrace ckpt ls` lists them)",
            run,
            timeline.read_timeline(store, run, numbers[-1]).timeline,
            ", ".join(map(str, with_steps[-8:])),
        )


def _has_commit(store: Store, run: str, number: int) -> bool:
    return any(store.exists(names.commit(run, number, at)) for at in timeline.steps(store, run, number))


def is_step(store: Store, run: str, attempt: Base) -> bool:
    """Whether this attempt is the step. If it is complete, its COMMIT is written first."""
    base = recognise(store, run, attempt.timeline, names.check_step(attempt.step))
    return base is not None and base.attempt == attempt.attempt


def step_of_attempt(store: Store, run: str, attempt: str) -> StepName | None:
    """The step that an attempt of this run saved; None if it is not found.

    The ids of attempts and the numbers of steps both grow with time, so a few listings find the step in a timeline. An
    attempt of a process whose clock was wrong may not be found.
    """
    for number in reversed(timeline.numbers(store, run)):
        steps = list(timeline.steps(store, run, number))
        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            attempts = timeline.attempts(store, run, number, steps[middle])
            if not attempts:  # a removed step, of which only the tombstone is left
                document = commit.find_commit(store, names.commit(run, number, steps[middle]))
                attempts = [document.attempt] if document is not None and document.attempt else []
            if attempt in attempts:
                return StepName(number, steps[middle])
            if attempts and attempts[0] > attempt:
                high = middle
            else:
                low = middle + 1
    return None


def require_exists(store: Store, run: str, base: Base, *, published_by: str = "") -> None:
    """Raise `NotFoundError` if the step is removed or being removed.

    The caller must have written its lease before the call. With `published_by`, the tag of a published version, a step
    that only policies would remove is accepted while the tag is there. A collector that works now spares it, unless the
    tag is deleted meanwhile. So the caller must verify what it reads, and nothing may depend on the step.
    """
    at = (run, base.timeline, base.step)
    pending = at in pending_deletes(store)
    if pending and tag_records.keeps_published(store, published_by, run, base):
        pending = at in pending_deletes(store, but_policies=True)
    if pending or is_removed(store, run, base):
        raise removed(run, base.step)


def is_removed(store: Store, run: str, base: Base) -> bool:
    """Whether the step has no COMMIT, or its COMMIT is a tombstone. Collections delete old tombstones."""
    document = commit.find_commit(store, names.commit(run, base.timeline, base.step))
    return document is None or document.tombstone


def has_tombstone(store: Store, run: str, number: int, at: int) -> bool:
    """Whether a collection has just removed the step. A missing or unreadable COMMIT does not count."""
    try:
        document = commit.find_commit(store, names.commit(run, number, at))
    except (CorruptionError, UnsupportedError):
        return False
    return document is not None and document.tombstone


def is_committed(store: Store, run: str, base: Base) -> bool:
    """Whether COMMIT names this attempt. Unlike `is_step`, this function never writes COMMIT."""
    document = commit.find_commit(store, names.commit(run, base.timeline, base.step))
    return document is not None and document.commits(base.attempt)


def removed(run: str, step: int) -> NotFoundError:
    """The error of a reader that requests a step that retention removes."""
    return NotFoundError(f"step {step} of run {run} is being removed by retention", hint="restore a later step")


def pending_deletes(store: Store, *, but_policies: bool = False) -> set[tuple[str, int, int]]:
    """(run, timeline, step) of the steps that collectors are about to remove. `but_policies`: not because of a policy."""
    steps: set[tuple[str, int, int]] = set()
    for info in store.list(names.GC):
        with suppress(NotFoundError):  # a collector deletes its record when it has finished
            record = read(store, info.key, PendingDelete)
            if record.policy is None or not but_policies:
                steps |= {(s.run, s.timeline, s.step) for s in record.steps}
    return steps
