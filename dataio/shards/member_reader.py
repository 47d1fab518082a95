"""Reads one member of a sample directly from the store, and verifies its checksum.

Purpose: tools and tests use these functions. Training reads through a `ShardReader`, which shares and caches reads.
Invariant: `read_member` returns the bytes that were packed, or raises an error.
Failure behaviour: `CorruptionError` names the sample, the member and the shard. A missing or short shard is also
corruption, because the version document names it.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CapacityError, CorruptionError, NotFoundError, RangeError
from headrace.dataio.shards.sample import Member, Sample
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import describe_damage, url_of

_CHUNK = 8 * limits.MIB


def find_member(sample: Sample, ext: str) -> Member:
    """Return the member with this extension, or raise `NotFoundError` listing the existing members."""
    try:
        return sample.member(ext)
    except KeyError:
        have = ", ".join(member.ext for member in sample.members)
        raise NotFoundError(f"sample {sample.key!r} has no member {ext!r}", hint=f"it has {have}") from None


def read_member(store: Store, sample: Sample, ext: str, *, max_bytes: int = limits.GIB) -> bytes:
    """Read the whole member and verify its checksum. Raises `CapacityError` if it is larger than `max_bytes`."""
    member = find_member(sample, ext)
    if member.length > max_bytes:
        raise CapacityError(
            f"{sample.key}.{ext} has {limits.format_bytes(member.length)}, above the limit of this call"
        )
    return b"".join(read_chunks(store, sample, member))


def read_chunks(store: Store, sample: Sample, member: Member) -> Iterator[bytes]:
    """Yield the member's bytes in pieces. They are verified only when the iterator ends without an error."""
    name = f"{sample.key}.{member.ext} in {url_of(store, sample.shard, member.offset)}"
    hasher = xxhash.xxh3_64()
    for start in range(0, member.length, _CHUNK):
        piece = bytearray(min(_CHUNK, member.length - start))
        try:
            store.get_into(sample.shard, member.offset + start, memoryview(piece))
        except (NotFoundError, RangeError) as error:
            raise CorruptionError(
                f"{_described(store, sample, member, name)}: {error.message}",
                hint="the shard is not what was packed or indexed",
            ) from error
        hasher.update(piece)
        yield bytes(piece)
    if hasher.intdigest() != member.xxh3:
        raise CorruptionError(
            f"{_described(store, sample, member, name)}: the checksum does not match",
            hint="restore the shard from a copy",
        )


def _described(store: Store, sample: Sample, member: Member, name: str) -> str:
    damage = describe_damage(store, sample.shard, member.offset)
    return name if damage == sample.shard else f"{sample.key}.{member.ext} in {damage}"
