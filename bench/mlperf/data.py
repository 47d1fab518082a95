"""Samples to read: files of random bytes, and the same bytes in tar shards with an index.

Invariant: a pure function of (workload, count); every candidate reads the same records. Failure behaviour: errors of the
file system pass.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable
from pathlib import Path

from headrace.bench.mlperf.workloads import Workload
from headrace.dataio.core.limits import MIB

SHARD_BYTES = 64 * MIB
_LEAST = 1024


def lengths(workload: Workload, count: int) -> list[int]:
    """Bytes of each record: normal, cut off at a tenth of the mean."""
    rng = random.Random(workload.name)
    least = max(_LEAST, workload.record_bytes / 10)
    return [int(max(least, rng.gauss(workload.record_bytes, workload.record_stdev))) for _ in range(count)]


def make(folder: Path, workload: Workload, count: int, tell: Callable[[str, float], None]) -> int:
    """`folder`/files/*.bin, `folder`/shards/*.tar, and a dataset over these in `folder`/dataset; total bytes."""
    files = folder / "files"
    files.mkdir(parents=True)
    sizes = lengths(workload, count)
    for number, size in enumerate(sizes):
        tell("making records", number / count)
        (files / f"{number:07d}.bin").write_bytes(random.Random(number).randbytes(size))
    shard(files, folder)
    return sum(sizes)


def shard(files: Path, folder: Path) -> str:
    """Put all of `files` into tars of about `SHARD_BYTES`, index them, and say where the dataset is."""
    from headrace.dataio import index

    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(_groups(sorted(files.iterdir()))):
        with tarfile.open(folder / "shards" / f"{number:06d}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for path in members:
                tar.add(path, path.name)
    index([str(folder / "shards")], str(folder / "dataset"), strict=True).close()
    return str(folder / "dataset")


def _groups(paths: list[Path]) -> list[list[Path]]:
    """Files in order, as many together as make a shard."""
    groups, size = list[list[Path]](), SHARD_BYTES
    for path in paths:
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(path)
        size += path.stat().st_size
    return groups
