"""What a checkpointer reads from the node's tier.

Purpose: `NodeTier.near(store)` is the store to read a step from; `NodeTier.find` says which step, also while the store is away.
Invariants: the sidecar says where the tier is; without one, or without a tier, the store itself is read. What is restored while
the store is away was committed, and is in the tier, the buddy's included, whole.
Failure behaviour: a sidecar that does not answer means no tier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.repository import steps as repository
from headrace.checkpoint.repository.opening import Step, open_step
from headrace.checkpoint.tier import finishing
from headrace.checkpoint.tier.saving import keeps, open_shelf
from headrace.dataio.core.errors import ConflictError, HeadraceError, TransientError
from headrace.dataio.core.limits import format_bytes
from headrace.dataio.core.log import get_logger
from headrace.dataio.sidecar.client import Sidecar
from headrace.dataio.sidecar.connection import SidecarName
from headrace.dataio.store.base import Store
from headrace.dataio.store.local_tier.stores import TierReader
from headrace.dataio.store.local_tier.tier import LocalTier

RECALL_SECONDS = 600.0
"""The most that one object may take on its way from the buddy."""
_log = get_logger(__name__)


class Found(msgspec.Struct, array_like=True, frozen=True):
    """The step to restore; `away`: the store could not be asked."""

    base: Base
    away: bool = False


class NodeTier:
    """The node's tier while it is in use: `shelf` is None where there is none."""

    def __init__(self, sidecar: Sidecar | None) -> None:
        self._sidecar, self._buddy = sidecar, False
        self.shelf = self._open()

    def near(self, store: Store) -> Store:
        """`store`, read through the tier."""
        return store if self.shelf is None else TierReader(store, self.shelf, keeps, self.recall)

    def recall(self, source: str, key: str) -> bool:
        """Whether the buddy had the object; it is in the tier now."""
        if self._sidecar is None or not self._buddy:
            return False
        try:
            return self._sidecar.recall(source, key, RECALL_SECONDS)
        except HeadraceError as error:
            _log.warning("the buddy's copy of %s did not come: %s", key, error)
            return False

    def send(self, store: Store, run: str) -> None:
        """On every rank, before a step is looked for: see `finishing`. The buddy's records come first."""
        if self.shelf is not None:
            self.recall(store.location.url, "")
            finishing.send(store, self.shelf, run, self.recall)

    def find(self, store: Store, run: str, step: int | str | Base) -> Found | None:
        """On one rank, when all have sent: the step to restore, None where there is none."""
        try:
            if self.shelf is not None:
                finishing.finish(store, self.shelf, run)
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
    """The tier of the node that `sidecar` names; asked for anew each time, since it may come and go."""
    found = Sidecar.find(sidecar)
    try:
        yield NodeTier(found)
    finally:
        if found is not None:
            found.close()


def latest(shelf: LocalTier | None, url: str, run: str, step: int | str | Base) -> Base | None:
    """The newest step of the run that the tier knows to be committed, or that one."""
    for record in shelf.records(url, run) if shelf is not None else ():
        base = Base(record.timeline, record.step, record.attempt)
        if record.committed and not record.over and step in ("latest", record.step, base):
            return base
    return None


@contextlib.contextmanager
def away(near: Store, run: str, base: Base) -> Iterator[Step]:
    """The step without a word to the store: no lease, no COMMIT."""
    _log.warning("the store cannot be reached: restoring step %d of run %s from the node's tier", base.step, run)
    yield open_step(near, run, base)


def outdated(run: str, restored: Base, newer: Base | None) -> ConflictError:
    """The error of a trainer that goes on from a step which is not the latest any more."""
    what = f"step {newer.step} of timeline {newer.timeline}" if newer is not None else "gone"
    return ConflictError(
        f"run {run}: step {restored.step} was restored while the store was away, and its latest is {what}",
        hint="restore again; or restore a step by its number to go back on purpose",
    )


def told(near: Store, step: int) -> None:
    """Say where the bytes came from."""
    if isinstance(near, TierReader) and near.bytes["tier"] + near.bytes["buddy"]:
        read = ", ".join(f"{format_bytes(size)} from the {where}" for where, size in near.bytes.items() if size)
        _log.info("restored step %d: %s", step, read)
