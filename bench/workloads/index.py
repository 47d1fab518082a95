"""`headrace bench index`: opening, querying and reading a large index, compared with pyarrow and DuckDB on the same
files.

`--samples 10000000` makes a synthetic index of that many rows. With `--directory` the index is kept there and used
again. `python -m headrace.bench.workloads.index CANDIDATE DIRECTORY` runs one candidate and prints its figures as JSON.
Invariant: each candidate has its own process and measures itself; `peak_mib` is the whole process. All candidates must
find the same number of samples.
Failure behaviour: a candidate that fails is named with the end of its error, and the others continue.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headrace.bench.core import command
from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part
from headrace.dataio import Dataset, open_store
from headrace.dataio.core.cli import positive_int
from headrace.dataio.shards.index import rows as index
from headrace.dataio.shards.query import part_writer
from headrace.dataio.shards.versions import documents as versions

CANDIDATES = ("headrace", "pyarrow.read_table", "pyarrow.dataset", "duckdb")
METRICS = {
    "open_s": Metric("open, and count, s", "s"),
    "opened_peak_mib": Metric("peak memory once open, one sample read, MiB", "MiB"),
    "where_s": Metric("`where` of three columns with ilike, s", "s"),
    "first_sample_s": Metric("first sample by number, s", "s"),
    "sample_anywhere_median_s": Metric("a sample anywhere, median, s", "s"),
    "sample_anywhere_p99_s": Metric("a sample anywhere, 99 %, s", "s"),
    "batch_median_s": Metric("64 samples anywhere in an index just opened, median, s", "s"),
    "sample_near_median_s": Metric("a sample of a run of eight whose page is held, s", "s"),
    "one_column_s": Metric("one column of all samples, s", "s"),
    "find_last_s": Metric("find the last sample by its key, s", "s"),
    "peak_mib": Metric("peak memory after all of it, MiB", "MiB"),
}


def main(argv: Sequence[str]) -> int:
    """Run `headrace bench index` and return the exit code."""
    return command.run(
        argv,
        "index",
        "Opening, querying and reading a large index, compared with pyarrow and DuckDB.",
        fill,
        _options,
        rounds=1,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples", type=positive_int, default=1_000_000, help="rows of the index (default: %(default)s)"
    )


def fill(job: command.Job, part: Part) -> None:
    """Measure all candidates on one index."""
    from headrace.bench.workloads.index import make_index
    from headrace.dataio.shards.versions.documents import version_key

    where = job.args.directory / f"index-{job.args.samples}" if job.args.directory else job.scratch
    if not (where / "versions").exists():
        make_index(where, job.args.samples)
    size = sum(path.stat().st_size for path in (where / "index").iterdir())
    document = (where / version_key(1)).stat().st_size
    part.title = f"A large index: {job.args.samples:,} samples, {size / 2**20:.0f} MiB, page cache warm"
    part.settings = {"samples": job.args.samples, "index_bytes": size, "document_bytes": document}
    part.metrics, part.against = METRICS, "duckdb"
    wanted = [Candidate(name, "headrace.bench.workloads.index", (name, str(where))) for name in CANDIDATES]
    alternate(wanted, job.rounds, job.tell, part.candidates, seconds=1800)
    _require_equal(part)


def _require_equal(part: Part) -> None:
    """Raise unless all candidates counted the same samples. The counts are not figures, so they are removed."""
    for counted in ("samples", "where_samples"):
        found = {name: set(one.metrics.pop(counted, [])) for name, one in part.candidates.items()}
        if len(set[float]().union(*found.values())) > 1:
            raise AssertionError(f"the candidates found different numbers of samples: {found}")
    for one in part.candidates.values():
        one.metrics = {name: values for name, values in one.metrics.items() if name in METRICS}


WHERE = "duration between 2 and 20 and height >= 720 and caption ilike '%dog%'"
_SQL = "duration between 2 and 20 and height >= 720 and text ilike '%dog%'"  # the index's column names
_PER_SHARD, _PER_PART = 400, 100_000
_WORDS = (
    *(
        "a",
        "the",
        "man",
        "woman",
        "dog",
        "cat",
        "child",
        "runs",
        "walks",
        "sits",
        "plays",
        "red",
        "blue",
        "green",
        "old",
    ),
    *(
        "street",
        "garden",
        "beach",
        "kitchen",
        "with",
        "near",
        "under",
        "ball",
        "car",
        "bicycle",
        "guitar",
        "at",
        "night",
    ),
)
# --- the index


def make_index(where: Path, samples: int) -> None:
    """Write the index of a dataset without shards. Its rows are as large as those of real clips with captions."""
    with open_store(where) as store:
        stored, shards = list[versions.IndexPart](), list[versions.Shard]()
        for first in range(0, samples, _PER_PART):
            table = _rows(first, min(_PER_PART, samples - first))
            part, size = part_writer.write_table(table), pc.sum(table["bytes"]).as_py()
            stored.append(part_writer.store_part(store, len(stored), part, table.num_rows, size, {"score": "number"}))
            print(f"\r{first + table.num_rows:,} of {samples:,} rows", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        for number in range(-(-samples // _PER_SHARD)):
            held = min(_PER_SHARD, samples - number * _PER_SHARD)
            shards.append(versions.Shard(key=_shard(number), size=1 << 40, samples=held))
        document = versions.new_document("synthetic", tuple(shards), tuple(stored), version=1, parent=None, message="")
        versions.publish(store, document)


def _shard(number: int) -> str:
    return f"shards/{number:08}-{number * 0x9E3779B97F4A7C15 % 2**64:016x}.tar"


def _rows(first: int, count: int) -> pa.Table:
    rng, numbers = np.random.default_rng(first), np.arange(first, first + count)
    in_shard = numbers % _PER_SHARD
    lengths = rng.integers(200_000, 1_000_000, count)
    texts = pa.array(_WORDS).take(pa.array(rng.integers(0, len(_WORDS), count * 14)))
    frames = rng.integers(48, 900, count)
    heights = rng.choice([360, 480, 720, 1080], count)
    key_frames = pa.array(np.arange(count + 1, dtype=np.int32) * 4)
    at = np.repeat(frames, 4) * np.tile(np.arange(4), count) // 4
    members = pa.array(np.arange(count + 1, dtype=np.int32) * 2)
    offsets = in_shard * 1_100_000 + 512
    flat_members = {
        "ext": pa.array(["mp4", "txt"]).take(pa.array(np.tile([0, 1], count))),
        "offset": np.stack([offsets, offsets + 1_001_024], 1).ravel(),
        "length": np.stack([lengths, np.full(count, 80)], 1).ravel(),
        "xxh3": rng.integers(0, 2**64, count * 2, np.uint64),
    }
    columns: dict[str, Any] = {
        "key": pc.binary_join_element_wise("clips/", pc.cast(pa.array(rng.integers(10**11, 10**12, count)), "string"),
                                           pc.cast(pa.array(numbers), "string"), "_"),
        "shard": pa.array([_shard(n) for n in np.unique(numbers // _PER_SHARD).tolist()]).take(
            pa.array(numbers // _PER_SHARD - first // _PER_SHARD)),
        "bytes": lengths + 80,
        "duration": frames * 1001 / 30000,
        "video_ext": _same("mp4", count), "video_stream": np.zeros(count), "video_codec": _same("h264", count),
        "width": heights * 16 // 9, "height": heights, "fps_numerator": np.full(count, 30000),
        "fps_denominator": np.full(count, 1001), "frames": frames, "time_base_numerator": np.full(count, 1),
        "time_base_denominator": np.full(count, 30000), "start_pts": np.zeros(count), "duration_pts": frames * 1001,
        "pixel_format": _same("yuv420p", count), "rotation": np.zeros(count),
        "color_space": _same("bt709", count), "color_range": _same("tv", count),
        "color_primaries": _same("bt709", count), "color_transfer": _same("bt709", count),
        "audio_ext": _same("mp4", count), "audio_stream": np.ones(count), "audio_codec": _same("aac", count),
        "sample_rate": np.full(count, 48000), "channels": np.full(count, 2), "samples": frames * 1601,
        "text": pc.binary_join(pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32) * 14), texts), " "),
        "fields": pc.binary_join_element_wise(
            '{"score": 0.', pc.cast(pa.array(rng.integers(1, 10**4, count)), "string"), "}", ""),
    }  # fmt: skip
    arrays = [
        pa.array(columns[name]).cast(index.SCHEMA.field(name).type)
        for name in index.SCHEMA.names
        if name not in ("members", "key_frames")
    ]
    arrays.append(_lists("members", members, flat_members))
    arrays.append(_lists("key_frames", key_frames, {"pts": at * 1001, "index": at}))
    return pa.Table.from_arrays(arrays, schema=index.SCHEMA)


def _same(text: str, count: int) -> Any:
    return pa.repeat(text, count)


def _lists(name: str, offsets: Any, flat: dict[str, Any]) -> Any:
    kind = index.SCHEMA.field(name).type.value_type
    children = [pa.array(flat[kind.field(i).name]).cast(kind.field(i).type) for i in range(kind.num_fields)]
    values = pa.StructArray.from_arrays(children, fields=[kind.field(i) for i in range(kind.num_fields)])
    return pa.ListArray.from_arrays(offsets, values, type=index.SCHEMA.field(name).type)


# --- candidates; each runs in its own process


def _headrace(where: Path) -> dict[str, Any]:
    clock = time.perf_counter()
    dataset = Dataset(where)
    found: dict[str, Any] = {"open_s": time.perf_counter() - clock, "samples": len(dataset)}
    clock = time.perf_counter()
    dataset.sample(len(dataset) // 2)
    found["first_sample_s"], found["opened_peak_mib"] = time.perf_counter() - clock, _peak_mib()
    rng, times = np.random.default_rng(0), list[float]()
    for number in rng.integers(0, len(dataset), 300).tolist():
        clock = time.perf_counter()
        dataset.sample(number)
        times.append(time.perf_counter() - clock)
    found["sample_anywhere_median_s"] = float(np.median(times))
    found["sample_anywhere_p99_s"] = float(np.quantile(times, 0.99))
    times.clear()
    for _ in range(20):
        with Dataset.at_once(where) as fresh:
            clock = time.perf_counter()
            fresh.samples(rng.integers(0, len(fresh), 64).tolist())
            times.append(time.perf_counter() - clock)
    found["batch_median_s"] = float(np.median(times))
    times.clear()
    for number in rng.integers(0, len(dataset) - 8, 300).tolist():
        dataset.sample(number)
        clock = time.perf_counter()
        dataset.samples(range(number, number + 8))
        times.append((time.perf_counter() - clock) / 8)
    found["sample_near_median_s"] = float(np.median(times))
    clock = time.perf_counter()
    video = dataset.columns(["video_codec"])["video_codec"]
    found["one_column_s"], found["videos"] = time.perf_counter() - clock, len(video) - video.null_count
    clock = time.perf_counter()
    view = dataset.where(WHERE)
    found["where_s"], found["where_samples"] = time.perf_counter() - clock, len(view)
    clock = time.perf_counter()
    key = dataset.sample(len(dataset) - 1).key
    dataset.find(key)
    found["find_last_s"], found["peak_mib"] = time.perf_counter() - clock, _peak_mib()
    return found


def _peak_mib() -> float:
    """Return the peak memory of this process. `getrusage` would also count the parent's memory before the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _read_table(where: Path) -> dict[str, Any]:
    import pyarrow.parquet as pq

    clock = time.perf_counter()
    table = pq.read_table(where / "index", memory_map=True)
    return {"open_s": time.perf_counter() - clock, "samples": table.num_rows, "peak_mib": _peak_mib()}


