"""A list of bad samples that outlives runs and is shared by their ranks, and how a loader follows it.

Purpose: samples that one run found to be damaged are not read again by another run, or by the same run after a restart.
A restored run still substitutes exactly what the interrupted run substituted, however much the list has grown since.

How the list is stored. It is an append-only folder in any store. Object `entries/<n>.json` holds what version n added;
version n of the list is everything that was added up to there. The first rank that needs it decides which version an
epoch of a run follows, and writes that down as `epochs/<run>/<epoch>.json`. So all ranks follow the same version
without talking to each other, and a run that begins an epoch again follows the same version as before. What the run
itself found in that epoch or before it is skipped as well: it is not read again, and is substituted the same.

Invariants:
- Objects are never changed, so a version always means the same samples; its `digest` says so.
- A sample is skipped by the version, the run and the epoch alone. What only one run suspects is skipped by that run
  only.
- A sample is known by where its bytes lie (dataset, shard, offset). An entry holds for all versions and views of a
  dataset, and for no copy of it.
- Nothing here keeps the loader alive.

Failure behaviour: the store's errors pass through. `CapacityError` for a full list, `CorruptionError` for an object
that is not part of a list, or for a version that is not there. When a loader cannot append what it found, that is
logged once, and the loader's state remembers the sample instead. Needs no torch.
Bounded: `MAX_VERSIONS` versions of `MAX_ENTRIES` samples each.
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
from headrace.dataio.core.errors import CapacityError, CorruptionError, HeadraceError, NotFoundError, UsageError
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
"""Where a sample's bytes lie: the dataset's URL, the shard, the offset of its first member."""


class Entry(msgspec.Struct, frozen=True):
    """A bad sample.

    Args:
        dataset, shard, offset: where its bytes lie.
        key: of the sample.
        code, reason: of the error.
        run, epoch: which run found it in which of its epochs; "" and 0 for an entry made by hand.
        suspected: found by one run. Such an entry counts for that run. It counts for every run once another run, which
            read the sample in another process, adds the same sample.
        process: of the run; entries without one count as from different processes.
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
        """Whether another run found the same in another process."""
        return self.run != other.run and (self.process != other.process or not self.process)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """`entries/<n>.json`"""

    format: int
    entries: list[Entry]
    nonce: str


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """`epochs/<run>/<epoch>.json`"""

    format: int
    version: int
    nonce: str


