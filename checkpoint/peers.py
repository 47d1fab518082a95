"""Which other ranks still live.

Purpose: a rank that is killed while it stores its part cannot say so, and the others would wait for its manifest until their time
is over. Ranks of one node see each other's processes, so those of its node say it in its place. The nodes form a ring, in which
the ranks of each hold a lifeline to those of the next, and say it of them when a whole node is gone.
Invariant: a rank is gone only if its very process is: one that has ended and was not yet waited for too, but not another process
with its number. Of ranks on other nodes that nobody here holds nothing is said. A node counts as silent, with all its ranks, only
when its kernel does not answer: not when a process of it has ended, whose part a daemon there may still be storing.
Failure behaviour: what cannot be seen lives.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.lifeline import ADDRESS_BYTES, ENDED, SILENT, Door, Lifeline

_CARD = struct.Struct(f">8sQQ{ADDRESS_BYTES}s")
"""Where process numbers mean the same, the process, when it was started, and its door."""


class Peers:
    """`cards`: what every rank says of itself, by rank, as in `card`; `rank`: this one; `door`: this one's, closed with it."""

    def __init__(self, cards: Sequence[bytes], rank: int = 0, door: Door | None = None) -> None:
        told = [_CARD.unpack(each) for each in cards]
        here, self._door = _place(), door
        self._here = {r: (pid, started) for r, (place, pid, started, _) in enumerate(told) if place == here}
        places = [place for place, *_ in told]
        self._held = watched(places, rank)
        self._beside = {r for r, place in enumerate(places) if self._held is not None and place == places[self._held]}
        self._line = Lifeline(told[self._held][3]) if self._held is not None else None
        if self._held is None and door is not None:
            door.close()  # one node: nobody will knock

    def gone(self, ranks: Sequence[int]) -> str:
        """Which of `ranks` have ended, in words; "" for none."""
        ended = [rank for rank in ranks if rank in self._here and _started(self._here[rank][0]) != self._here[rank][1]]
        if self._line is not None and self._held is not None and self._held in ranks and self._line.state() == ENDED:
            ended.append(self._held)
        return f"the process of {_named(ended)} has ended" if ended else self.silent(ranks)

    def silent(self, ranks: Sequence[int]) -> str:
        """Which of `ranks` are on a node that does not answer any more, in words; "" for none."""
        if self._line is None or not self._beside.intersection(ranks) or self._line.state() != SILENT:
            return ""
        return f"the node of {_named(sorted(self._beside.intersection(ranks)))} does not answer"

    @property
    def across(self) -> bool:
        """Whether some rank of another node is held."""
        return self._line is not None

    def close(self) -> None:
        """Let go of the other ranks."""
        for each in (self._line, self._door):
            if each is not None:
                each.close()


def watched(places: Sequence[bytes], rank: int) -> int | None:
    """The rank of the next node that `rank` holds on to; None when there is one node. Each node's ranks hold on to different
    ones, as far as there are so many. Pure."""
    nodes = list(dict.fromkeys(places))
    if len(nodes) < 2:
        return None
    following = nodes[(nodes.index(places[rank]) + 1) % len(nodes)]
    theirs = [r for r, place in enumerate(places) if place == following]
    return theirs[places[:rank].count(places[rank]) % len(theirs)]


def card(door: Door | None = None) -> bytes:
    """What this process says of itself; always of the same size."""
    return _CARD.pack(_place(), os.getpid(), _started(os.getpid()), door.address if door else bytes(ADDRESS_BYTES))


def _named(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks[:8]))}"


def _place() -> bytes:
    """Equal for processes that see each other's numbers."""
    try:
        boot, space = Path("/proc/sys/kernel/random/boot_id").read_text(), os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, space = "", os.getpid()
    return digest(f"{boot}{space}{socket.gethostname()}".encode())[:8]


def _started(pid: int) -> int:
    """When the process was started, in ticks; 0 when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
