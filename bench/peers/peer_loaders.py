"""Runs a decoding function in other loaders, in two threads or two worker processes.

Each function takes `decode`, the source of the files, and the kind of data. Peers that can seek in a file get the file;
the others get its bytes. All clips or windows of a long file come from one open file, and long files are not shuffled
in a buffer: that is the least work. Energon and mosaicml-streaming may need their own interpreter (`--peer-python`), as
their pins and ours conflict. That interpreter also writes mosaicml's shards: `python -m
headrace.bench.peers.peer_loaders CLIPS TARGET BYTES`.
Invariant: each loader delivers the number of samples of each file that the kind defines, in batches (samples of a
batch, ...).
Failure behaviour: exceptions of the loaders, which end the candidate's process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headrace.bench.workloads.source import Place, part_at_fork, the_file
from headrace.bench.workloads.video import AnyKind, whole

THREADS = 2
Decode = Callable[[Any], torch.Tensor]


def decoding(decode: Callable[..., torch.Tensor], run: Callable[..., Iterator[torch.Tensor]], *more: Any) -> Any:
    """Return a candidate that runs `decode` in the loader `run`."""
    return lambda place, kind: run(functools.partial(decode, kind=kind), place, kind, *more)


def alone(decode: Callable[[Any, memoryview], torch.Tensor], place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """The floor: a plain loop over the files of our shards, in threads. `decode` gets the sample and its bytes."""
    from headrace.dataio import Dataset
    from headrace.dataio.shards.sample import Sample

    folder = place.folder / "dataset"

    def one(sample: Sample) -> torch.Tensor:
        torch.set_num_threads(1)
        (member,) = sample.members
        with contextlib.ExitStack() as opened:
            if not kind.sought:
                data = memoryview(os.pread(shards[sample.shard].fileno(), member.length, member.offset))
            else:  # reads only the pages that the decoder touches
                mapped = mmap.mmap(shards[sample.shard].fileno(), 0, access=mmap.ACCESS_READ)
                data = opened.enter_context(memoryview(opened.enter_context(mapped)))
                data = opened.enter_context(data[member.offset : member.offset + member.length])
            return decode(sample, data)

    with contextlib.ExitStack() as held:
        dataset = held.enter_context(Dataset(str(folder)))
        names = {sample.shard for sample in dataset}
        shards = {name: held.enter_context((folder / name).open("rb", buffering=0)) for name in names}
        yield from held.enter_context(ThreadPoolExecutor(THREADS)).map(one, dataset)


def _read(decode: Decode, place: Place, kind: AnyKind, name: str) -> torch.Tensor:
    """Decode the samples of one file, from its bytes or, if it is long, from an open file."""
    torch.set_num_threads(1)
    if not kind.sought:
        return decode(place.read(name))
    with place.opened(name) as file:
        return decode(file)


def threads(decode: Decode, place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """A plain loop over files, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(functools.partial(_read, decode, place, kind), place.clips())


def webdataset(decode: Decode, place: Place, kind: AnyKind, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = wds.WebDataset(place.shards(), shardshuffle=False, empty_check=False, handler=wds.reraise_exception)
    chain = dataset.shuffle(kind.buffer).map(functools.partial(_of_sample, decode))
    for batch in DataLoader(chain, batch_size=kind.batch, num_workers=workers):
        yield batch.flatten(0, 1)


def _of_sample(decode: Decode, sample: Mapping[str, Any]) -> torch.Tensor:
    torch.set_num_threads(1)
    return decode(the_file(sample))


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, decode: Decode, place: Place, kind: AnyKind) -> None:
        self._read, self._names = functools.partial(_read, decode, place, kind), place.clips()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._read(self._names[number])