def _dataset(where: Path) -> dict[str, Any]:
    import pyarrow.dataset as ds

    clock = time.perf_counter()
    opened = ds.dataset(where / "index", format="parquet")
    found: dict[str, Any] = {"samples": opened.count_rows(), "open_s": time.perf_counter() - clock}
    clock = time.perf_counter()
    field = ds.field
    condition = (field("duration") >= 2) & (field("duration") <= 20) & (field("height") >= 720)
    condition &= pc.match_substring(field("text"), "dog", ignore_case=True)
    found["where_samples"] = opened.count_rows(filter=condition)
    found["where_s"], found["peak_mib"] = time.perf_counter() - clock, _peak_mib()
    clock = time.perf_counter()
    opened.take(pa.array([found["samples"] // 2])).to_pylist()
    return found | {"first_sample_s": time.perf_counter() - clock, "sample_peak_mib": _peak_mib()}


def _duckdb(where: Path) -> dict[str, Any]:
    import duckdb

    clock = time.perf_counter()
    connection, files = duckdb.connect(), f"read_parquet('{where}/index/*.parquet', file_row_number=true)"
    rows = connection.execute(f"SELECT count(*) FROM {files}").fetchall()[0][0]
    found: dict[str, Any] = {"samples": rows, "open_s": time.perf_counter() - clock}
    clock = time.perf_counter()
    chosen = connection.execute(f"SELECT filename, file_row_number FROM {files} WHERE {_SQL}").fetchnumpy()
    found["where_s"], found["where_samples"] = time.perf_counter() - clock, len(chosen["file_row_number"])
    found["peak_mib"] = _peak_mib()
    return found


RUN = {
    "headrace": _headrace,
    "pyarrow.read_table": _read_table,
    "pyarrow.dataset": _dataset,
    "duckdb": _duckdb,
}

if __name__ == "__main__":
    print(json.dumps(RUN[sys.argv[1]](Path(sys.argv[2]))))
