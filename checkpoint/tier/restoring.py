"""Restores from the node's local tier, and commits steps that only the tier has.

- `NodeTier.near(store)` returns the store to read a step from. `NodeTier.find` finds the step, also while the store
  is unreachable.
- Before a restore, `send` and `finish` complete steps that were saved while the store was unreachable, or whose saver
  died.

Invariants: the sidecar names the tier's directory. Without a sidecar the store itself is read. A step that is restored
while the store is unreachable was committed and is complete in the node's tier and its buddy's. The ordinary commit
protocol decides about unfinished steps, under a lease that names the bases *before* they are checked. An attempt that
can no longer be committed is marked as over; this module deletes nothing from the tier.
Failure behaviour: a sidecar that does not answer counts as no tier. Errors of `send` and `finish` are logged; the next
restore tries again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.fetch import Step, open_step
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.tier import restoring
from headrace.checkpoint.tier.saving import keeps, mark_committed, open_shelf
from headrace.dataio.core.errors import (
    ConflictError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    NotFoundError,
    TransientError,
)
from headrace.dataio.core.files import file_lock
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.sidecar.connection import SidecarName
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.stores import FetchFromBuddy, TierReader, checked
from headrace.dataio.store.local_tier.tier import LocalTier

RECALL_SECONDS = 600.0
"""Timeout in seconds for the transfer of one object from the buddy."""
_log = get_logger(__name__)


class Found(msgspec.Struct, array_like=True, frozen=True):
    """The step to restore. `away`: the store was unreachable, so the step was found in the tier."""

    base: Base
    away: bool = False


class NodeTier:
    """The node's tier during one operation. `shelf` is None if the node has no usable tier."""

    def __init__(self, sidecar: Sidecar | None) -> None:
        self._sidecar, self._buddy = sidecar, False
        self.shelf = self._open()

    def near(self, store: Store) -> Store:
        """`store`, read through the tier."""
        return store if self.shelf is None else TierReader(store, self.shelf, keeps, self.recall)

    def recall(self, source: str, key: str) -> bool:
        """Fetch an object from the buddy into the tier.

        Returns False if the buddy does not have it or cannot be reached.
        """
        if self._sidecar is None or not self._buddy:
            return False
        try:
            return self._sidecar.recall(source, key, RECALL_SECONDS)
        except HeadraceError as error:
            _log.warning("the buddy's copy of %s did not come: %s", key, error)
            return False

    def send(self, store: Store, run: str) -> None:
        """On every rank, before a step is looked up: fetch the buddy's records, then call `send` of this module."""
        if self.shelf is not None:
            self.recall(store.location.url, "")
            restoring.send(store, self.shelf, run, self.recall)

    def find(self, store: Store, run: str, step: int | str | Base) -> Found | None:
        """On one rank, after all ranks have called `send`: the step to restore; None if the run has none."""
        try:
            if self.shelf is not None:
                restoring.finish(store, self.shelf, run)
            base = repository.find(store, run, step)
            return None if base is None else Found(base)
        except TransientError:
            base = latest(self.shelf, store.location.url, run, step)
            if base is None:
                raise
            return Found(base, away=True)

    def _open(self) -> LocalTier | None:
        try:
            told = self._sidecar.status().get("tier") if self._sidecar is not None else None
        except HeadraceError as error:
            _log.warning("the sidecar does not say where its tier is: %s", error)
            return None
        if not isinstance(told, dict) or not told.get("directory"):
            return None
        self._buddy = bool(told.get("buddy"))
        return open_shelf(Path(told["directory"]), int(told["budget_bytes"]), int(told["steps"]))


@contextlib.contextmanager
def node_tier(sidecar: SidecarName) -> Iterator[NodeTier]:
    """The tier that the sidecar reports.

    It is looked up for each operation, because the sidecar may start or stop.
    """
    found = Sidecar.find(sidecar)
    try:
        yield NodeTier(found)
    finally:
        if found is not None:
            found.close()


