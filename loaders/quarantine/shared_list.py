"""A list of bad samples that all ranks of a run, and several runs, share.

Purpose: a run that restarts does not read again the samples that it found damaged. Other runs skip such a sample too,
once a second run has confirmed it. A resumed run substitutes exactly what the interrupted run substituted, even if the
list has grown since.

The list is an append-only directory in any store:

- `entries/<n>.json` holds the entries that version n added. Version n of the list is the union of the entries of
  versions 1 to n.
- `epochs/<run>/<epoch>.json` holds the version that one epoch of a run follows. The first rank that needs this version
  chooses the newest one and writes the object. The other ranks read the object.

So all ranks follow the same version without communicating, and a run that repeats an epoch follows the same version as
before. In addition, a run skips every sample that it found damaged itself, in the current epoch or an earlier one.

Invariants:
- Objects never change, so a version always means the same entries. `digest` is a hash of these entries.
- Whether a sample is skipped depends only on the version, the run and the epoch. A sample that only one run suspects is
  skipped by that run only.
- A sample is identified by the location of its bytes: dataset, shard and offset. An entry applies to all versions and
  views of a dataset, and not to copies of it.
- No object of this module holds a reference to the loader.

Failure behaviour: the store's errors are raised unchanged. `CapacityError` is raised if the list is full.
`CorruptionError` is raised for an object that is not part of a list, and for a version that does not exist,
`UnsupportedError` for a format that this version does not know. If a loader cannot append an entry, it logs one warning
and keeps the sample in its own state instead.

Limits: `MAX_VERSIONS` versions of `MAX_ENTRIES` samples each. The module imports no torch.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import blake3
import msgspec
from msgspec.structs import replace

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    HeadraceError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.log import get_logger, warn_once
from headrace.dataio.shards.sample import Sample
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.loaders.sampling.state import Difference, Position

if TYPE_CHECKING:
    from headrace.loaders.interfaces import Plan, SampleRef
    from headrace.loaders.quarantine.records import SkippedSample
    from headrace.loaders.sampling.plan import OrderPlan

_log = get_logger(__name__)

FORMAT = 1
MAX_VERSIONS = 100_000
MAX_ENTRIES = 10_000
_TRIES = 64
Location = tuple[str, str, int]
"""The location of a sample's bytes: the dataset's URL, the shard, and the offset of the sample's first member."""


class Entry(msgspec.Struct, frozen=True):
    """A bad sample.

    Args:
        dataset, shard, offset: the location of the sample's bytes.
        key: key of the sample.
        code, reason: code and message of the error.
        run, epoch: the run that found the sample, and the epoch of that run; "" and 0 for an entry added by hand.
        suspected: True if a loader found the sample. The entry then applies to the loader's run. It applies to every
            run once another run, in another process, adds the same sample.
        process: identifies the process that found the sample. An entry without it counts as from a different process.
    """

    dataset: str
    shard: str
    offset: int
    key: str
    code: str
    reason: str
    run: str = ""
    epoch: int = 0
    suspected: bool = False
    process: str = ""

    @property
    def location(self) -> Location:
        return self.dataset, self.shard, self.offset

    def confirms(self, other: Entry) -> bool:
        """Whether this entry and `other` come from different runs in different processes."""
        return self.run != other.run and (self.process != other.process or not self.process)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `entries/<n>.json`."""

    format: int
    entries: list[Entry]
    nonce: str


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `epochs/<run>/<epoch>.json`."""

    format: int
    version: int
    nonce: str


