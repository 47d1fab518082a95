"""Plan a save: which rank writes which tensor, and how the tensors are laid out.

A rank knows only its own tensors. It does not know which ranks hold a replica or another shard of them. The ranks
therefore exchange tables of names and boxes, at the first save and whenever a table changes. Every rank computes the
same assignment from these tables. In a large job, a rank exchanges only the rows that concern it
(`headrace.checkpoint.state.home_plan`).

Invariant: exactly one of the ranks that hold a tensor, or a shard of one, writes it. The shards of a tensor cover it.
Empty shards are not written, except for tensors without elements.

Failure behaviour: `UsageError` names the path of a value that cannot be saved. All ranks raise the same
`MismatchError`, which names the tensor, if ranks hold it with different types or shapes, or if its shards do not cover
it exactly.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zstandard

from headrace.checkpoint.format import artifacts, chunking, group, names
from headrace.checkpoint.format.chunking import Box, Layout, TensorSpec, digest, lay_out
from headrace.checkpoint.sharding import assign_writers
from headrace.checkpoint.state import flatten as state
from headrace.checkpoint.state import home_plan, tree
from headrace.checkpoint.state.flatten import Leaf, share
from headrace.checkpoint.state.home_plan import Row
from headrace.dataio.core.errors import CapacityError, UsageError
from headrace.dataio.core.limits import MIB, format_bytes

TABLE_BYTES = 64 * MIB
"""The largest table of one rank, in bytes."""


_Row = tuple[str, str, Box, bool, bool]
"""Name, dtype and box of a leaf, whether it is replicated, and whether the first rank writes it."""


@dataclass(frozen=True, slots=True)
class Structure:
    """The part of a state that the assignment depends on.

    `table` is sent to the other ranks. `keys` are the names of the leaves in the assignment.
    """

    rows: tuple[_Row, ...]
    table: bytes
    keys: tuple[str, ...]

    @classmethod
    def of(cls, rows: tuple[_Row, ...]) -> Structure:
        """Raises `CapacityError` if the rows do not fit one table."""
        return cls(rows, _table(rows), tuple(_key(name, box) for name, _, box, _, _ in rows))


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state on one rank, as tensors and a document."""

    tree: bytes
    leaves: list[Leaf]
    structure: Structure | None = None

    @property
    def rows(self) -> tuple[_Row, ...]:
        return tuple((x.name, x.local.dtype, x.local.box, x.replicated, x.first) for x in self.leaves)


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor, or a shard, that several ranks hold. Its bytes should be equal on all of them.

    `holders` are these ranks, in ascending order.
    """

    key: str
    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaSet:
    """Tensors, or shards, of this rank that the same ranks hold: their keys and names, and these ranks."""

    holders: tuple[int, ...]
    keys: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """The rank that writes each tensor or shard, by key. `replicas` is equal on all ranks. `digest` covers all
    tables."""

    owners: dict[str, int]
    replicas: tuple[Replica, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The parts of a state that one rank writes.

    `parts` holds the number of each leaf and the part of it to write. `specs` describes these parts, and `layout`
    places them. `shared` holds the keys and numbers of the leaves that other ranks hold too.
    """

    structure: Structure
    assignment: WriteAssignment
    parts: tuple[tuple[int, tuple[slice, ...]], ...]
    specs: tuple[TensorSpec, ...]
    layout: Layout
    shared: tuple[tuple[str, int], ...]
    sets: tuple[ReplicaSet, ...] | None = None


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """The tensors that this rank writes, in the order of `specs`, at the offsets of `layout`.

    After the tensors, `specs` may have large artifacts, which are not in memory.

    A shard that is cut in an inner dimension is stored as several bands. `replicas` is the digest that all ranks must
    share. `replicated` lists all tensors of the job that several ranks hold. `shared` has those that this rank holds, by
    key. In a large job, `replicated` is empty, and `sets` lists only the tensors that this rank holds.
    """

    tree: bytes
    specs: tuple[TensorSpec, ...]
    tensors: list[Any]
    layout: Layout
    replicas: bytes
    replicated: tuple[Replica, ...] = ()
    shared: dict[str, Leaf] = field(default_factory=dict)
    sets: tuple[ReplicaSet, ...] | None = None


