"""Who reads which chunk when several ranks need the same: pure, and the same answer on every rank.

Chunks that one rank needs it reads alone. A chunk that several need is read by one of them, the one with the least to read
so far, and sent to the others, in turns of at most `TURN_BYTES`, so that memory stays bounded.
Invariant: every chunk that is needed is read by exactly one rank.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.limits import MIB

TURN_BYTES = 32 * MIB


@dataclass(frozen=True, slots=True)
class Shared:
    """Chunk number `chunk` is read by `reader` and needed by `others` too."""

    chunk: int
    reader: int
    others: tuple[int, ...]


def pack_needs(needed: Sequence[int], count: int) -> bytes:
    """The numbers of the chunks that a rank needs, of `count`, as a bit map."""
    flags = np.zeros(count, np.uint8)
    flags[list(needed)] = 1
    return np.packbits(flags).tobytes()


def shared(needs: Sequence[bytes], sizes: Sequence[int]) -> list[Shared]:
    """All chunks that more than one rank needs, in order. `needs`: every rank's bit map; `sizes`: bytes of every chunk."""
    if not sizes:
        return []
    table: npt.NDArray[np.uint8] = np.stack([np.unpackbits(np.frombuffer(n, np.uint8))[: len(sizes)] for n in needs])
    load = [0] * len(needs)
    found = []
    for chunk in np.flatnonzero(table.sum(axis=0) > 1).tolist():
        ranks = np.flatnonzero(table[:, chunk]).tolist()
        reader = min(ranks, key=lambda rank: (load[rank], rank))
        load[reader] += sizes[chunk]
        found.append(Shared(chunk, reader, tuple(rank for rank in ranks if rank != reader)))
    return found


def turns(given: Sequence[Shared], sizes: Sequence[int]) -> Iterator[list[Shared]]:
    """The chunks in turns."""
    turn: list[Shared] = []
    held = 0
    for each in given:
        if turn and held + sizes[each.chunk] > TURN_BYTES:
            yield turn
            turn, held = [], 0
        turn.append(each)
        held += sizes[each.chunk]
    if turn:
        yield turn