def latest(shelf: LocalTier | None, url: str, run: str, step: int | str | Base) -> Base | None:
    """The step, or for "latest" the newest step, that the tier knows to be committed; None if there is none."""
    for record in shelf.records(url, run) if shelf is not None else ():
        base = Base(record.timeline, record.step, record.attempt)
        if record.committed and not record.over and step in ("latest", record.step, base):
            return base
    return None


@contextlib.contextmanager
def away(near: Store, run: str, base: Base) -> Iterator[Step]:
    """Open a step from the tier while the store is unreachable. No lease and no COMMIT are written."""
    _log.warning("the store cannot be reached: restoring step %d of run %s from the node's tier", base.step, run)
    yield open_step(near, run, base)


def outdated(run: str, restored: Base, newer: Base | None) -> ConflictError:
    """The error of a trainer that continues from a step which is no longer the latest."""
    what = f"step {newer.step} of timeline {newer.timeline}" if newer is not None else "gone"
    return ConflictError(
        f"run {run}: step {restored.step} was restored while the store was away, and its latest is {what}",
        hint="restore again; or restore a step by its number to go back on purpose",
    )


def told(near: Store, step: int) -> None:
    """Log how many bytes each source (tier, buddy, store) supplied, if the tier or the buddy supplied any."""
    if isinstance(near, TierReader) and near.bytes["tier"] + near.bytes["buddy"]:
        read = ", ".join(f"{format_bytes(size)} from the {where}" for where, size in near.bytes.items() if size)
        _log.info("restored step %d: %s", step, read)


TURN_SECONDS = 600.0
"""Seconds that one call of `send` waits in total for other processes of the node that are sending."""
_POLL = 0.1
OLD_SECONDS = 5 * 24 * 3600.0
"""Older attempts count as over, because a collector may remove their packs when they are a week old."""
_CANDIDATES = 4
"""The most unfinished attempts of one run that are tried, newest first."""
_log = get_logger(__name__)


def send(store: Store, shelf: LocalTier, run: str, recall: FetchFromBuddy) -> None:
    """On every rank: upload the objects of unfinished attempts that this node's tier has and the store lacks."""
    until = time.monotonic() + TURN_SECONDS
    for record in unfinished(shelf, store.location.url, run):
        with _logged(f"step {record.step} of run {run}, which only the tier has, is not sent"), _alone(shelf, until):
            if _may_become_a_step(store, shelf, record):
                _send(store, shelf, record, recall)


def finish(store: Store, shelf: LocalTier, run: str) -> None:
    """On one rank, after all ranks have called `send`: commit the newest attempt that is now complete in the store."""
    tried = set[str]()
    for record in unfinished(shelf, store.location.url, run):
        if record.attempt in tried:
            continue
        tried.add(record.attempt)
        with _logged(f"step {record.step} of run {run}, which only the tier has, is not committed"):
            if _may_become_a_step(store, shelf, record) and _commit(store, shelf, record):
                _log.warning("step %d of run %s was committed from the node's tier", record.step, run)
                return


def unfinished(shelf: LocalTier, source: str, run: str) -> list[Record]:
    """The newest records that are neither committed nor over, newest first."""
    return [r for r in shelf.records(source, run) if not r.committed and not r.over][:_CANDIDATES]


def _may_become_a_step(store: Store, shelf: LocalTier, record: Record) -> bool:
    """Whether the attempt can still become a step newer than the latest.

    Updates the record if it is committed or over.
    """
    attempt = attempt_of(record)
    old = time.time() - record.created > OLD_SECONDS
    found = commit.recognise(store, attempt)
    if found is not None and found.attempt == attempt.id and not found.tombstone:
        mark_committed(store, shelf, record, found.committed)
        return False
    if old or isinstance(commit.decide(attempt, commit.look(store, attempt, lease_alive=True)), commit.Stop):
        _over(shelf, record)
        return False
    latest = repository.find(store, record.run, "latest")
    return latest is None or (latest.timeline, latest.step) < record.place


def _send(store: Store, shelf: LocalTier, record: Record, recall: FetchFromBuddy) -> None:
    manifest, encoded = _manifest_of(shelf, record, recall)
    with _lease(store, record, manifest.bases) as lease:
        _require_bases(store, shelf, record, manifest.bases)
        for key in (pack.key for pack in manifest.packs if pack.attempt == record.attempt):
            if not store.exists(key):  # the manifest's packs; another worker than the record's may have written them
                _require_here(shelf, record, key, recall)
                store.put_multipart(key, _verified(shelf, record.source, key))
        lease.require_alive()
        store.put_if_absent(record.own[-1], encoded)


