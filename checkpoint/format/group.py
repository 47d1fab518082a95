"""A group: an object that summarises the manifests of up to `names.GROUP_RANKS` ranks of one attempt.

A job with more ranks has too many manifests for one process to read. So the head of each group reads the manifests of
its ranks, and writes a group. The decision names the digests of the groups, and each group names the digests of its
manifests.

The *share digest* of a rank covers the names, types and boxes of the shards that the rank writes, and nothing else. The
*plan digest* covers the share digests of all ranks, in their order. Every manifest carries it (`Manifest.replicas`). So
a process can compare the plan, which covers the whole state, with the contents of all manifests, without reading all of
them.

Invariant: the content of a group depends only on the manifests. Two processes that write it write the same bytes.
Failure behaviour: `UnsupportedError` for a newer version; `CorruptionError` for everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.checkpoint.format import names, own_digest
from headrace.checkpoint.format.chunking import DIGEST_BYTES, TensorSpec, digest
from headrace.checkpoint.format.documents import MOST_ATTEMPTS, VERSION, Base, Totals, newer
from headrace.checkpoint.format.manifest import Manifest, PackName
from headrace.checkpoint.format.metadata import Metadata, Value, flaw_of
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.core.limits import JSON_DOCUMENT_BYTES

MAX_BYTES = JSON_DOCUMENT_BYTES
"""The maximum size of a group's object, in bytes."""