def torchdata(decode: Decode, place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = _Files(decode, place, kind)
    for batch in StatefulDataLoader(files, batch_size=kind.batch, shuffle=True, num_workers=2):
        yield batch.flatten(0, 1)


def spdl(decode: Decode, place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """SPDL's pipeline. `decode` gets the name of a file, and its bytes or, if it is long, its path or URL."""
    source: Callable[[str], bytes | str] = place.link if kind.sought else place.read
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder = (
        builder.add_source(place.clips())
        .pipe(lambda name: decode((name, source(name))), concurrency=THREADS)
        .aggregate(kind.batch)
        .pipe(torch.cat)
        .add_sink(2)
    )
    # By default SPDL skips failed items and only logs them.
    pipeline = builder.build(num_threads=THREADS, max_failures=0)
    with pipeline.auto_stop():
        yield from pipeline


def litdata(decode: Decode, place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    from torch.utils.data import default_collate

    library: Any = importlib.import_module("litdata")
    collate = functools.partial(_collate, decode, default_collate)
    with tempfile.TemporaryDirectory(prefix="litdata-", dir=place.folder) as cache:
        options = _for_litdata(cache) if place.port else {}
        dataset = library.StreamingDataset(place.url("litdata"), shuffle=True, drop_last=False, **options)
        for batch in library.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)


def _for_litdata(cache: str) -> dict[str, Any]:
    downloader: Any = importlib.import_module("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litdata has no setting for a server without TLS
    keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    return {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], **keys}, "cache_dir": cache}


def _collate(decode: Decode, stack: Callable[..., Any], samples: list[Mapping[str, Any]]) -> Any:
    return stack([_of_sample(decode, sample) for sample in samples])


def write_energon_index(folder: Path, python: str) -> None:
    """Write the index that Energon needs, next to hard links of our tars."""
    options = ("--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset", "--num-workers", "1")
    with whole(folder / "energon") as made:
        made.mkdir()
        for shard in (folder / "dataset" / "shards").iterdir():
            os.link(shard, made / shard.name)
        command = [str(Path(python).parent / "energon"), "prepare", str(made), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"energon prepare: {done.stderr[-500:]}")


def energon(decode: Callable[[bytes], torch.Tensor], place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """Energon with a shuffle buffer and two workers."""
    library: Any = importlib.import_module("megatron.energon")

    def cook(sample: Any) -> Any:
        torch.set_num_threads(1)
        return {**library.basic_sample_keys(sample), "made": decode(the_file(sample))}

    encoder = type(
        "Encoder",
        (library.DefaultTaskEncoder,),
        {"decoder": None, "cookers": [library.Cooker(library.stateless(cook))]},
    )
    dataset = library.get_train_dataset(
        _energon_url(place) if place.port else str(place.folder / "energon"),
        batch_size=kind.batch,
        shuffle_buffer_size=kind.buffer,
        max_samples_per_sequence=None,
        worker_config=library.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=encoder(),
        repeat=False,
    )
    for batch in library.get_savable_loader(dataset):
        yield batch["made"].flatten(0, 1)


def _energon_url(place: Place) -> str:
    """Return Energon's URL of our folder on the server, and write the configuration of its storage client."""
    names = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY"}
    keys = {"type": "S3Credentials", "options": {name: os.environ[variable] for name, variable in names.items()}}
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "base_path": place.folder.name,
        "region_name": "us-east-1",
    }
    profile = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": keys}
    told = place.folder / "energon.json"
    told.write_text(json.dumps({"profiles": {"bench": profile}}))
    part_at_fork()
    os.environ["MSC_CONFIG"] = str(told)
    return "msc://bench/energon"


def write_mosaic(kind: AnyKind, folder: Path, python: str) -> None:
    """Write the files' bytes into mosaicml's shards, with an interpreter that has mosaicml-streaming installed."""
    with whole(folder / "mosaic") as made:
        command = [
            python,
            "-m",
            "headrace.bench.peers.peer_loaders",
            str(folder / "clips"),
            str(made),
            str(kind.shard_bytes),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"MDSWriter: {done.stderr[-500:]}")


def _write_mds(clips: Path, target: Path, shard_bytes: int) -> None:
    streaming: Any = importlib.import_module("streaming")
    with streaming.MDSWriter(out=str(target), columns={"file": "bytes"}, size_limit=shard_bytes) as out:
        for path in sorted(clips.iterdir()):
            out.write({"file": path.read_bytes()})


def mosaic(decode: Callable[[bytes], torch.Tensor], place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """mosaicml-streaming with its default shuffle, for one node."""
    streaming: Any = importlib.import_module("streaming")
    with tempfile.TemporaryDirectory(prefix="mosaic-", dir=place.folder) as cache:
        where = {"local": str(place.folder / "mosaic")}
        if place.port:
            part_at_fork()
            os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
            where = {"remote": place.url("mosaic"), "local": cache}
        dataset = streaming.StreamingDataset(**where, shuffle=True, batch_size=kind.batch, num_canonical_nodes=1)
        collate = functools.partial(_collate_mosaic, decode)
        for batch in streaming.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)


def _collate_mosaic(decode: Callable[[bytes], torch.Tensor], samples: list[Mapping[str, Any]]) -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.stack([decode(the_file(sample)) for sample in samples])


def write_litdata(read: Callable[[Any], Any], inputs: list[Any], target: Path, chunk_bytes: str) -> None:
    """Write `read(input)` of all inputs into litdata's chunks in `target`, by one process.

    litdata's temporary files go to a scratch folder: by default litdata empties the folders `data` and `chunks` of the
    system's temporary folder.
    """
    library: Any = importlib.import_module("litdata")
    with tempfile.TemporaryDirectory(prefix="headrace-litdata-", dir=target.parent) as scratch:
        folders = {
            "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/chunks",
            "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/data",
        }
        before = dict(os.environ)
        os.environ.update(folders)
        try:
            library.optimize(read, inputs=inputs, output_dir=str(target), chunk_bytes=chunk_bytes, num_workers=1)
        finally:
            os.environ.clear()
            os.environ.update(before)


if __name__ == "__main__":
    _write_mds(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