class QuarantineList:
    """A list of bad samples that runs share. Safe to share between threads, and between loaders.

    Args:
        url_or_store (str | os.PathLike | Store): a folder of any store, or an open store.
        version (int | None): follow this version only; nothing is written then. Default: the newest, which grows.
        storage_options (Mapping | None): options of the store at a URL. Default: None.

    Raises:
        UsageError: for an impossible version.

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
        self._digests: list[str] = [""]  # of versions 0, 1, …
        self._entries: dict[Location, list[tuple[int, Entry]]] = {}

    @property
    def url(self) -> str:
        return self._store.location.url

    def newest(self) -> int:
        """The newest version there is, looked up now."""
        with self._lock:
            while self._read(len(self._digests)):
                pass
            return len(self._digests) - 1

    def digest(self, version: int) -> str:
        """The digest of `version`."""
        self._need(version)
        return self._digests[version]

    def entries(self, version: int | None = None) -> list[Entry]:
        """The entries of a version, in the order in which they were added."""
        last = self.newest() if version is None else version
        self._need(last)
        return [entry for number, entry in self._ordered() if number <= last]

    def numbered(self) -> list[tuple[int, Entry]]:
        """All entries, with the version that added each."""
        self.newest()
        return self._ordered()

    def append(self, entries: Iterable[Entry]) -> int:
        """Add the entries that are not there yet, in versions of up to `MAX_ENTRIES`. Returns the version that has them
        all."""
        if self.pinned is not None:
            raise UsageError(f"{self.url} was opened at version {self.pinned}: nothing is added to it")
        wanted, lost = {(entry.location, entry.run): entry for entry in entries}, 0
        with self._lock:
            while lost < _TRIES:
                version = self.newest()
                new = [entry for entry in wanted.values() if self._is_news(entry, version)]
                if not new:
                    return version
                if version >= MAX_VERSIONS:
                    raise CapacityError(f"{self.url}: the list of bad samples is full", hint="begin another list")
                lost += not self._store.put_if_absent(_entries(version + 1), self._encoded(new[:MAX_ENTRIES]))
            raise CapacityError(f"{self.url}: other writers were faster {_TRIES} times", hint="try again")

    def adopted(self, run: str, epoch: int) -> int:
        """The version that `epoch` of `run` follows: the one that was decided before, or the newest now."""
        if self.pinned is not None:
            return self.pinned
        key = f"epochs/{run}/{epoch}.json"
        try:
            return self._decided(key)
        except NotFoundError:
            mine = Adopted(format=FORMAT, version=self.newest(), nonce=secrets.token_hex(16))
            self._store.put_if_absent(key, msgspec.json.encode(mine))
            return self._decided(key)

    def refused(self, location: Location, version: int, run: str, epoch: int) -> Entry | None:
        """The entry for which `epoch` of `run` skips a sample when it follows `version`."""
        own = (e for _, e in self._entries.get(location, ()) if e.run == run and run and e.epoch <= epoch)
        return self._lasting(location, version) or next(own, None)

    def is_lasting(self, location: Location, version: int) -> bool:
        """Whether every run that follows `version` skips the sample."""
        return self._lasting(location, version) is not None

    def _lasting(self, location: Location, version: int) -> Entry | None:
        """The entry by which every run goes: one that was not only suspected, or the second run's, of another
        process."""
        before = list[Entry]()
        for number, entry in self._entries.get(location, ()):
            if number <= version:
                if not entry.suspected or any(map(entry.confirms, before)):
                    return entry
                before.append(entry)
        return None

    def _is_news(self, entry: Entry, version: int) -> bool:
        """Whether it adds something to this version. What a run suspects does, the first time: the run may go by an
        older version, by which it would read the sample again."""
        own = any(
            e.run == entry.run and e.suspected <= entry.suspected for _, e in self._entries.get(entry.location, ())
        )
        return not own and (entry.suspected or self._lasting(entry.location, version) is None)

    def _ordered(self) -> list[tuple[int, Entry]]:
        """All entries by version."""
        return sorted((one for some in self._entries.values() for one in some), key=lambda one: one[0])

    def close(self) -> None:
        """Close the store if it was opened here."""
        if self._owns_store:
            self._store.close()

    def _encoded(self, entries: list[Entry]) -> bytes:
        """What a version adds."""
        data = msgspec.json.encode(Version(format=FORMAT, entries=entries, nonce=secrets.token_hex(16)))
        if len(data) > limits.SMALL_OBJECT_BYTES:  # such an object, and all later versions, would be unreadable
            raise CapacityError(f"{self.url}: {len(data)} bytes are too many for a version", hint="add fewer at a time")
        return data

    def _decided(self, key: str) -> int:
        version = int(self._decode(key, Adopted).version)
        self._need(version)
        return version

    def _need(self, version: int) -> None:
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

    def _read(self, number: int) -> bool:
        """Take in version `number`, if it is there."""
        key = _entries(number)
        try:
            data = self._store.get(key, max_bytes=limits.SMALL_OBJECT_BYTES)
        except NotFoundError:
            return False
        found = self._parse(data, key, Version)
        for entry in found.entries:
            self._entries.setdefault(entry.location, []).append((number, entry))
        self._digests.append(blake3.blake3(self._digests[-1].encode() + data).hexdigest(4))
        return True

    def _decode(self, key: str, kind: type[Any]) -> Any:
        return self._parse(self._store.get(key, max_bytes=limits.SMALL_OBJECT_BYTES), key, kind)

    def _parse(self, data: bytes, key: str, kind: type[Any]) -> Any:
        try:
            found = msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptionError(f"{self.url}: {key} is no part of a list of bad samples: {error}") from error
        if found.format != FORMAT:
            raise CorruptionError(f"{self.url}: {key} is of format {found.format}, not {FORMAT}")
        return found


def _entries(version: int) -> str:
    return f"entries/{version:08}.json"


def location_of(sample: Sample, url: str) -> Location:
    """Where a sample lies."""
    return url, sample.shard, sample.members[0].offset if sample.members else 0


KEPT_EPOCHS = 1024
"""Epochs whose versions are remembered. It is more than the batches that are planned ahead, since an epoch may have one
batch."""
PROCESS = secrets.token_hex(8)
"""Two loaders in one process do not confirm each other: they share its memory and its network. Neither does a forked
child."""


class ListAtVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The samples that an epoch of a run skips: `SampleRef.known_bad`. `urls` are those of the plan's datasets."""

    list: QuarantineList
    version: int
    run: str
    epoch: int
    urls: tuple[str, ...]

    def refuses(self, ref: SampleRef) -> HeadraceError | None:
        """Why this sample is skipped, or None."""
        entry = self.list.refused(location_of(ref.sample, self.urls[ref.source]), self.version, self.run, self.epoch)
        return None if entry is None else CorruptionError(f"it is on the list at {self.list.url}: {entry.reason}")


