"""One rank of the sidecar's benchmark: reads its share of the global order, and copies each batch into one buffer.

    python -m headrace.bench.workloads.sidecar_rank JSON

JSON is a `RankJob`. The process waits for a line on standard input and prints one JSON object.

Invariant: a rank does the work of a loader except decoding and digests: it announces eight batches ahead, and reads
each sample once. It copies every byte.

Failure behaviour: any error ends the process with a traceback.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path

import numpy as np

import headrace.dataio.sidecar.reader  # noqa: F401  # the import must not count as reading
from headrace.dataio.core.tracing import span
from headrace.dataio.sidecar.client import open_reader
from headrace.dataio.store.open import open_store
from headrace.loaders.sampling.order import Order

AHEAD = 8
Read = tuple[str, list[tuple[int, int]]]


@dataclass(frozen=True)
class Shape:
    """A dataset of equal shards of equal samples. A sample is a video, a sound and a text, consecutive as in a tar."""

    shards: int = 14
    per_shard: int = 72
    members: tuple[int, ...] = (386_000, 64_000, 600)

    @property
    def sample_bytes(self) -> int:
        return sum(-(-size // 512) * 512 + 512 for size in self.members)

    @property
    def samples(self) -> int:
        return self.shards * self.per_shard

    @property
    def shard_bytes(self) -> int:
        return self.per_shard * self.sample_bytes

    @property
    def total_bytes(self) -> int:
        return self.shards * self.shard_bytes

    def read(self, sample: int) -> Read:
        """Return the key and the ranges of a sample."""
        shard, place = divmod(sample, self.per_shard)
        at, ranges = place * self.sample_bytes, list[tuple[int, int]]()
        for size in self.members:
            ranges.append((at + 512, size))
            at += -(-size // 512) * 512 + 512
        return f"shards/{shard:05}.tar", ranges


@dataclass(frozen=True)
class RankJob:
    """The settings of one rank. `batch` is the batch size of one rank. `sidecar` is a socket or None."""

    url: str
    sidecar: str | None
    shape: Shape
    _: KW_ONLY
    rank: int = 0
    ranks: int = 1
    batch: int = 16
    epochs: int = 1
    first_epoch: int = 0

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> RankJob:
        values = json.loads(text)
        shape = values.pop("shape")
        return cls(shape=Shape(**{**shape, "members": tuple(shape["members"])}), **values)

    def batches(self) -> Iterator[list[Read]]:
        """Yield the reads of this rank's batches, in order."""
        order = Order.of(self.shape.samples, self.batch * self.ranks, sample_bytes=self.shape.sample_bytes, seed=1)
        numbers = range(order.full_batches + bool(order.tail))
        for epoch in range(self.first_epoch, self.first_epoch + self.epochs):
            for first in numbers[
                :: 1 + AHEAD
            ]:  # several at once, as a loader does, because the computation costs the same for one as for ten
                slots = [order.slots(n, self.rank, self.ranks) for n in numbers[first : first + 1 + AHEAD]]
                samples = iter(order.take(epoch, np.concatenate(slots)).tolist())
                for size in map(len, slots):
                    if size:
                        yield [self.shape.read(n) for n in itertools.islice(samples, size)]


def run(job: RankJob) -> dict[str, float]:
    """Read all batches, and return the figures by name."""
    staging = memoryview(bytearray(job.batch * job.shape.sample_bytes))
    staging[::4096] = bytes(len(staging[::4096]))  # touch the pages before the first batch
    began, cpu = time.perf_counter(), time.process_time()
    store = open_store(job.url)
    reader = open_reader(store, job.sidecar)
    prefetched, batches = deque[list[Read]](), job.batches()
    first, samples, size = 0.0, 0, 0
    while True:
        prefetched.extend(itertools.islice(batches, 1 + AHEAD - len(prefetched)))
        if not prefetched:
            break
        now, at = prefetched.popleft(), 0
        reader.announce(
            [(key, offset, length) for batch in prefetched for key, ranges in batch for offset, length in ranges]
        )
        for key, ranges in now:
            for view in reader.read(key, ranges):
                staging[at : at + len(view)] = view
                at += len(view)
        samples, size = samples + len(now), size + at
        first = first or time.perf_counter() - began
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    reader.close()
    store.close()
    return {"samples": samples, "bytes": size, "wall_s": wall, "cpu_s": used, "first_batch_s": first}


def write_shards(folder: Path, shape: Shape) -> None:
    """Write shards of random bytes with the layout of a dataset."""
    (folder / "shards").mkdir(parents=True)
    for shard in range(shape.shards):
        key = shape.read(shard * shape.per_shard)[0]
        (folder / key).write_bytes(random.Random(shard).randbytes(shape.shard_bytes))


def run_ranks(
    jobs: Sequence[RankJob], environ: Mapping[str, str] | None = None, before: Callable[[], None] = lambda: None
) -> tuple[float, list[dict[str, float]]]:
    """Start a process for each rank, call `before`, and let all begin together.

    Returns:
        Wall seconds until the last rank has ended, and the figures of each rank.

    Raises:
        RuntimeError: A rank failed; the message has the end of its standard error.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "headrace.bench.workloads.sidecar_rank", job.text()],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for job in jobs
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        before()
        began = time.perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        figures = [_figures(process) for process in processes]
        return time.perf_counter() - began, figures
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _figures(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        _, errors = process.communicate()
        raise RuntimeError(f"a rank failed: {errors.strip()[-600:]}")
    figures: dict[str, float] = json.loads(line)
    return figures


def main() -> int:
    job = RankJob.of(sys.argv[1])
    open_store(job.url).close()
    with span("bench.start"):
        pass
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(run(job)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
