"""Plan a save: which rank writes which tensor, and how the tensors are laid out.

A rank knows only its own tensors. It does not know which ranks hold a replica or another shard of them. The ranks
therefore exchange tables of names and boxes, at the first save and whenever a table changes. Every rank computes the
same assignment from these tables.

Invariant: exactly one of the ranks that hold a tensor, or a shard of one, writes it. The shards of a tensor cover it.
Empty shards are not written, except for tensors without elements.

Failure behaviour: `UsageError` names the path of a value that cannot be saved. All ranks raise the same
`MismatchError`, which names the tensor, in two cases. Ranks hold it with different types or shapes, or its shards do
not cover it exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import zstandard

from headrace.checkpoint.format import chunking, group, names
from headrace.checkpoint.format.chunking import Box, Layout, TensorSpec, digest, lay_out
from headrace.checkpoint.sharding import assign_writers, coverage_error
from headrace.checkpoint.state import flatten as state
from headrace.checkpoint.state import tree
from headrace.checkpoint.state.flatten import Leaf, share
from headrace.dataio.core.errors import CapacityError, MismatchError
from headrace.dataio.core.limits import MIB, format_bytes

TABLE_BYTES = 64 * MIB
"""The largest table of one rank, in bytes."""


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A replicated tensor, or a shard. `first`: the lowest rank that holds it writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: bool

    @property
    def box(self) -> Box:
        return Box(self.shape, self.offset, self.local)


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
class WriteAssignment:
    """Which rank writes what. `replicas`: the same list on all ranks. `digest`: the digest of all tables."""

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


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """The tensors that this rank writes, in the order of `specs`, at the offsets of `layout`.

    A shard that is cut in an inner dimension is stored as several bands. `replicas` is the digest that all ranks must
    share. `replicated` lists the tensors that several ranks hold, on any ranks. `shared` holds those of them that this
    rank holds, by key.
    """

    tree: bytes
    specs: tuple[TensorSpec, ...]
    tensors: list[Any]
    layout: Layout
    replicas: bytes
    replicated: tuple[Replica, ...] = ()
    shared: dict[str, Leaf] = field(default_factory=dict)


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


def flatten_state(given: object, replicated: Callable[[str], bool] = state.never) -> FlatState:
    """Split `given` into tensors and a document, without communication.

    `replicated`: as `replicated_path` of `flatten`.
    """
    flat = share(state.flatten(given, replicated))
    return FlatState(tree.encode(flat.tree), flat.leaves)


class SavePlanner:
    """Plans the saves of one trainer.

    A plan depends only on the state's structure. It is reused until the structure changes on any rank.
    """

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._share: RankPlan | None = None
        self._tables, self._agreed = b"", b""

    def known(self, flat: FlatState) -> FlatState:
        """Add the structure, without communication. The structure of the last save is reused if it is equal."""
        rows = flat.rows
        if self._structure is None or self._structure.rows != rows:
            self._structure = Structure.of(rows)
        return replace(flat, structure=self._structure)

    def prepare(self, flat: FlatState, ranks: Exchange) -> PreparedSave:
        """Select the tensors that this rank writes, of a state that `known` returned. All ranks call it."""
        structure, share = flat.structure or Structure.of(flat.rows), self._share
        assignment = assign_writes(tuple(ranks.gather(structure.table)))
        if share is None or share.structure is not structure or share.assignment is not assignment:
            self._share = share = _rank_plan(structure, assignment, ranks.rank)
        tensors: list[Any] = []
        for number, part in share.parts:
            tensor = flat.leaves[number].local.tensor
            tensors.append(tensor[part] if part else tensor)
        shared = {key: flat.leaves[number] for key, number in share.shared}
        agreed = self._digest(share, ranks)
        return PreparedSave(flat.tree, share.specs, tensors, share.layout, agreed, assignment.replicas, shared)

    def _digest(self, share: RankPlan, ranks: Exchange) -> bytes:
        """The digest that all ranks share: of all tables, or the plan digest of a job that commits in groups.

        All ranks exchange their share digests in the same saves, because all have seen the same tables.
        """
        tables = share.assignment.digest
        if not names.is_grouped(ranks.world_size):
            return tables
        if self._tables != tables:
            shares = ranks.all(group.share_digest(share.specs))
            self._tables, self._agreed = tables, group.plan_digest(shares)
        return self._agreed


def expected(flat: FlatState, rank: int, world_size: int) -> Layout:
    """Estimate the layout of this rank's writes, to reserve memory early. This needs no communication."""
    replicated = [leaf for leaf in flat.leaves if leaf.replicated and not leaf.local.sharded]
    sizes = (
        (x.name, chunking.nbytes(x.local.dtype, x.local.shape), (0,) if x.first else range(world_size))
        for x in replicated
    )
    found = assign_writers(sizes)
    rows = flat.rows
    own = [i for i, x in enumerate(flat.leaves) if found.get(x.name, rank) == rank and not _empty(rows[i])]
    return lay_out(_specs(rows, own)[1])