class FollowedList:
    """The list as one loader follows it: a `BatchSource` whose samples know the version of their epoch. Safe to share
    between threads.

    `run` identifies everything that decides the order.
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
        """Follow the list at a URL, or an open list, which is not closed here."""
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
        """The version that an epoch follows."""
        with self._lock:
            if epoch not in self._versions:
                self._versions[epoch] = self._decided(epoch)
                for old in sorted(self._versions)[:-KEPT_EPOCHS]:
                    del self._versions[old]
            return self._versions[epoch]

    def follow(self, epoch: int, version: int) -> None:
        """From now on, `epoch` follows `version`, and later epochs follow no older one, whatever was decided for them
        while planning ahead."""
        self.list.digest(version)
        with self._lock:
            self._versions, self._followed = {epoch: version}, (epoch, version)

    def _decided(self, epoch: int) -> int:
        followed_epoch, version = self._followed
        found = self.list.adopted(self._run, epoch)
        return max(found, version) if epoch > followed_epoch and self.list.pinned is None else found

    def refs(self, epoch: int, batches: range) -> Sequence[Sequence[SampleRef]]:
        known_bad = ListAtVersion(
            list=self.list, version=self.version_of(epoch), run=self._run, epoch=epoch, urls=self._urls
        )
        found = self._plan.refs(epoch, batches)
        return [[replace(ref, known_bad=known_bad) for ref in refs] for refs in found]

    def batches_in(self, epoch: int) -> int:
        return self._plan.batches_in(epoch)

    def add(self, skipped: SkippedSample, epoch: int) -> bool:
        """Put a sample that was skipped in a batch of `epoch` on the list. Returns False if it is not on it
        afterwards."""
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
            warn_once(_log, f"bad samples are kept in the loader's state, since the list cannot take them: {error}")
            self._sealed = True  # do not try again: the trainer waits here
            return False
        return (
            self.list.refused(location, self.version_of(epoch), self._run, epoch) is not None
        )  # not if found in a later epoch


def follow_state(listed: FollowedList | None, position: Position) -> Difference | None:
    """Let the position's epoch follow the version that the state names, or the empty version 0. Returns what does not
    fit, if anything; then nothing changes."""
    version, digest = position.listed or (0, "")
    if listed is None:
        return Difference("quarantine_list", list(position.listed), None) if position.listed else None
    if position.listed is not None and (version > listed.list.newest() or listed.list.digest(version) != digest):
        return Difference("quarantine_list", [version, digest], listed.list.url)
    listed.follow(position.epoch, version)
    return None
