"""Reads one shard from end to end and compares it with the index.

Purpose: for `verify` and `repair`, find out whether the shard is an intact tar whose headers match the index, and which
members have wrong bytes. The check also compares the digests of pieces in the index with those of the bytes.

Invariants:

* Memory holds the windows of `ReadAhead` and the shard's rows.
* Every member that the index names is hashed, even after a damaged header. The findings therefore name all affected
  samples.
* Members that no row names (removed samples, names that are not keys) are not hashed.

Failure behaviour: damage is a `Finding`. A transient error is raised, since it says nothing about the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.dataio.core import limits
from headrace.dataio.core.errors import CorruptionError, NotFoundError, UnsupportedError
from headrace.dataio.shards import tar
from headrace.dataio.shards.pieces import Hasher, first_difference
from headrace.dataio.shards.readahead import ReadAhead
from headrace.dataio.shards.sample import Pieces
from headrace.dataio.shards.verify.report import Finding
from headrace.dataio.shards.versions.documents import Shard
from headrace.dataio.store.base import Store
from headrace.dataio.store.mounts import PREFIX

_WINDOW = 4 * limits.MIB


@dataclass(frozen=True, slots=True)
class IndexedMember:
    """One member as the index describes it."""

    key: str
    ext: str
    offset: int
    length: int
    xxh3: int
    pieces: Pieces | None = None


@dataclass(slots=True)
class ShardCheck:
    """The result of a check.

    `intact` means that the size, the headers and the end are right. `bad_offsets` holds the offsets of members whose
    bytes are wrong or missing.
    """

    bytes: int = 0
    members: int = 0
    intact: bool = True
    bad_offsets: set[int] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def add_structure_fault(self, code: str, message: str, member: IndexedMember | None = None) -> None:
        """Add a fault of the tar itself."""
        self.intact = False
        self.add_finding(code, message, member)

    def add_bad_member(self, code: str, message: str, member: IndexedMember) -> None:
        """Add a member whose bytes are wrong."""
        self.bad_offsets.add(member.offset)
        self.add_finding(code, message, member)

    def add_finding(self, code: str, message: str, member: IndexedMember | None) -> None:
        """Add a finding. The fault may also lie in the index."""
        if member is None:
            self.findings.append(Finding(code=code, message=message))
        else:
            self.findings.append(
                Finding(code=code, message=message, key=member.key, ext=member.ext, offset=member.offset)
            )


def check_shard(
    store: Store, shard: Shard, members: Sequence[IndexedMember], step: Callable[[int], None] = lambda _: None
) -> ShardCheck:
    """Read the shard and compare it with the rows. `step` is called with the number of bytes since the last call."""
    result = ShardCheck()
    try:
        size = store.stat(shard.key).size
    except NotFoundError:
        result.add_structure_fault("missing", "the object does not exist")
        result.bad_offsets = {w.offset for w in members}
        step(shard.size)
        return result
    if size != shard.size:
        change = "truncated" if size < shard.size else "extended"
        result.add_structure_fault("size", f"{change}: it has {size} bytes, the version says {shard.size}")
    unseen = {w.offset: w for w in members}
    with ReadAhead(store, shard.key, size, _WINDOW) as ahead:
        _walk(ahead, shard.key, unseen, result, step)
        for member in sorted(unseen.values(), key=lambda w: w.offset):
            check_bytes(ahead, member, result)
    result.bytes = size
    step(max(0, shard.size - min(size, shard.size)))
    return result


def check_members(store: Store, shard: Shard, members: Iterable[IndexedMember]) -> set[int]:
    """Read only these members of a shard, and return the offsets of those with wrong or missing bytes."""
    result = ShardCheck()
    try:
        size = store.stat(shard.key).size
    except NotFoundError:
        return {w.offset for w in members}
    with ReadAhead(store, shard.key, size, _WINDOW) as ahead:
        for member in sorted(members, key=lambda w: w.offset):
            check_bytes(ahead, member, result)
    return result.bad_offsets


def _walk(
    ahead: ReadAhead, shard: str, unseen: dict[int, IndexedMember], result: ShardCheck, step: Callable[[int], None]
) -> None:
    """Check the members that the headers name, and remove them from `unseen`."""
    at = 0
    try:
        for entry in tar.scan(ahead.read_at, ahead.size, shard):
            member = unseen.pop(entry.offset, None)
            if member is not None:
                _check_header(entry, member, shard, result)
                check_bytes(ahead, member, result)
            if not shard.startswith(PREFIX):  # other tar writers may put any bytes there
                _check_padding(ahead, entry, result)
            step(entry.offset + entry.length - at)
            at = entry.offset + entry.length
    except (CorruptionError, UnsupportedError) as error:
        result.add_structure_fault("structure", error.message.removeprefix(f"{shard}: "))
    else:
        for member in unseen.values():
            result.add_structure_fault(
                "header", f"no member starts at offset {member.offset}, where the index has one", member
            )
    step(ahead.size - at)


def _check_header(entry: tar.TarMember, member: IndexedMember, shard: str, result: ShardCheck) -> None:
    if not _is_same_key(entry.key, member.key, shard) or entry.ext != member.ext or entry.length != member.length:
        stored, indexed = f"{entry.name!r} of {entry.length} bytes", f"{member.key}.{member.ext} of {member.length}"
        result.add_structure_fault(
            "header", f"the header at offset {entry.header} is of {stored}, the index has {indexed}", member
        )


def _is_same_key(stored: str, indexed: str, shard: str) -> bool:
    """Whether the index may have this key for a member. `index --keys shard` puts the shard's path in front of it."""
    if indexed == stored:
        return True
    key = stored.removeprefix("./")
    if shard.startswith(PREFIX):  # the path in its own store is not known here
        return ("/" + indexed).endswith("/" + key)
    return indexed == f"{shard.removesuffix('.tar')}/{key}"


def _check_padding(ahead: ReadAhead, entry: tar.TarMember, result: ShardCheck) -> None:
    end = entry.offset + entry.length
    padding = ahead.read_at(end, min(tar.padded(entry.length), ahead.size - entry.offset) - entry.length)
    if any(padding):
        result.add_structure_fault("structure", f"the padding behind {entry.name!r}, at offset {end}, is not zero")


def check_bytes(ahead: ReadAhead, member: IndexedMember, result: ShardCheck, start: int = 0) -> None:
    """Hash the bytes of one member. `start` is the offset in the shard of the object that `ahead` reads."""
    offset = member.offset - start
    if offset + member.length > ahead.size:
        result.add_bad_member(
            "missing", f"its bytes end at {offset + member.length}, the shard at {ahead.size}", member
        )
        return
    hasher = Hasher(None if member.pieces is None else member.pieces.size)
    for part in ahead.parts(offset, member.length):
        hasher.update(part)
    result.members += 1
    if hasher.whole() != member.xxh3:
        result.add_bad_member(
            "checksum", "its bytes are not those that were packed: the checksum does not match", member
        )
    elif (expected := member.pieces) is not None and (actual := hasher.pieces()) is not None:
        number = first_difference(actual, expected)
        if number is not None:
            why = (
                f"its checksum matches, but the index has another digest of its piece {number} of {expected.size} bytes"
            )
            result.add_finding("pieces", f"{why}, so readers of it fail: pack or index the data again", member)