class Exchange(Protocol):
    """The collective operations that this module needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather(self, table: bytes) -> Sequence[bytes]:
        """All-gather: every rank's table, by rank. All ranks call it."""
        ...

    def all(self, own: bytes) -> Sequence[bytes]:
        """All-gather: every rank's bytes, by rank. All ranks send the same number of bytes."""
        ...

    def maximum(self, sent: bytes) -> bytes:
        """All-reduce: the maximum over all ranks, byte by byte. All ranks send the same number of bytes."""
        ...

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank that `sent` names; return the messages to this rank, by sender."""
        ...


def flatten_state(state_dict: object, replicated: Callable[[str], bool] = state.never) -> FlatState:
    """Split `state_dict` into tensors and a document, without communication.

    `replicated`: as `replicated_path` of `flatten`.
    """
    flat = share(state.flatten(state_dict, replicated))
    return FlatState(tree.encode(flat.tree), flat.leaves)


class SavePlanner:
    """Plans the saves of one trainer.

    A plan depends only on the state's structure. It is reused until the structure changes on any rank.
    """

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._share: RankPlan | None = None

    def known(self, flat: FlatState) -> FlatState:
        """Add the structure, without communication. The structure of the last save is reused if it is equal."""
        rows = flat.rows
        if self._structure is None or self._structure.rows != rows:
            self._structure = Structure.of(rows)
        return replace(flat, structure=self._structure)

    def prepare(self, flat: FlatState, ranks: Exchange) -> PreparedSave:
        """Select the tensors that this rank writes from a state that `known` returned. All ranks must call it."""
        structure = flat.structure or Structure.of(flat.rows)
        share = self._share = self._plan(structure, ranks)
        tensors: list[Any] = []
        for number, part in share.parts:
            tensor = flat.leaves[number].local.tensor
            tensors.append(tensor[part] if part else tensor)
        shared = {key: flat.leaves[number] for key, number in share.shared}
        agreed, replicated = share.assignment.digest, share.assignment.replicas
        return PreparedSave(flat.tree, share.specs, tensors, share.layout, agreed, replicated, shared, share.sets)

    def _plan(self, structure: Structure, ranks: Exchange) -> RankPlan:
        """Return the plan of the last save, or make a new one if the structure changed on any rank."""
        share = self._share
        if names.is_grouped(ranks.world_size):
            changed = share is None or share.structure is not structure
            changed_on_any = bool(ranks.maximum(bytes([changed]))[0])
            return _plan_by_homes(structure, ranks) if share is None or changed_on_any else share
        assignment = assign_writes(tuple(ranks.gather(structure.table)))
        if share is None or share.structure is not structure or share.assignment is not assignment:
            return _rank_plan(structure, assignment, ranks.rank)
        return share


def with_artifacts(
    prepared: PreparedSave, small: Mapping[str, npt.NDArray[np.uint8]], large: Mapping[str, int]
) -> PreparedSave:
    """Add artifacts as tensors of this rank. The other ranks need not know of them.

    `large`: the sizes of artifacts that are not in memory. They come last, and have specs but no tensors.
    """
    if not small and not large:
        return prepared
    if taken := next((spec.name for spec in prepared.specs if spec.name.startswith(artifacts.PREFIX)), None):
        raise UsageError(f"{taken!r:.200} is a reserved name", hint="rename the entry of the state")
    rows: list[_Row] = [
        (f"{artifacts.PREFIX}{name}", "uint8", chunking.whole((size,)), False, False)
        for name, size in ({name: data.nbytes for name, data in small.items()} | dict(large)).items()
    ]
    specs = (*prepared.specs, *_specs(rows, range(len(rows)))[1])
    tensors = [*prepared.tensors, *map(_as_tensor, small.values())]
    return replace(prepared, specs=specs, tensors=tensors, layout=lay_out(specs))


def _as_tensor(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bytes are read-only, and the tensor is only read
        return torch.from_numpy(data)


def _plan_by_homes(structure: Structure, ranks: Exchange) -> RankPlan:
    """Make the plan of a large job. Its digest is the plan digest, which covers the writes of all ranks."""
    rows = structure.rows
    exchanged = [number for number, row in enumerate(rows) if row[3] and not _empty(row)]
    table = [_as_row(rows[number]) for number in exchanged]
    own_share = home_plan.divide(table, ranks)
    written = [number for number, row in enumerate(rows) if not row[3]] + [
        exchanged[number] for number in own_share.written
    ]
    parts, specs = _specs(rows, sorted(written))
    digests = ranks.all(group.share_digest(specs))
    sets = tuple(
        ReplicaSet(
            each.holders,
            tuple(table[number].key for number in each.rows),
            tuple(table[number].name for number in each.rows),
        )
        for each in own_share.shared
    )
    shared = tuple((table[number].key, exchanged[number]) for each in own_share.shared for number in each.rows)
    assignment = WriteAssignment({}, (), group.plan_digest(digests))
    return RankPlan(structure, assignment, parts, specs, lay_out(specs), shared, sets)


def expected(flat: FlatState, rank: int, world_size: int) -> Layout:
    """Estimate the layout of this rank's writes, to reserve memory early. This needs no communication."""
    replicated = [leaf for leaf in flat.leaves if leaf.replicated and not leaf.local.sharded]
    sizes = (
        (x.name, chunking.nbytes(x.local.dtype, x.local.shape), (0,) if x.first else range(world_size))
        for x in replicated
    )
    writers = assign_writers(sizes)
    rows = flat.rows
    own_leaves = [i for i, x in enumerate(flat.leaves) if writers.get(x.name, rank) == rank and not _empty(rows[i])]
    return lay_out(_specs(rows, own_leaves)[1])


