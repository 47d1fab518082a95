"""Loaders that run a decoding function in two threads or two worker processes.

Each loader gets `decode`, the source of the files and the kind of data. Peers that can seek in a file get the file. The
others get its bytes. All samples of a long file are read from one open file, and long files are not shuffled in a
buffer, because that is the least work. Energon and mosaicml-streaming may need their own interpreter (`--peer-python`),
because the versions that they require conflict with ours.

Invariant: each loader delivers the number of samples of each file that the kind defines, in batches (samples of a
batch, ...).

Failure behaviour: an exception of a loader ends the candidate's process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from headrace.bench.peers.source import Kind, Peer, Source, close_connections_at_fork

THREADS = 2
Decode = Callable[..., torch.Tensor]


def decoding(decode: Decode, run: Callable[..., Iterator[torch.Tensor]], *more: Any) -> Any:
    """Return a candidate that runs `decode` in the loader `run`."""
    return lambda source, kind: run(functools.partial(decode, kind=kind), source, kind, *more)


def peers_with(library: str, decode: Decode, *packages: str) -> dict[str, Peer]:
    """Return webdataset, torchdata and litdata with `decode`, which uses `library` and needs `packages`."""
    return {
        f"webdataset + {library}, 0 workers": Peer(decoding(decode, webdataset, 0), ("webdataset", *packages)),
        f"webdataset + {library}, 2 workers": Peer(decoding(decode, webdataset, 2), ("webdataset", *packages)),
        f"torchdata StatefulDataLoader + {library}, 2 workers": Peer(
            decoding(decode, torchdata), ("torchdata", *packages)
        ),
        f"litdata + {library}, 2 workers": Peer(decoding(decode, litdata), ("litdata", *packages)),
    }


def peers_with_own_python(library: str, decode: Decode) -> dict[str, Peer]:
    """Return Energon and mosaicml-streaming with `decode`."""
    return {
        f"energon + {library}, 2 workers": Peer(decoding(decode, energon), ("megatron.energon",)),
        f"mosaicml-streaming + {library}, 2 workers": Peer(decoding(decode, mosaic), ("streaming",)),
    }


def decoder_only(
    decode: Callable[[Any, memoryview], torch.Tensor], source: Source, kind: Kind
) -> Iterator[torch.Tensor]:
    """The upper bound ("floor"): a loop over the files of our shards, in threads.

    `decode` gets the sample and its bytes.
    """
    from headrace.dataio import Dataset
    from headrace.dataio.shards.sample import Sample

    folder = source.folder / "dataset"

    def decode_file(sample: Sample) -> torch.Tensor:
        torch.set_num_threads(1)
        (member,) = sample.members
        with contextlib.ExitStack() as opened:
            if not kind.long_files:
                data = memoryview(os.pread(shards[sample.shard].fileno(), member.length, member.offset))
            else:  # reads only the pages that the decoder touches
                mapped = mmap.mmap(shards[sample.shard].fileno(), 0, access=mmap.ACCESS_READ)
                data = opened.enter_context(memoryview(opened.enter_context(mapped)))
                data = opened.enter_context(data[member.offset : member.offset + member.length])
            return decode(sample, data)

    with contextlib.ExitStack() as stack:
        dataset = stack.enter_context(Dataset(str(folder)))
        names = {sample.shard for sample in dataset}
        shards = {name: stack.enter_context((folder / name).open("rb", buffering=0)) for name in names}
        yield from stack.enter_context(ThreadPoolExecutor(THREADS)).map(decode_file, dataset)


def _decode_file(decode: Decode, source: Source, kind: Kind, name: str) -> torch.Tensor:
    """Decode the samples of one file, from its bytes or, if it is long, from an open file."""
    torch.set_num_threads(1)
    if not kind.long_files:
        return decode(source.read(name))
    with source.opened(name) as file:
        return decode(file)


def _decode_row(decode: Decode, row: Mapping[str, Any]) -> torch.Tensor:
    """Decode the file of a sample as a library delivers it: a mapping with one value of bytes."""
    torch.set_num_threads(1)
    (data,) = (value for value in row.values() if isinstance(value, bytes))
    return decode(data)


def _stack_rows(decode: Decode, rows: list[Mapping[str, Any]]) -> torch.Tensor:
    return torch.stack([_decode_row(decode, row) for row in rows])


def threads(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    """A plain loop over files, in threads."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield from pool.map(functools.partial(_decode_file, decode, source, kind), source.files())


