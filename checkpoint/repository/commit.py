"""The commit protocol, by which an attempt becomes a step: first the decision, then COMMIT. Each is written once.

Invariant: COMMIT names an attempt only if that attempt's decision is "commit". A decision "commit" is written only if
every rank's manifest is stored and valid, no newer timeline is open, and the writer's lease is alive. After the
decision is written, the step is complete. Any process may then write COMMIT, and writing it twice changes nothing.
Failure behaviour: `ConflictError` names the attempt that was committed instead, or the new owner of the run.
`TransientError` is raised when the lease ran out or the attempt was aborted. `DeadlineError` names the missing ranks.
Each of these leaves the step absent or complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names, own_digest
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Commit, Decision, Timeline, encode, read
from headrace.checkpoint.format.group import Tally
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.format.metadata import to_json
from headrace.checkpoint.repository import lease as leases
from headrace.checkpoint.repository import timeline
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import (
    ConflictError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    MismatchError,
    NotFoundError,
    TransientError,
)
from headrace.dataio.store.base import Store

_POLL, _POLL_MAX = 0.02, 1.0
_TURN_SECONDS = 2.0
"""A rank that waited gives the last rank this many seconds, times its own rank plus one, to write the decision."""
_REASON_CHARACTERS = 500
FailedRanks = Callable[[Sequence[int]], str]
"""Describes which of the given ranks can never store a manifest; "" if none is known to have ended."""

_before_decision = declare("ckpt.before-decision", "all manifests are checked; no decision: the step is invisible")
_decision_written = declare(
    "ckpt.decision-written", "the decision is commit, COMMIT is absent: complete, any process finishes it"
)
_commit_written = declare("ckpt.commit-written", "COMMIT is written and the lease still exists: committed")


class FinalError(TransientError):
    """This attempt can never become the step, even if the store recovers. Another save can."""


class LateError(FinalError, DeadlineError):
    """Other ranks did not store their manifests in time."""

    code = DeadlineError.code


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to save one step."""

    run: str
    timeline: int
    step: int
    id: str
    world_size: int

    def __str__(self) -> str:
        return f"step {self.step} of run {self.run}"

    @property
    def commit_key(self) -> str:
        return names.commit(self.run, self.timeline, self.step)

    @property
    def decision_key(self) -> str:
        return names.decision(self.run, self.timeline, self.step, self.id)

    def manifest_key(self, rank: int) -> str:
        return names.manifest(self.run, self.timeline, self.step, self.id, rank)

    def group_key(self, index: int) -> str:
        return names.group(self.run, self.timeline, self.step, self.id, index)


@dataclass(frozen=True, slots=True)
class View:
    """The objects of an attempt and its step that a saver found in the store.

    `manifests`: ranks whose manifest is stored. `newer`: a newer timeline that took over the run. `same_process`: the
    process that opened the attempt's timeline opened the newer one, too.
    """

    manifests: frozenset[int] = frozenset()
    decision: Decision | None = None
    commit: Commit | None = None
    newer: Timeline | None = None
    lease_alive: bool = True
    same_process: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """COMMIT names this attempt."""


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """The decision is written: make the step visible."""


