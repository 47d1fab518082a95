"""What one rank writes of a state.

A rank knows what it holds; who else holds it, only the ranks together know, since a tensor may be spread over some of them and be
the same on others. So they exchange tables of names and boxes, at the first save and whenever one of them changed, and every rank
comes to the same division.
Invariant: each tensor, or part of one, is written by exactly one of the ranks that hold it; the parts make up the tensors. Empty
parts are not written, but for tensors that have no elements at all.
Failure behaviour: `UsageError` naming the path of what cannot be saved; `MismatchError`, on all ranks alike, naming the tensor
that ranks hold in different types or shapes, or of which a part is held by nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import zstandard

from checkpoint.format import dtypes
from checkpoint.format.chunk import Box, digest
from checkpoint.format.layout import TensorSpec, in_bands
from checkpoint.sharding.cover import flaw
from checkpoint.sharding.owners import owners
from checkpoint.state import flatten as state
from checkpoint.state import tree
from checkpoint.state.flatten import Kinds, Leaf
from checkpoint.state.views import share
from dataio.core.errors import CapacityError, MismatchError
from dataio.core.limits import MIB, format_bytes

TABLE_BYTES = 64 * MIB
"""The most that one rank's table may hold."""


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A tensor, or a part of one, that belongs to all ranks. `first`: the lowest rank that has it writes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: bool

    @property
    def box(self) -> Box:
        return Box(self.shape, self.offset, self.local)


@dataclass(frozen=True, slots=True)
class Taken:
    """A state taken apart, on one rank."""

    tree: bytes
    leaves: list[Leaf]

    def table(self) -> bytes:
        """What the other ranks must know of it."""
        rows = [_row(leaf) for leaf in self.leaves if leaf.replicated and not _empty(leaf)]
        data = msgspec.msgpack.encode(rows)
        if len(data) > TABLE_BYTES:
            raise CapacityError(
                f"the names and shapes of {len(rows)} tensors take {format_bytes(len(data))}, "
                f"more than {format_bytes(TABLE_BYTES)}",
                hint="join tiny tensors",
            )
        return zstandard.ZstdCompressor(level=1).compress(data)


@dataclass(frozen=True, slots=True)
class Replica:
    """A tensor, or a part of one, of which several ranks (`holders`, ascending) have what should be the same bytes."""

    key: str
    name: str
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """Who writes what. `replicas` are the same list on all ranks; `digest` is that of all tables."""

    owners: dict[str, int]
    replicas: tuple[Replica, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class Prepared:
    """What this rank writes: `mine`. `replicas`: the digest that all ranks must share. `replicated`: what several ranks hold,
    on whichever ranks; `shared`: those of them that are here, by key."""

    tree: bytes
    mine: list[Leaf]
    replicas: bytes
    replicated: tuple[Replica, ...] = ()
    shared: dict[str, Leaf] = field(default_factory=dict)

    def specs(self) -> list[TensorSpec]:
        """The tensors of `mine`, for the layout: a shard that is cut in an inner dimension as its bands."""
        return self._in_bands()[0]

    def tensors(self) -> list[Any]:
        """What is to be staged, in the order of `specs`."""
        return self._in_bands()[1]

    def _in_bands(self) -> tuple[list[TensorSpec], list[Any]]:
        whole = [TensorSpec(x.name, x.seen.dtype, x.seen.box, x.replicated) for x in self.mine]
        return in_bands(whole, [leaf.seen.tensor for leaf in self.mine])


class Exchange(Protocol):
    """What this room must know of the other ranks."""

    @property
    def rank(self) -> int: ...
    def gather(self, table: bytes) -> Sequence[bytes]:
        """Every rank's table, by rank; called by all ranks."""
        ...


def take_apart(given: object, kinds: Kinds) -> Taken:
    """`given` as tensors and a document. Talks to nobody."""
    flat = share(state.flatten(given, kinds), kinds)
    return Taken(tree.encode(flat.tree), flat.leaves)


def prepare(taken: Taken, ranks: Exchange) -> Prepared:
    """This rank's share; called by all ranks."""
    division = divide(tuple(ranks.gather(taken.table())))
    mine, here = [], {}
    for leaf in taken.leaves:
        key = _key(leaf.name, leaf.seen.box)
        if division.owners.get(key, None if leaf.replicated else ranks.rank) == ranks.rank:
            mine.append(leaf)
        if leaf.replicated:
            here[key] = leaf
    shared = {replica.key: here[replica.key] for replica in division.replicas if replica.key in here}
    return Prepared(taken.tree, mine, division.digest, division.replicas, shared)


def expected(taken: Taken, rank: int, world_size: int) -> list[TensorSpec]:
    """What this rank will probably write, for making room in time: judged without asking the other ranks."""
    everywhere = [leaf for leaf in taken.leaves if leaf.replicated and not leaf.seen.sharded]
    sizes = (
        (x.name, dtypes.nbytes(x.seen.dtype, x.seen.shape), (0,) if x.first else range(world_size)) for x in everywhere
    )
    found = owners(sizes)
    mine = [leaf for leaf in taken.leaves if found.get(leaf.name, rank) == rank and not _empty(leaf)]
    return Prepared(b"", mine, b"").specs()


@functools.lru_cache(maxsize=2)
def divide(tables: tuple[bytes, ...]) -> Division:
    """The division that these tables lead to. The last ones are remembered: layouts rarely change."""
    rows: dict[str, Row] = {}
    holders: dict[str, list[int]] = {}
    for rank, table in enumerate(tables):
        for row in _decode(table):
            key = _key(row.name, row.box)
            rows.setdefault(key, row)
            holders.setdefault(key, []).append(rank)
    _check(rows, holders)
    held = ((key, dtypes.nbytes(row.dtype, row.local), _may_write(row, holders[key])) for key, row in rows.items())
    whole = digest(msgspec.msgpack.encode([digest(table) for table in tables]))
    replicas = (Replica(k, row.name, tuple(holders[k])) for k, row in rows.items() if len(holders[k]) > 1)
    compared = tuple(replica for replica in replicas if not rows[replica.key].first)
    return Division(owners(held), compared, whole)


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
            what = f"it is {_called(first)} on rank {holders[keys[0]][0]} and {_called(rows[other])} on rank {holders[other][0]}"
        else:
            what = flaw([rows[key].box for key in keys]) or ""
        if what:
            raise MismatchError(
                f"tensor {name!r:.200}: {what}",
                hint="with several ranks, modules, optimizers and schedulers must fit together; nothing was saved",
            )


def _called(row: Row) -> str:
    return f"{row.dtype}{list(row.shape)}"


def _key(name: str, box: Box) -> str:
    return f"{name}\0{box.offset}{box.local}"


def _empty(leaf: Leaf) -> bool:
    return 0 in leaf.seen.box.local and 0 not in leaf.seen.box.shape


def _row(leaf: Leaf) -> Row:
    box, first = leaf.seen.box, leaf.first
    if 0 in box.shape:  # the parts of nothing are all the same
        box, first = Box(box.shape, (0,) * len(box.shape), box.shape), True
    return Row(leaf.name, leaf.seen.dtype, box.shape, box.offset, box.local, first)
