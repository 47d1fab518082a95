"""Each loader's way to deliver the clips: uint8 (B, 16, 3, size, size), two threads or two worker processes.

Invariant: every candidate delivers each clip of the dataset once. `bare` is the floor of ours: the same clips of the same places,
read from files and decoded and cut by as many threads, but put into no batch, by no plan, and checked by nobody.
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.loader import by_hand, in_energon, in_mosaic
from bench.loader.data import Kind
from bench.loader.place import Place

BATCH, THREADS = 8, 2
Decode = Callable[[bytes], torch.Tensor]


def batches(name: str, place: Place, kind: Kind) -> Iterable[torch.Tensor]:
    """The batches of this candidate."""
    return CANDIDATES[name](place, kind)


def _ours(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "threads": THREADS, "color": color}
    clip = Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE)
    with VideoLoader(place.url("dataset"), BATCH, clip=clip, size=(kind.size, kind.size), **options) as loader:
        for batch in loader:
            yield batch["video"]


def _bare(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    """The decoder alone."""
    from dataio import Dataset
    from dataio.shards.contract import Sample
    from loaders.clip import Clip, choose
    from loaders.decode.contract import Decoded, Request
    from loaders.decode.geometry import Fit
    from loaders.decode.pyav import PyAVDecoder

    decoder, clip = PyAVDecoder(), Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE)
    folder, cut = place.folder / "dataset", Fit((kind.size, kind.size))
    dataset = Dataset(str(folder))
    shards = {shard: (folder / shard).open("rb", buffering=0) for shard in {s.shard for s in dataset}}

    def one(sample: Sample) -> torch.Tensor:
        import os

        torch.set_num_threads(1)
        member = sample.member("mp4")
        data = os.pread(shards[sample.shard].fileno(), member.length, member.offset)
        assert sample.video is not None
        wanted = choose(sample.video, clip, 0, 0, sample.id, 0)
        request = Request(memoryview(data), sample.video, wanted, color, cut)
        (decoded,) = decoder.decode([request])
        assert isinstance(decoded, Decoded)
        return decoded.frames[None]

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(one, dataset)


def _threads(decode: Decode, place: Place) -> Iterator[torch.Tensor]:
    """A plain loop over files, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        for clip in pool.map(lambda name: decode(place.read(name)), place.clips()):
            yield clip[None]


def _webdataset(decode: Decode, place: Place, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = wds.WebDataset(place.shards(), shardshuffle=False, empty_check=False, handler=wds.reraise_exception)
    chain = dataset.shuffle(64).map(functools.partial(_of_sample, decode))
    yield from DataLoader(chain, batch_size=BATCH, num_workers=workers)


def _of_sample(decode: Decode, sample: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    return decode(sample["mp4"])


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, decode: Decode, place: Place) -> None:
        self._decode, self._place, self._names = decode, place, place.clips()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return self._decode(self._place.read(self._names[number]))


def _torchdata(decode: Decode, place: Place) -> Iterator[torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    yield from StatefulDataLoader(_Files(decode, place), batch_size=BATCH, shuffle=True, num_workers=2)


def _spdl(place: Place, kind: Kind) -> Iterator[torch.Tensor]:
    decode = functools.partial(by_hand.spdl, size=kind.size, seconds=kind.seconds)
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder = builder.add_source(place.clips())
    builder = (
        builder.pipe(lambda name: decode(place.read(name)), concurrency=THREADS).aggregate(BATCH).pipe(torch.stack)
    )
    pipeline = builder.add_sink(2).build(num_threads=THREADS)
    with pipeline.auto_stop():
        yield from pipeline


def _litdata(decode: Decode, place: Place) -> Iterator[torch.Tensor]:
    from torch.utils.data import default_collate

    litdata: Any = importlib.import_module("litdata")
    collate = functools.partial(_collate, decode, default_collate)
    with tempfile.TemporaryDirectory(prefix="litdata-", dir=place.folder) as cache:
        options = _for_litdata(cache) if place.port else {}
        dataset = litdata.StreamingDataset(place.url("litdata"), shuffle=True, drop_last=False, **options)
        yield from litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=2, collate_fn=collate)


def _for_litdata(cache: str) -> dict[str, Any]:
    downloader: Any = importlib.import_module("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for a server without TLS
    keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    return {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], **keys}, "cache_dir": cache}


def _collate(decode: Decode, stack: Callable[..., Any], samples: list[Mapping[str, Any]]) -> Any:
    return stack([_of_sample(decode, sample) for sample in samples])


def _with(decode: Callable[..., torch.Tensor], run: Callable[..., Iterator[torch.Tensor]], *more: Any) -> Any:
    """A candidate that decodes by hand."""
    return lambda place, kind: run(functools.partial(decode, size=kind.size), place, *more)


OURS, FAST = "millrace", "millrace, color='fast'"
ENERGON = "energon + PyAV, 2 workers"
MOSAIC = "mosaicml-streaming + PyAV, 2 workers"
FLOOR, FAST_FLOOR = "floor: our decoder alone", "floor: our decoder alone, color='fast'"
PEERS: dict[str, str] = {
    "webdataset + PyAV, 0 workers": "webdataset",
    "webdataset + PyAV, 2 workers": "webdataset",
    "webdataset + torchcodec, 2 workers": "torchcodec",
    "torchdata StatefulDataLoader + PyAV, 2 workers": "torchdata",
    "litdata + PyAV, 2 workers": "litdata",
    "SPDL, 2 threads": "spdl",
    "torchcodec, 2 threads": "torchcodec",
    ENERGON: "megatron.energon",
    MOSAIC: "streaming",
}
"""Each peer and the package that it needs."""
CANDIDATES: dict[str, Callable[[Place, Kind], Iterator[torch.Tensor]]] = {
    OURS: _ours,
    FAST: functools.partial(_ours, color="fast"),
    FLOOR: _bare,
    FAST_FLOOR: functools.partial(_bare, color="fast"),
    "webdataset + PyAV, 0 workers": _with(by_hand.pyav, _webdataset, 0),
    "webdataset + PyAV, 2 workers": _with(by_hand.pyav, _webdataset, 2),
    "webdataset + torchcodec, 2 workers": _with(by_hand.torchcodec, _webdataset, 2),
    "torchdata StatefulDataLoader + PyAV, 2 workers": _with(by_hand.pyav, _torchdata),
    "litdata + PyAV, 2 workers": _with(by_hand.pyav, _litdata),
    "SPDL, 2 threads": _spdl,
    "torchcodec, 2 threads": _with(by_hand.torchcodec, _threads),
    ENERGON: _with(by_hand.pyav, in_energon.batches),
    MOSAIC: _with(by_hand.pyav, in_mosaic.batches),
}
