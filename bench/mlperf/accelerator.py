"""One emulated accelerator: takes a batch, "computes" by sleeping for the published time, takes the next.

`python -m headrace.bench.mlperf.accelerator JSON` (a `Seat`) waits for a line on standard input, runs its share of an epoch,
prints one JSON object.
Invariant: the clock begins when all accelerators are told to go, so the wait for the first batch counts, as in the rules.
Failure behaviour: a candidate that delivers another number of bytes than its share raises.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.core.measure import Meter
from headrace.bench.mlperf import raw

WORKERS = 4
CANDIDATES = ("headrace", f"torch DataLoader on files, {WORKERS} workers")
_IMPORTS = {
    CANDIDATES[0]: ("headrace.dataio.shards.dataset", "pyarrow.parquet"),
    CANDIDATES[1]: ("torch.utils.data",),
    "video": ("headrace.loaders.video_loader", "pyarrow.parquet"),
}
"""Imports are the process's start, not the epoch's."""


class Seat(msgspec.Struct):
    """Which accelerator this is, what it eats, and how."""

    candidate: str
    folder: str
    batch: int
    compute_seconds: float
    rank: int
    ranks: int
    video: bool = False
    sidecar: str | None = None


def run(seat: Seat) -> dict[str, float]:
    """Steps, computing time, wall time, bytes and CPU of one epoch."""
    for module in _IMPORTS["video" if seat.video else seat.candidate]:
        importlib.import_module(module)
    print("ready", flush=True)
    sys.stdin.readline()
    meter, steps, size, first = Meter(), 0, 0, 0.0
    for batch in _batches(seat):
        first = first or meter.read()["wall_s"]
        steps, size = steps + 1, size + sum(len(sample) for sample in batch)
        time.sleep(seat.compute_seconds)
    read = meter.read()
    return {"steps": steps, "bytes": size, "first_s": first, "wall_s": read["wall_s"], "cpu_s": read["cpu_s"]}


def _batches(seat: Seat) -> Iterator[Any]:
    if seat.video:
        return _video(seat)
    if seat.candidate == CANDIDATES[0]:
        url = f"{seat.folder}/dataset"
        return raw.batches(url, seat.batch, rank=seat.rank, ranks=seat.ranks, sidecar=seat.sidecar)
    return _files(seat)


def _video(seat: Seat) -> Iterator[Any]:
    from headrace.loaders import Clip, VideoLoader

    clip = Clip(frames=16, stride=2)
    with VideoLoader(
        f"{seat.folder}/dataset",
        batch_size=seat.batch,
        clip=clip,
        size=(112, 112),
        rank=seat.rank,
        world_size=seat.ranks,
        sidecar=seat.sidecar,
        drop_last=False,
        trust_mounts=True,
    ) as loader:
        for batch in loader:
            yield batch["video"].flatten(1).numpy()


def _files(seat: Seat) -> Iterator[list[bytes]]:
    """What the reference harness does by default: a file a sample, read whole by worker processes."""
    import torch.utils.data as data

    paths = sorted(Path(seat.folder, "files").iterdir())[seat.rank :: seat.ranks]

    class Files(data.Dataset[bytes]):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, number: int) -> bytes:
            return paths[number].read_bytes()

    yield from data.DataLoader(Files(), seat.batch, shuffle=True, num_workers=WORKERS, collate_fn=list)


if __name__ == "__main__":
    print(json.dumps(run(msgspec.json.decode(sys.argv[1], type=Seat))))
