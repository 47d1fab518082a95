"""`headrace bench raw`: samples as bytes, without decoding, compared with a plain loop of `preadv`.

Every candidate reads the same shuffled samples (three files each, in tars on local disk) and delivers each batch in one
staging buffer. The page cache holds everything.

- The plain loop does the least work: it knows all offsets, keeps the shards open, and lets the kernel copy into the
  buffer.
- Headrace does the work of a loader before decoding: the order, the index, announcements eight batches ahead, a read
  into the buffer, and the digest of every file.
- Both also run as a loader does: in two threads, one batch ahead, into one of two buffers.
- `FileLoader` prepares three batches while the trainer holds one. Its lower bound is the loop with as many buffers,
  because one buffer of some megabytes stays in the processor's cache, and four do not.

The first epoch fills caches and has its own column.

Invariant: all candidates deliver the same bytes, which their digests show.

Failure behaviour: a candidate that fails is named.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.data import tar_shards
from headrace.bench.core.measure import Candidate, Meter, Progress, alternate
from headrace.bench.core.processes import daemon
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads.sidecar_rank import AHEAD
from headrace.dataio import Dataset
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.shards.sample import Files
from headrace.dataio.sidecar.client import open_shard_reader
from headrace.loaders.fetch import sample_reader
from headrace.loaders.sampling.order import Order

BATCH, EPOCHS, AT_ONCE = 16, 6, 32
HELD = 4
"""Batches in memory at once: the trainer has one, one is next, and two are prepared ahead."""
MEMBERS = {"video.bin": 386_000, "sound.bin": 64_000, "text.bin": 600}
PLAIN, SIDECAR, ALONE = "pread into the staging buffer", "Headrace through the sidecar", "Headrace in one process"
TWO, PLAIN_TWO = f"{ALONE}, 2 threads", f"{PLAIN}, 2 threads"
LOADER, LOADER_SIDECAR = "FileLoader in one process, 2 threads", "FileLoader through the sidecar, 2 threads"
PLAIN_CHECKED = f"{PLAIN}, with digests"
PLAIN_CHECKED_TWO = f"{PLAIN_TWO}, with digests"
PLAIN_CHECKED_HELD = f"{PLAIN_CHECKED_TWO}, {HELD} buffers"
METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "gb_per_s": Metric("GB/s", "GB/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s", "lower"),
    "first_epoch_per_s": Metric("first epoch, samples/s", "1/s", "higher"),
}
Batches = Iterator[memoryview]
Epochs = Callable[[int], Batches]
Wanted = tuple[int, int, int, int]
"""A file to read: the shard's descriptor, and the file's offset, length and digest."""
T = TypeVar("T")


@benchmark(
    "raw",
    "Samples as bytes, checked, compared with a plain loop of preadv.",
    argument("--samples", type=positive_int, default=800, help="of 450 kB (default: %(default)s)"),
    rounds=5,
)
def raw(job: Job, part: Part) -> None:
    """Make one dataset, and measure all candidates in turn."""
    make(job.scratch, job.args.samples, job.progress)
    part.title = (
        f"Raw: {job.args.samples} samples of {sum(MEMBERS.values()) / 1000:.0f} kB, shuffled, batches of {BATCH}"
    )
    part.settings = {"samples": job.args.samples, "batch": BATCH, "epochs": EPOCHS, "threads": 1}
    part.metrics, part.against = METRICS, PLAIN
    candidates = [
        Candidate(name, "headrace.bench.workloads.raw:measure", (name, str(job.scratch))) for name in CANDIDATES
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)
    require_equal_digests(part)


def require_equal_digests(part: Part) -> None:
    """Raise unless all candidates delivered the same bytes. Then remove the digests, which are not figures."""
    digests = {samples.metrics["digest"][0] for samples in part.candidates.values() if "digest" in samples.metrics}
    if len(digests) > 1:
        raise AssertionError("the candidates did not deliver the same bytes")
    for samples in part.candidates.values():
        samples.metrics.pop("digest", None)


def make(folder: Path, samples: int, progress: Progress) -> None:
    """Make the dataset in `folder`/dataset."""
    files = folder / "files"
    files.mkdir()
    rng = random.Random(1)
    for number in range(samples):
        progress("making samples", number / samples)
        for ext, size in MEMBERS.items():
            (files / f"{number:06}.{ext}").write_bytes(rng.randbytes(size))
    tar_shards(files, folder)
    for path in files.iterdir():
        path.unlink()


# the candidates


def _order(dataset: Dataset, epoch: int) -> Iterator[list[Files]]:
    """Yield the files of each batch of an epoch.

    The order and the index are queried for `AT_ONCE` batches at once, which takes a tenth of the time.
    """
    order = Order.of(len(dataset), BATCH, sample_bytes=dataset.total_bytes / len(dataset), seed=1)
    batches = order.full_batches + bool(order.tail)
    for first in range(0, batches, AT_ONCE):
        slots = [order.slots(number) for number in range(first, min(first + AT_ONCE, batches))]
        files = iter(dataset.files(order.take(epoch, np.concatenate(slots)).tolist()))
        for batch in slots:
            yield list(itertools.islice(files, len(batch)))


def _plain(
    folder: Path,
    staging: memoryview,
    stack: contextlib.ExitStack,
    threads: int = 1,
    *,
    check: bool = False,
    buffers: int = 2,
) -> Epochs:
    """The plain loop. Offsets and descriptors are looked up before the measurement."""
    with Dataset(str(folder / "dataset"), trust_mounts=True) as dataset:
        epochs = [list(_order(dataset, epoch)) for epoch in range(EPOCHS)]
    shards = {sample.shard for batch in epochs[0] for sample in batch}
    opened = {key: stack.enter_context(shard_path(folder, key).open("rb", buffering=0)).fileno() for key in shards}
    reads = [
        [[(opened[s.shard], m.offset, m.length, m.xxh3) for s in batch for m in s.members] for batch in batches]
        for batches in epochs
    ]

    def fill(batch: Sequence[Wanted], memory: memoryview) -> int:
        at = 0
        for fd, offset, length, _ in batch:
            os.preadv(fd, [memory[at : at + length]], offset)
            at += length
        return at

    def fill_and_check(batch: Sequence[Wanted], memory: memoryview) -> int:
        at = 0
        for fd, offset, length, xxh3 in batch:
            view = memory[at : at + length]
            os.preadv(fd, [view], offset)
            assert xxhash.xxh3_64_intdigest(view) == xxh3
            at += length
        return at

    read = _reading(fill_and_check if check else fill, lambda wanted: wanted[2], staging, stack, threads, buffers)
    return lambda epoch: read(reads[epoch])


def shard_path(folder: Path, key: str) -> Path:
    """Return the path of the shard `key` below `folder`."""
    return next(path for path in (folder / "shards").iterdir() if key.endswith(path.name))


def _headrace(
    folder: Path, staging: memoryview, stack: contextlib.ExitStack, sidecar: Path | None, threads: int = 1
) -> Epochs:
    dataset = stack.enter_context(Dataset(str(folder / "dataset"), trust_mounts=True))
    reader = stack.enter_context(contextlib.closing(open_shard_reader(dataset.store, sidecar)))
    samples = sample_reader.SampleReader(reader, dataset.store)

    def fill(batch: Sequence[Files], memory: memoryview) -> int:
        at = 0
        for files in batch:
            at += samples.fetch_into(files, memory[at:])
        return at

    def planned(epoch: int) -> Iterator[list[Files]]:
        """Yield each batch after the next ones are announced."""
        prefetched, order = deque[tuple[list[Files], list[sample_reader.Range]]](), _order(dataset, epoch)
        while True:
            for batch in itertools.islice(order, 1 + AHEAD - len(prefetched)):
                prefetched.append((batch, [(one.shard, m.offset, m.length) for one in batch for m in one.members]))
            if not prefetched:
                return
            now, _ = prefetched.popleft()
            samples.announce([read for _, reads in prefetched for read in reads])
            yield now

    read = _reading(fill, lambda files: files.size, staging, stack, threads)
    return lambda epoch: read(planned(epoch))


def _reading(
    fill: Callable[[Sequence[T], memoryview], int],
    size: Callable[[T], int],
    staging: memoryview,
    stack: contextlib.ExitStack,
    threads: int,
    buffers: int = 2,
) -> Callable[[Iterable[Sequence[T]]], Batches]:
    """Return a function that fills batches.

    One thread fills the batches in turn into `staging`. Several threads fill each batch together, into one of several
    buffers. The consumer of the batches holds one of these buffers.
    """
    if threads == 1:
        return lambda batches: (staging[: fill(batch, staging)] for batch in batches)
    pool = stack.enter_context(ThreadPoolExecutor(threads))
    memory = [staging, *(_staging() for _ in range(1, buffers))]

    def begin(batch: Sequence[T], buffer: memoryview) -> Callable[[], memoryview]:
        """Let all threads fill the batch, and return a function that waits for the batch and returns it."""
        share, at, parts = -(-len(batch) // threads), 0, list[Future[int]]()
        for first in range(0, len(batch), share):
            part = batch[first : first + share]
            parts.append(pool.submit(fill, part, buffer[at:]))
            at += sum(map(size, part))
        return lambda: buffer[: sum(part.result() for part in parts)]

    def ahead(batches: Iterable[Sequence[T]]) -> Batches:
        turns, filling = itertools.cycle(memory), deque[Callable[[], memoryview]]()
        for batch in batches:
            filling.append(begin(batch, next(turns)))
            if len(filling) == buffers:
                yield filling.popleft()()
        yield from (one() for one in filling)

    return ahead


def _loader(folder: Path, staging: memoryview, stack: contextlib.ExitStack, sidecar: Path | None = None) -> Epochs:
    """Measure `FileLoader`, which delivers batches in its own memory."""
    from headrace.loaders import FileLoader

    options: dict[str, Any] = {"seed": 1, "sidecar": sidecar, "num_threads": 2, "drop_last": False}
    loader = stack.enter_context(
        FileLoader(str(folder / "dataset"), BATCH, files=sorted(MEMBERS), trust_mounts=True, **options)
    )
    states = dict[int, dict[str, Any]]()

    def batches(epoch: int) -> Batches:
        if loader.epoch != epoch:
            loader.load_state_dict(states[epoch])
        states[epoch] = loader.state_dict()
        return (memoryview(batch["bytes"].numpy()) for batch in loader)

    return batches


def _staging() -> memoryview:
    """Return a buffer for a batch. All its pages have been touched."""
    memory = memoryview(bytearray(BATCH * sum(MEMBERS.values())))
    memory[::4096] = bytes(len(memory[::4096]))
    return memory


def measure(name: str, folder: str) -> dict[str, float]:
    """Measure one candidate: the first epoch separately, then the others."""
    with contextlib.ExitStack() as stack:
        staging = _staging()
        batches = CANDIDATES[name](Path(folder), staging, stack)
        began = time.perf_counter()
        first = sum(1 for _ in batches(0))
        first_s = time.perf_counter() - began
        meter, sizes = Meter(), [len(batch) for epoch in range(1, EPOCHS) for batch in batches(epoch)]
        read = meter.read()
        digest = xxhash.xxh3_64()
        for batch in batches(1):
            digest.update(batch)
    samples = sum(sizes) / sum(MEMBERS.values())
    return {
        "samples_per_s": samples / read["wall_s"],
        "gb_per_s": sum(sizes) / read["wall_s"] / 1e9,
        "cpu_s_per_1k": 1000 * read["cpu_s"] / samples,
        "first_epoch_per_s": samples / (EPOCHS - 1) / first_s if first else 0.0,
        "digest": float(digest.intdigest() >> 12),
    }


def _through_daemon(
    read: Callable[[Path, memoryview, contextlib.ExitStack, Path | None], Epochs],
) -> Callable[[Path, memoryview, contextlib.ExitStack], Epochs]:
    """Return the same candidate, which reads through a daemon."""

    def epochs(folder: Path, staging: memoryview, stack: contextlib.ExitStack) -> Epochs:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="mr-"))
        running = stack.enter_context(daemon(Path(place) / "node", cache_bytes="4GiB"))
        return read(folder, staging, stack, running.socket)

    return epochs


CANDIDATES: Mapping[str, Callable[[Path, memoryview, contextlib.ExitStack], Epochs]] = {
    PLAIN: _plain,
    PLAIN_TWO: lambda folder, staging, stack: _plain(folder, staging, stack, 2),
    PLAIN_CHECKED: lambda folder, staging, stack: _plain(folder, staging, stack, check=True),
    PLAIN_CHECKED_TWO: lambda folder, staging, stack: _plain(folder, staging, stack, 2, check=True),
    PLAIN_CHECKED_HELD: lambda folder, staging, stack: _plain(folder, staging, stack, 2, check=True, buffers=HELD),
    SIDECAR: _through_daemon(_headrace),
    ALONE: lambda folder, staging, stack: _headrace(folder, staging, stack, None),
    TWO: lambda folder, staging, stack: _headrace(folder, staging, stack, None, 2),
    LOADER: _loader,
    LOADER_SIDECAR: _through_daemon(_loader),
}
