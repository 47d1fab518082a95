"""What the ranks of a node pay to start a loader of very many samples: `python -m tests.support.node_scale`.

Purpose: prints one JSON line with the bytes that each rank reads of the index, its seconds and its memory, for

- `column`: one column of the index, as a number for each sample;
- `every`: `VideoLoader` with `Clip(start="every")`;
- `buckets`: `VideoLoader` with 30 buckets.

Method: the dataset is that of `index_scale`. The ranks are processes that begin at the same time. Memory is what a rank
has after its loader started and its first batch was looked up, above what it had after imports: its own pages, and its
share of the pages that the ranks share (PSS). The peak counts shared pages in full.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.query import tables
from headrace.dataio.store.open import open_store
from headrace.loaders import Bucket, Buckets, Clip, VideoLoader
from headrace.loaders.sampling import columns
from headrace.loaders.sampling.columns import F64, small_numbers
from headrace.loaders.sampling.sample_ids import AllIds
from tests.support.index_scale import Counted, make

COLUMNS = {"column": ["frames"], "every": ["frames", "duration"], "buckets": ["height", "width", "rotation", "frames"]}
SIZES = [(h, w) for h in (256, 384, 512, 640, 768) for w in (256, 448, 640)]
BUCKETS = Buckets(tuple(Bucket(size, frames) for size in SIZES for frames in (16, 64)), budget=512 * 640 * 768 * 64)


@dataclass(frozen=True)
class Hundreds:
    """A number below 256 for each video: its frames in hundreds."""

    def __call__(self, frames: F64) -> Any:
        return (frames // 100).astype(np.int64)


def start_column(dataset: Dataset) -> Any:
    return small_numbers(dataset, COLUMNS["column"], AllIds(len(dataset)), Hundreds())


def start_every(dataset: Dataset) -> VideoLoader:
    loader = VideoLoader(dataset, batch_size=64, clip=Clip(frames=16, start="every"), size=(256, 256))
    loader._plan.refs(0, range(1))
    return loader


def start_buckets(dataset: Dataset) -> VideoLoader:
    loader = VideoLoader(dataset, clip=Clip(frames=16), buckets=BUCKETS)
    loader._plan.refs(0, range(1))
    return loader


STARTS: dict[str, Callable[[Dataset], Any]] = {
    "column": start_column,
    "every": start_every,
    "buckets": start_buckets,
}


def memory(name: str) -> float:
    """A line of this process's memory in MiB."""
    file = "status" if name.startswith("Vm") else "smaps_rollup"
    (kib,) = re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self", file).read_text(), re.MULTILINE)
    return int(kib) / 1024


def rank(folder: str, kind: str, barrier: Any, results: Any) -> None:
    """Start one rank's loader, and put what it cost into `results`."""
    columns._OWN += (f"{Hundreds.__module__}.",)
    store = Counted(open_store(folder))
    dataset = Dataset.open_lazy(folder)
    dataset.close()
    with Dataset(store) as dataset:
        store.requests = store.bytes = 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before, peak = memory("Pss"), memory("VmHWM")
        barrier.wait()
        begin, cpu = time.monotonic(), time.process_time()
        loader = STARTS[kind](dataset)
        cost = {"bytes": store.bytes, "requests": store.requests, "cpu_s": round(time.process_time() - cpu, 2)}
        cost["seconds"] = round(time.monotonic() - begin, 2)
        gc.collect()
        barrier.wait()
        cost |= {"mib": round(memory("Pss") - before, 1), "peak_mib": round(memory("VmHWM") - peak, 1)}
        barrier.wait()
        results.put(cost)
        del loader


def own_bytes(folder: str, columns: Sequence[str]) -> int:
    """The bytes of these columns in all parts."""
    with Dataset(folder) as dataset:
        reader = tables.PartReader(dataset.store, dataset.document.index[0], dataset.document.shard_sizes())
        chunks = reader._chunks([0], set(columns))
        return len(dataset.document.index) * sum(chunk.end - chunk.start for chunk in chunks)


def measured(folder: str, kind: str, ranks: int) -> dict[str, Any]:
    """The costs of the ranks, smallest and largest."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [context.Process(target=rank, args=(folder, kind, barrier, results)) for _ in range(ranks)]
    for process in processes:
        process.start()
    costs = [results.get() for _ in processes]
    for process in processes:
        process.join()
    ranges = {name: [pick(cost[name] for cost in costs) for pick in (min, max)] for name in costs[0]}
    own, mean = own_bytes(folder, COLUMNS[kind]) / ranks, sum(cost["bytes"] for cost in costs) / ranks
    return ranges | {"own_bytes_by_ranks": round(own), "mean_ratio": round(mean / own, 3)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100_000_000, help="samples of the version")
    parser.add_argument("--ranks", type=int, default=8, help="processes on this machine")
    parser.add_argument("--kinds", nargs="+", choices=list(STARTS), default=list(STARTS))
    args = parser.parse_args(argv)
    costs: dict[str, Any] = {"samples": args.samples, "ranks": args.ranks}
    with tempfile.TemporaryDirectory(prefix="headrace-scale-") as folder:
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(folder, args.samples))
        maker.start()
        maker.join()
        for kind in args.kinds:
            costs[kind] = measured(folder, kind, args.ranks)
            costs[f"{kind}_again"] = measured(folder, kind, args.ranks)
    print(json.dumps(costs))


if __name__ == "__main__":
    main()
