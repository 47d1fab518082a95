"""Check that the ranks that hold the same tensor hold the same bytes.

One rank writes each replicated tensor. Without this check, a rank that has diverged would go unnoticed. Causes are a
hardware fault, a gradient that was not reduced, or a different seed. The next restore would remove the difference, or
spread it to all ranks.

The check has two steps:

1. Every rank hashes a sample of each replica. The ranks compare a hash of these hashes. This takes one all-reduce, with
   16 bytes for each set of tensors that the same ranks hold.
2. Only for the sets whose hashes differ, the ranks exchange the hashes of the single tensors.

In a large job, a rank knows only the sets that it holds. One rank of each set, its divider
(`headrace.checkpoint.state.home_plan`), compares the hashes.

The sample is `BLOCKS` blocks of `BLOCK_BYTES`, evenly spread. Their positions change with the step. Tensors of up to
16 KiB are hashed whole. A diverged rank differs nearly everywhere. A single flipped bit in a large tensor is found only
if it is sampled.

Invariant: every rank takes part in every exchange, and all ranks reach the same result. Modules' buffers are not
compared, because running means may differ. The lowest rank's buffers are saved.

Failure behaviour: a rank that cannot hash its tensors takes part as a rank that holds none. It then raises its error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
import xxhash

from headrace.checkpoint.state.home_plan import Holders, divider_of, runs
from headrace.checkpoint.state.save_plan import PreparedSave, Replica, ReplicaSet
from headrace.checkpoint.state.tensors import as_bits, memory_of

BLOCKS, BLOCK_BYTES = 16, 1024
POLICIES = ("off", "warn", "error")
_SET = 4096
"""The maximum number of tensors whose hashes are combined into one.

If the combined hashes differ, the ranks exchange all of these tensors' hashes.
"""
_NAMED = 64
"""The maximum number of tensors that a report names."""


class Exchange(Protocol):
    """The collective operations that this module needs."""

    @property
    def rank(self) -> int: ...
    def maximum(self, sent: bytes) -> bytes:
        """All-reduce: the maximum over all ranks, byte by byte. All ranks send the same number of bytes."""
        ...

    def all(self, own: bytes) -> Sequence[bytes]:
        """All-gather: every rank's bytes, by rank. All ranks send the same number of bytes."""
        ...

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank that `sent` names; return the messages to this rank, by sender."""
        ...


@dataclass(frozen=True, slots=True)
class Divergence:
    """A tensor whose replicas differ. `ranks`: the ranks that differ from the most common hash."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.name} (rank {ranks})"


def diverged(prepared: PreparedSave, ranks: Exchange, step: int) -> tuple[Divergence, ...]:
    """Return the replicas that differ, at most `_NAMED` of them. All ranks must call it."""
    if prepared.sets is not None:
        return _diverged_in_sets(prepared, prepared.sets, ranks, step)
    sets = list(_sets(prepared.replicated))
    if not sets:
        return ()
    error, hashes = None, {}
    try:
        hashes = _hashes(prepared, step)
    except Exception as caught:  # the other ranks wait for this one
        error = caught
    joined = [
        b"".join(hashes[replica.key] for replica in replicas_of_set) if _holds_all(replicas_of_set, hashes) else b""
        for replicas_of_set in sets
    ]
    own_hashes = b"".join(_with_inverse(xxhash.xxh3_64_digest(one)) if one else bytes(16) for one in joined)
    most = ranks.maximum(own_hashes)
    divergences: list[Divergence] = []
    for i, replicas_of_set in enumerate(sets):
        if most[16 * i : 16 * i + 8] != _inverse(most[16 * i + 8 : 16 * i + 16]) and len(divergences) < _NAMED:
            divergences += _named(replicas_of_set, ranks.all(joined[i] or bytes(8 * len(replicas_of_set))))
    if error is not None:
        raise error
    return tuple(divergences[:_NAMED])


def _diverged_in_sets(
    prepared: PreparedSave, sets: Sequence[ReplicaSet], ranks: Exchange, step: int
) -> tuple[Divergence, ...]:
    error, hashes = None, {}
    try:
        hashes = _hashes(prepared, step)
    except Exception as caught:  # the other ranks wait for this one
        error = caught
    own_sets = {runs(each.holders): each for each in sets}
    hashes_by_set = {
        holders: b"".join(hashes[key] for key in each.keys)
        for holders, each in own_sets.items()
        if each.keys[0] in hashes
    }
    combined = {holders: xxhash.xxh3_64_digest(joined) for holders, joined in hashes_by_set.items()}
    compared = _by_set(_to_dividers(own_sets, combined, ranks))
    unequal = {holders for holders, given in compared.items() if len(set(given.values())) > 1}
    divergences: tuple[Divergence, ...] = ()
    if ranks.maximum(bytes([bool(unequal)]))[0]:
        divergences = _details(own_sets, hashes_by_set, {holders: compared[holders] for holders in unequal}, ranks)
    if error is not None:
        raise error
    return divergences


_Hashes = dict[Holders, bytes]


def _to_dividers(own_sets: Mapping[Holders, ReplicaSet], hashes: _Hashes, ranks: Exchange) -> dict[int, _Hashes]:
    """Send the hashes of each set to its divider; return those that this rank got as a divider, by sender."""
    sent: dict[int, _Hashes] = defaultdict(dict)
    for holders, value in hashes.items():
        sent[divider_of(own_sets[holders].holders)][holders] = value
    messages = {rank: msgspec.msgpack.encode(list(values.items())) for rank, values in sent.items()}
    received = ranks.all_to_all(messages)
    return {rank: dict(_decoder.decode(data)) for rank, data in received.items()}