class Member(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank of a group: the digest of its manifest's bytes, and its share digest."""

    manifest: bytes
    share: bytes


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one group, in ascending order, from rank `first` on.

    `plan`: the plan digest. `packs`, `bases`: all packs and bases that the manifests name. Sizes are the sums over the
    ranks, in bytes. `tensors`: number of shards of tensors; None in groups of older versions. `metadata`, `description`:
    as in rank 0's manifest; empty in all groups but the first.
    """

    version: int = VERSION
    attempt: str
    index: int
    first: int
    world_size: int
    plan: bytes
    members: tuple[Member, ...]
    packs: tuple[PackName, ...]
    bases: tuple[Base, ...]
    bytes_state: int
    bytes_written: int
    bytes_deduplicated: int
    tensors: int | None = None
    metadata: dict[str, Value] = {}
    description: str = ""

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + len(self.members))


class Summary(msgspec.Struct, frozen=True, gc=False):
    """The part of a manifest that its group needs."""

    member: Member
    plan: bytes
    packs: tuple[PackName, ...]
    bases: tuple[Base, ...]
    sizes: tuple[int, int, int]
    tensors: int
    metadata: dict[str, Value]
    description: str


class _Head(msgspec.Struct):
    version: int


def share_digest(specs: Iterable[TensorSpec]) -> bytes:
    """The share digest of a rank that writes these tensors. Only tensors that belong to all ranks count."""
    rows = sorted((s.name, s.dtype, s.box.shape, s.box.offset, s.box.local) for s in specs if s.replicated)
    return digest(msgspec.msgpack.encode(rows))


NO_SHARE = share_digest(())
"""The share digest of a rank that writes only tensors of its own."""


def plan_digest(shares: Sequence[bytes]) -> bytes:
    """The plan digest, from the share digests of all ranks, in their order."""
    return digest(b"".join(shares))


def summarize(manifest: Manifest, data: bytes) -> Summary:
    """The summary of a manifest whose object holds `data`."""
    specs = (TensorSpec(t.name, t.dtype, t.box, t.replicated) for t in manifest.tensors)
    sizes = manifest.bytes_state, manifest.bytes_written, manifest.bytes_deduplicated
    member = Member(digest(data), share_digest(specs))
    return Summary(
        member,
        manifest.replicas,
        manifest.packs,
        manifest.bases,
        sizes,
        len(manifest.tensors),
        manifest.metadata,
        manifest.description,
    )


def join(attempt: str, index: int, world_size: int, summaries: Sequence[Summary]) -> Group:
    """The group of these ranks. All summaries must have the same plan digest."""
    state, written, deduplicated = (sum(each.sizes[i] for each in summaries) for i in range(3))
    return Group(
        attempt=attempt,
        index=index,
        first=names.ranks_of_group(index, world_size)[0],
        world_size=world_size,
        plan=summaries[0].plan,
        members=tuple(each.member for each in summaries),
        packs=tuple(sorted({pack for each in summaries for pack in each.packs})),
        bases=tuple(dict.fromkeys(base for each in summaries for base in each.bases)),
        bytes_state=state,
        bytes_written=written,
        bytes_deduplicated=deduplicated,
        tensors=sum(each.tensors for each in summaries),
        metadata={} if index else summaries[0].metadata,
        description="" if index else summaries[0].description,
    )


@dataclass(slots=True)
class Tally:
    """Adds up the manifests, or the groups, of one attempt. `metadata`, `description`: those of rank 0."""

    attempt: str
    ranks: int
    packs: set[PackName] = field(default_factory=set)
    tensors: int = 0
    bytes_state: int = 0
    bytes_written: int = 0
    bytes_deduplicated: int = 0
    is_complete: bool = True
    metadata: Metadata = field(default_factory=dict)
    description: str = ""

    def add(self, counted: Group | Manifest) -> None:
        """Add one manifest or group. A group of an older version lacks the number of its tensors."""
        self.packs.update(counted.packs)
        tensors = len(counted.tensors) if isinstance(counted, Manifest) else counted.tensors
        self.tensors += tensors or 0
        self.is_complete &= tensors is not None
        self.bytes_state += counted.bytes_state
        self.bytes_written += counted.bytes_written
        self.bytes_deduplicated += counted.bytes_deduplicated
        if (counted.rank if isinstance(counted, Manifest) else counted.index) == 0:
            self.metadata, self.description = counted.metadata, counted.description

    def totals(self) -> Totals | None:
        """The totals; None if a group lacks the number of its tensors, or if the packs belong to too many attempts."""
        attempts = sorted({pack.attempt for pack in self.packs} - {self.attempt})
        if not self.is_complete or len(attempts) > MOST_ATTEMPTS:
            return None
        return Totals(
            ranks=self.ranks,
            tensors=self.tensors,
            packs=sum(pack.attempt == self.attempt for pack in self.packs),
            attempts=tuple(attempts),
            bytes_state=self.bytes_state,
            bytes_written=self.bytes_written,
            bytes_deduplicated=self.bytes_deduplicated,
        )


def encode(group: Group) -> bytes:
    return own_digest.append(msgspec.msgpack.encode(group))


def decode(data: bytes, key: str, expected_digest: bytes | None = None) -> Group:
    """Decode and check the group in the object `key`.

    The given digest is compared first. If none is given, the group's own digest is compared, if it has one.
    """
    if expected_digest is None:
        own_digest.check(data, key)
    elif digest(data) != expected_digest:
        raise _damaged(key, "its digest is not the one in the decision")
    try:
        version = msgspec.msgpack.decode(data, type=_Head).version
        if version != VERSION:
            raise newer(key, version)
        group = msgspec.msgpack.decode(data, type=Group)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(key, str(error)) from None
    if flaw := _flaw(group, key):
        raise _damaged(key, flaw)
    return group


def _flaw(group: Group, key: str) -> str:
    at = names.parse_step_key(key)
    if at is None or (at.attempt, at.rank) != (group.attempt, group.index) or at.kind != "group":
        return "it belongs to another key"
    if not group.members or not 0 <= group.first <= group.world_size - len(group.members):
        return f"{len(group.members)} ranks from rank {group.first} on, of a world of {group.world_size}"
    digests = [group.plan, *(value for member in group.members for value in (member.manifest, member.share))]
    if any(len(value) != DIGEST_BYTES for value in digests):
        return "a digest has the wrong length"
    if not all(names.is_id(pack.attempt) and names.is_pack_name(pack.name) for pack in group.packs):
        return "a pack has a bad name"
    return flaw_of(group.metadata, group.description)


def _damaged(key: str, flaw: str) -> CorruptionError:
    return CorruptionError(f"{key} is not a valid group: {flaw}", hint="run `headrace ckpt check`")
