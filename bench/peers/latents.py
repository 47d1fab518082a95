"""The samples of `headrace bench latents`, and other loaders that deliver them.

A sample is a latent of 100 kB and an embedding of 10 kB, both .npy files, and a caption. The tars of `make` are read by
Headrace, webdataset and Energon. The plain files are read by torch's DataLoader. litdata and LanceDB read files of
their own.

Invariant: each candidate yields batches (latents, embeddings, captions). Each sample comes once in an epoch.

Failure behaviour: an exception of a loader ends the candidate's process.
"""

from __future__ import annotations

import importlib
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.bench.core.data import tar_shards
from headrace.bench.core.measure import Progress
from headrace.bench.peers.source import atomic_folder, index_for_energon, write_litdata

BATCH, WORKERS, BUFFER = 32, 2, 1000
LATENT, EMBEDDING, CAPTION = "latent.npy", "emb.npy", "txt"
SHAPES: dict[str, tuple[int, ...]] = {LATENT: (4, 16, 28, 28), EMBEDDING: (10, 512)}
"""The shape of each array. They are float16: 100,352 and 10,240 bytes."""


class Batch(NamedTuple):
    """A batch: one array or tensor, and one text, for each sample."""

    latents: Any
    embeddings: Any
    captions: Sequence[str]


Epochs = Callable[[Path, int], Iterator[Batch]]
"""A candidate: yields the batches of this number of epochs from a folder."""


def make(folder: Path, samples: int, progress: Progress) -> None:
    """Write the samples to `folder`/files, and a dataset of tars to `folder`/dataset."""
    files, rng = folder / "files", np.random.default_rng(1)
    files.mkdir()
    for number in range(samples):
        progress("making samples", number / samples)
        for ext, shape in SHAPES.items():
            np.save(files / f"{number:06}.{ext}", rng.standard_normal(shape, np.float32).astype(np.float16))
        (files / f"{number:06}.{CAPTION}").write_text(f"the caption of sample {number}")
    tar_shards(files, folder)


def to_litdata(folder: Path) -> None:
    """Write the samples into litdata's chunks."""
    keys = sorted(str(path).removesuffix(f".{CAPTION}") for path in (folder / "files").glob(f"*.{CAPTION}"))
    with atomic_folder(folder / "litdata") as target:
        write_litdata(_read, keys, target, "64MB")


def to_lancedb(folder: Path) -> None:
    """Write the samples into a table of LanceDB, whose arrays are lists of a fixed size."""
    import pyarrow as pa

    library: Any = importlib.import_module("lancedb")
    sizes = {"latent": math.prod(SHAPES[LATENT]), "embedding": math.prod(SHAPES[EMBEDDING])}
    types = {name: pa.list_(pa.float16(), size) for name, size in sizes.items()} | {"caption": pa.string()}
    schema = pa.schema(list(types.items()))

    def batches() -> Iterator[pa.RecordBatch]:
        keys = sorted(str(path).removesuffix(f".{CAPTION}") for path in (folder / "files").glob(f"*.{CAPTION}"))
        for first in range(0, len(keys), 256):
            samples = [_read(key) for key in keys[first : first + 256]]
            arrays = [
                pa.FixedSizeListArray.from_arrays(np.concatenate([one[name].ravel() for one in samples]), size)
                for name, size in sizes.items()
            ]
            captions = pa.array([one["caption"] for one in samples])
            yield pa.RecordBatch.from_arrays([*arrays, captions], schema=schema)

    with atomic_folder(folder / "lancedb") as target:
        library.connect(str(target)).create_table("samples", batches(), schema=schema)


def to_energon(folder: Path) -> None:
    """Write Energon's index of the tars."""
    index_for_energon(folder / "shards", folder / "energon", sys.executable)


def _read(key: str) -> dict[str, Any]:
    """Read one sample from its files."""
    return {
        "latent": np.load(f"{key}.{LATENT}"),
        "embedding": np.load(f"{key}.{EMBEDDING}"),
        "caption": Path(f"{key}.{CAPTION}").read_text(),
    }


# --- the loaders


def webdataset(folder: Path, epochs: int, workers: int = WORKERS) -> Iterator[Batch]:
    """webdataset with its default decoders. The workers make the batches, as its documentation recommends."""
    import webdataset as wds

    shards = sorted(str(path) for path in (folder / "shards").iterdir())
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False, handler=wds.reraise_exception)
        .shuffle(BUFFER)
        .decode()
        .to_tuple(LATENT, EMBEDDING, CAPTION)
        .batched(BATCH, collation_fn=_collate)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(epochs):
        yield from (Batch(*batch) for batch in loader)


