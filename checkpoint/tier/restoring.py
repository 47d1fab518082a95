"""Restores from the node's local tier, and commits steps that only the tier has.

- `NodeTier.reader(store)` returns the store to read a step from. `NodeTier.find` finds the step, also while the store
  is unreachable.
- Before a restore, `send_unfinished` and `commit_unfinished` complete steps that were saved while the store was
  unreachable, or whose saver died.

Invariants: the sidecar names the tier's directory. Without a sidecar the store itself is read. A step that is restored
while the store is unreachable was committed. The tiers of this node and of its buddy together hold all of it. The buddy
is another node that keeps a copy of this node's tier. The ordinary commit protocol decides about unfinished steps. Its
lease names the bases *before* they are checked. If an attempt can no longer be committed, its record is marked as over.
This module deletes nothing from the tier.
Failure behaviour: a sidecar that does not answer counts as no tier. Errors while unfinished steps are sent or committed
are logged, and the next restore tries again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names, own_digest
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import commit, group_commit
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.commit import Attempt, Committed, FinalError, Stop, Wait, WriteCommit
from headrace.checkpoint.repository.lease import LeaseKeeper
from headrace.checkpoint.tier.saving import mark_committed, may_hold, open_local_tier
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
from headrace.dataio.core.log import get_logger, warn_first, warn_once
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.sidecar.connection import SidecarName
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record
from headrace.dataio.store.local_tier.stores import FetchFromBuddy, TierReader, checked
from headrace.dataio.store.local_tier.tier import LocalTier

RECALL_SECONDS = 600.0
"""Timeout in seconds for the transfer of one object from the buddy."""
TURN_SECONDS = 600.0
"""The total time in seconds that one call of `send_unfinished` waits for other sending processes of the node."""
_POLL = 0.1
STALE_SECONDS = 5 * 24 * 3600.0
"""Older attempts count as over, because a collector may remove their packs when they are a week old."""
_CANDIDATES, _LOOKS = 4, 32
"""The maximum number of unfinished attempts of one run that are sent, newest first, and of those that are looked at."""
_log = get_logger(__name__)


class Found(msgspec.Struct, array_like=True, frozen=True):
    """The step to restore. `offline`: the store was unreachable, so the step was found in the tier."""

    base: Base
    offline: bool = False


class NodeTier:
    """The node's tier during one operation. `local_tier` is None if the node has no usable tier."""

    def __init__(self, sidecar: Sidecar | None) -> None:
        self._sidecar, self._buddy = sidecar, False
        self.local_tier = self._open()
        self.unfinished: list[Attempt] = []
        """What `send` returned, on any of the nodes that `add_unfinished` was told of."""

    def reader(self, store: Store) -> Store:
        """`store`, read through the tier."""
        return store if self.local_tier is None else TierReader(store, self.local_tier, may_hold, self.recall)

    def recall(self, source: str, key: str) -> bool:
        """Fetch an object from the buddy into the tier.

        Returns False if the buddy does not have it or cannot be reached.
        """
        if self._sidecar is None or not self._buddy:
            return False
        try:
            return self._sidecar.recall(source, key, RECALL_SECONDS)
        except HeadraceError as error:
            warn_first(_log, "node", "could not fetch %s from the buddy: %s", key, error)
            return False

    def send(self, store: Store, run: str) -> bytes:
        """Fetch the buddy's records, then send unfinished attempts. All ranks call it before a step is looked up.

        Returns a message with these attempts for `add_unfinished`.
        """
        if self.local_tier is not None:
            self.recall(store.location.url, "")
            self.unfinished = send_unfinished(store, self.local_tier, run, self.recall)
        return msgspec.msgpack.encode(self.unfinished)

    def add_unfinished(self, messages: Iterable[bytes]) -> None:
        """Take over the attempts that the ranks of all nodes have sent. The node of rank 0 may have no part of them."""
        sent = [each for message in messages for each in msgspec.msgpack.decode(message, type=list[Attempt])]
        self.unfinished = list(dict.fromkeys(sent))

    def find(self, store: Store, run: str, step: int | str | Base) -> Found | None:
        """The step to restore; None if the run has none. Rank 0 calls it after all ranks have called `send`."""
        try:
            commit_unfinished(store, self.local_tier, self.unfinished)
            base = repository.find(store, run, step)
            return None if base is None else Found(base)
        except TransientError:
            base = latest(self.local_tier, store.location.url, run, step)
            if base is None:
                raise
            return Found(base, offline=True)

    def _open(self) -> LocalTier | None:
        try:
            reported = self._sidecar.status().get("tier") if self._sidecar is not None else None
        except HeadraceError as error:
            warn_first(_log, "node", "could not ask the sidecar for the directory of the tier: %s", error)
            return None
        if not isinstance(reported, dict) or not reported.get("directory"):
            return None
        folder = Path(reported["directory"])
        if not (folder / "records").is_dir():  # do not make another directory, which the sidecar would not see
            warn_once(
                _log, f"the sidecar's tier {folder} is not here: mount it in the trainer's container, too", "node"
            )
            return None
        self._buddy = bool(reported.get("buddy"))
        return open_local_tier(folder, int(reported["budget_bytes"]), int(reported["steps"]))


