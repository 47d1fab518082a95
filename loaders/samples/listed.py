"""How a loader goes by a shared list of bad samples (`headrace.loaders.samples.shared_list`).

Purpose: say which version of the list each epoch goes by, mark the places of batches with it, and put on the list what is found.
Invariants: a place that is marked is refused or not by the version, the run and the epoch alone. Nothing here keeps the loader
alive.
Failure behaviour: the store's errors pass through; only what cannot be appended is said once, and kept in the loader's state
instead.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Sequence

import blake3
import msgspec
from msgspec.structs import replace

from headrace.dataio.core.errors import CorruptionError, HeadraceError
from headrace.dataio.core.log import get_logger, warn_once
from headrace.loaders.contract import Place, Plan
from headrace.loaders.plan import OrderPlan
from headrace.loaders.refusals import Refusal
from headrace.loaders.samples.shared_list import Entry, QuarantineList, spot_of
from headrace.loaders.state import Difference, Position

KEPT_EPOCHS = 1024
"""More than batches are looked up ahead of the trainer, who may be as many epochs behind where each has one batch."""
PROCESS = secrets.token_hex(8)
"""Loaders that share a process share its memory and its network, so two of them are no two witnesses; nor is a forked child."""
_log = get_logger(__name__)


class AsOf(msgspec.Struct, frozen=True):
    """What an epoch of a run leaves out: `Place.asof`. `urls` are those of the plan's datasets."""

    list: QuarantineList
    version: int
    run: str
    epoch: int
    urls: tuple[str, ...]

    def refuses(self, place: Place) -> HeadraceError | None:
        """Why the sample of this place is not read, or None."""
        entry = self.list.refused(spot_of(place.sample, self.urls[place.source]), self.version, self.run, self.epoch)
        return None if entry is None else CorruptionError(f"it is on the list at {self.list.url}: {entry.reason}")


class Listed:
    """A list as one loader goes by it: which version in which epoch, and the plan's places marked with that.

    `run` stands for everything that decides the order. Safe to share between threads.
    """

    def __init__(self, chosen: QuarantineList, plan: Plan, run: str, *, owns_list: bool = False) -> None:
        self.list, self._plan, self._run, self._owns_list = chosen, plan, run, owns_list
        self._urls = tuple(dataset.url for dataset in plan.datasets)
        self._versions: dict[int, int] = {}
        self._told = -1, 0
        self._sealed = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, place: str | os.PathLike[str] | QuarantineList, plan: OrderPlan) -> Listed:
        """The list at a URL, or one that is open and stays so."""
        described = json.dumps(plan.fingerprint(0, 0).values(), sort_keys=True)
        owns = not isinstance(place, QuarantineList)
        chosen = QuarantineList(place) if not isinstance(place, QuarantineList) else place
        return cls(chosen, plan, blake3.blake3(described.encode()).hexdigest(8), owns_list=owns)

    def close(self) -> None:
        if self._owns_list:
            self.list.close()

    def state(self, epoch: int) -> tuple[int, str]:
        """Version and digest, for a loader's state."""
        version = self.version_of(epoch)
        return version, self.list.digest(version)

    def version_of(self, epoch: int) -> int:
        """The version that an epoch goes by."""
        with self._lock:
            if epoch not in self._versions:
                self._versions[epoch] = self._decided(epoch)
                for old in sorted(self._versions)[:-KEPT_EPOCHS]:
                    del self._versions[old]
            return self._versions[epoch]

    def go_by(self, epoch: int, version: int) -> None:
        """From here on, `epoch` goes by `version`, and later ones by no older one, whatever was decided for them by those who
        looked ahead."""
        self.list.digest(version)
        with self._lock:
            self._versions, self._told = {epoch: version}, (epoch, version)

    def _decided(self, epoch: int) -> int:
        told, version = self._told
        found = self.list.adopted(self._run, epoch)
        return max(found, version) if epoch > told and self.list.pinned is None else found

    def places(self, epoch: int, batches: range) -> Sequence[Sequence[Place]]:
        asof = AsOf(self.list, self.version_of(epoch), self._run, epoch, self._urls)
        found = self._plan.places(epoch, batches)
        return [[replace(place, asof=asof) for place in places] for places in found]

    def batches_in(self, epoch: int) -> int:
        return self._plan.batches_in(epoch)

    def add(self, refusal: Refusal, epoch: int) -> bool:
        """See to it that a sample that a batch of `epoch` was found to hold is on the list; False where it is not."""
        sample = self._plan.datasets[refusal.source].sample(refusal.id)
        spot = spot_of(sample, self._urls[refusal.source])
        if self.list.refused(spot, self.version_of(epoch), self._run, epoch) is not None:
            return True
        if self.list.pinned is not None or self._sealed:
            return False
        try:
            why = refusal.key, refusal.code, refusal.reason
            self.list.append([Entry(*spot, *why, self._run, epoch, suspected=True, process=PROCESS)])
        except HeadraceError as error:
            warn_once(_log, f"bad samples are kept in the loader's state, since the list cannot take them: {error}")
            self._sealed = True  # the trainer waits here: once is enough
            return False
        return (
            self.list.refused(spot, self.version_of(epoch), self._run, epoch) is not None
        )  # not if found in a later epoch


def go_by_state(listed: Listed | None, position: Position) -> Difference | None:
    """Have the position's epoch go by the version that the state names: none of the list, where it names none. What does not fit
    is left as it is, and said."""
    version, digest = position.listed or (0, "")
    if listed is None:
        return Difference("quarantine_list", list(position.listed), None) if position.listed else None
    if position.listed is not None and (version > listed.list.newest() or listed.list.digest(version) != digest):
        return Difference("quarantine_list", [version, digest], listed.list.url)
    listed.go_by(position.epoch, version)
    return None
