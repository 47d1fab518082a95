"""Each loader's way to deliver the clips: uint8 (B, 16, 3, size, size), two threads or two worker processes.

Invariant: every candidate delivers each clip of the dataset once. `bare` is the floor of ours: the same clips of the same places,
read and decoded and resized by as many threads, but put into no batch, by no plan, and checked by nobody.
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.loader import by_hand
from bench.loader.data import Kind

BATCH, THREADS = 8, 2
Decode = Callable[[bytes], torch.Tensor]


def batches(name: str, folder: Path, kind: Kind) -> Iterable[torch.Tensor]:
    """The batches of this candidate."""
    return CANDIDATES[name](folder, kind)


def _ours(folder: Path, kind: Kind, *, url: str = "", color: Any = "bt601") -> Iterator[torch.Tensor]:
    from loaders import Clip, VideoLoader

    options: dict[str, Any] = {"sidecar": None, "drop_last": False, "threads": THREADS, "color": color}
    clip = Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE)
    with VideoLoader(
        url or str(folder / "dataset"), BATCH, clip=clip, size=(kind.size, kind.size), **options
    ) as loader:
        for batch in loader:
            yield batch["video"]


def _bare(folder: Path, kind: Kind) -> Iterator[torch.Tensor]:
    """The decoder alone."""
    from dataio import Dataset
    from dataio.shards.contract import Sample
    from loaders.clip import Clip, choose
    from loaders.decode.contract import Decoded, Request
    from loaders.decode.pyav import PyAVDecoder
    from loaders.decode.resize import fit

    decoder, clip = PyAVDecoder(), Clip(frames=by_hand.FRAMES, stride=by_hand.STRIDE)
    dataset = Dataset(str(folder / "dataset"))
    shards = {shard: (folder / "dataset" / shard).open("rb", buffering=0) for shard in {s.shard for s in dataset}}

    def one(sample: Sample) -> torch.Tensor:
        import os

        torch.set_num_threads(1)
        member = sample.member("mp4")
        data = os.pread(shards[sample.shard].fileno(), member.length, member.offset)
        assert sample.video is not None
        request = Request(memoryview(data), sample.video, choose(sample.video, clip, 0, 0, sample.id, 0))
        (decoded,) = decoder.decode([request])
        assert isinstance(decoded, Decoded)
        return fit(decoded.frames, (kind.size, kind.size)).contiguous()[None]

    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(one, dataset)


def _payloads(folder: Path) -> list[Path]:
    return sorted((folder / "clips").iterdir())


def _threads(decode: Decode, folder: Path) -> Iterator[torch.Tensor]:
    """A plain loop over files, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        for clip in pool.map(lambda path: decode(path.read_bytes()), _payloads(folder)):
            yield clip[None]


def _webdataset(decode: Decode, folder: Path, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    shards = [str(shard) for shard in sorted((folder / "dataset" / "shards").iterdir())]
    dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False, handler=wds.reraise_exception)
    chain = dataset.shuffle(64).map(functools.partial(_of_sample, decode))
    yield from DataLoader(chain, batch_size=BATCH, num_workers=workers)


def _of_sample(decode: Decode, sample: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    return decode(sample["mp4"])


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, decode: Decode, paths: list[Path]) -> None:
        self._decode, self._paths = decode, paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        torch.set_num_threads(1)
        return self._decode(self._paths[number].read_bytes())


def _torchdata(decode: Decode, folder: Path) -> Iterator[torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = _Files(decode, _payloads(folder))
    yield from StatefulDataLoader(files, batch_size=BATCH, shuffle=True, num_workers=2)


def _spdl(folder: Path, kind: Kind) -> Iterator[torch.Tensor]:
    decode = functools.partial(by_hand.spdl, size=kind.size, seconds=kind.seconds)
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder = builder.add_source(_payloads(folder))
    builder = (
        builder.pipe(lambda path: decode(path.read_bytes()), concurrency=THREADS).aggregate(BATCH).pipe(torch.stack)
    )
    pipeline = builder.add_sink(2).build(num_threads=THREADS)
    with pipeline.auto_stop():
        yield from pipeline


def _litdata(decode: Decode, folder: Path) -> Iterator[torch.Tensor]:
    from torch.utils.data import default_collate

    litdata: Any = importlib.import_module("litdata")
    dataset = litdata.StreamingDataset(str(folder / "litdata"), shuffle=True, drop_last=False)
    collate = functools.partial(_collate, decode, default_collate)
    yield from litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=2, collate_fn=collate)


def _collate(decode: Decode, stack: Callable[..., Any], samples: list[Mapping[str, Any]]) -> Any:
    return stack([_of_sample(decode, sample) for sample in samples])


def _with(decode: Callable[..., torch.Tensor], run: Callable[..., Iterator[torch.Tensor]], *more: Any) -> Any:
    """A candidate that decodes by hand."""
    return lambda folder, kind: run(functools.partial(decode, size=kind.size), folder, *more)


OURS, FAST, FLOOR = "millrace", "millrace, color='fast'", "floor: our decoder alone"
PEERS: dict[str, str] = {
    "webdataset + PyAV, 0 workers": "webdataset",
    "webdataset + PyAV, 2 workers": "webdataset",
    "webdataset + torchcodec, 2 workers": "torchcodec",
    "torchdata StatefulDataLoader + PyAV, 2 workers": "torchdata",
    "litdata + PyAV, 2 workers": "litdata",
    "SPDL, 2 threads": "spdl",
    "torchcodec, 2 threads": "torchcodec",
}
"""Each peer and the package that it needs."""
CANDIDATES: dict[str, Callable[[Path, Kind], Iterator[torch.Tensor]]] = {
    OURS: _ours,
    FAST: functools.partial(_ours, color="fast"),
    FLOOR: _bare,
    "webdataset + PyAV, 0 workers": _with(by_hand.pyav, _webdataset, 0),
    "webdataset + PyAV, 2 workers": _with(by_hand.pyav, _webdataset, 2),
    "webdataset + torchcodec, 2 workers": _with(by_hand.torchcodec, _webdataset, 2),
    "torchdata StatefulDataLoader + PyAV, 2 workers": _with(by_hand.pyav, _torchdata),
    "litdata + PyAV, 2 workers": _with(by_hand.pyav, _litdata),
    "SPDL, 2 threads": _spdl,
    "torchcodec, 2 threads": _with(by_hand.torchcodec, _threads),
}