def _collate(samples: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
    """Stack the arrays into tensors, which workers pass through shared memory."""
    latents, embeddings, captions = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(latents)), torch.from_numpy(np.stack(embeddings)), list(captions)


class _Files(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, folder: Path) -> None:
        self._keys = sorted(str(path).removesuffix(f".{CAPTION}") for path in (folder / "files").glob(f"*.{CAPTION}"))

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return _read(self._keys[number])


def torch_files(folder: Path, epochs: int) -> Iterator[Batch]:
    """torch's DataLoader with `np.load` of plain files."""
    loader = torch.utils.data.DataLoader(
        _Files(folder), batch_size=BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True
    )
    for _ in range(epochs):
        yield from (Batch(**_named(batch)) for batch in loader)


def litdata(folder: Path, epochs: int) -> Iterator[Batch]:
    """litdata with arrays in its own format."""
    library: Any = importlib.import_module("litdata")
    dataset = library.StreamingDataset(str(folder / "litdata"), shuffle=True, drop_last=False)
    loader = library.StreamingDataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, drop_last=False
    )
    for _ in range(epochs):
        yield from (Batch(**_named(batch)) for batch in loader)


def lancedb(folder: Path, epochs: int) -> Iterator[Batch]:
    """LanceDB's `StreamingDataset` in this process, with its own threads, as its documentation shows."""
    library: Any = importlib.import_module("lancedb")
    streaming: Any = importlib.import_module("lancedb.streaming")
    table = library.connect(str(folder / "lancedb")).open_table("samples")

    def rows(batch: Any) -> list[dict[str, Any]]:
        """Make tensors of a batch of Arrow without a copy."""
        latents, embeddings = (batch.column(name).flatten().to_numpy() for name in ("latent", "embedding"))
        shaped = (
            torch.from_numpy(latents).view(-1, *SHAPES[LATENT]),
            torch.from_numpy(embeddings).view(-1, *SHAPES[EMBEDDING]),
            batch.column("caption").to_pylist(),
        )
        return [dict(zip(("latent", "embedding", "caption"), row, strict=True)) for row in zip(*shaped, strict=True)]

    for epoch in range(epochs):
        dataset = streaming.StreamingDataset(
            table, shuffle_seed=1, epoch=epoch, transform=rows, transform_parallelism=WORKERS
        )
        yield from (Batch(**_named(batch)) for batch in torch.utils.data.DataLoader(dataset, batch_size=BATCH))


def energon(folder: Path, epochs: int) -> Iterator[Batch]:
    """Energon with a shuffle buffer."""
    library: Any = importlib.import_module("megatron.energon")

    def cook(sample: Any) -> Any:
        return {
            **library.basic_sample_keys(sample),
            "latent": torch.from_numpy(np.load(io.BytesIO(sample[LATENT]))),
            "embedding": torch.from_numpy(np.load(io.BytesIO(sample[EMBEDDING]))),
            "caption": bytes(sample[CAPTION]).decode(),
        }

    encoder = type(
        "Encoder",
        (library.DefaultTaskEncoder,),
        {"decoder": None, "cookers": [library.Cooker(library.stateless(cook))]},
    )
    dataset = library.get_train_dataset(
        str(folder / "energon"),
        batch_size=BATCH,
        shuffle_buffer_size=BUFFER,
        max_samples_per_sequence=None,
        worker_config=library.WorkerConfig(rank=0, world_size=1, num_workers=WORKERS),
        task_encoder=encoder(),
        repeat=False,
    )
    loader = library.get_savable_loader(dataset)
    for _ in range(epochs):
        yield from (Batch(**_named(batch)) for batch in loader)


def _named(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"latents": batch["latent"], "embeddings": batch["embedding"], "captions": batch["caption"]}


PEERS: Mapping[str, tuple[Epochs, str]] = {
    "webdataset, 0 workers": (lambda folder, epochs: webdataset(folder, epochs, 0), "webdataset"),
    "webdataset, 2 workers": (webdataset, "webdataset"),
    "torch DataLoader over files, 2 workers": (torch_files, "torch"),
    "litdata, 2 workers": (litdata, "litdata"),
    "lancedb, 2 threads": (lancedb, "lancedb"),
    "energon, 2 workers": (energon, "megatron.energon"),
}
"""The other loaders, by name: the candidate, and the package that it needs."""