@dataclass(frozen=True, slots=True)
class WriteDecision:
    """All manifests are stored: write the decision."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Manifests of other ranks are missing."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """This attempt can never become the step."""

    error: HeadraceError


Action = Committed | WriteCommit | WriteDecision | Wait | Stop


def decide(attempt: Attempt, view: View) -> Action:
    """Return the next action for the attempt. This is a pure function."""
    if view.commit is not None:
        return Committed() if view.commit.commits(attempt.id) else Stop(_lost_to(attempt, view.commit))
    if view.decision is not None:
        return WriteCommit() if view.decision.outcome == "commit" else Stop(_aborted(attempt, view.decision))
    if view.newer is not None:
        return Stop(timeline.superseded(attempt.run, attempt.timeline, view.newer, view.same_process))
    if not view.lease_alive:
        return Stop(leases.lost(attempt.id))
    missing = tuple(rank for rank in range(attempt.world_size) if rank not in view.manifests)
    return Wait(missing) if missing else WriteDecision()


def look(store: Store, attempt: Attempt, lease_alive: bool) -> View:
    """Read the objects of this attempt and its step from the store."""
    commit = find_commit(store, attempt.commit_key)
    if commit is not None:
        return View(commit=commit)
    ranks, decision = set(), None
    for info in store.list(names.attempt(attempt.run, attempt.timeline, attempt.step, attempt.id)):
        parsed = names.parse_step_key(info.key)
        if parsed is not None and parsed.kind == "manifest":
            ranks.add(parsed.rank)
        elif parsed is not None and parsed.kind == "fate":
            decision = read(store, info.key, Decision)
    newest = newer_timeline(store, attempt) if decision is None else View()
    return replace(newest, manifests=frozenset(ranks), decision=decision, lease_alive=lease_alive)


def newer_timeline(store: Store, attempt: Attempt) -> View:
    """Return a view with only the newer timeline that took over the run, if there is one."""
    newer = timeline.newest_after(store, attempt.run, attempt.timeline)
    same = newer is not None and timeline.is_of_same_process(store, attempt.run, attempt.timeline, newer)
    return View(newer=newer, same_process=same)


def no_failed_ranks(ranks: Sequence[int]) -> str:
    """A `FailedRanks` for callers that cannot observe other ranks."""
    return ""


def finish(
    store: Store,
    attempt: Attempt,
    lease: LeaseKeeper,
    *,
    timeout: float,
    rank: int = 0,
    failed_ranks: FailedRanks = no_failed_ranks,
    clock: Clock = SYSTEM_CLOCK,
) -> Commit:
    """Commit the attempt once this rank's manifest is written. Waits at most `timeout` seconds for other ranks.

    A rank that finds all manifests the first time that it reads the store checks them and writes the decision. The last
    rank always does. The other ranks wait for that decision, so that not every rank reads all manifests. If no decision
    appears, they take over one after another, in the order of their ranks.

    If `failed_ranks` reports a missing rank twice in a row, this rank aborts the attempt for all ranks. If retention
    has already removed the committed step, the step counts as committed.
    """
    deadline, pause, lost = clock.monotonic() + timeout, _POLL, ""
    waited, turn = False, None
    while True:
        view = look(store, attempt, lease.alive())
        if view.commit is not None and view.commit.attempt == attempt.id:  # it may be a tombstone by now
            return view.commit
        match decide(attempt, view):
            case Stop(error):
                raise error
            case WriteDecision():
                if waited and turn is None:
                    pause, turn = _POLL, min(clock.monotonic() + _TURN_SECONDS * (1 + rank), deadline)
                if turn is None or clock.monotonic() >= turn:
                    write_decision(store, attempt, lease)
                else:
                    pause = _sleep(clock, pause, turn)
            case WriteCommit():
                write_commit(store, attempt, clock)
            case Wait(missing):
                before, lost = lost, failed_ranks(missing)
                if lost and lost == before:
                    abort(store, attempt, lost)
                if lost:
                    continue  # the ended rank may have stored its manifest just before it ended: read the store again
                if clock.monotonic() >= deadline:
                    raise late(attempt, missing, timeout)
                waited, pause = True, _sleep(clock, pause, deadline)


def _sleep(clock: Clock, pause: float, until: float) -> float:
    """Sleep before the next poll, and return the next pause."""
    clock.sleep(min(pause, max(until - clock.monotonic(), 0)))
    return min(pause * 1.5, _POLL_MAX)


def write_decision(store: Store, attempt: Attempt, lease: LeaseKeeper) -> None:
    """Check every rank's manifest and write the decision. If another rank wrote it first, that decision counts."""
    digests, tally = _checked_manifests(store, attempt)
    document = Decision(
        attempt=attempt.id,
        outcome="commit",
        manifests=tuple(each.hex() for each in digests),
        totals=tally.totals(),
        metadata=to_json(tally.metadata),
        description=tally.description,
    )
    put_decision(store, attempt, lease, document)


def put_decision(store: Store, attempt: Attempt, lease: LeaseKeeper, document: Decision) -> None:
    """Write a decision "commit" for an attempt whose manifests were checked."""
    _before_decision()
    lease.require_alive()
    store.put_if_absent(attempt.decision_key, encode(document))
    _decision_written()


def abort(store: Store, attempt: Attempt, reason: str) -> None:
    """Write the decision "abort", unless the attempt has a decision."""
    document = Decision(attempt=attempt.id, outcome="abort", reason=reason[:_REASON_CHARACTERS])
    store.put_if_absent(attempt.decision_key, encode(document))


