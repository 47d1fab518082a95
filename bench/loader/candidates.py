"""Each loader's way to deliver the clips: uint8 (B, 16, 3, size, size), two threads or two worker processes.

Invariant: every candidate delivers as many clips of each file as its kind says. `bare` is the floor of ours: clips drawn alike,
read from files and decoded and cut by as many threads, but put into no batch, by no plan, and checked by nobody.
Films: peers that can seek in a file get the file, others its bytes; either takes all clips of a film at once, so that a batch is
of one film, and shuffles no films in a buffer, which is the least work. Our batches mix the clips of different films.
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from bench.loader import by_hand, in_energon, in_mosaic
from bench.loader.data import BATCH, Kind
from bench.loader.place import Place

THREADS = 2
Decode = Callable[[Any], torch.Tensor]


def batches(name: str, place: Place, kind: Kind) -> Iterable[torch.Tensor]:
    """The batches of this candidate."""
    return CANDIDATES[name](place, kind)


def _ours(place: Place, kind: Kind, *, color: Any = "bt601") -> Iterator[torch.Tensor]:
    from loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "threads": THREADS, "color": color}
    clip = Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE, per_video=kind.per_file)
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

    decoder, clip = PyAVDecoder(), Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE, per_video=kind.per_file)
    folder, cut = place.folder / "dataset", Fit((kind.size, kind.size))

    def one(sample: Sample) -> torch.Tensor:
        torch.set_num_threads(1)
        member = sample.member("mp4")
        assert sample.video is not None
        with contextlib.ExitStack() as opened:
            if kind.parts == 1:
                data = memoryview(os.pread(shards[sample.shard].fileno(), member.length, member.offset))
            else:  # which is not read where nobody looks
                mapped = mmap.mmap(shards[sample.shard].fileno(), 0, access=mmap.ACCESS_READ)
                data = opened.enter_context(memoryview(opened.enter_context(mapped)))
                data = opened.enter_context(data[member.offset : member.offset + member.length])
            wanted = [choose(sample.video, clip, 0, 0, sample.id, number) for number in range(kind.per_file)]
            found = decoder.decode([Request(data, sample.video, frames, color, cut) for frames in wanted])
            assert all(isinstance(decoded, Decoded) for decoded in found), found
            return torch.stack([decoded.frames for decoded in found if isinstance(decoded, Decoded)])

    with contextlib.ExitStack() as held:
        dataset = held.enter_context(Dataset(str(folder)))
        names = {sample.shard for sample in dataset}
        shards = {name: held.enter_context((folder / name).open("rb", buffering=0)) for name in names}
        yield from held.enter_context(ThreadPoolExecutor(THREADS)).map(one, dataset)


def _read(decode: Decode, place: Place, kind: Kind, name: str) -> torch.Tensor:
    """The clips of a file: of its bytes, or of a film that is sought in."""
    torch.set_num_threads(1)
    if kind.parts == 1:
        return decode(place.read(name))
    with place.opened(name) as film:
        return decode(film)


def _threads(decode: Decode, place: Place, kind: Kind) -> Iterator[torch.Tensor]:
    """A plain loop over files, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(functools.partial(_read, decode, place, kind), place.clips())


def _webdataset(decode: Decode, place: Place, kind: Kind, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = wds.WebDataset(place.shards(), shardshuffle=False, empty_check=False, handler=wds.reraise_exception)
    chain = dataset.shuffle(kind.buffer).map(functools.partial(_of_sample, decode))
    for batch in DataLoader(chain, batch_size=kind.batch, num_workers=workers):
        yield batch.flatten(0, 1)


def _of_sample(decode: Decode, sample: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    return decode(sample["mp4"])


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, decode: Decode, place: Place, kind: Kind) -> None:
        self._read, self._names = functools.partial(_read, decode, place, kind), place.clips()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._read(self._names[number])


def _torchdata(decode: Decode, place: Place, kind: Kind) -> Iterator[torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = _Files(decode, place, kind)
    for batch in StatefulDataLoader(files, batch_size=kind.batch, shuffle=True, num_workers=2):
        yield batch.flatten(0, 1)


def _spdl(place: Place, kind: Kind) -> Iterator[torch.Tensor]:
    source: Callable[[str], bytes | str] = place.read if kind.parts == 1 else place.link
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder = (
        builder.add_source(place.clips())
        .pipe(lambda name: by_hand.spdl(source(name), kind), concurrency=THREADS)
        .aggregate(kind.batch)
        .pipe(torch.cat)
        .add_sink(2)
    )
    # Left to itself it leaves out what failed, and says so in its log alone.
    pipeline = builder.build(num_threads=THREADS, max_failures=0)
    with pipeline.auto_stop():
        yield from pipeline


def _litdata(decode: Decode, place: Place, kind: Kind) -> Iterator[torch.Tensor]:
    from torch.utils.data import default_collate

    litdata: Any = importlib.import_module("litdata")
    collate = functools.partial(_collate, decode, default_collate)
    with tempfile.TemporaryDirectory(prefix="litdata-", dir=place.folder) as cache:
        options = _for_litdata(cache) if place.port else {}
        dataset = litdata.StreamingDataset(place.url("litdata"), shuffle=True, drop_last=False, **options)
        for batch in litdata.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)


def _for_litdata(cache: str) -> dict[str, Any]:
    downloader: Any = importlib.import_module("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no setting for a server without TLS
    keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    return {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], **keys}, "cache_dir": cache}


def _collate(decode: Decode, stack: Callable[..., Any], samples: list[Mapping[str, Any]]) -> Any:
    return stack([_of_sample(decode, sample) for sample in samples])


def _with(decode: Callable[..., torch.Tensor], run: Callable[..., Iterator[torch.Tensor]], *more: Any) -> Any:
    """A candidate that decodes by hand."""
    return lambda place, kind: run(functools.partial(decode, kind=kind), place, kind, *more)


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