def _rank_plan(structure: Structure, assignment: WriteAssignment, rank: int) -> RankPlan:
    rows, keys = structure.rows, structure.keys
    own_leaves = [i for i, row in enumerate(rows) if assignment.owners.get(keys[i], None if row[3] else rank) == rank]
    local_keys = {key: i for i, key in enumerate(keys) if rows[i][3]}
    shared = tuple(
        (replica.key, local_keys[replica.key]) for replica in assignment.replicas if replica.key in local_keys
    )
    parts, specs = _specs(rows, own_leaves)
    return RankPlan(structure, assignment, parts, specs, lay_out(specs), shared)


def _specs(
    rows: Sequence[_Row], numbers: Sequence[int]
) -> tuple[tuple[tuple[int, tuple[slice, ...]], ...], tuple[TensorSpec, ...]]:
    """The parts of the leaves `numbers` to store, and their specs.

    A shard that is cut in an inner dimension is stored as several bands.
    """
    parts: list[tuple[int, tuple[slice, ...]]] = []
    specs: list[TensorSpec] = []
    for number in numbers:
        name, dtype, box, replicated, _ = rows[number]
        bands = chunking.bands(box, chunking.ITEM_BYTES[dtype])
        parts += [(number, chunking.inside(band, box) if len(bands) > 1 else ()) for band in bands]
        specs += [TensorSpec(name, dtype, band, replicated) for band in bands]
    return tuple(parts), tuple(specs)


@functools.lru_cache(maxsize=2)
def assign_writes(tables: tuple[bytes, ...]) -> WriteAssignment:
    """The assignment for these tables. The last ones are cached, because layouts rarely change."""
    held_rows = home_plan.HeldRows((rank, _decode(table)) for rank, table in enumerate(tables))
    if held_rows.error is not None:
        raise home_plan.mismatch(held_rows.error)
    rows, holders = held_rows.rows, held_rows.holders
    tensors = ((key, chunking.nbytes(row.dtype, row.local), _may_write(row, holders[key])) for key, row in rows.items())
    all_digests = digest(msgspec.msgpack.encode([digest(table) for table in tables]))
    replicas = (Replica(k, row.name, tuple(holders[k])) for k, row in rows.items() if len(holders[k]) > 1)
    compared = tuple(replica for replica in replicas if not rows[replica.key].first)
    return WriteAssignment(assign_writers(tensors), compared, all_digests)


def _decode(table: bytes) -> list[Row]:
    data = zstandard.ZstdDecompressor().decompress(table, max_output_size=TABLE_BYTES)
    return msgspec.msgpack.decode(data, type=list[Row])


def _may_write(row: Row, holders: list[int]) -> tuple[int, ...]:
    return (holders[0],) if row.first else tuple(holders)


def _key(name: str, box: Box) -> str:
    return f"{name}\0{box.offset}{box.local}"


def _empty(row: _Row) -> bool:
    return 0 in row[2].local and 0 not in row[2].shape


def _table(rows: Sequence[_Row]) -> bytes:
    rows_to_send = [_as_row(row) for row in rows if row[3] and not _empty(row)]
    data = msgspec.msgpack.encode(rows_to_send)
    if len(data) > TABLE_BYTES:
        raise CapacityError(
            f"the names and shapes of {len(rows_to_send)} tensors take {format_bytes(len(data))}, "
            f"more than {format_bytes(TABLE_BYTES)}",
            hint="combine small tensors",
        )
    return zstandard.ZstdCompressor(level=1).compress(data)


def _as_row(row: _Row) -> Row:
    name, dtype, box, _, first = row
    if 0 in box.shape:  # a tensor without elements: all its shards are equal
        box, first = Box(box.shape, (0,) * len(box.shape), box.shape), True
    return Row(name, dtype, box.shape, box.offset, box.local, first)
