"""Which ranks of this node still live.

Purpose: a rank that is killed while it stores its part cannot say so, and the others would wait for its manifest until their time
is over. Ranks of one node see each other's processes, so those of its node say it in its place.
Invariant: a rank is gone only if its very process is: one that has ended and was not yet waited for too, but not another process
with its number. Of ranks on other nodes nothing is said.
Failure behaviour: what cannot be seen lives.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from checkpoint.format.chunk import digest

_CARD = struct.Struct(">8sQQ")
"""Where process numbers mean the same, the process, and when it was started."""


class Peers:
    """`cards`: what every rank says of itself, by rank, as in `card`."""

    def __init__(self, cards: Sequence[bytes]) -> None:
        told = [_CARD.unpack(each) for each in cards]
        here = _place()
        self._here = {rank: (pid, started) for rank, (place, pid, started) in enumerate(told) if place == here}

    def gone(self, ranks: Sequence[int]) -> str:
        """Which of `ranks` have ended, in words; "" for none."""
        ended = [rank for rank in ranks if rank in self._here and _started(self._here[rank][0]) != self._here[rank][1]]
        return f"the process of rank {', '.join(map(str, ended[:8]))} has ended" if ended else ""


def card() -> bytes:
    """What this process says of itself; always of the same size."""
    return _CARD.pack(_place(), os.getpid(), _started(os.getpid()))


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
