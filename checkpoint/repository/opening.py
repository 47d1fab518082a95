"""The manifests of a committed step: which they are, says its fate, and each is compared with that.

Invariant: a manifest that is returned is the one that was sealed; with all of a step's, what belongs to all ranks is whole.
Failure behaviour: `CorruptionError` naming what is missing or damaged, once no copy of it is left to try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from headrace.checkpoint.format import manifest as manifests
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.format.documents import Base
from headrace.checkpoint.format.manifest import Manifest
from headrace.checkpoint.repository import commit
from headrace.checkpoint.repository.ahead import in_order
from headrace.checkpoint.repository.commit import Attempt
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.store.base import Store

T = TypeVar("T")
_AT_ONCE = 8
"""Manifests that are read at once: most of what one takes is the store's answer."""


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step with its manifests, by rank."""

    run: str
    base: Base
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """A committed step as its fate has it: the attempt, and the digests of its ranks' manifests."""

    run: str
    base: Base
    attempt: Attempt
    digests: tuple[bytes, ...]

    def decode(self, rank: int, data: bytes) -> Manifest:
        """The manifest of a rank, checked, from the bytes of its object."""
        return manifests.decode(data, self.attempt.manifest_key(rank), self.digests[rank])


def open_step(store: Store, run: str, base: Base) -> Step:
    """The step's manifests, each checked against the digest in the fate, and all against each other."""
    found = sealed(store, run, base)
    return together(found, read(store, found, range(len(found.digests)), found.decode))


def manifests_like(
    store: Store, run: str, base: Base, rank: int, world_size: int, replicas: bytes
) -> tuple[Manifest, ...]:
    """What holds all that `rank` is likely to save again: its own manifest where as many ranks divided the same work, which they
    then did alike, else those of all."""
    found = sealed(store, run, base)
    if replicas and len(found.digests) == world_size > 1:
        own = found.decode(rank, _encoded(store, found, rank))
        if own.replicas == replicas:
            return (own,)
    return open_step(store, run, base).manifests


def sealed(store: Store, run: str, base: Base) -> Sealed:
    """What the step's fate says."""
    where = Attempt(run, base.timeline, base.step, base.attempt, 0)
    fate = commit.find_fate(store, where.fate_key)
    if fate is None:
        raise CorruptionError(f"{where.fate_key} is missing although its step is committed")
    if fate.fate != "commit" or not fate.manifests or fate.attempt != base.attempt:
        raise CorruptionError(f"{where.fate_key} does not commit the attempt that COMMIT names")
    try:
        return Sealed(run, base, where, tuple(bytes.fromhex(each) for each in fate.manifests))
    except ValueError:  # of a document without a digest of its own, as older ones are
        raise CorruptionError(f"{where.fate_key} names manifests by what is no digest") from None


def read(store: Store, found: Sealed, ranks: Sequence[int], take: Callable[[int, bytes], T]) -> list[T]:
    """What `take` makes of the manifests of these ranks, one after another, as they lie in the store."""
    with ThreadPoolExecutor(_AT_ONCE, "headrace-manifests") as pool:
        coming = in_order(pool, lambda rank: _encoded(store, found, rank), ranks, _AT_ONCE)
        return [take(rank, data) for rank, data in zip(ranks, coming, strict=True)]


def together(found: Sealed, given: Sequence[Manifest]) -> Step:
    """The step of these manifests, by rank, once they were seen to belong together."""
    for each in given:
        if each.world_size != len(given):
            raise CorruptionError(
                f"{found.attempt.fate_key} names {len(given)} manifests of a world of {each.world_size}"
            )
    what = manifests.check_shards(given)
    if what is not None:
        raise CorruptionError(f"{found.attempt.fate_key}: {what}", hint="run `headrace ckpt check`")
    return Step(found.run, found.base, tuple(given))


def _encoded(store: Store, found: Sealed, rank: int) -> bytes:
    """The manifest with the digest of the fate, from whichever copy has it. The last copy is read twice: a byte may have changed
    on the way."""
    key = found.attempt.manifest_key(rank)
    while digest(data := _get(store, key)) != found.digests[rank]:
        if not store.invalidate(key):
            return _get(store, key)
    return data


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key, max_bytes=manifests.MAX_BYTES)
    except NotFoundError:
        raise CorruptionError(f"{key} is missing although its step is committed") from None
