"""The commit of a job with more than `names.GROUP_RANKS` ranks: groups, then the decision, then COMMIT.

The first rank of each group is its *head*. Only heads hold the attempt's lease.

1. A head lists the manifests of its group repeatedly and reads the new ones. When it has read all, it writes the group.
2. A head that then finds all groups compares them with the plan. It writes the decision, and then COMMIT.
3. All other ranks read COMMIT repeatedly, at growing intervals.

So a rank makes a few requests, and a head makes about one for each rank of its group. A head may die. A rank that has
waited for some time therefore checks which objects are missing. If all manifests of its group are stored at two checks
and the group is not, it writes the group. If all groups are stored and the decision is not, it writes the decision. The
ranks check at different times, so few of them do this work.

A rank without a lease may reference a base that a collection removes at the same time. So the process that writes the
decision first checks, after it has written its own lease, that all referenced bases exist.

Invariant: as for `headrace.checkpoint.repository.commit`. Groups and the decision are written once, and their keys name
the attempt. Two processes write the same group, so a late or a repeated request changes nothing
(`tests/support/late_writes_model.py`).
Failure behaviour: as for `commit.finish`. A base that no longer exists, and a newer timeline, abort the attempt for all
ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from headrace.checkpoint.format import group as groups
from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names, own_digest
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base, Commit, Decision
from headrace.checkpoint.format.group import Group, Summary
from headrace.checkpoint.format.metadata import to_json
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import (
    Attempt,
    FailedRanks,
    FinalError,
    LateError,
    Stop,
    View,
    WriteCommit,
)
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.dataio.core.clock import SYSTEM_CLOCK, Clock
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import ConflictError, CorruptionError, HeadraceError, MismatchError, NotFoundError
from headrace.dataio.store.base import Store

_AT_ONCE = 16
"""The number of objects that a head reads concurrently."""
_GROUP, _DECISION = "group", "decision"
_POLL, _HEAD_POLL_MAX = 0.02, 0.5
"""Seconds between two listings of a head whose group is not complete: the first pause and the longest."""
_WAIT, _WAIT_MAX = 1.5, 5.0
"""Seconds between two reads of COMMIT: the first pause and the longest."""
_GROWTH = 2
"""The factor between one pause and the next."""
_TURN_SECONDS = 10.0
"""Seconds until a rank first checks for missing objects, times one plus its position in its group.

A head uses the number of its group instead of its position.
"""
_CHECK_SECONDS, _SECOND_CHECK_SECONDS = 60.0, 5.0
"""Seconds until the rank checks again: if no object was overdue, and if one was."""
_LOST_SECONDS = 2.0
"""Seconds between two checks for ranks that ended without a manifest."""
_DECISION_EVERY, _HEAD_READS_EVERY = 3, 8
"""A rank reads the decision, too, at every third poll and at the last one, because the attempt may be aborted.

A head whose group is not complete reads COMMIT and the decision only at every eighth poll.
"""

_group_written = declare("ckpt.group-written", "a group is written; the decision is not: invisible")


def is_head(rank: int, world_size: int) -> bool:
    """Whether the rank holds a lease from the start: the head of a group, or any rank of a small job."""
    return not names.is_grouped(world_size) or rank % names.GROUP_RANKS == 0


class LateLease(contextlib.AbstractContextManager["LateLease"]):
    """A lease that is written when it is first needed: at once for a head, and perhaps never for another rank."""

    def __init__(self, keeper: LeaseKeeper, *, now: bool) -> None:
        self._keeper, self._now = keeper, now
        self._stack = contextlib.ExitStack()
        self.written = False

    def __enter__(self) -> LateLease:
        if self._now:
            self.require()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def require(self) -> LeaseKeeper:
        """Write the lease if it is not written yet, and return it."""
        if not self.written:
            self._stack.enter_context(self._keeper)
            self.written = True
        return self._keeper

    def alive(self) -> bool:
        """Whether the lease is valid. Also True before it is written: the rank does not depend on it then."""
        return not self.written or self._keeper.alive()

    def release(self) -> None:
        """Delete the lease, if it was written."""
        if self.written:
            self._keeper.release()


def existing(store: Store, attempt: Attempt) -> View:
    """Read the attempt's COMMIT and, if there is none, its decision."""
    document = commit.find_commit(store, attempt.commit_key)
    return View(commit=document, decision=None if document else commit.find_decision(store, attempt.decision_key))


