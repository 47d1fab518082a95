"""The commit protocol: how an attempt becomes a step. First the decision, then COMMIT; each object is written once.

Invariant: COMMIT names an attempt only if that attempt's decision is "commit". A decision "commit" is written only
when every rank's manifest is stored and sound, no newer timeline is open, and the writer's lease is alive. Once the
decision is written the step is complete: any process may write COMMIT, and writing it twice changes nothing.
Failure behaviour: `ConflictError` names the winner or the new owner; `TransientError` when the lease ran out or a
collector aborted the attempt; `DeadlineError` names the missing ranks. Each of these leaves the step absent or
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Commit, Decision, Timeline, encode, read
from headrace.checkpoint.format.manifest import Manifest
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
"""A rank that waited leaves the decision to the last rank for so long, multiplied by its own rank plus one."""
_REASON_CHARACTERS = 500
Gone = Callable[[Sequence[int]], str]
"""Which of these ranks can never come, in words; "" when none is known to be."""

_before_decision = declare("ckpt.before-decision", "all manifests are checked; no decision: the step is invisible")
_decision_written = declare(
    "ckpt.decision-written", "the decision is commit, COMMIT is absent: complete, any process finishes it"
)
_commit_written = declare("ckpt.commit-written", "COMMIT is there, the lease too: committed")


class FinalError(TransientError):
    """This attempt cannot become the step any more, whatever the store does later; another save can."""


class LateError(FinalError, DeadlineError):
    """Other ranks did not come."""

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


@dataclass(frozen=True, slots=True)
class View:
    """What a saver sees. `manifests`: ranks whose manifest is there; `newer`: a timeline that took over;
    `same_process`: opened by the process that opened the attempt's."""

    manifests: frozenset[int] = frozenset()
    decision: Decision | None = None
    commit: Commit | None = None
    newer: Timeline | None = None
    lease_alive: bool = True
    same_process: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The step is this attempt."""


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """The decision is written: make the step visible."""


@dataclass(frozen=True, slots=True)
class WriteDecision:
    """All manifests are stored: write the decision."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Other ranks have not come yet."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """This attempt cannot become the step any more."""

    error: HeadraceError


Action = Committed | WriteCommit | WriteDecision | Wait | Stop


def decide(attempt: Attempt, view: View) -> Action:
    """The one thing to do next. Pure."""
    if view.commit is not None:
        mine = view.commit.attempt == attempt.id and not view.commit.tombstone
        return Committed() if mine else Stop(_taken(attempt, view.commit))
    if view.decision is not None:
        return WriteCommit() if view.decision.outcome == "commit" else Stop(_aborted(attempt, view.decision))
    if view.newer is not None:
        return Stop(timeline.superseded(attempt.run, attempt.timeline, view.newer, view.same_process))
    if not view.lease_alive:
        return Stop(leases.lost(attempt.id))
    missing = tuple(rank for rank in range(attempt.world_size) if rank not in view.manifests)
    return Wait(missing) if missing else WriteDecision()


def look(store: Store, attempt: Attempt, lease_alive: bool) -> View:
    """What the store holds of this attempt and its step."""
    commit = find_commit(store, attempt.commit_key)
    if commit is not None:
        return View(commit=commit)
    ranks, decision = set(), None
    for info in store.list(names.attempt(attempt.run, attempt.timeline, attempt.step, attempt.id)):
        parsed = names.parse_step_key(info.key)
        if parsed is not None and parsed.kind == "manifest":
            ranks.add(parsed.rank)
        elif parsed is not None:
            decision = read(store, info.key, Decision)
    newer = timeline.newest_after(store, attempt.run, attempt.timeline) if decision is None else None
    same = newer is not None and timeline.is_of_same_process(store, attempt.run, attempt.timeline, newer)
    return View(frozenset(ranks), decision, None, newer, lease_alive, same)


def none_known(ranks: Sequence[int]) -> str:
    """Nothing is known of other ranks."""
    return ""


def finish(
    store: Store,
    attempt: Attempt,
    lease: LeaseKeeper,
    *,
    timeout: float,
    rank: int = 0,
    gone: Gone = none_known,
    clock: Clock = SYSTEM_CLOCK,
) -> Commit:
    """Take the attempt from "my manifest is written" to committed; wait at most `timeout` seconds for other ranks.

    A rank that finds all manifests at its first look (the last rank does) checks them and writes the decision. The other
    ranks wait for it, because each of them would have to read all manifests. If no decision comes, they take over in turn.

    When a missing rank is `gone`, the attempt is aborted, for every rank that waits.

    A step that retention has removed meanwhile counts as committed.
    """
    deadline, pause, lost = clock.monotonic() + timeout, _POLL, ""
    waited, turn = False, None
    while True:
        view = look(store, attempt, lease.alive())
        match decide(attempt, view):
            case Committed():
                assert view.commit is not None
                return view.commit
            case Stop(error):
                if view.commit is not None and view.commit.attempt == attempt.id:  # a tombstone now
                    return view.commit
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
                before, lost = lost, gone(missing)
                if lost and lost == before:
                    abort(store, attempt, lost)
                if lost:
                    continue  # what is gone may have stored its manifest as the last thing it did: look once more
                if clock.monotonic() >= deadline:
                    raise _late(attempt, missing, timeout)
                waited, pause = True, _sleep(clock, pause, deadline)