def webdataset(decode: Decode, source: Source, kind: Kind, workers: int) -> Iterator[torch.Tensor]:
    import webdataset as wds
    from torch.utils.data import DataLoader

    dataset = wds.WebDataset(source.shards(), shardshuffle=False, empty_check=False, handler=wds.reraise_exception)
    chain = dataset.shuffle(kind.buffer).map(functools.partial(_decode_row, decode))
    for batch in DataLoader(chain, batch_size=kind.batch, num_workers=workers):
        yield batch.flatten(0, 1)


class _Files(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, decode: Decode, source: Source, kind: Kind) -> None:
        self._read, self._names = functools.partial(_decode_file, decode, source, kind), source.files()

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self._read(self._names[number])


def torchdata(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    files = _Files(decode, source, kind)
    for batch in StatefulDataLoader(files, batch_size=kind.batch, shuffle=True, num_workers=2):
        yield batch.flatten(0, 1)


def spdl(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    """SPDL's pipeline. `decode` gets the name of a file, and its bytes or, if it is long, its path or URL."""
    read: Callable[[str], bytes | str] = source.link if kind.long_files else source.read
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder()
    builder = (
        builder.add_source(source.files())
        .pipe(lambda name: decode((name, read(name))), concurrency=THREADS)
        .aggregate(kind.batch)
        .pipe(torch.cat)
        .add_sink(2)
    )
    # By default SPDL skips failed items and only logs them.
    pipeline = builder.build(num_threads=THREADS, max_failures=0)
    with pipeline.auto_stop():
        yield from pipeline


def litdata(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    library: Any = importlib.import_module("litdata")
    collate = functools.partial(_stack_rows, decode)
    with tempfile.TemporaryDirectory(prefix="litdata-", dir=source.folder) as cache:
        options = _litdata_options(cache) if source.port else {}
        dataset = library.StreamingDataset(source.url("litdata"), shuffle=True, drop_last=False, **options)
        for batch in library.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)


def _litdata_options(cache: str) -> dict[str, Any]:
    downloader: Any = importlib.import_module("litdata.streaming.downloader")
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # litdata has no setting for a server without TLS
    keys = {name.lower(): os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    return {"storage_options": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"], **keys}, "cache_dir": cache}


def energon(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    """Energon with a shuffle buffer and two workers."""
    library: Any = importlib.import_module("megatron.energon")

    def cook(sample: Any) -> Any:
        return {**library.basic_sample_keys(sample), "decoded": _decode_row(decode, sample)}

    encoder = type(
        "Encoder",
        (library.DefaultTaskEncoder,),
        {"decoder": None, "cookers": [library.Cooker(library.stateless(cook))]},
    )
    dataset = library.get_train_dataset(
        _energon_url(source) if source.port else str(source.folder / "energon"),
        batch_size=kind.batch,
        shuffle_buffer_size=kind.buffer,
        max_samples_per_sequence=None,
        worker_config=library.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=encoder(),
        repeat=False,
    )
    for batch in library.get_savable_loader(dataset):
        yield batch["decoded"].flatten(0, 1)


def _energon_url(source: Source) -> str:
    """Return Energon's URL of our folder on the server, and write the configuration of its storage client."""
    names = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY"}
    keys = {"type": "S3Credentials", "options": {name: os.environ[variable] for name, variable in names.items()}}
    options = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "base_path": source.folder.name,
        "region_name": "us-east-1",
    }
    profile = {"storage_provider": {"type": "s3", "options": options}, "credentials_provider": keys}
    config = source.folder / "energon.json"
    config.write_text(json.dumps({"profiles": {"bench": profile}}))
    close_connections_at_fork()
    os.environ["MSC_CONFIG"] = str(config)
    return "msc://bench/energon"


def mosaic(decode: Decode, source: Source, kind: Kind) -> Iterator[torch.Tensor]:
    """mosaicml-streaming with its default shuffle, for one node."""
    streaming: Any = importlib.import_module("streaming")
    with tempfile.TemporaryDirectory(prefix="mosaic-", dir=source.folder) as cache:
        where = {"local": str(source.folder / "mosaic")}
        if source.port:
            close_connections_at_fork()
            os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
            where = {"remote": source.url("mosaic"), "local": cache}
        dataset = streaming.StreamingDataset(**where, shuffle=True, batch_size=kind.batch, num_canonical_nodes=1)
        collate = functools.partial(_stack_rows, decode)
        for batch in streaming.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)
