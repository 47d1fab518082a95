"""Repairs damaged objects from a second copy of the dataset.

Invariants:

* Only whole objects are written, atomically. Every byte with a checksum is checked while it is written.
* If a shard's own headers are intact, only its damaged members are taken from the copy. If they are not, the shard is
  rebuilt from the copy, and members that are damaged in the copy are taken from the shard.
* If a member is damaged in both, the shard is not written.
* A copy of another dataset is refused.
* Objects in mounted stores are never written.

Failure behaviour: `NotRepairable` says why an object cannot be repaired. The object stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from headrace.dataio.core import limits
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    HeadraceError,
    NotFoundError,
    RangeError,
    TransientError,
    UsageError,
)
from headrace.dataio.shards.index.pages import digest
from headrace.dataio.shards.verify.shard_check import IndexedMember, ShardCheck, check_members, check_shard
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions.documents import IndexPart, RowBitmap, Shard
from headrace.dataio.shards.versions.paging import Page, check_page
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

_COPY_BYTES = 4 * limits.MIB


class NotRepairable(Exception):
    """The reason why an object was not repaired. `verify` reports it."""


def check_copy(store: Store, copy: Store) -> None:
    """Raise `UsageError` unless `copy` is a second copy of the dataset in `store`.

    The `dataset.json` of `copy` must be readable. If that of `store` is readable, both must have the same nonce.
    """
    nonces = [_nonce(store), _nonce(copy)]
    if copy.location.url == store.location.url:
        raise UsageError("the copy is the dataset itself", hint="--repair takes the address of a second copy")
    if nonces[1] is None:
        raise UsageError(
            f"{copy.location.url} holds no readable dataset.json, so it cannot repair the dataset",
            hint="give the root of a complete copy",
        )
    if None not in nonces and nonces[0] != nonces[1]:
        raise UsageError(f"{copy.location.url} is another dataset", hint="give a copy of the damaged dataset")


def _nonce(store: Store) -> str | None:
    try:
        data = store.get(versions.DATASET_KEY, max_bytes=limits.JSON_DOCUMENT_BYTES)
        return versions.decode_dataset(data, versions.DATASET_KEY).nonce
    except (NotFoundError, CorruptionError, CapacityError):
        return None


def repair_document(store: Store, copy: Store, key: str, check: Callable[[bytes, str], object]) -> None:
    """Replace a document with the copy's, if the copy's passes `check(bytes, name)`."""
    data = _get_from_copy(copy, key, limits.JSON_DOCUMENT_BYTES)
    try:
        check(data, f"{copy.location.url}: {key}")
    except HeadraceError as error:
        raise NotRepairable(f"the object in the copy is damaged, too: {error.message}") from error
    store.put(key, data)


def repair_page(store: Store, copy: Store, page: Page) -> None:
    """Replace a page of the version's document with the copy's. Raises `CorruptionError` if it is damaged there."""
    store.put(page.key, check_page(copy, page))


def repair_part(store: Store, copy: Store, part: IndexPart) -> None:
    """Replace an index part with the copy's."""
    _check_not_mounted(part.key)
    data = _get_from_copy(copy, part.key, versions.PART_BYTES)
    if len(data) != part.size or digest(data) != part.digest:
        raise NotRepairable("the object in the copy is damaged, too: its BLAKE3 digest does not match the version")
    store.put(part.key, data)


def repair_bitmaps(store: Store, copy: Store, key: str, ranges: Sequence[RowBitmap]) -> None:
    """Replace an object of bitmaps with the copy's, if all `ranges` that the version uses are intact there."""
    _check_not_mounted(key)
    data = _get_from_copy(copy, key, versions.PART_BYTES)
    if any(digest(data[k.offset : k.offset + k.size]) != k.digest for k in ranges):
        raise NotRepairable(
            "the object in the copy is damaged, too: the BLAKE3 digest of a range does not match the version"
        )
    store.put(key, data)


def repair_shard(store: Store, copy: Store, shard: Shard, rows: Sequence[IndexedMember], check: ShardCheck) -> None:
    """Replace a shard with an intact one.

    The headers come from the dataset's shard or from the copy's, whichever has intact headers. Each member comes from a
    shard in which it is intact.
    """
    _check_not_mounted(shard.key)
    try:
        if check.intact:
            base, base_bad, other = store, check.bad_offsets, copy
            other_bad = check_members(copy, shard, (w for w in rows if w.offset in check.bad_offsets))
        else:
            copy_check = check_shard(copy, shard, rows)
            if not copy_check.intact:
                raise NotRepairable(f"the object in the copy is damaged, too: {copy_check.findings[0].message}")
            base, base_bad, other, other_bad = copy, copy_check.bad_offsets, store, check.bad_offsets
        damaged_in_both = sorted(base_bad & other_bad)
        if damaged_in_both:
            count = limits.counted(len(damaged_in_both), "member")
            raise NotRepairable(
                f"the object in the copy is damaged, too: {count} damaged in both, the first at offset {damaged_in_both[0]}"
            )
        store.put_multipart(shard.key, _merged(base, other, base_bad, shard, rows))
    except CorruptionError as error:
        raise NotRepairable(error.message) from error


def _merged(base: Store, other: Store, bad: set[int], shard: Shard, rows: Sequence[IndexedMember]) -> Iterator[bytes]:
    """Yield the shard's bytes from `base`, but the members at the offsets `bad` from `other`.

    If a member does not match its checksum, raise `CorruptionError` before the end, so that the object is not replaced.
    """
    at = 0
    for member in sorted(rows, key=lambda w: w.offset):
        yield from _range(base, shard.key, at, member.offset)
        hasher = xxhash.xxh3_64()
        source = other if member.offset in bad else base
        for piece in _range(source, shard.key, member.offset, member.offset + member.length):
            hasher.update(piece)
            yield piece
        if hasher.intdigest() != member.xxh3:
            raise CorruptionError(f"{member.key}.{member.ext} changed while it was copied, so nothing was replaced")
        at = member.offset + member.length
    yield from _range(base, shard.key, at, shard.size)


def _range(store: Store, key: str, start: int, end: int) -> Iterator[bytes]:
    for at in range(start, end, _COPY_BYTES):
        piece = bytearray(min(_COPY_BYTES, end - at))
        try:
            store.get_into(key, at, memoryview(piece))
        except (NotFoundError, RangeError) as error:
            raise TransientError(f"{key} changed while it was copied: {error.message}", hint="try again") from error
        yield bytes(piece)


def _get_from_copy(copy: Store, key: str, max_bytes: int) -> bytes:
    try:
        return copy.get(key, max_bytes=max_bytes)
    except (NotFoundError, CapacityError) as error:
        raise NotRepairable(f"the copy has no such object: {error.message}") from error


def _check_not_mounted(key: str) -> None:
    if key.startswith(PREFIX):
        raise NotRepairable("it was indexed in place: repair it where it is stored")


def bitmaps_by_object(parts: Iterable[IndexPart]) -> dict[str, list[RowBitmap]]:
    """Return the bitmaps that the parts use, by the object that holds them."""
    bitmaps: dict[str, list[RowBitmap]] = {}
    for described in parts:
        if described.bitmap is not None:
            bitmaps.setdefault(described.bitmap.key, []).append(described.bitmap)
    return bitmaps