@contextlib.contextmanager
def node_tier(sidecar: SidecarName) -> Iterator[NodeTier]:
    """The tier that the sidecar reports.

    It is looked up for each operation, because the sidecar may start or stop.
    """
    connection = Sidecar.find(sidecar)
    try:
        yield NodeTier(connection)
    finally:
        if connection is not None:
            connection.close()


def latest(local_tier: LocalTier | None, url: str, run: str, step: int | str | Base) -> Base | None:
    """The step, if the tier's record of it says that it is committed; for "latest", the newest such step. Else None."""
    for record in local_tier.records(url, run) if local_tier is not None else ():
        base = Base(record.timeline, record.step, record.attempt)
        if record.committed and not record.over and step in ("latest", record.step, base):
            return base
    return None


def log_offline(run: str, base: Base) -> None:
    """Log that a step is restored from the tier while the store is unreachable. No lease is written for it."""
    message = "the store cannot be reached: restoring step %d of run %s from the node's tier"
    warn_first(_log, "node", message, base.step, run)


def outdated(run: str, restored: Base, newer: Base | None) -> ConflictError:
    """The error of a trainer that continues from a step which is no longer the latest."""
    reason = f"step {newer.step} of timeline {newer.timeline} is newer" if newer is not None else "the run has no step"
    return ConflictError(
        f"run {run}: step {restored.step} was restored while the store was unreachable, but {reason}",
        hint="restore again, or restore an older step by its number",
    )


def log_sources(reader: Store, step: int) -> None:
    """Log how many bytes each source (tier, buddy, store) supplied, if the tier or the buddy supplied any."""
    if isinstance(reader, TierReader) and reader.bytes["tier"] + reader.bytes["buddy"]:
        read = ", ".join(f"{format_bytes(size)} from the {where}" for where, size in reader.bytes.items() if size)
        _log.info("restored step %d: %s", step, read)


def send_unfinished(store: Store, local_tier: LocalTier, run: str, recall: FetchFromBuddy) -> list[Attempt]:
    """Upload the objects of unfinished attempts that this node's tier has and the store lacks. All ranks call it.

    The newest attempt comes first. If the tier has the parts of all its ranks and they are sent, older ones are not. Nor
    are they if the store fails: a step that is committed instead of a newer one would replace it.
    Returns the attempts that may become a step.
    """
    until, attempts = time.monotonic() + TURN_SECONDS, dict[Attempt, None]()
    for _, group in itertools.groupby(unfinished(local_tier, store.location.url, run), lambda record: record.attempt):
        records, sent = list(group), 0
        for record in records:
            try:
                with _one_sender(local_tier, until), local_tier.hold(record.attempt):
                    if _is_committable(store, local_tier, record):
                        attempts[attempt_of(record)] = None
                        _send(store, local_tier, record, recall)
                        sent += 1
            except (HeadraceError, OSError) as error:
                problem = f"step {record.step} of run {run}, which only the tier has, could not be sent"
                warn_first(_log, "node", "%s: %s", problem, error)
                if isinstance(error, TransientError) and not isinstance(error, FinalError):
                    return list(attempts)
        if sent == records[0].world_size or len(attempts) == _CANDIDATES:
            break
    return list(attempts)


