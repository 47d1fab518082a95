"""Several ranks read one step together: what more than one of them needs leaves the store once.

From a store that is not on this node each such chunk is read by one rank and sent on. From a directory on the node's own disk or
memory it reaches the others through the page cache instead, which is faster than any process group: the rank whose turn it would
be asks the kernel for it, and everybody reads it there.
Invariant: as in `restore.read`; the digest of a chunk that another rank sent is checked again. Every rank takes part in
every exchange, also one that has failed, so that none waits for another's exception. One exchange for the whole restore says who
needs what; one more for each turn of chunks that are sent.
Failure behaviour: a rank that cannot read raises its own error, the others `TransientError` naming it; an error of `read` itself
is returned, so that the caller tells it at its next exchange.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.repository import fetch
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring.nearby import NODE_BYTES, bring_near, node, on_this_node, threads
from headrace.checkpoint.restoring.restore import Needed, Reading, ReadsStraight
from headrace.checkpoint.sharding.turns import Shared, pack_needs, shared, turns
from headrace.checkpoint.state.kinds import memory_of
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

_Mine = dict[int, tuple[str, Needed]]


@dataclass(frozen=True, slots=True)
class Common:
    """What the ranks know of each other's parts in a restore.

    `marked`: some rank set its mark; `near`: to all of them the store is their own node's; `places`: every chunk of the step, by
    pack and offset, with its bytes, in the same order on every rank; `shared`: for each of the readings, the chunks that several
    ranks need; `threads`: how many this rank should read with.
    """

    marked: bool
    near: bool
    places: dict[tuple[str, int], int]
    shared: tuple[list[Shared], ...]
    threads: int

    def mine(self, reading: Reading) -> _Mine:
        """What the reading needs, by number."""
        number = {place: i for i, place in enumerate(self.places)}
        return {number[key, chunk.offset]: (key, chunk) for key, chunk in reading.needed()}


class Pending(contextlib.AbstractContextManager["Pending"]):
    """Keeps the error of what is done inside until the next exchange."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)

    def tell(self) -> None:
        """Raise it: to be called inside of an exchange."""
        if self.error is not None:
            raise self.error


def compare(store: Store, step: Step, readings: Sequence[Reading], mark: bool, ranks: Ranks) -> Common:
    """Tell each other what is needed; called by all ranks, with the same number of readings."""
    if ranks.world_size == 1:
        return Common(mark, True, {}, tuple([] for _ in readings), threads(store, 1))
    alone = Common(mark, on_this_node(store), _places(step), (), 0)
    count = len(alone.places)
    needs = [pack_needs(list(alone.mine(reading)), count) for reading in readings]
    told = ranks.all(bytes([mark, alone.near]) + node() + b"".join(needs))
    sizes, maps = list(alone.places.values()), [one[2 + NODE_BYTES :] for one in told]
    width = len(needs[0])
    common = tuple(shared([each[i * width :][:width] for each in maps], sizes) for i in range(len(readings)))
    here = sum(one[2 : 2 + NODE_BYTES] == node() for one in told)
    # a directory that one node exports to the others is near to its own ranks only: all must go the same way
    near = all(one[1] for one in told)
    return Common(any(one[0] for one in told), near, alone.places, common, threads(store, here))


def read(store: Store, reading: Reading, given: Sequence[Shared], common: Common, ranks: Ranks) -> Pending:
    """Fill what the reading is for; called by all ranks. `given`: what of it is shared. What went wrong here is returned."""
    pending = Pending()
    near = not given or common.near
    sizes = list(common.places.values())
    with pending:
        mine = common.mine(reading) if given else {}
        if near:
            if given and not isinstance(store, ReadsStraight):  # which has no use for the page cache
                bring_near(store, [mine[each.chunk] for each in given if each.reader == ranks.rank])
            reading.fetch(store, reading.needed(), common.threads)
        else:
            sent = {each.chunk for each in given}
            reading.fetch(store, [place for n, place in mine.items() if n not in sent], common.threads)
    for turn in turns(given, sizes) if not near else ():
        held: dict[int, torch.Tensor] = {}
        if pending.error is None:
            with pending:
                held = _read_turn(store, reading, mine, turn, ranks.rank, common.threads)
        ranks.agree(0, b"", pending.error)
        _send(turn, held, sizes, ranks)
        with pending:
            _use_all(reading, mine, held, [each for each in turn if ranks.rank in each.others])
    return pending


def _places(step: Step) -> dict[tuple[str, int], int]:
    found = {(m.packs[c.pack].key, c.offset): c.raw for m in step.manifests for c in m.chunks}
    return dict(sorted(found.items()))


def _read_turn(
    store: Store, reading: Reading, mine: _Mine, turn: Sequence[Shared], rank: int, workers: int
) -> dict[int, torch.Tensor]:
    """What this rank reads for the others too, by number."""
    held: dict[int, torch.Tensor] = {}
    own = {mine[each.chunk]: each.chunk for each in turn if each.reader == rank}

    def keep(key: str, chunk: Needed, payload: memoryview | None) -> None:
        reading.use(key, chunk, payload)
        held[own[key, chunk]] = torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8)

    fetch.fetch(store, reading.batches(own), keep, workers=workers)
    return held


def _send(turn: Sequence[Shared], held: dict[int, torch.Tensor], sizes: Sequence[int], ranks: Ranks) -> None:
    """Every chunk of the turn to all who need it; what comes here is put into `held`."""
    sending: list[Any] = []
    for tag, each in enumerate(turn):
        if each.reader == ranks.rank:
            sending += [dist.isend(held[each.chunk], other, ranks.group(), tag) for other in each.others]
        elif ranks.rank in each.others:
            held[each.chunk] = torch.empty(sizes[each.chunk], dtype=torch.uint8)
            sending.append(dist.irecv(held[each.chunk], each.reader, ranks.group(), tag))
    for request in sending:
        request.wait()


def _use_all(reading: Reading, mine: _Mine, held: dict[int, torch.Tensor], received: Sequence[Shared]) -> None:
    for each in received:
        key, chunk = mine[each.chunk]
        payload = memory_of(held[each.chunk])
        if digest(payload) != chunk.digest:
            raise CorruptionError(f"rank {each.reader} sent {len(payload)} other bytes of {key} than were saved")
        reading.use(key, chunk, payload)
