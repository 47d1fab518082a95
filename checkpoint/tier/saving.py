"""Keeps a save in the node's local tier while it is written to the store.

A worker writes to `TierSave.store`. So packs are in the tier before they are in the store. A trainer that uploads only
its newest steps keeps the others in the tier alone; `KeptSteps` removes the older ones.
Invariants: a record is written when this rank's packs and manifest are in the tier. It is marked as committed only
after COMMIT was read. After an error of the tier, the save works as if there were no tier.
Failure behaviour: if the tier cannot be written, the rest of the save ignores it, and that is logged.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format import names
from headrace.checkpoint.format.documents import Commit
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository.commit import Attempt
from headrace.checkpoint.saving.plan import PutPlan
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import HeadraceError, NotFoundError, TransientError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.records import Record, TierLimits
from headrace.dataio.store.local_tier.stores import TROUBLE, WriteThroughTier, checked
from headrace.dataio.store.local_tier.tier import LocalTier

_log = get_logger(__name__)


def may_hold(key: str) -> bool:
    """Whether a tier may hold the object: a pack, manifest, group or decision.

    Their keys name an attempt, so they never change.
    """
    if key.startswith(names.PACKS):
        return True
    parsed = names.parse_step_key(key)
    return parsed is not None and parsed.kind in ("manifest", "group", "fate")


class TierSave:
    """The tier's part in one save.

    `kept`: seconds from the save's start until all of it was in the tier; None until then. `on_kept` is called then.
    """

    def __init__(
        self,
        writer: WriteThroughTier,
        plan: PutPlan,
        local_tier: LocalTier,
        *,
        clock: Clock,
        on_kept: Callable[[], None] = lambda: None,
    ) -> None:
        self.store: Store = writer
        self._url, self._plan, self._clock = writer.location.url, plan, clock
        self._writer, self._local_tier = writer, local_tier
        self._began = clock.monotonic()
        self._on_kept = on_kept
        self._record: Record | None = None
        self.kept: float | None = None

    @property
    def record(self) -> Record | None:
        """The record of the step; None until all of it is in the tier."""
        return self._record

    @property
    def can_save_locally(self) -> bool:
        """Whether the tier can still keep the step while the store is unreachable."""
        return self._writer.whole and self._record is None

    def skip_store(self) -> None:
        """Write to the tier only from now on."""
        self._writer.send = False

    def send_pending(self, encoded: bytes | None) -> None:
        """Send the packs that only the tier has, if an earlier worker finished this save's manifest (`encoded`)."""
        if encoded is None:
            return
        p = self._plan
        key = names.manifest(p.run, p.timeline, p.step, p.attempt, p.rank)
        for pack in manifests.decode(encoded, key).packs:
            entry = self._local_tier.open(self._url, pack.key) if pack.attempt == p.attempt else None
            if entry is not None and not self.store.exists(pack.key):
                self._writer.send_to_store(entry.label)

    def complete(self, manifest: Manifest, encoded: bytes) -> None:
        """Keep the manifest and write the record, after all packs are written."""
        if not self._writer.whole:
            return
        record = new_record(self._url, manifest, self._clock.time())
        try:
            self._local_tier.keep(self._url, record.own[-1], encoded)
            self._local_tier.put_record(record)
        except TROUBLE as error:
            self._writer.go_on_without(error)
            return
        self._record, self.kept = record, self._clock.monotonic() - self._began
        self._on_kept()

    def withdraw(self) -> None:
        """Withdraw the record and the manifest, because another worker's manifest counts."""
        if self._record is not None:
            with contextlib.suppress(*TROUBLE):
                self._local_tier.drop(self._url, self._record.own[-1])
                self._local_tier.withdraw(self._record)
        self._record = self.kept = None

    def committed(self, document: Commit) -> None:
        """Mark the record as committed."""
        if self._record is not None:
            with contextlib.suppress(*TROUBLE, HeadraceError):
                mark_committed(self.store, self._local_tier, self._record, document.committed)


@contextlib.contextmanager
def open_tier_save(
    store: Store, plan: PutPlan, local_tier: LocalTier, clock: Clock, on_kept: Callable[[], None] = lambda: None
) -> Iterator[TierSave]:
    """The tier's part in the save of `plan`, until the block ends. `on_kept`: see `TierSave`."""
    with WriteThroughTier(store, local_tier, may_hold) as writer:
        yield TierSave(writer, plan, local_tier, clock=clock, on_kept=on_kept)


