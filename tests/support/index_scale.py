"""What an index of very many samples costs a reader: `python -m tests.support.index_scale --samples 10000000`.

Purpose: prints one JSON line with the bytes, requests, seconds of CPU and memory of opening a dataset, of a look-up and of
reading one column, and the memory of a loader's ids.
Method: the dataset has as many index parts and shards in its version document as one of `--samples` clips has (1 MB a clip,
1 GiB a shard). All parts are one stored object, so it needs little disk and every byte is read and checked as usual. There
are no media. Memory is the growth of the process's peak, after imports.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from headrace.dataio.shards.dataset import Dataset
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.index.pages import short_digest
from headrace.dataio.shards.query import part_writer, tables
from headrace.dataio.shards.query.open_index import RowSelection
from headrace.dataio.shards.versions import documents as versions
from headrace.dataio.shards.versions import history, paging
from headrace.dataio.store.base import Store
from headrace.dataio.store.open import open_store
from headrace.dataio.store.wrappers import Wrapper
from headrace.loaders.sampling.columns import HasValue, samples_where
from tests.support.indexed_datasets import SHARD_BYTES

CLIPS_PER_SHARD = 1000
MIB = 1 << 20


class Counted(Wrapper):
    """Counts reads and their bytes."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests = self.bytes = 0

    def get(self, key: str, *, max_bytes: int = 1 << 40) -> bytes:
        data = self.inner.get(key, max_bytes=max_bytes)
        self._count(1, len(data))
        return data

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        self.inner.get_ranges_into(key, ranges)
        self._count(len(ranges), sum(len(view) for _, view in ranges))

    def open_file(self, key: str) -> int | None:
        return None

    def _count(self, requests: int, size: int) -> None:
        self.requests += requests
        self.bytes += size


