"""The candidates of `headrace bench loader` for each kind of data: Headrace, its floors, and the peers.

Failure behaviour: none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headrace.bench.peers import audio_peers, image_peers, video_peers
from headrace.bench.workloads.audio import Sound
from headrace.bench.workloads.images import Stills
from headrace.bench.workloads.source import Place
from headrace.bench.workloads.video import AnyKind


def ours(kind: AnyKind) -> list[str]:
    """Return the names of Headrace's candidates and of the floors."""
    if isinstance(kind, Sound | Stills):
        return [video_peers.OURS, video_peers.FLOOR]
    return [video_peers.OURS, video_peers.FAST, video_peers.FLOOR, video_peers.FAST_FLOOR]


def peers(kind: AnyKind) -> Mapping[str, tuple[str, ...]]:
    """Return each peer, with the packages that it needs."""
    if isinstance(kind, Sound):
        return audio_peers.peers(kind)
    return image_peers.PEERS if isinstance(kind, Stills) else video_peers.PEERS


def batches(name: str, place: Place, kind: AnyKind) -> Iterable[torch.Tensor]:
    """Return the batches of the candidate `name`."""
    chosen: Any = image_peers.CANDIDATES if isinstance(kind, Stills) else video_peers.CANDIDATES
    if isinstance(kind, Sound):
        chosen = audio_peers.candidates(kind)
    found: Iterator[torch.Tensor] = chosen[name](place, kind)
    return found
