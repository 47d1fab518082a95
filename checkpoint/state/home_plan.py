"""Divide the writes of a large job among its ranks. A rank handles only a few times as many rows as it holds.

In a small job every rank reads the tables of all ranks (`headrace.checkpoint.state.save_plan`). With thousands of ranks
these tables are too large. Here, each tensor has a *home*: the rank that a hash of its name selects. The ranks exchange
messages three times. Each message goes only to the ranks that need it:

1. Every rank sends the rows of its shards to their homes. A home checks that the shards of its tensors agree and cover
   them. It finds which ranks hold the same shard.
2. A home tells each rank which of its shards no other rank holds. It sends the rows of shards that several ranks hold to
   one of these ranks, their *divider*. All shards that the same ranks hold have the same divider.
3. The divider divides these shards among the ranks by size, and tells each rank which ones it writes.

Invariant: exactly one of the ranks that hold a shard writes it. The result is that of `save_plan.assign_writes`.

Failure behaviour: all ranks raise the same `MismatchError` if ranks hold a tensor with different types or shapes, or if
its shards do not cover it exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import xxhash

from headrace.checkpoint.format import chunking
from headrace.checkpoint.format.chunking import Box
from headrace.checkpoint.sharding import assign_writers, coverage_error
from headrace.dataio.core.errors import MismatchError

_TEXT_BYTES = 512
"""The maximum length of an error's text, in bytes."""


class Exchange(Protocol):
    """The collective operations that this module needs."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def maximum(self, sent: bytes) -> bytes:
        """All-reduce: the maximum over all ranks, byte by byte. All ranks send the same number of bytes."""
        ...

    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank that `sent` names; return the messages to this rank, by sender."""
        ...


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A replicated tensor, or a shard. `first`: whether the lowest rank that holds it must write it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: tuple[int, ...]
    first: bool

    @property
    def box(self) -> Box:
        return Box(self.shape, self.offset, self.local)

    @property
    def key(self) -> str:
        """The row's name in an assignment. Rows with equal names and boxes have equal keys."""
        return f"{self.name}\0{self.offset}{self.local}"

    @property
    def nbytes(self) -> int:
        return chunking.nbytes(self.dtype, self.local)


Holders = tuple[tuple[int, int, int], ...]
"""Ascending ranks, as runs of equal distance: (first rank, number of ranks, distance)."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows that this rank and all other ranks in `holders` hold. `rows`: their numbers on this rank, sorted by key."""

    holders: tuple[int, ...]
    rows: tuple[int, ...]

    @property
    def divider(self) -> int:
        return divider_of(self.holders)


@dataclass(frozen=True, slots=True)
class Share:
    """This rank's share of the writes.

    `written` holds the numbers of the rows that this rank writes. `shared` holds the rows that other ranks hold too. It
    leaves out rows that the first rank writes, because their bytes may differ.
    """

    written: frozenset[int]
    shared: tuple[SharedRows, ...]


class _Reply(msgspec.Struct, array_like=True, frozen=True):
    """A home's message to a rank.

    `states` has one number for each row that the rank sent: 0 if another rank writes the row, 1 if this rank does, or 2
    plus the position in `sets` of the ranks that hold it. `rows` are the rows that this rank divides: the position in
    `sets`, the key and the size in bytes.
    """

    states: tuple[int, ...] = ()
    sets: tuple[Holders, ...] = ()
    rows: tuple[tuple[int, str, int], ...] = ()


_ANOTHER, _OWN, _FIRST_SET = 0, 1, 2
_rows_decoder = msgspec.msgpack.Decoder(list[Row])
_reply_decoder = msgspec.msgpack.Decoder(_Reply)
_keys_decoder = msgspec.msgpack.Decoder(list[str])


