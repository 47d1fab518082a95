"""Several ranks read one step together: what more than one of them needs is fetched from the store once, and sent on.

Invariant: as in `restore.read`; the digest of a chunk that another rank sent is checked again. Every rank takes part in
every exchange, also one that has failed, so that none waits for another's exception.
Failure behaviour: a rank that cannot read raises its own error, the others `TransientError` naming it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from checkpoint.format.chunk import digest
from checkpoint.ranks import Ranks
from checkpoint.repository import fetch
from checkpoint.repository.steps import Step
from checkpoint.restoring.restore import Needed, Reading, Want
from checkpoint.sharding.turns import Shared, pack_needs, shared, turns
from checkpoint.state.kinds import memory_of
from dataio.core.errors import CorruptionError
from dataio.store.contract import Store


def read(store: Store, step: Step, wants: Sequence[Want], ranks: Ranks) -> None:
    """Fill the sinks of all `wants`; called by all ranks."""
    with ranks.agreed():
        reading = Reading(step, wants)
        places = _places(step)
        number = {place: i for i, place in enumerate(places)}
        mine = {number[key, chunk.offset]: (key, chunk) for key, chunk in reading.needed()}
    needs = ranks.all(pack_needs(list(mine), len(places)))
    sizes = [places[place] for place in places]
    common = shared(needs, sizes)
    together = {each.chunk for each in common}
    with ranks.agreed():
        reading.fetch(store, [place for n, place in mine.items() if n not in together])
    for turn in turns(common, sizes):
        _take_turn(store, reading, mine, turn, sizes, ranks)


def _places(step: Step) -> dict[tuple[str, int], int]:
    """Every chunk of the step, by pack and offset, with its bytes; in the same order on every rank."""
    found = {(m.packs[c.pack].key, c.offset): c.raw for m in step.manifests for c in m.chunks}
    return dict(sorted(found.items()))


def _take_turn(
    store: Store,
    reading: Reading,
    mine: dict[int, tuple[str, Needed]],
    turn: Sequence[Shared],
    sizes: Sequence[int],
    ranks: Ranks,
) -> None:
    held: dict[int, torch.Tensor] = {}
    own = {mine[each.chunk]: each.chunk for each in turn if each.reader == ranks.rank}

    def keep(key: str, chunk: Needed, payload: memoryview | None) -> None:
        reading.use(key, chunk, payload)
        held[own[key, chunk]] = torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8)

    with ranks.agreed():
        fetch.fetch(store, reading.batches(own), keep)
    sending: list[Any] = []
    for tag, each in enumerate(turn):
        if each.reader == ranks.rank:
            sending += [dist.isend(held[each.chunk], other, ranks.group(), tag) for other in each.others]
        elif ranks.rank in each.others:
            held[each.chunk] = torch.empty(sizes[each.chunk], dtype=torch.uint8)
            sending.append(dist.irecv(held[each.chunk], each.reader, ranks.group(), tag))
    for request in sending:
        request.wait()
    received = [each for each in turn if ranks.rank in each.others]
    with ranks.agreed():
        _use_all(reading, mine, held, received)


def _use_all(
    reading: Reading, mine: dict[int, tuple[str, Needed]], held: dict[int, torch.Tensor], received: Sequence[Shared]
) -> None:
    for each in received:
        key, chunk = mine[each.chunk]
        payload = memory_of(held[each.chunk])
        if digest(payload) != chunk.digest:
            raise CorruptionError(f"rank {each.reader} sent {len(payload)} other bytes of {key} than were saved")
        reading.use(key, chunk, payload)
