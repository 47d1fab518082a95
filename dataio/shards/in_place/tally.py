"""Counts and reports for indexing in place, and the check for unique keys.

Invariant: the tally lists every sample and shard that is left out, unless `strict` makes it an error.
Failure behaviour: `Tally.skip` raises with `strict`. `UniqueKeys` raises a `UsageError` that names both shards.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError, UsageError
from headrace.dataio.core.log import get_logger
from headrace.dataio.shards.in_place import patterns as found_by
from headrace.dataio.shards.ingest.report import PackReport, Skipped
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import url_of

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class IndexProgress:
    """The progress of indexing.

    `shards` counts the shards begun and `bytes` the bytes read. `samples` counts the samples found. `skipped` counts
    skipped samples and shards.
    """

    shards: int
    shards_total: int
    bytes: int
    bytes_total: int
    samples: int
    skipped: int


@dataclass(frozen=True, slots=True)
class ShardAt:
    """One tar: its key in the dataset, and its store and its key there."""

    key: str
    store: Store
    inner: str
    size: int
    modified: float

    @property
    def url(self) -> str:
        return url_of(self.store, self.inner)


class Tally:
    """Counts samples, members, shards and bytes, and applies `strict`."""

    def __init__(
        self,
        found: found_by.Found,
        strict: bool,
        progress: Callable[[IndexProgress], None] | None,
        sizes: Sequence[int],
    ) -> None:
        self.strict, self._progress = strict, progress
        self.ignored, self.skipped, self.notes = found.ignored, list[Skipped](), list[str]()
        self.samples = self.members = self.shards = self.done = 0
        self._shards_total, self._bytes_total = len(sizes), sum(sizes)
        self._began = time.monotonic()
        for item in found.missing:
            self.skip(item)

    def skip(self, item: Skipped) -> None:
        if self.strict:
            error = {UnsupportedError.code: UnsupportedError, NotFoundError.code: NotFoundError}.get(
                item.code, CorruptionError
            )
            raise error(f"{item.path}: {item.reason}", hint="without strict it would be skipped")
        _log.info("skipped %s: %s", item.path, item.reason)
        self.skipped.append(item)

    def step(self, bytes_of_shard: int) -> None:
        if self._progress is not None:
            at = self.done + bytes_of_shard
            self._progress(
                IndexProgress(self.shards, self._shards_total, at, self._bytes_total, self.samples, len(self.skipped))
            )

    def report(self, document: versions.VersionDocument) -> PackReport:
        return PackReport(
            files=self.members,
            samples=document.samples,
            shards=len(document.shards),
            bytes=sum(shard.size for shard in document.shards),
            seconds=time.monotonic() - self._began,
            skipped=tuple(self.skipped),
            ignored=self.ignored,
            notes=tuple(self.notes),
        )


class UniqueKeys:
    """Finds equal keys in two shards.

    It holds 8 bytes per sample, and checks whenever the number of samples has doubled.
    """

    def __init__(self, shards: Sequence[ShardAt]) -> None:
        self._shards = shards
        self._hashes, self._ends = array.array("Q"), list[tuple[int, int]]()
        self._look_at = 2

    def add(self, shard: int, keys: Sequence[str]) -> None:
        self._hashes.extend(xxhash.xxh3_64_intdigest(key.encode()) for key in keys)
        self._ends.append((len(self._hashes), shard))
        if len(self._ends) > 1 and len(self._hashes) >= self._look_at:
            self.check()
            self._look_at = 2 * len(self._hashes)

    def check(self) -> None:
        """Raise `UsageError` if two keys are equal."""
        hashes = np.frombuffer(self._hashes, np.uint64) if self._hashes else np.empty(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(hashes[order][1:] == hashes[order][:-1])
        if len(same):
            first, second = (self._shard_of(int(order[same[0] + i])) for i in (0, 1))
            raise UsageError(
                f"{first.url} and {second.url} hold samples of the same key",
                hint="keys='shard' (--keys shard) puts the shard's path in front of every key",
            )

    def _shard_of(self, place: int) -> ShardAt:
        return self._shards[next(shard for end, shard in self._ends if place < end)]