def commit_unfinished(store: Store, local_tier: LocalTier | None, attempts: Iterable[Attempt]) -> None:
    """Commit the newest of the attempts that is now complete in the store.

    One rank calls it after all ranks have called `send_unfinished`, with the attempts that any of them returned.
    """
    for attempt in sorted(attempts, key=lambda each: (each.timeline, each.step, each.id), reverse=True):
        with _logged(f"{attempt}, which only the tier has, could not be committed"):
            if _commit(store, local_tier, attempt):
                _log.warning("%s was committed from the node's tier", attempt)
                return


def unfinished(local_tier: LocalTier, source: str, run: str) -> list[Record]:
    """The records of the newest attempts that are neither committed nor over, by attempt, newest first."""
    attempts = dict[str, list[Record]]()
    for record in local_tier.records(source, run):
        if not record.committed and not record.over:
            attempts.setdefault(record.attempt, []).append(record)
    return [record for records in list(attempts.values())[:_LOOKS] for record in records]


def _is_committable(store: Store, local_tier: LocalTier, record: Record) -> bool:
    """Whether the attempt can still become a step newer than the latest.

    Updates the record if it is committed or over.
    """
    attempt = attempt_of(record)
    action = commit.decide(attempt, commit.look(store, attempt, lease_alive=True))
    if isinstance(action, Committed | WriteCommit):
        if (committed := commit.recognise(store, attempt)) is not None and committed.commits(attempt.id):
            mark_committed(store, local_tier, record, committed.committed)
        return False
    if isinstance(action, Stop) or time.time() - record.created > STALE_SECONDS:
        _mark_over(local_tier, record)
        return False
    latest = repository.find(store, record.run, "latest")
    return latest is None or (latest.timeline, latest.step) < record.place


def _send(store: Store, local_tier: LocalTier, record: Record, recall: FetchFromBuddy) -> None:
    manifest, encoded = _manifest_of(local_tier, record, recall)
    attempt = attempt_of(record)
    with _over_after_conflict(local_tier, [record]), _lease(store, attempt, manifest.bases) as lease:
        _require_bases(store, attempt, manifest.bases)
        for key in (pack.key for pack in manifest.packs if pack.attempt == record.attempt):
            if not store.exists(key):  # the manifest's packs; another worker than the record's may have written them
                _require_in_tier(local_tier, record, key, recall)
                store.put_multipart(key, _verified(local_tier, record.source, key))
        lease.require_alive()
        store.put_if_absent(record.own[-1], encoded)


def _commit(store: Store, local_tier: LocalTier | None, attempt: Attempt) -> bool:
    """Commit the attempt if all its manifests are in the store. Updates this node's records of it."""
    records = local_tier.records(store.location.url, attempt.run) if local_tier is not None else []
    own = [record for record in records if record.attempt == attempt.id]
    with _over_after_conflict(local_tier, own):
        action = commit.decide(attempt, commit.look(store, attempt, lease_alive=True))
        if isinstance(action, Stop | Wait):
            return False
        bases = _bases_of_all(store, attempt)
        with _lease(store, attempt, bases) as lease:
            _require_bases(store, attempt, bases)
            committed = group_commit.finish_alone(store, attempt, lease)
            lease.release()
            # the step is committed, so the leases of its other processes are not needed either
            store.delete_many([info.key for info in store.list(names.leases_of(attempt.id))])
    for record in own:
        assert local_tier is not None
        mark_committed(store, local_tier, record, committed.committed)
    return True


