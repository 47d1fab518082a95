"""Who takes part, for each kind: ours, its floors, and the peers.

Invariant: the names are those of `headrace.bench.loader.candidates` for video, of
`headrace.bench.loader.hearing` for sound and of `headrace.bench.loader.seeing` for pictures.
Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headrace.bench.loader import candidates, hearing, seeing
from headrace.bench.loader.data import AnyKind
from headrace.bench.loader.place import Place
from headrace.bench.loader.sounds import Sound
from headrace.bench.loader.stills import Stills


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
