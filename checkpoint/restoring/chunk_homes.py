"""Find which rank reads a chunk that several ranks need, and along which ranks it travels.

Each chunk has a *home*: the rank that a hash of its place selects. Every rank sends the chunks that other ranks may need
too to their homes. A home names one reader for each chunk that several ranks need. These ranks are the nodes of a binary
tree with the reader at its root, so no rank sends a chunk to more than two others. The home tells each rank only its own
place in the tree.

Invariant: exactly one of the ranks that sent a chunk to its home reads it, and each of the others receives it once. A
chunk that only one rank sent has no route: that rank reads it.
Failure behaviour: none of its own. Two chunks with equal 128-bit hashes would be mixed up; a rank that receives the wrong
one finds another digest.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import xxhash

from headrace.checkpoint.format.manifest import Chunk

Place = tuple[str, int]
"""A chunk's place: the key of its pack, and its offset in it."""
_ID = struct.Struct("<16sI")
"""The hash of a chunk's place, and its size in bytes."""
_STEP = struct.Struct("<iii")
_NONE, _ALONE = -1, -2


class Exchange(Protocol):
    """The collective operations that this module needs."""

    @property
    def world_size(self) -> int: ...
    def all_to_all(self, sent: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send a message to each rank that `sent` names; return the messages to this rank, by sender."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """One rank's part in the way of a chunk.

    `parent`: the rank that sends the chunk to this one; None if this rank reads it. `children`: the ranks to which this
    rank sends it.
    """

    chunk: Chunk
    parent: int | None
    children: tuple[int, ...]


Routes = dict[Place, Route]
_decoder = msgspec.msgpack.Decoder(list[bytes])


def find_routes(needed: Sequence[Iterable[tuple[str, Chunk]]], ranks: Exchange) -> list[Routes]:
    """The routes of these chunks, for each of the given sets. All ranks call it, with the same number of sets."""
    chunks_by_home = [_by_home(each, ranks.world_size) for each in needed]
    homes = {home for each in chunks_by_home for home in each}
    messages = {
        home: msgspec.msgpack.encode([b"".join(name for name, _, _ in each.get(home, ())) for each in chunks_by_home])
        for home in homes
    }
    received = {sender: _decoder.decode(data) for sender, data in ranks.all_to_all(messages).items()}
    answers: dict[int, list[bytes]] = {sender: [] for sender in received}
    for number in range(len(needed)):
        answered = assign_routes({sender: parts[number] for sender, parts in received.items()})
        for sender, answer in answered.items():
            answers[sender].append(answer)
    replies = ranks.all_to_all({sender: msgspec.msgpack.encode(parts) for sender, parts in answers.items()})
    decoded = {home: _decoder.decode(data) for home, data in replies.items()}
    return [
        _routes(each, {home: parts[number] for home, parts in decoded.items()})
        for number, each in enumerate(chunks_by_home)
    ]


def encode_needs(needed: Sequence[Iterable[tuple[str, Chunk]]]) -> bytes:
    """The chunks of all sets, in one message."""
    return msgspec.msgpack.encode([b"".join(name for name, _, _ in _by_home(each, 1).get(0, ())) for each in needed])


def routes_among(tables: Sequence[bytes], needed: Sequence[Iterable[tuple[str, Chunk]]], rank: int) -> list[Routes]:
    """The routes of this rank, as `find_routes`, in a small job whose ranks have all tables of `encode_needs`.

    Every rank does the work of a home for all chunks.
    """
    parts = [_decoder.decode(table) for table in tables]
    all_routes = []
    for number, chunks in enumerate(needed):
        answers = assign_routes({sender: its[number] for sender, its in enumerate(parts)})
        all_routes.append(_routes(_by_home(chunks, 1), {0: answers[rank]}))
    return all_routes


def are_shared(tables: Sequence[bytes]) -> tuple[bool, ...]:
    """For each set, whether several ranks need one of its chunks."""
    sets = zip(*(_decoder.decode(table) for table in tables), strict=True)
    ids = ([name for part in parts for name, _ in _ID.iter_unpack(part)] for parts in sets)
    return tuple(len(set(each)) < len(each) for each in ids)


def assign_routes(needs: Mapping[int, bytes]) -> dict[int, bytes]:
    """A home's answers. `needs`: the chunks that each rank needs, as `_ID` records.

    Of the ranks that need a chunk, the one with the fewest bytes to read so far reads it.
    """
    ids = {rank: list(_ID.iter_unpack(data)) for rank, data in needs.items()}
    holders: dict[bytes, list[int]] = defaultdict(list)
    for rank in sorted(ids):
        for name, _ in ids[rank]:
            holders[name].append(rank)
    load: dict[int, int] = defaultdict(int)
    steps: dict[bytes, dict[int, bytes]] = {}
    sizes = {name: size for each in ids.values() for name, size in each}
    for name in sorted(name for name, ranks in holders.items() if len(ranks) > 1):
        order = _in_tree_order(holders[name], int.from_bytes(name[8:], "little"), load)
        load[order[0]] += sizes[name]
        steps[name] = {rank: _step(order, at) for at, rank in enumerate(order)}
    alone = _STEP.pack(_ALONE, _NONE, _NONE)
    return {
        rank: b"".join(steps[name][rank] if name in steps else alone for name, _ in each) for rank, each in ids.items()
    }


def _in_tree_order(ranks: Sequence[int], turn: int, load: Mapping[int, int]) -> list[int]:
    """The ranks from the one that reads the chunk on. Among ranks with equal loads, the hash of the chunk decides."""
    count = len(ranks)
    first = min(range(count), key=lambda i: (load.get(ranks[i], 0), (i - turn) % count))
    return [*ranks[first:], *ranks[:first]]


def _step(order: Sequence[int], at: int) -> bytes:
    parent = order[(at - 1) // 2] if at else _NONE
    first_child, second_child = (order[i] if i < len(order) else _NONE for i in (2 * at + 1, 2 * at + 2))
    return _STEP.pack(parent, first_child, second_child)


def _by_home(needed: Iterable[tuple[str, Chunk]], world_size: int) -> dict[int, list[tuple[bytes, Place, Chunk]]]:
    by_home: dict[int, list[tuple[bytes, Place, Chunk]]] = defaultdict(list)
    for key, chunk in needed:
        name = xxhash.xxh3_128_digest(f"{key}\0{chunk.offset}".encode())
        home = int.from_bytes(name[:8], "little") % world_size
        by_home[home].append((_ID.pack(name, chunk.raw), (key, chunk.offset), chunk))
    return by_home


def _routes(chunks_by_home: Mapping[int, Sequence[tuple[bytes, Place, Chunk]]], answers: Mapping[int, bytes]) -> Routes:
    routes: Routes = {}
    for home, its in chunks_by_home.items():
        for (_, place, chunk), (parent, *children) in zip(its, _STEP.iter_unpack(answers[home]), strict=True):
            if parent != _ALONE:
                sent_to = tuple(rank for rank in children if rank != _NONE)
                routes[place] = Route(chunk, None if parent == _NONE else parent, sent_to)
    return dict(sorted(routes.items()))
