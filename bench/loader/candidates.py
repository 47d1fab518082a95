"""Who delivers clips: uint8 (B, 16, 3, size, size), two threads or two worker processes. Those of sound: `hearing`.

Invariant: every candidate delivers as many clips of each file as its kind says. `bare` is the floor of ours: clips drawn alike,
read from files and decoded and cut by as many threads, but put into no batch, by no plan, and checked by nobody.
Of films, peers take all clips at once (`headrace.bench.loader.ways`). Our batches mix the clips of different films.
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headrace.bench.loader import by_hand, in_energon, in_mosaic, ways
from headrace.bench.loader.data import BATCH, FRAMES, STRIDE, Kind
from headrace.bench.loader.place import Place
from headrace.bench.loader.ways import THREADS, decoding


def _ours(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from headrace.loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "num_threads": THREADS, "color": color}
    clip = Clip(frames=FRAMES, stride=STRIDE, per_video=kind.per_file)
    with VideoLoader(place.url("dataset"), BATCH, clip=clip, size=(kind.size, kind.size), **options) as loader:
        for batch in loader:
            yield batch["video"]


def _bare(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    """The decoder alone."""
    from headrace.dataio.shards.contract import Sample
    from headrace.loaders.clip import Clip, choose
    from headrace.loaders.decode.contract import Decoded, Request
    from headrace.loaders.decode.geometry import Fit
    from headrace.loaders.decode.pyav import PyAVDecoder

    decoder, clip = PyAVDecoder(), Clip(frames=FRAMES, stride=STRIDE, per_video=kind.per_file)
    cut = Fit((kind.size, kind.size))

    def one(sample: Sample, data: memoryview) -> torch.Tensor:
        assert sample.video is not None
        wanted = [choose(sample.video, clip, 0, 0, sample.id, number) for number in range(kind.per_file)]
        found = decoder.decode([Request(data, sample.video, frames, color, cut) for frames in wanted])
        assert all(isinstance(decoded, Decoded) for decoded in found), found
        return torch.stack([decoded.frames for decoded in found if isinstance(decoded, Decoded)])

    return ways.alone(one, place, kind)


def _seen_by_spdl(named: tuple[str, bytes | str], kind: Kind) -> torch.Tensor:
    return by_hand.spdl(named[1], kind)


OURS, FAST = "headrace", "headrace, color='fast'"
ENERGON = "energon + PyAV, 2 workers"
MOSAIC = "mosaicml-streaming + PyAV, 2 workers"
FLOOR, FAST_FLOOR = "floor: our decoder alone", "floor: our decoder alone, color='fast'"
PEERS: dict[str, tuple[str, ...]] = {
    "webdataset + PyAV, 0 workers": ("webdataset",),
    "webdataset + PyAV, 2 workers": ("webdataset",),
    "webdataset + torchcodec, 2 workers": ("webdataset", "torchcodec"),
    "torchdata StatefulDataLoader + PyAV, 2 workers": ("torchdata",),
    "litdata + PyAV, 2 workers": ("litdata",),
    "SPDL, 2 threads": ("spdl",),
    "torchcodec, 2 threads": ("torchcodec",),
    ENERGON: ("megatron.energon",),
    MOSAIC: ("streaming",),
}
"""Each peer and the packages that it needs."""
CANDIDATES: dict[str, Callable[[Place, Kind], Iterator[torch.Tensor]]] = {
    OURS: _ours,
    FAST: functools.partial(_ours, color="fast"),
    FLOOR: _bare,
    FAST_FLOOR: functools.partial(_bare, color="fast"),
    "webdataset + PyAV, 0 workers": decoding(by_hand.pyav, ways.webdataset, 0),
    "webdataset + PyAV, 2 workers": decoding(by_hand.pyav, ways.webdataset, 2),
    "webdataset + torchcodec, 2 workers": decoding(by_hand.torchcodec, ways.webdataset, 2),
    "torchdata StatefulDataLoader + PyAV, 2 workers": decoding(by_hand.pyav, ways.torchdata),
    "litdata + PyAV, 2 workers": decoding(by_hand.pyav, ways.litdata),
    "SPDL, 2 threads": decoding(_seen_by_spdl, ways.spdl),
    "torchcodec, 2 threads": decoding(by_hand.torchcodec, ways.threads),
    ENERGON: decoding(by_hand.pyav, in_energon.batches),
    MOSAIC: decoding(by_hand.pyav, in_mosaic.batches),
}