def _by_set(received: Mapping[int, _Hashes]) -> dict[Holders, dict[int, bytes]]:
    by_set: dict[Holders, dict[int, bytes]] = defaultdict(dict)
    for rank, values in received.items():
        for holders, value in values.items():
            by_set[holders][rank] = value
    return by_set


def _details(
    own_sets: Mapping[Holders, ReplicaSet],
    hashes_by_set: _Hashes,
    unequal: Mapping[Holders, Mapping[int, bytes]],
    ranks: Exchange,
) -> tuple[Divergence, ...]:
    """Return the divergences of all sets whose hashes their dividers found unequal. All ranks get the same result."""
    requested: dict[int, list[tuple[Holders, bytes]]] = defaultdict(list)
    for holders, hashes_by_rank in unequal.items():
        for rank in hashes_by_rank:
            requested[rank].append((holders, b""))
    messages = {rank: msgspec.msgpack.encode(sets) for rank, sets in requested.items()}
    requested_sets = {holders for data in ranks.all_to_all(messages).values() for holders, _ in _decoder.decode(data)}
    received = _by_set(_to_dividers(own_sets, {holders: hashes_by_set[holders] for holders in requested_sets}, ranks))
    unequal_names: list[tuple[str, tuple[int, ...]]] = []
    for holders in sorted(received):
        if len(unequal_names) < _NAMED:
            unequal_names += [(each.name, each.ranks) for each in _unequal(own_sets[holders].names, received[holders])]
    encoded = msgspec.msgpack.encode(unequal_names[:_NAMED])
    longest = int.from_bytes(ranks.maximum(len(encoded).to_bytes(4, "big")), "big")
    lists = ranks.all(len(encoded).to_bytes(4, "big") + encoded.ljust(longest, b"\0"))
    rows = [row for data in lists for row in _rows_decoder.decode(data[4 : 4 + int.from_bytes(data[:4], "big")])]
    return tuple(Divergence(name, differing) for name, differing in rows[:_NAMED])


_decoder = msgspec.msgpack.Decoder(list[tuple[Holders, bytes]])
_rows_decoder = msgspec.msgpack.Decoder(list[tuple[str, tuple[int, ...]]])


def sample(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """The bytes to hash for this step: the same elements on any device and with any strides."""
    flat = as_bits(tensor.detach().resolve_conj().resolve_neg()).contiguous().view(-1)
    count, size = flat.numel(), flat.element_size()
    if count * size > BLOCKS * BLOCK_BYTES:
        block, stride = BLOCK_BYTES // size, count // BLOCKS
        start = xxhash.xxh3_64_intdigest(step.to_bytes(8, "little")) % (stride - block + 1)
        flat = flat.as_strided((BLOCKS, block), (stride, 1), flat.storage_offset() + start).reshape(-1)
    return flat.view(torch.uint8)


def _sets(replicas: Sequence[Replica]) -> Iterator[list[Replica]]:
    """Sets of tensors that the same ranks hold, of at most `_SET` tensors, in the same order on every rank."""
    groups: dict[tuple[int, ...], list[Replica]] = {}
    for replica in sorted(replicas, key=lambda r: (r.holders, r.key)):
        groups.setdefault(replica.holders, []).append(replica)
    for members in groups.values():
        yield from (members[i : i + _SET] for i in range(0, len(members), _SET))


def _hashes(prepared: PreparedSave, step: int) -> dict[str, bytes]:
    """Hashes of the replicas on this rank. One copy moves all samples of a device to main memory."""
    keys, samples = [], []
    for key, leaf in prepared.shared.items():
        keys.append(key)
        samples.append(sample(leaf.local.tensor, step))
    by_key: dict[str, bytes] = {}
    for device in {each.device for each in samples}:
        on_device = [i for i, each in enumerate(samples) if each.device == device]
        if device.type == "cpu":
            by_key |= {keys[i]: xxhash.xxh3_64_digest(memory_of(samples[i])) for i in on_device}
            continue
        together, at = memory_of(copied := torch.cat([samples[i] for i in on_device]).cpu()), 0
        for i in on_device:
            by_key[keys[i]] = xxhash.xxh3_64_digest(together[at : at + samples[i].numel()])
            at += samples[i].numel()
        del copied  # `together` is a view of its memory
    return by_key


def _holds_all(members: Sequence[Replica], hashes: dict[str, bytes]) -> bool:
    return all(replica.key in hashes for replica in members)


def _with_inverse(value: bytes) -> bytes:
    """A value and its inverse. After an all-reduce by maximum, they are still inverse only if all values were equal."""
    return value + _inverse(value)


def _inverse(value: bytes) -> bytes:
    return bytes(255 - byte for byte in value)


def _named(members: Sequence[Replica], hashes: Sequence[bytes]) -> Iterator[Divergence]:
    holders = members[0].holders
    yield from _unequal([replica.name for replica in members], {rank: hashes[rank] for rank in holders})


def _unequal(names: Sequence[str], hashes: Mapping[int, bytes]) -> Iterator[Divergence]:
    """Yield the tensors whose hashes differ. `hashes` has each rank's joined hashes, in the order of `names`."""
    for i, name in enumerate(names):
        hashes_of_name = {rank: joined[8 * i : 8 * i + 8] for rank, joined in sorted(hashes.items())}
        if len(set(hashes_of_name.values())) > 1:
            most = Counter(hashes_of_name.values()).most_common(1)[0][0]
            yield Divergence(name, tuple(rank for rank, value in hashes_of_name.items() if value != most))
