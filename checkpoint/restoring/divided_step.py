"""A step of which each rank of a job reads a part of the manifests.

Reading all manifests costs every rank as much as the whole step has. So the ranks divide them:

1. If the step has groups, the ranks divide the groups, and send each digest to the rank that reads the manifest.
2. Each rank reads its share of the manifests, and its own. It compares them with their digests and with the plan.
3. It sends the places of their shards to the homes of the tensors (`headrace.checkpoint.restoring.tensor_homes`), and
   each home checks that they cover its tensors.
4. The ranks ask the homes for the types and shapes in their own documents, and then for the shards of their boxes.
5. A rank asks the readers of the other manifests for the rows of these shards.

A rank holds the rows of its share of the manifests, the rows it needs, and the places of the shards of its tensors.

Invariant: each manifest is read by one rank, and manifest 0 also by ranks that the saving job did not have. Shards cover
every tensor of the step, as in `fetch.together`. A rank checks the rows that another rank sends as it checks a manifest.
Failure behaviour: all ranks raise `CorruptionError` or `NotFoundError` if one of them finds damage. They raise
`TransientError` if one of them fails otherwise. No rank waits for a rank that has failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from headrace.checkpoint.format import excerpt, group
from headrace.checkpoint.format.chunking import Box, TensorSpec
from headrace.checkpoint.format.manifest import Manifest, Rows, Tensor
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.fetch import Sealed
from headrace.checkpoint.restoring import tensor_homes
from headrace.checkpoint.restoring.chunk_reader import Saved, own_tensors
from headrace.checkpoint.restoring.opening import OF_ALL_RANKS, Exchange
from headrace.checkpoint.restoring.tensor_homes import Answer, TensorHome, TensorType
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

WHOLE_RANKS = 8
"""If neither the saving nor the restoring job has more ranks, every rank reads all manifests.

The exchanges would cost such a job more than the manifests.
"""


class _Member(msgspec.Struct, array_like=True, frozen=True):
    """What the group of a rank says of its manifest: the digests of the manifest, its share and the plan."""

    rank: int
    manifest: bytes
    share: bytes
    plan: bytes


class _GroupShares(msgspec.Struct, array_like=True, frozen=True):
    """The share digests of the ranks of one group, from rank `first` on, and its plan digest."""

    first: int
    plan: bytes
    shares: list[bytes]


class _FromGroups(msgspec.Struct, array_like=True):
    """The message of a rank that has read groups: about the receiver's manifests, and for rank 0 all shares."""

    members: list[_Member] = []
    shares: list[_GroupShares] = []


_Answering = Callable[[Mapping[int, bytes]], dict[int, bytes]]
_from_groups_decoder = msgspec.msgpack.Decoder(_FromGroups)
_rows_decoder = msgspec.msgpack.Decoder(list[tuple[int, list[int]]])


def is_divided(sealed: Sealed, ranks: Exchange) -> bool:
    """Whether the ranks divide the manifests of this step. If not, every rank reads all of them."""
    return ranks.world_size > 1 and max(sealed.attempt.world_size, ranks.world_size) > WHOLE_RANKS


def readers_of(manifest: int, saved: int, ranks: int) -> list[int]:
    """The ranks that read a manifest of a step that `saved` ranks wrote, in a job of so many ranks."""
    others = range(saved, ranks) if manifest == 0 else ()
    return [manifest % ranks, *others]


def manifests_of(rank: int, saved: int, ranks: int) -> list[int]:
    """The manifests that a rank reads, its own first: that of the same rank, or of rank 0 if there is none."""
    first = rank if rank < saved else 0
    return [first, *(number for number in range(rank, saved, ranks) if number != first)]


def open_divided(store: Store, sealed: Sealed, ranks: Exchange) -> DividedStep:
    """Read this rank's share of the manifests. All ranks call it."""
    expected = _members(store, sealed, ranks) if sealed.groups else {}
    with ranks.agreed(alike=OF_ALL_RANKS):
        manifests = _read(store, sealed, expected, ranks)
        share = [each for number, each in manifests.items() if number % ranks.world_size == ranks.rank]
        places = tensor_homes.places_by_home(share, ranks.world_size)
    received = ranks.all_to_all(places)
    with ranks.agreed(alike=OF_ALL_RANKS):
        home = TensorHome((data for _, data in sorted(received.items())), sealed.attempt.decision_key)
    return DividedStep(sealed, manifests, home, ranks)