def _sleep(clock: Clock, pause: float, until: float) -> float:
    """Wait a little before looking again; the next pause."""
    clock.sleep(min(pause, max(until - clock.monotonic(), 0)))
    return min(pause * 1.5, _POLL_MAX)


def write_decision(store: Store, attempt: Attempt, lease: LeaseKeeper) -> None:
    """Check every rank's manifest and write the decision. If another rank was faster, its decision counts."""
    digests = _sound_manifests(store, attempt)
    _before_decision()
    lease.require_alive()
    document = Decision(attempt=attempt.id, outcome="commit", manifests=tuple(d.hex() for d in digests))
    store.put_if_absent(attempt.decision_key, encode(document))
    _decision_written()


def abort(store: Store, attempt: Attempt, reason: str) -> None:
    """Decide that the attempt never becomes a step, unless it is decided already."""
    document = Decision(attempt=attempt.id, outcome="abort", reason=reason[:_REASON_CHARACTERS])
    store.put_if_absent(attempt.decision_key, encode(document))


def abort_without(store: Store, attempt: Attempt, gone: Gone) -> None:
    """Abort if the attempt still waits for a rank that is `gone`."""
    action = decide(attempt, look(store, attempt, lease_alive=True))
    if isinstance(action, Wait) and (lost := gone(action.missing)):
        abort(store, attempt, lost)


def write_commit(store: Store, attempt: Attempt, clock: Clock = SYSTEM_CLOCK) -> None:
    """Make the step visible. If another process did so first, its COMMIT counts."""
    document = Commit(step=attempt.step, attempt=attempt.id, committed=clock.time())
    store.put_if_absent(attempt.commit_key, encode(document))
    _commit_written()


def find_commit(store: Store, key: str) -> Commit | None:
    """The step's COMMIT, or None while there is none."""
    try:
        found = read(store, key, Commit)
    except NotFoundError:
        return None
    at = names.parse_step_key(key)
    if at is None or at.step != found.step:
        raise CorruptionError(f"{key} is the COMMIT of step {found.step}", hint="run `headrace ckpt check`")
    return found


def find_decision(store: Store, key: str) -> Decision | None:
    """The attempt's decision, or None while it has none."""
    try:
        return read(store, key, Decision)
    except NotFoundError:
        return None


def recognise(store: Store, attempt: Attempt) -> Commit | None:
    """COMMIT of a step whose saver may have died, written now if the decision is "commit"; None when it is not complete."""
    commit = find_commit(store, attempt.commit_key)
    if commit is None:
        decision = find_decision(store, attempt.decision_key)
        if decision is None or decision.outcome != "commit":
            return None
        write_commit(store, attempt)
        commit = find_commit(store, attempt.commit_key)
    return commit


def _sound_manifests(store: Store, attempt: Attempt) -> list[bytes]:
    digests: list[bytes] = []

    def checked() -> Iterator[Manifest]:
        first = None
        for rank in range(attempt.world_size):
            key = attempt.manifest_key(rank)
            data = store.get(key, max_bytes=manifests.MAX_BYTES)
            found = manifests.decode(data, key)
            first = first or found
            _check_agrees(attempt, first, found)
            digests.append(digest(data))
            yield found

    what = manifests.check_shards(checked())
    if what is not None:
        raise MismatchError(f"{attempt}: {what}", hint="every rank that holds a part of a tensor must save it, once")
    return digests


def _check_agrees(attempt: Attempt, first: Manifest, other: Manifest) -> None:
    if other.world_size != attempt.world_size or other.replicas != first.replicas:
        raise MismatchError(
            f"{attempt}: rank {other.rank} does not hold the same modules and optimizers as rank {first.rank}",
            hint="with several ranks, modules, optimizers and schedulers must have the same tensors on every rank",
        )


def _taken(attempt: Attempt, commit: Commit) -> ConflictError:
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
        f"{attempt}: attempt {attempt.id} was aborted: {decision.reason or 'its lease was over'}", hint="save again"
    )


def _late(attempt: Attempt, missing: Sequence[int], timeout: float) -> LateError:
    ranks = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return LateError(
        f"{attempt}: no manifest of rank {ranks} within {timeout:g} s", hint="look at the log of that rank"
    )
