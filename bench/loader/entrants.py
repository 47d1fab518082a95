"""Who takes part, for each kind: ours, its floors, and the peers.

Invariant: the names are those of `bench.loader.candidates` for video, of
`bench.loader.hearing` for sound and of `bench.loader.seeing` for pictures.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bench.loader import candidates, hearing, seeing
from bench.loader.data import AnyKind
from bench.loader.place import Place
from bench.loader.sounds import Sound
from bench.loader.stills import Stills


def ours(kind: AnyKind) -> list[str]:
    """We, and the floors."""
    if isinstance(kind, Sound | Stills):
        return [candidates.OURS, candidates.FLOOR]
    return [candidates.OURS, candidates.FAST, candidates.FLOOR, candidates.FAST_FLOOR]


def peers(kind: AnyKind) -> Mapping[str, tuple[str, ...]]:
    """Each peer and the packages that it needs."""
    if isinstance(kind, Sound):
        return hearing.peers(kind)
    return seeing.PEERS if isinstance(kind, Stills) else candidates.PEERS


def batches(name: str, place: Place, kind: AnyKind) -> Iterable[torch.Tensor]:
    """The batches of this candidate."""
    chosen: Any = seeing.CANDIDATES if isinstance(kind, Stills) else candidates.CANDIDATES
    if isinstance(kind, Sound):
        chosen = hearing.candidates(kind)
    found: Iterator[torch.Tensor] = chosen[name](place, kind)
    return found