def _commit(store: Store, shelf: LocalTier, record: Record) -> bool:
    attempt = attempt_of(record)
    ranks = commit.look(store, attempt, lease_alive=True).manifests
    if len(ranks) < attempt.world_size:
        return False
    bases = _bases_of_all(store, attempt)
    with _lease(store, record, bases) as lease:
        _require_bases(store, shelf, record, bases)
        try:
            found = commit.finish(store, attempt, lease, timeout=0.0)
        except ConflictError:
            _over(shelf, record)
            raise
        lease.release()
        # the step is committed, so the leases of its other processes are not needed either
        store.delete_many([info.key for info in store.list(names.leases_of(attempt.id))])
    for other in shelf.records(record.source, record.run):
        if other.attempt == record.attempt:
            mark_committed(store, shelf, other, found.committed)
    return True


def _bases_of_all(store: Store, attempt: Attempt) -> tuple[Base, ...]:
    """The bases of all ranks. The manifest of a rank that was kept while the store was unreachable names none."""
    keys = [attempt.manifest_key(rank) for rank in range(attempt.world_size)]
    found = (manifests.decode(store.get(key, max_bytes=manifests.MAX_BYTES), key) for key in keys)
    return tuple(dict.fromkeys(base for manifest in found for base in manifest.bases))


def attempt_of(record: Record) -> Attempt:
    return Attempt(record.run, record.timeline, record.step, record.attempt, record.world_size)


def _manifest_of(shelf: LocalTier, record: Record, recall: FetchFromBuddy) -> tuple[Manifest, bytes]:
    key = record.own[-1]
    _require_here(shelf, record, key, recall)
    data = b"".join(_verified(shelf, record.source, key))
    found = manifests.decode(data, key)
    if key != attempt_of(record).manifest_key(record.rank):
        raise CorruptionError(f"the record of step {record.step} names another's manifest")
    return found, data


def _require_here(shelf: LocalTier, record: Record, key: str, recall: FetchFromBuddy) -> None:
    if not shelf.has(record.source, key) and not recall(record.source, key):
        raise NotFoundError(f"{key} is neither in the store nor in a tier")


def _verified(shelf: LocalTier, source: str, key: str) -> Iterator[memoryview]:
    held = shelf.open(source, key)
    if held is None:
        raise NotFoundError(f"{key} is in the tier no more")
    return checked(shelf, held.label)


def _require_bases(store: Store, shelf: LocalTier, record: Record, bases: Sequence[Base]) -> None:
    """Check that the bases still exist. The lease must protect them already."""
    going = repository.pending_deletes(store)
    for base in bases:
        at = base.of(record.run)
        found = commit.find_commit(store, names.commit(at.run, at.timeline, at.step))
        there = found is not None and found.attempt == base.attempt and not found.tombstone
        if not there or (at.run, at.timeline, at.step) in going:
            _over(shelf, record)
            raise ConflictError(f"step {base.step}, which it references, was removed by retention")


def _lease(store: Store, record: Record, bases: Sequence[Base]) -> LeaseKeeper:
    """A lease on the attempt with this process's own key: a saver on another node may still hold a lease with other bases."""
    holder = os.urandom(4).hex()
    return LeaseKeeper(store, record.attempt, record.run, record.timeline, record.step, bases, holder=holder)


def _over(shelf: LocalTier, record: Record) -> None:
    shelf.put_record(msgspec.structs.replace(record, over=True))


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except (HeadraceError, OSError) as error:
        _log.warning("%s: %s", what, error)


@contextlib.contextmanager
def _alone(shelf: LocalTier, until: float) -> Iterator[None]:
    """Let one process of the node send at a time. The next one then finds the objects in the store."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(shelf.root / "sending", until - time.monotonic(), _POLL))
        except TimeoutError:
            raise DeadlineError("another process of this node is still sending", hint="restore again later") from None
        yield