def part_table() -> Any:
    """The rows of 50,000 clips with random lengths and shapes."""
    count, random = part_writer.PART_ROWS, np.random.default_rng(0)
    numbers, lengths = np.arange(count), random.integers(300_000, 900_000, count)
    seconds = np.round(random.uniform(1, 20, count), 3)
    frames = (seconds * 30).astype(np.int32)
    places = 512 + np.cumsum(lengths + 1024) - lengths
    places -= places[numbers // CLIPS_PER_SHARD * CLIPS_PER_SHARD] - 512
    member, key_frame = (index.SCHEMA.field(name).type.value_type for name in ("members", "key_frames"))
    digests = random.integers(0, 2**63, count).astype(np.uint64)
    files = [pa.array(["mp4"] * count), pa.array(places), pa.array(lengths), pa.array(digests)]
    marks = [pa.array(np.zeros(count, np.int64)), pa.array(np.zeros(count, np.int32))]
    one_each = pa.array(np.arange(count + 1, dtype=np.int32))
    columns: dict[str, Any] = {
        "key": [f"clips/{n // CLIPS_PER_SHARD:06}/{n:09}" for n in numbers.tolist()],
        "shard": [shard(n // CLIPS_PER_SHARD).key for n in numbers.tolist()],
        "bytes": lengths,
        "duration": seconds,
        "frames": frames,
        "width": random.choice([640, 1280, 1920], count).astype(np.int32),
        "height": random.choice([360, 720, 1080], count).astype(np.int32),
        "members": pa.ListArray.from_arrays(one_each, pa.StructArray.from_arrays(files, fields=list(member))),
        "key_frames": pa.ListArray.from_arrays(one_each, pa.StructArray.from_arrays(marks, fields=list(key_frame))),
    }
    same = {"video_ext": "mp4", "video_codec": "h264", "pixel_format": "yuv420p", "video_stream": 0, "rotation": 0}
    same |= {"fps_numerator": 30, "fps_denominator": 1, "time_base_numerator": 1, "time_base_denominator": 30}
    columns |= {name: [value] * count for name, value in (same | {"start_pts": 0, "duration_pts": 30}).items()}
    arrays = [
        pa.array(columns[field.name], field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in index.SCHEMA
    ]
    return pa.table(arrays, schema=index.SCHEMA)


def shard(number: int) -> versions.Shard:
    """A shard; its key is as long as that of a packed one."""
    digest = short_digest(number.to_bytes(8, "little")).hex()[:16]
    return versions.Shard(key=f"shards/{number:08}-{digest}.tar", size=SHARD_BYTES, samples=CLIPS_PER_SHARD)


class Shards(Sequence[versions.Shard]):
    """As many shards, made when they are asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        return tuple(map(shard, range(self._count)[at])) if isinstance(at, slice) else shard(at)

    def __iter__(self) -> Iterator[versions.Shard]:
        return map(shard, range(self._count))


def make(folder: str, samples: int) -> None:
    """Write the dataset: one part, and a document of format 2 that names it for every 50,000 samples."""
    store, table = open_store(folder), part_table()
    versions.WHOLE_BYTES = 0
    made = part_writer.write_table(table)
    part = part_writer.store_part(store, 0, made, table.num_rows, int(np.sum(table["bytes"].to_numpy())), {})
    shards, parts = Shards(samples // CLIPS_PER_SHARD), samples // table.num_rows
    pages = [
        paging.store_page(store, shards[start : start + paging.PAGE_SHARDS], "shards")
        for start in range(0, len(shards), paging.PAGE_SHARDS)
    ]
    index_of_all = (part,) * parts
    document = versions.new_document("scale", (), index_of_all, version=1, parent=None, message="")
    kind = paging.PagedList[versions.Shard]
    listed = kind(store, pages, kind=versions.Shard, check=lambda *_: None, cached=1)
    history.publish(store, msgspec.structs.replace(document, shards=listed))


def measured(store: Counted, run: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What `run` returns, and what it costs."""
    store.requests = store.bytes = 0
    before, cpu = peak(), time.process_time()
    found = run()
    cost = {"requests": store.requests, "bytes": store.bytes, "cpu_s": round(time.process_time() - cpu, 3)}
    return found, cost | {"mib": round(peak() - before, 1)}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def opened(store: Store) -> Dataset:
    """Open the dataset. It must be larger than the indexes that are checked completely when they are opened."""
    dataset = Dataset(store)
    assert dataset.document.format == versions.PAGED_FORMAT
    return dataset


def column_cost(store: Counted, dataset: Dataset, parts: int) -> dict[str, float]:
    """The cost of the column `frames` of the first parts, and the column's own bytes there."""
    first = tables.PartReader(store, dataset.document.index[0], dataset.document.shard_sizes())
    own = parts * sum(chunk.end - chunk.start for chunk in first._chunks([0], {"frames"}))
    reads = (dataset.index.part_table(number, ["frames"]).num_rows for number in range(parts))
    rows, cost = measured(store, lambda: sum(reads))
    return cost | {"samples": rows, "own_bytes": own, "ratio": round(cost["bytes"] / own, 3)}


def half_selected() -> float:
    """The bytes a sample of a selection of every other sample, in random order."""
    selection, rows = RowSelection(), part_writer.PART_ROWS
    chosen = np.sort(np.random.default_rng(0).choice(rows, rows // 2, replace=False))
    selection.add(chosen.astype(np.uint32), rows)
    return selection.nbytes / rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10_000_000, help="samples of the version")
    parser.add_argument("--column-parts", type=int, default=200, help="index parts of which the column is read")
    args = parser.parse_args(argv)
    found = dict[str, Any](samples=args.samples)
    with tempfile.TemporaryDirectory(prefix="headrace-scale-") as folder:
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(folder, args.samples))
        maker.start()
        maker.join()
        store = Counted(open_store(folder))
        found["document_bytes"] = len(store.inner.get(versions.version_key(1)))
        dataset, found["open"] = measured(store, lambda: opened(store))
        numbers = np.random.default_rng(0).integers(0, len(dataset), 64).tolist()
        _, found["first_batch_of_64"] = measured(store, lambda: dataset.samples(numbers))
        parts = min(args.column_parts, len(dataset.document.index))
        found["column_frames"] = column_cost(store, dataset, parts)
        found["ids_of_all_bytes"] = samples_where(dataset, HasValue("video_ext")).nbytes
        found["where_half_bytes_per_sample"] = half_selected()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