def _bases_of_all(store: Store, attempt: Attempt) -> tuple[Base, ...]:
    """The bases of all ranks. The manifest of a rank that was kept while the store was unreachable names none."""
    keys = [attempt.manifest_key(rank) for rank in range(attempt.world_size)]
    all_manifests = (manifests.decode(own_digest.fetch(store, key, max_bytes=manifests.MAX_BYTES), key) for key in keys)
    return tuple(dict.fromkeys(base for manifest in all_manifests for base in manifest.bases))


def attempt_of(record: Record) -> Attempt:
    return Attempt(record.run, record.timeline, record.step, record.attempt, record.world_size)


def _manifest_of(local_tier: LocalTier, record: Record, recall: FetchFromBuddy) -> tuple[Manifest, bytes]:
    key = record.own[-1]
    _require_in_tier(local_tier, record, key, recall)
    data = b"".join(_verified(local_tier, record.source, key))
    manifest = manifests.decode(data, key)
    if key != attempt_of(record).manifest_key(record.rank):
        raise CorruptionError(f"the record of step {record.step} names the manifest of another rank")
    return manifest, data


def _require_in_tier(local_tier: LocalTier, record: Record, key: str, recall: FetchFromBuddy) -> None:
    if not local_tier.has(record.source, key) and not recall(record.source, key):
        raise NotFoundError(f"{key} is neither in the store nor in a local tier")


def _verified(local_tier: LocalTier, source: str, key: str) -> Iterator[memoryview]:
    entry = local_tier.open(source, key)
    if entry is None:
        raise NotFoundError(f"{key} is no longer in the local tier")
    return checked(local_tier, entry.label)


def _require_bases(store: Store, attempt: Attempt, bases: Sequence[Base]) -> None:
    """Check that the bases still exist. The lease must protect them already."""
    pending = repository.pending_deletes(store)
    for base in bases:
        at = base.of(attempt.run)
        if not repository.is_committed(store, at.run, base) or (at.run, at.timeline, at.step) in pending:
            raise ConflictError(
                f"{attempt} cannot be committed: retention removed step {base.step}, which it references"
            )


def _lease(store: Store, attempt: Attempt, bases: Sequence[Base]) -> LeaseKeeper:
    """A lease on the attempt with a key of this process.

    A saver on another node may still hold a lease that names other bases.
    """
    holder = os.urandom(4).hex()
    return LeaseKeeper(
        store, attempt.id, run=attempt.run, timeline=attempt.timeline, step=attempt.step, bases=bases, holder=holder
    )


@contextlib.contextmanager
def _over_after_conflict(local_tier: LocalTier | None, records: Iterable[Record]) -> Iterator[None]:
    """Mark the records as over if the block raises `ConflictError`."""
    try:
        yield
    except ConflictError:
        for record in records:
            assert local_tier is not None
            _mark_over(local_tier, record)
        raise


def _mark_over(local_tier: LocalTier, record: Record) -> None:
    local_tier.put_record(msgspec.structs.replace(record, over=True))


@contextlib.contextmanager
def _logged(problem: str) -> Iterator[None]:
    try:
        yield
    except (HeadraceError, OSError) as error:
        warn_first(_log, "node", "%s: %s", problem, error)


@contextlib.contextmanager
def _one_sender(local_tier: LocalTier, until: float) -> Iterator[None]:
    """Let one process of the node send at a time. The next one then finds the objects in the store."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(file_lock(local_tier.root / "sending", until - time.monotonic(), _POLL))
        except TimeoutError:
            raise DeadlineError(
                "another process of this node is still sending steps from the local tier", hint="restore again later"
            ) from None
        yield
