"""Reads the objects of one joined shard and compares them with the index.

Purpose: as `check_shard` does for a tar, find the samples with wrong or missing bytes. A joined shard has no headers.
Its objects belong to the user, so every finding names the object, and says whether its size or time changed.

Invariants: only objects of samples that the version has are read. Memory holds the windows of `ReadAhead`, the shard's
list and its rows.

Failure behaviour: damage is a `Finding`. A transient error is raised, since it says nothing about the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.shards.verify.shard_check import IndexedMember, ShardCheck, check_bytes, check_shard
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store
from headrace.dataio.store.joined import SHARD_PREFIX, JoinedList, JoinedObject
from headrace.dataio.store.mounts import Mounts, describe_damage

_WINDOW = 4 * limits.MIB

Step = Callable[[int], None]


def check_any_shard(
    store: Store, shard: Shard, members: Sequence[IndexedMember], step: Step = lambda _: None
) -> ShardCheck:
    """Check a tar or a joined shard. `step` is called with the number of bytes since the last call."""
    if not shard.key.startswith(SHARD_PREFIX):
        return check_shard(store, shard, members, step)
    return _check_joined(store, shard, members, step)


def _check_joined(store: Store, shard: Shard, members: Sequence[IndexedMember], step: Step) -> ShardCheck:
    result, listed = ShardCheck(), None
    try:
        if isinstance(store, Mounts) and store.joined is not None:
            listed = store.joined.objects(shard.key[len(SHARD_PREFIX) :])
    except NotFoundError as error:
        result.add_structure_fault("missing", f"its list does not exist: {error.message}")
    except CorruptionError as error:
        result.add_structure_fault("digest", error.message)
    if listed is not None and listed.size != shard.size:
        result.add_structure_fault("size", f"its objects have {listed.size} bytes, the version says {shard.size}")
    if listed is None or not result.intact:
        result.bad_offsets = {member.offset for member in members}
        step(shard.size)
        return result
    by_start = dict[int, list[IndexedMember]]()
    for member in members:
        by_start.setdefault(member.offset - listed.find(member.offset)[1], []).append(member)
    for start in sorted(by_start):
        _check_object(store, shard.key, listed, start, by_start[start], result)
        step(listed.find(start)[0].size)
    result.bytes = sum(listed.find(start)[0].size for start in by_start)
    step(shard.size - result.bytes)
    return result


def _check_object(
    store: Store, shard: str, listed: JoinedList, start: int, members: Sequence[IndexedMember], result: ShardCheck
) -> None:
    found, _ = listed.find(start)
    own = ShardCheck()
    try:
        size = store.stat(found.key).size
        if size < found.size:
            for member in members:
                own.add_bad_member("size", f"truncated: it has {size} bytes, the list says {found.size}", member)
        else:
            _read_object(store, found, start, members, own)
    except NotFoundError:
        for member in members:
            own.add_bad_member("missing", "the object does not exist", member)
    result.members += own.members
    result.bad_offsets |= own.bad_offsets
    if own.findings:
        name = describe_damage(store, shard, start)
        for one in own.findings:
            result.findings.append(msgspec.structs.replace(one, message=f"{name}: {one.message}"))


def _read_object(
    store: Store, found: JoinedObject, start: int, members: Sequence[IndexedMember], result: ShardCheck
) -> None:
    with ReadAhead(store, found.key, found.size, _WINDOW) as ahead:
        for member in sorted(members, key=lambda one: one.offset):
            check_bytes(ahead, member, result, start)