class QuarantineList:
    """A list of bad samples that several runs share. Threads and loaders may share one instance.

    Args:
        url_or_store (str | os.PathLike | Store): URL or directory of the list, or an open store.
        version (int | None): follow only this version, and add no entries. Default: follow the newest version, and add
            entries to the list.
        storage_options (Mapping | None): options for the store at the URL. Default: None.

    Raises:
        UsageError: `version` is negative.

    Example:
        >>> QuarantineList(folder).newest()
        0
    """

    def __init__(
        self,
        url_or_store: str | os.PathLike[str] | Store,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if version is not None and version < 0:
            raise UsageError(f"a list of bad samples has no version {version}")
        self._store = (
            url_or_store
            if isinstance(url_or_store, Store)
            else open_store(url_or_store, storage_options=storage_options)
        )
        self._owns_store = not isinstance(url_or_store, Store)
        self.pinned = version
        self._lock = threading.RLock()
        self._digests: list[str] = [""]  # the digests of versions 0, 1, …
        self._entries: dict[Location, list[tuple[int, Entry]]] = {}

    @property
    def url(self) -> str:
        return self._store.location.url

    def newest(self) -> int:
        """The newest version, read from the store."""
        with self._lock:
            while self._read_version(len(self._digests)):
                pass
            return len(self._digests) - 1

    def digest(self, version: int) -> str:
        self._check_version(version)
        return self._digests[version]

    def entries(self, version: int | None = None) -> list[Entry]:
        """The entries of `version`, in the order in which they were added. Default: the newest version."""
        last = self.newest() if version is None else version
        self._check_version(last)
        return [entry for number, entry in self._ordered() if number <= last]

    def numbered(self) -> list[tuple[int, Entry]]:
        """All entries, with the version that added each."""
        self.newest()
        return self._ordered()

    def append(self, entries: Iterable[Entry]) -> int:
        """Add the entries that the list lacks, in versions of up to `MAX_ENTRIES`.

        Returns the newest version, which then contains all of `entries`.
        """
        if self.pinned is not None:
            raise UsageError(f"{self.url} was opened at version {self.pinned}: nothing is added to it")
        by_location, lost_races = {(entry.location, entry.run): entry for entry in entries}, 0
        with self._lock:
            while lost_races < _TRIES:
                version = self.newest()
                new = [entry for entry in by_location.values() if self._adds_information(entry, version)]
                if not new:
                    return version
                if version >= MAX_VERSIONS:
                    raise CapacityError(f"{self.url}: the list of bad samples is full", hint="begin another list")
                lost_races += not self._store.put_if_absent(_entries_key(version + 1), self._encoded(new[:MAX_ENTRIES]))
            raise CapacityError(f"{self.url}: other writers were faster {_TRIES} times", hint="try again")

    def adopted(self, run: str, epoch: int) -> int:
        """The version that `epoch` of `run` follows.

        If no rank has chosen one, the newest version is chosen and stored.
        """
        if self.pinned is not None:
            return self.pinned
        key = f"epochs/{run}/{epoch}.json"
        try:
            return self._adopted_version(key)
        except NotFoundError:
            choice = Adopted(format=FORMAT, version=self.newest(), nonce=secrets.token_hex(16))
            self._store.put_if_absent(key, msgspec.json.encode(choice))
            return self._adopted_version(key)

    def refused(self, location: Location, version: int, run: str, epoch: int) -> Entry | None:
        """The entry because of which `epoch` of `run`, following `version`, skips a sample, or None."""
        own_entries = (e for _, e in self._entries.get(location, ()) if e.run == run and run and e.epoch <= epoch)
        return self._lasting(location, version) or next(own_entries, None)

    def is_lasting(self, location: Location, version: int) -> bool:
        """Whether every run that follows `version` skips the sample."""
        return self._lasting(location, version) is not None

    def _lasting(self, location: Location, version: int) -> Entry | None:
        """The entry because of which every run skips the sample, or None.

        Either the entry is not marked as suspected, or it confirms the suspicion of another run in another process.
        """
        earlier = list[Entry]()
        for number, entry in self._entries.get(location, ()):
            if number <= version:
                if not entry.suspected or any(map(entry.confirms, earlier)):
                    return entry
                earlier.append(entry)
        return None

    def _adds_information(self, entry: Entry, version: int) -> bool:
        """Whether `entry` adds information to this version.

        A run's first suspicion always does. The run may follow an older version, with which it would read the sample
        again.
        """
        is_repeated = any(
            e.run == entry.run and e.suspected <= entry.suspected for _, e in self._entries.get(entry.location, ())
        )
        return not is_repeated and (entry.suspected or self._lasting(entry.location, version) is None)

    def _ordered(self) -> list[tuple[int, Entry]]:
        """All entries, sorted by version."""
        return sorted(
            (numbered for entries in self._entries.values() for numbered in entries), key=lambda numbered: numbered[0]
        )

    def close(self) -> None:
        """Close the store if it was opened here."""
        if self._owns_store:
            self._store.close()

    def _encoded(self, entries: list[Entry]) -> bytes:
        """Encode the object of a new version."""
        data = msgspec.json.encode(Version(format=FORMAT, entries=entries, nonce=secrets.token_hex(16)))
        if len(data) > limits.SMALL_OBJECT_BYTES:  # no reader could read a larger object, nor any later version
            raise CapacityError(f"{self.url}: {len(data)} bytes are too many for a version", hint="add fewer at a time")
        return data

    def _adopted_version(self, key: str) -> int:
        version = int(self._decode(key, Adopted).version)
        self._check_version(version)
        return version

    def _check_version(self, version: int) -> None:
        if version < 0:
            raise UsageError(f"{self.url}: a list of bad samples has no version {version}")
        with self._lock:
            if version >= len(self._digests):
                self.newest()
            if version >= len(self._digests):
                raise CorruptionError(
                    f"{self.url} has {len(self._digests) - 1} versions, but version {version} was followed",
                    hint="is it the list of this run?",
                )

    def _read_version(self, number: int) -> bool:
        """Read version `number`. Returns False if it does not exist."""
        key = _entries_key(number)
        try:
            data = self._store.get(key, max_bytes=limits.SMALL_OBJECT_BYTES)
        except NotFoundError:
            return False
        version = self._parse(data, key, Version)
        for entry in version.entries:
            self._entries.setdefault(entry.location, []).append((number, entry))
        self._digests.append(blake3.blake3(self._digests[-1].encode() + data).hexdigest(4))
        return True

    def _decode(self, key: str, kind: type[Any]) -> Any:
        return self._parse(self._store.get(key, max_bytes=limits.SMALL_OBJECT_BYTES), key, kind)

    def _parse(self, data: bytes, key: str, kind: type[Any]) -> Any:
        try:
            document = msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptionError(f"{self.url}: {key} is not a valid part of a list of bad samples: {error}") from error
        if document.format != FORMAT:
            raise UnsupportedError(
                f"{self.url}: {key} is of format {document.format}; this version reads format {FORMAT}",
                hint="upgrade Headrace",
            )
        return document


def _entries_key(version: int) -> str:
    return f"entries/{version:08}.json"


def location_of(sample: Sample, url: str) -> Location:
    """The location of a sample's bytes."""
    return url, sample.shard, sample.members[0].offset if sample.members else 0


KEPT_EPOCHS = 1024
"""Number of epochs whose versions are cached. It exceeds the number of batches planned ahead, since an epoch may have
only one batch."""
PROCESS = secrets.token_hex(8)
"""Identifies this process. Two loaders in one process do not confirm each other's findings, since they share memory and
network. A forked child keeps its parent's value, so it does not confirm them either."""


class ListAtVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The samples that one epoch of a run skips; the value of `SampleRef.known_bad`.

    `urls` are the URLs of the plan's datasets.
    """

    list: QuarantineList
    version: int
    run: str
    epoch: int
    urls: tuple[str, ...]

    def refuses(self, ref: SampleRef) -> HeadraceError | None:
        """The reason for which this sample is skipped, or None."""
        entry = self.list.refused(location_of(ref.sample, self.urls[ref.source]), self.version, self.run, self.epoch)
        return None if entry is None else CorruptionError(f"it is on the list at {self.list.url}: {entry.reason}")


class FollowedList:
    """A shared list, as one loader follows it. Safe to share between threads.

    This `BatchSource` sets `known_bad` of each sample to the list at the version that the sample's epoch follows. `run`
    identifies everything that determines the order.
    """

    def __init__(self, chosen: QuarantineList, plan: Plan, run: str, *, owns_list: bool = False) -> None:
        self.list, self._plan, self._run, self._owns_list = chosen, plan, run, owns_list
        self._urls = tuple(dataset.url for dataset in plan.datasets)
        self._versions: dict[int, int] = {}
        self._followed = -1, 0
        self._sealed = False
        self._lock = threading.Lock()

    @classmethod
    def of(cls, place: str | os.PathLike[str] | QuarantineList, plan: OrderPlan) -> FollowedList:
        """Follow the list at a URL, or an open list. `close` does not close a list that was given open."""
        described = json.dumps(plan.fingerprint(0, 0).values(), sort_keys=True)
        owns = not isinstance(place, QuarantineList)
        chosen = QuarantineList(place) if not isinstance(place, QuarantineList) else place
        return cls(chosen, plan, blake3.blake3(described.encode()).hexdigest(8), owns_list=owns)

    def close(self) -> None:
        if self._owns_list:
            self.list.close()

    def state(self, epoch: int) -> tuple[int, str]:
        """Version and digest, for the loader's state."""
        version = self.version_of(epoch)
        return version, self.list.digest(version)

    def version_of(self, epoch: int) -> int:
        with self._lock:
            if epoch not in self._versions:
                self._versions[epoch] = self._adopted_version(epoch)
                for old in sorted(self._versions)[:-KEPT_EPOCHS]:
                    del self._versions[old]
            return self._versions[epoch]

    def follow(self, epoch: int, version: int) -> None:
        """Make `epoch` follow `version` from now on.

        Later epochs follow this version or a newer one, even if planning ahead had already chosen an older one for
        them.
        """
        self.list.digest(version)
        with self._lock:
            self._versions, self._followed = {epoch: version}, (epoch, version)

    def follow_position(self, position: Position) -> None:
        """Make the position's epoch follow the version that the state names, or the empty version 0."""
        self.follow(position.epoch, (position.listed or (0, ""))[0])

    def _adopted_version(self, epoch: int) -> int:
        followed_epoch, version = self._followed
        adopted = self.list.adopted(self._run, epoch)
        return max(adopted, version) if epoch > followed_epoch and self.list.pinned is None else adopted

    def refs(self, epoch: int, batches: range) -> Sequence[Sequence[SampleRef]]:
        known_bad = ListAtVersion(
            list=self.list, version=self.version_of(epoch), run=self._run, epoch=epoch, urls=self._urls
        )
        planned = self._plan.refs(epoch, batches)
        return [[replace(ref, known_bad=known_bad) for ref in refs] for refs in planned]

    def batches_in(self, epoch: int) -> int:
        return self._plan.batches_in(epoch)

    def add(self, skipped: SkippedSample, epoch: int) -> bool:
        """Add a sample that was skipped in a batch of `epoch`.

        Returns whether that epoch then skips it because of the list.
        """
        sample = self._plan.datasets[skipped.source].sample(skipped.id)
        location = location_of(sample, self._urls[skipped.source])
        if self.list.refused(location, self.version_of(epoch), self._run, epoch) is not None:
            return True
        if self.list.pinned is not None or self._sealed:
            return False
        try:
            why = skipped.key, skipped.code, skipped.reason
            self.list.append([Entry(*location, *why, self._run, epoch, suspected=True, process=PROCESS)])
        except HeadraceError as error:
            warn_once(
                _log, f"bad samples are kept in the loader's state, since the list cannot take them: {error}", "node"
            )
            self._sealed = True  # do not try again, since the trainer waits for this call
            return False
        return (
            self.list.refused(location, self.version_of(epoch), self._run, epoch) is not None
        )  # False if this run found it in a later epoch


def difference_of(listed: FollowedList | None, position: Position) -> Difference | None:
    """The field that does not match, if the loader cannot follow the list that the state names."""
    version, digest = position.listed or (0, "")
    if listed is None:
        return Difference("quarantine_list", list(position.listed), None) if position.listed else None
    if position.listed is not None and (version > listed.list.newest() or listed.list.digest(version) != digest):
        return Difference("quarantine_list", [version, digest], listed.list.url)
    return None