def _rank_plan(structure: Structure, assignment: WriteAssignment, rank: int) -> RankPlan:
    rows, keys = structure.rows, structure.keys
    own = [i for i, row in enumerate(rows) if assignment.owners.get(keys[i], None if row[3] else rank) == rank]
    local_keys = {key: i for i, key in enumerate(keys) if rows[i][3]}
    shared = tuple(
        (replica.key, local_keys[replica.key]) for replica in assignment.replicas if replica.key in local_keys
    )
    parts, specs = _specs(rows, own)
    return RankPlan(structure, assignment, parts, specs, lay_out(specs), shared)


def _specs(
    rows: Sequence[_Row], own: Sequence[int]
) -> tuple[tuple[tuple[int, tuple[slice, ...]], ...], tuple[TensorSpec, ...]]:
    """The parts of the leaves `own` to store, and their specs.

    A shard that is cut in an inner dimension is stored as several bands.
    """
    parts: list[tuple[int, tuple[slice, ...]]] = []
    specs: list[TensorSpec] = []
    for number in own:
        name, dtype, box, replicated, _ = rows[number]
        found = chunking.bands(box, chunking.ITEM_BYTES[dtype])
        parts += [(number, chunking.inside(band, box) if len(found) > 1 else ()) for band in found]
        specs += [TensorSpec(name, dtype, band, replicated) for band in found]
    return tuple(parts), tuple(specs)


@functools.lru_cache(maxsize=2)
def assign_writes(tables: tuple[bytes, ...]) -> WriteAssignment:
    """The assignment for these tables. The last ones are cached, because layouts rarely change."""
    rows: dict[str, Row] = {}
    holders: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for row in _decode(table):
            key = _key(row.name, row.box)
            rows.setdefault(key, row)
            holders.setdefault(key, []).append(rank)
    _check(rows, holders)
    held = ((key, chunking.nbytes(row.dtype, row.local), _may_write(row, holders[key])) for key, row in rows.items())
    all_digests = digest(msgspec.msgpack.encode([digest(table) for table in tables]))
    replicas = (Replica(k, row.name, tuple(holders[k])) for k, row in rows.items() if len(holders[k]) > 1)
    compared = tuple(replica for replica in replicas if not rows[replica.key].first)
    return WriteAssignment(assign_writers(held), compared, all_digests)


def _decode(table: bytes) -> list[Row]:
    data = zstandard.ZstdDecompressor().decompress(table, max_output_size=TABLE_BYTES)
    return msgspec.msgpack.decode(data, type=list[Row])


def _may_write(row: Row, holders: list[int]) -> tuple[int, ...]:
    return (holders[0],) if row.first else tuple(holders)


def _check(rows: dict[str, Row], holders: dict[str, list[int]]) -> None:
    parts: dict[str, list[str]] = {}
    for key, row in rows.items():
        parts.setdefault(row.name, []).append(key)
    for name, keys in parts.items():
        first = rows[keys[0]]
        other = next((k for k in keys if (rows[k].dtype, rows[k].shape) != (first.dtype, first.shape)), None)
        if other is not None:
            rank, other_rank = holders[keys[0]][0], holders[other][0]
            what = f"it is {_type_name(first)} on rank {rank} and {_type_name(rows[other])} on rank {other_rank}"
        else:
            what = coverage_error([rows[key].box for key in keys]) or ""
        if what:
            raise MismatchError(
                f"tensor {name!r:.200}: {what}",
                hint="with several ranks, modules, optimizers and schedulers must fit together; nothing was saved",
            )


def _type_name(row: Row) -> str:
    return f"{row.dtype}{list(row.shape)}"


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
            hint="join tiny tensors",
        )
    return zstandard.ZstdCompressor(level=1).compress(data)


def _as_row(row: _Row) -> Row:
    name, dtype, box, _, first = row
    if 0 in box.shape:  # a tensor without elements: all its shards are equal
        box, first = Box(box.shape, (0,) * len(box.shape), box.shape), True
    return Row(name, dtype, box.shape, box.offset, box.local, first)
