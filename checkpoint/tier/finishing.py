"""Committing what only the tier has: the store was away when it was saved, or its saver died on the way.

Purpose: a step that is whole in the tiers of its nodes becomes a real one before anything is restored.
Invariants: the ordinary protocol decides (`headrace.checkpoint.repository.commit`), under a lease that names the bases
*before* they
are seen to be there; so a newer timeline, an abort by a collector, or a base that is gone stop it as they stop any late
saver. An attempt that can never be committed any more is marked as over; nothing is deleted here.
Failure behaviour: whatever goes wrong is logged, and the attempt stays as it was, to be tried by the next restore.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence

import msgspec

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.tier.saving import mark_committed
from headrace.dataio.core.errors import ConflictError, CorruptionError, DeadlineError, HeadraceError, NotFoundError
from headrace.dataio.core.files import file_lock
from headrace.dataio.core.log import get_logger
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.stores import FetchFromBuddy, checked
from headrace.dataio.store.local_tier.tier import LocalTier

TURN_SECONDS = 600.0
"""How long one call of `send` waits for other processes of the node that send, together; what is theirs they go on with."""
_POLL = 0.1
OLD_SECONDS = 5 * 24 * 3600.0
"""Older attempts are over: a collector may remove packs that nothing explains when they are a week old."""
_CANDIDATES = 4
"""Unfinished attempts of one run that are looked at, newest first."""
_log = get_logger(__name__)


def send(store: Store, shelf: LocalTier, run: str, recall: FetchFromBuddy) -> None:
    """On every rank: put what this node's tier holds, and the store lacks, of attempts that may still become steps."""
    until = time.monotonic() + TURN_SECONDS
    for record in unfinished(shelf, store.location.url, run):
        with _logged(f"step {record.step} of run {run}, which only the tier has, is not sent"), _alone(shelf, until):
            if _may_become_a_step(store, shelf, record):
                _send(store, shelf, record, recall)


def finish(store: Store, shelf: LocalTier, run: str) -> None:
    """On one rank, when all have sent: commit the newest attempt that is whole in the store now."""
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
    """Records that are not known to be committed, newest first."""
    return [r for r in shelf.records(source, run) if not r.committed and not r.over][:_CANDIDATES]


def _may_become_a_step(store: Store, shelf: LocalTier, record: Record) -> bool:
    """Whether it is worth sending; what is known now is noted in the record."""
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
            if not store.exists(key):  # those of the manifest, which may be another carrier's than the record
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
        store.delete_many([info.key for info in store.list(names.leases_of(attempt.id))])  # no one else needs its own
    for other in shelf.records(record.source, record.run):
        if other.attempt == record.attempt:
            mark_committed(store, shelf, other, found.committed)
    return True


def _bases_of_all(store: Store, attempt: Attempt) -> tuple[Base, ...]:
    """What any rank leans on: one that was kept while the store was away leans on nothing, another may."""
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
    """The lease names the bases; now that they cannot go any more, see whether they are there."""
    going = repository.condemned(store)
    for base in bases:
        at = base.of(record.run)
        found = commit.find_commit(store, names.commit(at.run, at.timeline, at.step))
        there = found is not None and found.attempt == base.attempt and not found.tombstone
        if not there or (at.run, at.timeline, at.step) in going:
            _over(shelf, record)
            raise ConflictError(f"step {base.step}, which it leans on, was removed by retention")


def _lease(store: Store, record: Record, bases: Sequence[Base]) -> LeaseKeeper:
    """A lease of this process on the attempt. A saver on another node may still be at work, and has its own with its bases."""
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
    """One process of the node at a time: the second then finds everything in the store."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(file_lock(shelf.root / "sending", until - time.monotonic(), _POLL))
        except TimeoutError:
            raise DeadlineError("another process of this node is still sending", hint="restore again later") from None
        yield