class KeptSteps:
    """The steps that this process keeps in the tier only, and those whose upload failed. Thread-safe.

    Otherwise the tier would be full of old steps when the store has been unreachable for a while.

    `more`: how many of them stay in addition to the tier's `steps`. A step that another process holds, because it sends
    it to the buddy or to the store, stays too.
    """

    def __init__(self, more: int = 2) -> None:
        self._more, self._lock = more, threading.Lock()
        self._records = list[Record]()

    def add(self, local_tier: LocalTier, record: Record) -> None:
        """Add a step, and remove the oldest ones. An error of the disk is ignored: the next call tries again."""
        with self._lock:
            self._records.append(record)
            self._records.sort(key=lambda each: each.place)  # an upload may fail after newer steps were kept
            surplus = self._records[: -(local_tier.limits.steps + self._more)]
            if not surplus:
                return
            with contextlib.suppress(OSError):
                self._records[: len(surplus)] = local_tier.forget_unchanged(surplus)

    def add_failed(self, local_tier: LocalTier, url: str, plan: PutPlan) -> None:
        """Add the step of a plan whose upload failed, if the tier has this rank's part."""
        with contextlib.suppress(OSError):
            for record in local_tier.records(url, plan.run):
                if (record.attempt, record.rank) == (plan.attempt, plan.rank) and not record.committed:
                    self.add(local_tier, record)

    def clear(self) -> None:
        """Remove no step that was added before, because another process may now depend on it."""
        with self._lock:
            self._records.clear()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with which the daemon passes the tier to its workers."""
    parser.add_argument("--tier-dir", type=Path, help="the node's tier; none without it")
    parser.add_argument("--tier-bytes", type=int, default=0, help="its budget")
    parser.add_argument("--tier-steps", type=int, default=1, help="how many steps of a run it keeps")


def local_tier_from(options: argparse.Namespace) -> LocalTier | None:
    """The tier that the flags name; None if there is none, or if it cannot be used (logged once)."""
    return (
        None if options.tier_dir is None else open_local_tier(options.tier_dir, options.tier_bytes, options.tier_steps)
    )


def open_local_tier(folder: Path, size: int, steps: int) -> LocalTier | None:
    """Open the tier in this directory; None if it cannot be used (logged once)."""
    try:
        return LocalTier(folder, TierLimits(size, steps))
    except (OSError, HeadraceError) as error:
        warn_once(_log, f"the tier in {folder} cannot be used: {error}", "node")
        return None


def kept_manifest(url: str, local_tier: LocalTier, key: str) -> bytes:
    """The encoded manifest that the tier keeps; `NotFoundError` if there is none."""
    entry = local_tier.open(url, key)
    if entry is None:
        raise NotFoundError(f"{key} is no longer in the local tier", hint="save again")
    return b"".join(checked(local_tier, entry.label))


def new_record(url: str, manifest: Manifest, now: float) -> Record:
    """The record of a rank's part of a step in the tier."""
    m = manifest
    where = Attempt(m.run, m.timeline, m.step, m.attempt, m.world_size)
    return Record(
        source=url,
        run=m.run,
        timeline=m.timeline,
        step=m.step,
        attempt=m.attempt,
        rank=m.rank,
        world_size=m.world_size,
        own=(*(p.key for p in m.packs if p.attempt == m.attempt), where.manifest_key(m.rank)),
        references=(*(p.key for p in m.packs if p.attempt != m.attempt), where.decision_key),
        created=now,
    )


def mark_committed(store: Store, local_tier: LocalTier, record: Record, when: float) -> None:
    """Mark the record as committed, and keep the step's decision, which holds the digests of all manifests."""
    key = names.decision(record.run, record.timeline, record.step, record.attempt)
    local_tier.keep(record.source, key, store.get(key))
    local_tier.put_record(msgspec.structs.replace(record, committed=when))


class LocalOnlyError(TransientError):
    """Only the tier has the save. A later restore may still commit it."""


def not_uploaded(step: int) -> LocalOnlyError:
    """The outcome of a save that was not uploaded, because an earlier one was on its way to the store."""
    return LocalOnlyError(
        f"step {step} is kept in this node's tier and is not uploaded: an earlier step was on its way to the store",
        hint="`close` uploads the last step, and `restore` the newest one; uploads='all' uploads every step",
    )


def local_only_error(error: TransientError, step: int) -> LocalOnlyError:
    """The error of a save that only the tier has."""
    return LocalOnlyError(
        f"step {step} is not committed, but kept in this node's tier: {error.message}",
        hint="when the store is back, `restore` commits it first",
    )
