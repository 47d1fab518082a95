"""MosaicML Streaming's way to deliver the clips: its own shards (MDS), two workers that decode by hand.

It wants an older numpy than we do, so it may run in an interpreter of its own (`--peer-python streaming=…`), which also
writes the shards: `python -m headrace.bench.loader.in_mosaic CLIPS TARGET BYTES`. Invariant: as
`headrace.bench.loader.candidates`.
Failure behaviour: exceptions of its libraries; `RuntimeError` when it cannot write its shards.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from headrace.bench.loader.data import AnyKind, whole
from headrace.bench.loader.place import Place, part_at_fork, the_file


def write(kind: AnyKind, folder: Path, python: str) -> None:
    """The clips' bytes in its shards, written by an interpreter that has it."""
    with whole(folder / "mosaic") as made:
        command = [
            python,
            "-m",
            "headrace.bench.loader.in_mosaic",
            str(folder / "clips"),
            str(made),
            str(kind.shard_bytes),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"MDSWriter: {done.stderr[-500:]}")


def _write(clips: Path, target: Path, shard_bytes: int) -> None:
    streaming: Any = importlib.import_module("streaming")
    with streaming.MDSWriter(out=str(target), columns={"file": "bytes"}, size_limit=shard_bytes) as out:
        for path in sorted(clips.iterdir()):
            out.write({"file": path.read_bytes()})


def batches(decode: Callable[[bytes], torch.Tensor], place: Place, kind: AnyKind) -> Iterator[torch.Tensor]:
    """Its default shuffle, of one node."""
    streaming: Any = importlib.import_module("streaming")
    with tempfile.TemporaryDirectory(prefix="mosaic-", dir=place.folder) as cache:
        where = {"local": str(place.folder / "mosaic")}
        if place.port:
            part_at_fork()
            os.environ["S3_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
            where = {"remote": place.url("mosaic"), "local": cache}
        dataset = streaming.StreamingDataset(**where, shuffle=True, batch_size=kind.batch, num_canonical_nodes=1)
        collate = functools.partial(_collate, decode)
        for batch in streaming.StreamingDataLoader(dataset, batch_size=kind.batch, num_workers=2, collate_fn=collate):
            yield batch.flatten(0, 1)


def _collate(decode: Callable[[bytes], torch.Tensor], samples: list[Mapping[str, Any]]) -> torch.Tensor:
    torch.set_num_threads(1)
    return torch.stack([decode(the_file(sample)) for sample in samples])


if __name__ == "__main__":
    _write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