class DividedStep:
    """The step as one rank sees it. The methods are collective.

    `manifests`: those that this rank has read, its own first. `own`: the manifest with this rank's document and
    rank-local tensors.
    """

    def __init__(self, sealed: Sealed, manifests: Mapping[int, Manifest], home: TensorHome, ranks: Exchange) -> None:
        self._manifests, self._home, self._ranks = manifests, home, ranks
        self.own = next(iter(manifests.values()))
        first_is_shared = ranks.world_size > sealed.attempt.world_size
        self._local = own_tensors(self.own, alone=self.own.rank > 0 or not first_is_shared)

    def types(self, names: Sequence[str]) -> dict[str, TensorType]:
        """The types and shapes of these tensors. A tensor that the step does not hold is left out."""
        types_by_name = {t.name: (t.dtype, t.shape) for t in self.own.tensors}
        names_by_home = tensor_homes.names_by_home(
            dict.fromkeys(n for n in names if n not in types_by_name), self._ranks.world_size
        )
        answers = self._ask(tensor_homes.encode_names(names_by_home), self._home.shapes)
        with self._ranks.agreed():
            for home, its in names_by_home.items():
                types = tensor_homes.decode_types(answers[home])
                types_by_name |= {name: type_ for name, type_ in zip(its, types, strict=True) if type_ is not None}
        return types_by_name

    def tensors(self, types: Mapping[str, TensorType], boxes: Mapping[str, Sequence[Box]]) -> dict[str, Saved]:
        """The tensors with these names, each with the shards that overlap its boxes."""
        shared = {name: its for name, its in boxes.items() if name not in self._local}
        names_by_home = tensor_homes.names_by_home(shared, self._ranks.world_size)
        answers = self._ask(tensor_homes.encode_requests(names_by_home, shared), self._home.shards)
        with self._ranks.agreed():
            places: dict[str, Answer] = {}
            for home, its in names_by_home.items():
                places |= zip(its, tensor_homes.decode_answers(answers[home]), strict=True)
            rows = _Rows(self._manifests, places)
        received = self._ask(rows.requests(self._ranks.world_size), self._excerpts)
        with self._ranks.agreed(alike=OF_ALL_RANKS):
            rows.add(received, self._ranks.world_size)
            return self._local | {name: rows.tensor(name, types[name]) for name in shared}

    def _ask(self, messages: dict[int, bytes], answer: _Answering) -> dict[int, bytes]:
        """Send messages, answer those that this rank receives, and return the answers to its own, by rank."""
        received = self._ranks.all_to_all(messages)
        with self._ranks.agreed():
            answers = answer(received)
        return self._ranks.all_to_all(answers)

    def _excerpts(self, received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Answer requests for rows, by sender. Replicas ask for the same rows, which are encoded once."""
        encoded: dict[bytes, bytes] = {}
        for data in received.values():
            if data not in encoded:
                requested = _rows_decoder.decode(data)
                encoded[data] = excerpt.encode(
                    [excerpt.excerpt(self._manifests[number], rows) for number, rows in requested]
                )
        return {sender: encoded[data] for sender, data in received.items()}


class _Rows:
    """The rows that a rank needs: those in the manifests that it has read, and those that other ranks send."""

    def __init__(self, manifests: Mapping[int, Manifest], answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._rows: dict[tuple[int, int], tuple[Rows, Tensor]] = {}
        self._missing: dict[int, list[int]] = defaultdict(list)
        for place in dict.fromkeys(place for answer in answers.values() for place in answer.shards):
            number, row = place
            if number in manifests:
                self._rows[place] = manifests[number], manifests[number].tensors[row]
            else:
                self._missing[number].append(row)

    def requests(self, world_size: int) -> dict[int, bytes]:
        """The messages that ask for rows, by the rank that has read their manifest."""
        return {reader: msgspec.msgpack.encode(its) for reader, its in self._by_reader(world_size).items()}

    def add(self, received: Mapping[int, bytes], world_size: int) -> None:
        """Add the rows that the other ranks sent."""
        for reader, requested in self._by_reader(world_size).items():
            for (number, numbers), part in zip(requested, excerpt.decode(received[reader], reader), strict=True):
                for row, tensor in zip(numbers, part.tensors, strict=True):
                    self._rows[number, row] = part, tensor

    def tensor(self, name: str, type_: TensorType) -> Saved:
        """A tensor with the shards that its home named. Each must be a shard of this tensor."""
        answer = self._answers[name]
        shards = tuple(self._rows[place] for place in answer.shards)
        if any((t.name, t.dtype, t.shape, t.replicated) != (name, *type_, True) for _, t in shards):
            raise CorruptionError(f"the ranks do not agree about the shards of tensor {name!r:.200}")
        return Saved(name, *type_, shards, answer.alone)

    def _by_reader(self, world_size: int) -> dict[int, list[tuple[int, list[int]]]]:
        by_reader: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
        for number, rows in self._missing.items():
            by_reader[number % world_size].append((number, rows))
        return by_reader


def _members(store: Store, sealed: Sealed, ranks: Exchange) -> dict[int, _Member]:
    """What the groups say of the manifests that this rank reads. Rank 0 also compares them with the plan."""
    saved = sealed.attempt.world_size
    with ranks.agreed(alike=OF_ALL_RANKS):
        indexes = range(ranks.rank, len(sealed.groups), ranks.world_size)
        groups_read = list(fetch.read_groups(store, sealed, indexes))
        messages: dict[int, _FromGroups] = defaultdict(_FromGroups)
        for group_read in groups_read:
            messages[0].shares.append(
                _GroupShares(group_read.first, group_read.plan, [m.share for m in group_read.members])
            )
            for rank, member in zip(group_read.ranks, group_read.members, strict=True):
                for reader in readers_of(rank, saved, ranks.world_size):
                    messages[reader].members.append(_Member(rank, member.manifest, member.share, group_read.plan))
        sent = {reader: msgspec.msgpack.encode(message) for reader, message in messages.items()}
    received = ranks.all_to_all(sent)
    with ranks.agreed(alike=OF_ALL_RANKS):
        parts = [_from_groups_decoder.decode(data) for data in received.values()]
        if ranks.rank == 0:
            _check_plan(sealed, sorted((each for part in parts for each in part.shares), key=lambda each: each.first))
    return {member.rank: member for part in parts for member in part.members}


def _check_plan(sealed: Sealed, group_shares: Sequence[_GroupShares]) -> None:
    """Check that the groups hold every rank once, and that their shares are those of the plan."""
    shares: list[bytes] = []
    for group_share in group_shares:
        if group_share.first != len(shares) or group_share.plan != group_shares[0].plan:
            raise CorruptionError(f"{sealed.attempt.decision_key}: its groups do not belong together")
        shares += group_share.shares
    if len(shares) != sealed.attempt.world_size or group.plan_digest(shares) != group_shares[0].plan:
        raise CorruptionError(f"{sealed.attempt.decision_key}: its groups do not hold what the ranks planned to save")


def _read(store: Store, sealed: Sealed, members: Mapping[int, _Member], ranks: Exchange) -> dict[int, Manifest]:
    """Read and check this rank's manifests, its own first."""
    saved = sealed.attempt.world_size
    digests: dict[int, bytes] = {}
    for number in manifests_of(ranks.rank, saved, ranks.world_size):
        if sealed.groups and number not in members:
            raise fetch.missing_digest(sealed, number)
        digests[number] = members[number].manifest if sealed.groups else sealed.digests[number]
    by_number: dict[int, Manifest] = {}
    for number, manifest in zip(digests, fetch.read_manifests(store, sealed, digests), strict=True):
        if manifest.world_size != saved:
            raise fetch.other_world(sealed, manifest)
        if number in members:
            _check_share(sealed, manifest, members[number])
        by_number[number] = manifest
    return by_number


def _check_share(sealed: Sealed, manifest: Manifest, member: _Member) -> None:
    specs = (TensorSpec(t.name, t.dtype, t.box, t.replicated) for t in manifest.tensors)
    if group.share_digest(specs) != member.share or manifest.replicas != member.plan:
        key = sealed.attempt.manifest_key(manifest.rank)
        raise CorruptionError(f"{key} does not hold what its rank planned to save", hint="run `headrace ckpt check`")