def finish(
    store: Store,
    attempt: Attempt,
    lease: LateLease,
    *,
    timeout: float,
    rank: int = 0,
    failed_ranks: FailedRanks = commit.no_failed_ranks,
    clock: Clock = SYSTEM_CLOCK,
) -> Commit:
    """Commit the attempt once this rank's manifest is written, as `commit.finish` does, in a job of any size."""
    if names.is_grouped(attempt.world_size):
        return _Finishing(store, attempt, lease, timeout, rank, failed_ranks, clock).run()
    return commit.finish(
        store, attempt, lease.require(), timeout=timeout, rank=rank, failed_ranks=failed_ranks, clock=clock
    )


def finish_alone(store: Store, attempt: Attempt, lease: LeaseKeeper) -> Commit:
    """Commit an attempt whose manifests are all stored, without its ranks."""
    if not names.is_grouped(attempt.world_size):
        return commit.finish(store, attempt, lease, timeout=0.0)
    if (decided := existing(store, attempt)).commit is None and decided.decision is None:
        for index in range(names.group_count(attempt.world_size)):
            reader = GroupReader(store, attempt, index)
            if missing := reader.read():
                raise commit.late(attempt, missing, 0.0)
            reader.write()
        write_decision(store, attempt, lease)
    return commit.finish(store, attempt, lease, timeout=0.0)


def decide_copy(store: Store, attempt: Attempt, lease: LeaseKeeper, *, grouped: bool) -> None:
    """Write the decision of a copied step, whose manifests are all stored. `grouped`: whether the source has groups."""
    if not grouped:
        commit.write_decision(store, attempt, lease)
        return
    for index in range(names.group_count(attempt.world_size)):
        reader = GroupReader(store, attempt, index)
        if missing := reader.read():
            raise commit.late(attempt, missing, 0.0)
        reader.write()
    write_decision(store, attempt, lease, is_copy=True)


class GroupReader:
    """Reads the manifests of one group, each once, and writes the group."""

    def __init__(self, store: Store, attempt: Attempt, index: int) -> None:
        self._store, self._attempt, self.index = store, attempt, index
        self.ranks = names.ranks_of_group(index, attempt.world_size)
        self._summaries: dict[int, Summary] = {}

    @property
    def key(self) -> str:
        return self._attempt.group_key(self.index)

    def missing(self) -> tuple[int, ...]:
        """List the group's manifests, and return the ranks whose manifest is not stored."""
        listed = self._listed()
        return tuple(rank for rank in self.ranks if rank not in listed)

    def read(self) -> tuple[int, ...]:
        """Read the stored manifests that were not read before, and return the ranks whose manifest is not stored."""
        listed = self._listed()
        new = sorted(listed - self._summaries.keys())
        if new:
            with ThreadPoolExecutor(min(_AT_ONCE, len(new)), thread_name_prefix="headrace-group") as pool:
                for rank, summary in zip(new, pool.map(self._summary, new), strict=True):
                    self._summaries[rank] = summary
        return tuple(rank for rank in self.ranks if rank not in self._summaries)

    def write(self) -> None:
        """Write the group, after all its manifests were read."""
        summaries = [self._summaries[rank] for rank in self.ranks]
        _check_plan(self._attempt, summaries, self.ranks)
        a = self._attempt
        self._store.put_if_absent(self.key, groups.encode(groups.join(a.id, self.index, a.world_size, summaries)))
        _group_written()

    def _listed(self) -> set[int]:
        a, stored_ranks = self._attempt, set()
        for info in self._store.list(names.manifests_of(a.run, a.timeline, a.step, a.id, self.ranks)):
            at = names.parse_step_key(info.key)
            if at is not None and at.kind == "manifest" and at.rank in self.ranks:
                stored_ranks.add(at.rank)
        return stored_ranks

    def _summary(self, rank: int) -> Summary:
        key = self._attempt.manifest_key(rank)
        data = own_digest.fetch(self._store, key, max_bytes=manifests.MAX_BYTES)
        manifest = manifests.decode(data, key)
        if manifest.world_size != self._attempt.world_size:
            raise MismatchError(f"{self._attempt}: rank {rank} belongs to a job of {manifest.world_size} ranks")
        return groups.summarize(manifest, data)


def missing_groups(store: Store, attempt: Attempt) -> list[int]:
    """List the attempt's groups, and return the numbers of those that are not stored."""
    keys = store.list(names.groups(attempt.run, attempt.timeline, attempt.step, attempt.id))
    listed = {at.rank for info in keys if (at := names.parse_step_key(info.key)) is not None and at.kind == "group"}
    return [index for index in range(names.group_count(attempt.world_size)) if index not in listed]