def divide(rows: Sequence[Row], ranks: Exchange) -> Share:
    """Return this rank's share of the writes. All ranks must call it, each with its own rows."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        numbers[home_of(row.name, ranks.world_size)].append(number)
    messages = {home: msgspec.msgpack.encode([rows[number] for number in indices]) for home, indices in numbers.items()}
    received = {sender: _rows_decoder.decode(data) for sender, data in ranks.all_to_all(messages).items()}
    home = _Home(received)
    _raise_together(ranks, home.error)
    replies = {sender: _reply_decoder.decode(data) for sender, data in ranks.all_to_all(home.replies()).items()}
    keys = {rows[number].key: number for indices in numbers.values() for number in indices}
    keys_to_write = ranks.all_to_all(_divided(replies.values()))
    written = {keys[key] for data in keys_to_write.values() for key in _keys_decoder.decode(data)}
    shared: dict[Holders, list[int]] = defaultdict(list)
    for sender, indices in numbers.items():
        reply = replies[sender]
        for number, state in zip(indices, reply.states, strict=True):
            if state == _OWN:
                written.add(number)
            elif state >= _FIRST_SET:
                shared[reply.sets[state - _FIRST_SET]].append(number)
    return Share(frozenset(written), tuple(_shared_rows(rows, shared)))


def divider_of(holders: Sequence[int]) -> int:
    """Return the rank that divides the rows that all ranks in `holders` hold."""
    return holders[xxhash.xxh3_64_intdigest(repr(runs(holders)).encode()) % len(holders)]


def runs(ranks: Sequence[int]) -> Holders:
    """Express ascending ranks as runs. All ranks of a job are one run, and so are those along a mesh dimension."""
    merged: list[tuple[int, int, int]] = []
    for rank in ranks:
        if merged:
            first, count, distance = merged[-1]
            if count == 1 or rank == first + count * distance:
                merged[-1] = first, count + 1, rank - first if count == 1 else distance
                continue
        merged.append((rank, 1, 1))
    return tuple(merged)


def ranks_in(holders: Holders) -> tuple[int, ...]:
    """The ranks of these runs."""
    return tuple(first + i * distance for first, count, distance in holders for i in range(count))


class HeldRows:
    """The distinct rows of several ranks, by key, and the ranks that hold each. `error`: the first mismatch, if any."""

    def __init__(self, tables: Iterable[tuple[int, Iterable[Row]]]) -> None:
        self.rows: dict[str, Row] = {}
        self.holders: dict[str, list[int]] = defaultdict(list)
        self._first: dict[str, tuple[Row, int]] = {}
        self.error: str | None = None
        for rank, rows in tables:
            for row in rows:
                self._add(rank, row)
        self.error = self.error or self._uncovered()

    def _add(self, rank: int, row: Row) -> None:
        key = row.key
        self.rows.setdefault(key, row)
        if rank not in self.holders[key][-1:]:
            self.holders[key].append(rank)
        first, other_rank = self._first.setdefault(row.name, (row, rank))
        if (first.dtype, first.shape) != (row.dtype, row.shape) and self.error is None:
            difference = f"it is {_type_name(first)} on rank {other_rank} and {_type_name(row)} on rank {rank}"
            self.error = f"tensor {row.name!r:.200}: {difference}"

    def _uncovered(self) -> str | None:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for row in self.rows.values():
            boxes[row.name].append(row.box)
        errors = ((name, coverage_error(parts)) for name, parts in boxes.items())
        return next((f"tensor {name!r:.200}: {what}" for name, what in errors if what), None)


def mismatch(text: str) -> MismatchError:
    """The error of ranks whose tensors do not fit together."""
    return MismatchError(
        text, hint="with several ranks, modules, optimizers and schedulers must fit together; nothing was saved"
    )


class _Home:
    """One rank's work as the home of tensors. `received`: the rows of these tensors, by the rank that holds them."""

    def __init__(self, received: Mapping[int, Sequence[Row]]) -> None:
        self._received = received
        held_rows = HeldRows(sorted(received.items()))
        self._rows, self._holders, self.error = held_rows.rows, held_rows.holders, held_rows.error

    def replies(self) -> dict[int, bytes]:
        """The messages to the ranks that sent rows, and to dividers."""
        sets = {key: runs(ranks) for key, ranks in self._holders.items() if len(ranks) > 1}
        to_divide: dict[int, list[tuple[Holders, Row]]] = defaultdict(list)
        for key, holders in sets.items():
            if not self._rows[key].first:
                to_divide[divider_of(self._holders[key])].append((holders, self._rows[key]))
        messages = {}
        for rank in {*self._received, *to_divide}:
            table: dict[Holders, int] = {}
            states = tuple(self._state(rank, row, sets, table) for row in self._received.get(rank, ()))
            rows = tuple(
                (table.setdefault(holders, len(table)), row.key, row.nbytes) for holders, row in to_divide.get(rank, ())
            )
            messages[rank] = msgspec.msgpack.encode(_Reply(states, tuple(table), rows))
        return messages

    def _state(self, rank: int, row: Row, sets: Mapping[str, Holders], table: dict[Holders, int]) -> int:
        holders = sets.get(row.key)
        if holders is None or self._rows[row.key].first:
            return _OWN if self._holders[row.key][0] == rank else _ANOTHER
        return _FIRST_SET + table.setdefault(holders, len(table))


def _divided(replies: Iterable[_Reply]) -> dict[int, bytes]:
    """A divider's messages: to each rank, the keys of the rows that it writes."""
    expanded: dict[Holders, Sequence[int]] = {}
    rows = []
    for reply in replies:
        sets = [expanded.get(each) or expanded.setdefault(each, ranks_in(each)) for each in reply.sets]
        rows += [(key, nbytes, sets[number]) for number, key, nbytes in reply.rows]
    keys_by_rank: dict[int, list[str]] = defaultdict(list)
    for key, rank in assign_writers(rows).items():
        keys_by_rank[rank].append(key)
    return {rank: msgspec.msgpack.encode(keys) for rank, keys in keys_by_rank.items()}


def _shared_rows(rows: Sequence[Row], shared: Mapping[Holders, Sequence[int]]) -> Iterator[SharedRows]:
    for holders in sorted(shared):
        numbers = sorted(shared[holders], key=lambda number: rows[number].key)
        yield SharedRows(ranks_in(holders), tuple(numbers))


def _raise_together(ranks: Exchange, text: str | None) -> None:
    """Raise on all ranks the error of the lowest rank that has one."""
    marked = ranks.rank.to_bytes(4, "big") if text is not None else b"\xff" * 4
    lowest = bytes(255 - byte for byte in ranks.maximum(bytes(255 - byte for byte in marked)))
    if lowest == b"\xff" * 4:
        return
    own_text = (text or "").encode()[:_TEXT_BYTES] if lowest == marked else b""
    raise mismatch(ranks.maximum(own_text.ljust(_TEXT_BYTES, b"\0")).rstrip(b"\0").decode(errors="ignore"))


def home_of(name: str, world_size: int) -> int:
    """The rank that is the home of the tensor."""
    return xxhash.xxh3_64_intdigest(name.encode()) % world_size


def _type_name(row: Row) -> str:
    return f"{row.dtype}{list(row.shape)}"