def abort_without(store: Store, attempt: Attempt, failed_ranks: FailedRanks) -> None:
    """Abort the attempt if a rank whose manifest is missing is one that `failed_ranks` reports."""
    action = decide(attempt, look(store, attempt, lease_alive=True))
    if isinstance(action, Wait) and (lost := failed_ranks(action.missing)):
        abort(store, attempt, lost)


def write_commit(store: Store, attempt: Attempt, clock: Clock = SYSTEM_CLOCK) -> None:
    """Make the step visible. If another process wrote COMMIT first, that one counts."""
    document = Commit(step=attempt.step, attempt=attempt.id, committed=clock.time())
    is_first = store.put_if_absent(attempt.commit_key, encode(document))
    _commit_written()
    if is_first:
        timeline.record_newest(store, attempt.run, attempt.timeline, attempt.step)


def find_commit(store: Store, key: str) -> Commit | None:
    """The step's COMMIT, which may be a tombstone; None if there is none."""
    try:
        document = read(store, key, Commit)
    except NotFoundError:
        return None
    at = names.parse_step_key(key)
    if at is None or at.step != document.step:
        raise CorruptionError(f"{key} is the COMMIT of step {document.step}", hint="run `headrace ckpt check`")
    return document


def find_decision(store: Store, key: str) -> Decision | None:
    """The attempt's decision; None if there is none."""
    try:
        return read(store, key, Decision)
    except NotFoundError:
        return None


def recognise(store: Store, attempt: Attempt) -> Commit | None:
    """The COMMIT of a step whose saver may have died; None if the step is not complete.

    If the decision is "commit" and COMMIT is missing, this function writes COMMIT.
    """
    commit = find_commit(store, attempt.commit_key)
    if commit is None:
        decision = find_decision(store, attempt.decision_key)
        if decision is None or decision.outcome != "commit":
            return None
        write_commit(store, attempt)
        commit = find_commit(store, attempt.commit_key)
    return commit


def _checked_manifests(store: Store, attempt: Attempt) -> tuple[list[bytes], Tally]:
    digests, tally = list[bytes](), Tally(attempt.id, attempt.world_size)

    def checked() -> Iterator[Manifest]:
        first = None
        for rank in range(attempt.world_size):
            key = attempt.manifest_key(rank)
            data = own_digest.fetch(store, key, max_bytes=manifests.MAX_BYTES)
            manifest = manifests.decode(data, key)
            first = first or manifest
            _check_agrees(attempt, first, manifest)
            digests.append(digest(data))
            tally.add(manifest)
            yield manifest

    mismatch = manifests.check_shards(checked())
    if mismatch is not None:
        raise MismatchError(
            f"{attempt}: {mismatch}", hint="every rank that holds a part of a tensor must save it, once"
        )
    return digests, tally


def _check_agrees(attempt: Attempt, first: Manifest, other: Manifest) -> None:
    if other.world_size != attempt.world_size or other.replicas != first.replicas:
        raise different(attempt, other.rank, first.rank)


def different(attempt: Attempt, rank: int, first: int) -> MismatchError:
    """The error of an attempt whose ranks planned their saves from different states."""
    return MismatchError(
        f"{attempt}: rank {rank} does not hold the same modules and optimizers as rank {first}",
        hint="with several ranks, modules, optimizers and schedulers must have the same tensors on every rank",
    )


def _lost_to(attempt: Attempt, commit: Commit) -> ConflictError:
    if commit.tombstone:
        return ConflictError(
            f"{attempt} was removed by retention", hint="a removed step never comes back; save a later one"
        )
    return ConflictError(
        f"{attempt}: attempt {commit.attempt} won, attempt {attempt.id} did not",
        hint="two writers saved the same step; check that only one trainer uses this run",
    )


def _aborted(attempt: Attempt, decision: Decision) -> FinalError:
    return FinalError(
        f"{attempt}: attempt {attempt.id} was aborted: {decision.reason or 'its lease had expired'}", hint="save again"
    )


def late(attempt: Attempt, missing: Sequence[int], timeout: float) -> LateError:
    """The error of a rank that waited `timeout` seconds for the manifests of other ranks."""
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return LateError(f"{attempt}: no manifest of rank {ranks} within {timeout:g} s", hint="see the log of that rank")