def write_decision(store: Store, attempt: Attempt, lease: LeaseKeeper, *, is_copy: bool = False) -> None:
    """Check all groups and write the decision. If another process wrote it first, that decision counts.

    With `is_copy`, a newer timeline does not abort the attempt (`docs/design/0045-copy.md`). The lease was written before
    this call, so no collection removes the bases after they are found here.
    """

    def read(index: int) -> tuple[bytes, Group]:
        key = attempt.group_key(index)
        data = own_digest.fetch(store, key, max_bytes=groups.MAX_BYTES)
        return digest(data), groups.decode(data, key)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="headrace-groups") as pool:
        groups_read = list(pool.map(read, range(names.group_count(attempt.world_size))))
    _check_groups(attempt, [group for _, group in groups_read])
    _require_bases(store, attempt, {base for _, group in groups_read for base in group.bases})
    newer = View() if is_copy else commit.newer_timeline(store, attempt)
    if isinstance(stop := commit.decide(attempt, newer), Stop):
        raise _aborted(store, attempt, stop.error)
    tally = groups.Tally(attempt.id, attempt.world_size)
    for _, group in groups_read:
        tally.add(group)
    document = Decision(
        version=Decision.newest,
        attempt=attempt.id,
        outcome="commit",
        groups=tuple(each.hex() for each, _ in groups_read),
        world_size=attempt.world_size,
        group_ranks=names.GROUP_RANKS,
        totals=tally.totals(),
        metadata=to_json(tally.metadata),
        description=tally.description,
    )
    commit.put_decision(store, attempt, lease, document)


def _check_plan(attempt: Attempt, summaries: Sequence[Summary], ranks: range) -> None:
    other = next((rank for rank, each in zip(ranks, summaries, strict=True) if each.plan != summaries[0].plan), None)
    if other is not None:
        raise commit.different(attempt, other, ranks[0])


def _check_groups(attempt: Attempt, all_groups: Sequence[Group]) -> None:
    for index, group in enumerate(all_groups):
        if group.world_size != attempt.world_size or group.plan != all_groups[0].plan:
            raise commit.different(attempt, group.first, 0)
        if group.ranks != names.ranks_of_group(index, attempt.world_size):
            raise CorruptionError(f"{attempt.group_key(index)} does not hold the ranks of its group")
    shares = [member.share for group in all_groups for member in group.members]
    if groups.plan_digest(shares) != all_groups[0].plan:
        raise MismatchError(
            f"{attempt}: the manifests do not hold what the ranks planned to save",
            hint="please report this as a bug of Headrace; nothing was committed",
        )


def _require_bases(store: Store, attempt: Attempt, bases: set[Base]) -> None:
    """Abort the attempt if a step that a manifest references is removed or being removed."""
    for base in sorted(bases, key=lambda each: (each.run, each.timeline, each.step, each.attempt)):
        run = base.run or attempt.run
        try:
            repository.require_exists(store, run, base)
        except NotFoundError as error:
            raise _aborted(store, attempt, error) from None


def _aborted(store: Store, attempt: Attempt, error: HeadraceError) -> HeadraceError:
    """Abort the attempt for all ranks, and return the error of this one."""
    commit.abort(store, attempt, f"{error}")
    if isinstance(error, ConflictError):
        return error
    return FinalError(f"{attempt}: attempt {attempt.id} was aborted: {error}", hint="save again")


