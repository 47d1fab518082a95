"""Who takes part, for each kind: ours, its floors, and the peers.

Invariant: the names are those of `bench.loader.candidates` for pictures and of `bench.loader.hearing` for sound.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bench.loader import candidates, hearing
from bench.loader.data import AnyKind
from bench.loader.place import Place
from bench.loader.sounds import Sound


def ours(kind: AnyKind) -> list[str]:
    """We, and the floors."""
    if isinstance(kind, Sound):
        return [candidates.OURS, candidates.FLOOR]
    return [candidates.OURS, candidates.FAST, candidates.FLOOR, candidates.FAST_FLOOR]


def peers(kind: AnyKind) -> Mapping[str, tuple[str, ...]]:
    """Each peer and the packages that it needs."""
    return hearing.peers(kind) if isinstance(kind, Sound) else candidates.PEERS


def batches(name: str, place: Place, kind: AnyKind) -> Iterable[torch.Tensor]:
    """The batches of this candidate."""
    chosen: Any = hearing.candidates(kind) if isinstance(kind, Sound) else candidates.CANDIDATES
    found: Iterator[torch.Tensor] = chosen[name](place, kind)
    return found