@dataclass(slots=True)
class _Finishing:
    """One rank's part in the commit: it waits for COMMIT, and writes overdue objects of ranks that may have died."""

    store: Store
    attempt: Attempt
    lease: LateLease
    timeout: float
    rank: int
    failed_ranks: FailedRanks
    clock: Clock
    _reader: GroupReader = field(init=False)
    _leading: bool = field(init=False)
    _deadline: float = field(init=False)
    _turn: float = field(init=False)
    _pause: float = field(init=False)
    _missing: tuple[int, ...] = ()
    _polls: int = 0
    _overdue: str = ""
    _lost: str = ""
    _lost_checked: float = 0.0

    def run(self) -> Commit:
        index, place = divmod(self.rank, names.GROUP_RANKS)
        now = self.clock.monotonic()
        self._reader, self._leading = GroupReader(self.store, self.attempt, index), place == 0
        self._deadline, self._turn = now + self.timeout, now + _TURN_SECONDS * (1 + (place or index))
        self._pause = _POLL if self._leading else _WAIT
        if not self._leading:
            self._sleep(_WAIT_MAX)
        while True:
            if self._leading and self._lead():
                continue
            if (committed := self._look()) is not None:
                return committed
            if self.clock.monotonic() >= self._deadline:
                raise self._late_error()
            if self._abort_without_failed() or self._take_turn():
                continue
            self._sleep(_HEAD_POLL_MAX if self._leading else _WAIT_MAX)

    def _sleep(self, longest: float) -> None:
        self.clock.sleep(min(self._pause, max(self._deadline - self.clock.monotonic(), 0)))
        self._pause = min(self._pause * _GROWTH, longest)

    def _lead(self) -> bool:
        """Read the manifests of the group. If all are stored, write the group. If all groups are, write the decision.

        Return whether the group was written.
        """
        self._missing = self._reader.read()
        if self._missing:
            return False
        self._write_group()
        self._leading, self._pause = False, _WAIT
        return True

    def _write_group(self) -> None:
        self._reader.write()
        if not missing_groups(self.store, self.attempt):
            self._decide()

    def _decide(self) -> None:
        write_decision(self.store, self.attempt, self.lease.require())
        self._polls = -1  # the next poll reads the decision, too

    def _look(self) -> Commit | None:
        """Return COMMIT, or None if there is none. Raise an error if the attempt can no longer become the step."""
        self._polls += 1
        if self._leading and self._polls % _HEAD_READS_EVERY:
            return None
        with_decision = self._leading or self._polls % _DECISION_EVERY == 0 or self.clock.monotonic() >= self._deadline
        view = existing(self.store, self.attempt) if with_decision else self._commit_only()
        if self._leading and view.commit is None and view.decision is None:
            view = commit.newer_timeline(self.store, self.attempt)
        if view.commit is not None and view.commit.attempt == self.attempt.id:  # it may be a tombstone by now
            return view.commit
        match commit.decide(self.attempt, replace(view, lease_alive=self.lease.alive())):
            case Stop(error):
                raise _aborted(self.store, self.attempt, error) if view.newer is not None else error
            case WriteCommit():
                commit.write_commit(self.store, self.attempt, self.clock)
                return self._commit_only().commit
        return None

    def _commit_only(self) -> View:
        return View(commit=commit.find_commit(self.store, self.attempt.commit_key))

    def _take_turn(self) -> bool:
        """When it is this rank's turn, check for an overdue object. Write it if two checks in a row find it."""
        if self._leading or self.clock.monotonic() < self._turn:
            return False
        before, self._overdue = self._overdue, self._find_overdue()
        if self._overdue and self._overdue == before:
            self.lease.require()
            if self._overdue == _DECISION:
                self._decide()
                return True
            self._missing = self._reader.read()
            if not self._missing:
                self._write_group()
                return True
            self._overdue = (
                ""  # a collection removes the manifests of an aborted attempt; the next poll finds the abort
            )
        self._turn = self.clock.monotonic() + (_SECOND_CHECK_SECONDS if self._overdue else _CHECK_SECONDS)
        return False

    def _find_overdue(self) -> str:
        """Return the kind of object that is missing although it can be written now; "" for none."""
        if self.store.exists(self._reader.key):
            return "" if missing_groups(self.store, self.attempt) else _DECISION
        self._missing = self._reader.missing()
        return "" if self._missing else _GROUP

    def _abort_without_failed(self) -> bool:
        """Abort the attempt if two checks in a row report that a rank without a manifest has ended."""
        now = self.clock.monotonic()
        if now - self._lost_checked < _LOST_SECONDS or not self.failed_ranks(range(self.attempt.world_size)):
            return False
        self._lost_checked = now
        stored = commit.look(self.store, self.attempt, lease_alive=True).manifests
        lost = self.failed_ranks([rank for rank in range(self.attempt.world_size) if rank not in stored])
        if lost and lost == self._lost:
            commit.abort(self.store, self.attempt, lost)
            self._polls = -1
            return True
        self._lost = lost
        return False

    def _late_error(self) -> LateError:
        missing = self._missing or self._reader.missing()
        if missing:
            return commit.late(self.attempt, missing, self.timeout)
        return LateError(
            f"{self.attempt}: not committed within {self.timeout:g} s, although ranks"
            f" {self._reader.ranks[0]} to {self._reader.ranks[-1]} are ready",
            hint="see the logs of the other ranks",
        )
