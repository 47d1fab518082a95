"""`headrace bench raw`: samples as bytes, without decoding, compared with a plain loop of `preadv`.

Every candidate reads the same shuffled samples, in tars on local disk. With `--kind media` a sample has three files, with
`--kind small` one file of 100 kB. Each batch is delivered in one staging buffer. The page cache holds everything.

- The plain loop does the least work: it knows all offsets, keeps the shards open, and lets the kernel copy into the
  buffer.
- Headrace does the work of a loader before decoding: the order, the index, announcements eight batches ahead, a read
  into the buffer, and the digest of every file.
- Both also run as a loader does: in two threads, one batch ahead, into one of two buffers.
- `FileLoader` prepares three batches while the trainer holds one. Its lower bound is the loop with as many buffers,
  because one buffer of some megabytes stays in the processor's cache, and four do not.
- webdataset's `WebLoader` reads the tars in order, mixes the samples in a buffer of 1,000, and checks no digests. Its
  worker processes join the bytes of a batch in a tensor, which torch passes through shared memory. That is several times
  faster than lists of `bytes`, which torch sends through a pipe.

The first epoch fills caches and has its own column.

Invariant: all candidates deliver the same samples in each epoch, which their digests show.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.data import tar_shards
from headrace.bench.core.measure import Candidate, Meter, Progress, alternate, children_cpu_seconds
from headrace.bench.core.processes import daemon
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads.sidecar_rank import AHEAD
from headrace.dataio import Dataset
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.shards.sample import Files
from headrace.dataio.sidecar.client import open_shard_reader
from headrace.loaders.fetch import sample_reader
from headrace.loaders.sampling.order import Order

EPOCHS, AT_ONCE = 6, 32
HELD = 4
"""Batches in memory at once: the trainer has one, one is next, and two are prepared ahead."""
MIXED = 1000
"""Samples in the shuffle buffer of webdataset."""


class Kind(NamedTuple):
    """Samples of a batch, and the files of a sample with their sizes."""

    batch: int
    members: Mapping[str, int]

    @property
    def sample_bytes(self) -> int:
        return sum(self.members.values())


KINDS = {
    "media": Kind(16, {"video.bin": 386_000, "sound.bin": 64_000, "text.bin": 600}),
    "small": Kind(64, {"image.bin": 100_000}),
}
PLAIN, SIDECAR, ALONE = "pread into the staging buffer", "Headrace through the sidecar", "Headrace in one process"
TWO, PLAIN_TWO = f"{ALONE}, 2 threads", f"{PLAIN}, 2 threads"
LOADER, LOADER_SIDECAR = "FileLoader in one process, 2 threads", "FileLoader through the sidecar, 2 threads"
PLAIN_CHECKED = f"{PLAIN}, with digests"
PLAIN_CHECKED_TWO = f"{PLAIN_TWO}, with digests"
PLAIN_CHECKED_HELD = f"{PLAIN_CHECKED_TWO}, {HELD} buffers"
WEBDATASET, WEBDATASET_TWO = "webdataset, 0 workers", "webdataset, 2 workers"
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


@dataclass(frozen=True, slots=True)
class Case:
    """What one candidate measures. `folder` holds the data, and `stack` closes what the candidate opens."""

    folder: Path
    kind: Kind
    staging: memoryview
    stack: contextlib.ExitStack

    @property
    def dataset(self) -> str:
        return str(self.folder / "dataset")


@benchmark(
    "raw",
    "Samples as bytes, checked, compared with a plain loop of preadv and with webdataset.",
    argument("--samples", type=positive_int, default=800, help="number of samples (default: %(default)s)"),
    argument("--kind", choices=sorted(KINDS), default="media", help="three files of 451 kB in all, or one of 100 kB"),
    rounds=5,
)
def raw(job: Job, part: Part) -> None:
    """Make one dataset, and measure all candidates in turn."""
    name, samples = job.args.kind, job.args.samples
    kind = KINDS[name]
    make(job.scratch, kind, samples, job.progress)
    part.title = f"Raw: {samples} samples of {kind.sample_bytes / 1000:.0f} kB, shuffled, batches of {kind.batch}"
    part.settings = {"samples": samples, "batch": kind.batch, "epochs": EPOCHS, "threads": 1}
    part.metrics, part.against = METRICS, PLAIN
    candidates = [
        Candidate(each, "headrace.bench.workloads.raw:measure", (each, str(job.scratch), name)) for each in CANDIDATES
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


def make(folder: Path, kind: Kind, samples: int, progress: Progress) -> None:
    """Make the dataset in `folder`/dataset, and its tars in `folder`/shards."""
    files = folder / "files"
    files.mkdir()
    rng = random.Random(1)
    for number in range(samples):
        progress("making samples", number / samples)
        for ext, size in kind.members.items():
            (files / f"{number:06}.{ext}").write_bytes(rng.randbytes(size))
    tar_shards(files, folder)
    for path in files.iterdir():
        path.unlink()


# the candidates


def _order(dataset: Dataset, batch: int, epoch: int) -> Iterator[list[Files]]:
    """Yield the files of each batch of an epoch.

    The order and the index are queried for `AT_ONCE` batches at once, which takes a tenth of the time.
    """
    order = Order.of(len(dataset), batch, sample_bytes=dataset.total_bytes / len(dataset), seed=1)
    batches = order.full_batches + bool(order.tail)
    for first in range(0, batches, AT_ONCE):
        slots = [order.slots(number) for number in range(first, min(first + AT_ONCE, batches))]
        files = iter(dataset.files(order.take(epoch, np.concatenate(slots)).tolist()))
        yield from (list(itertools.islice(files, len(each))) for each in slots)


def _plain(case: Case, threads: int = 1, *, check: bool = False, buffers: int = 2) -> Epochs:
    """The plain loop. Offsets and descriptors are looked up before the measurement."""
    with Dataset(case.dataset, trust_mounts=True) as dataset:
        epochs = [list(_order(dataset, case.kind.batch, epoch)) for epoch in range(EPOCHS)]
    shards = {sample.shard for batch in epochs[0] for sample in batch}
    opened = {
        key: case.stack.enter_context(shard_path(case.folder, key).open("rb", buffering=0)).fileno() for key in shards
    }
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

    read = _reading(fill_and_check if check else fill, lambda wanted: wanted[2], case, threads, buffers)
    return lambda epoch: read(reads[epoch])


def shard_path(folder: Path, key: str) -> Path:
    """Return the path of the shard `key` below `folder`."""
    return next(path for path in (folder / "shards").iterdir() if key.endswith(path.name))


def _headrace(case: Case, sidecar: Path | None, threads: int = 1) -> Epochs:
    dataset = case.stack.enter_context(Dataset(case.dataset, trust_mounts=True))
    reader = case.stack.enter_context(contextlib.closing(open_shard_reader(dataset.store, sidecar)))
    samples = sample_reader.SampleReader(reader, dataset.store)

    def fill(batch: Sequence[Files], memory: memoryview) -> int:
        at = 0
        for files in batch:
            at += samples.fetch_into(files, memory[at:])
        return at

    def planned(epoch: int) -> Iterator[list[Files]]:
        """Yield each batch after the next ones are announced."""
        prefetched, order = (
            deque[tuple[list[Files], list[sample_reader.Range]]](),
            _order(dataset, case.kind.batch, epoch),
        )
        while True:
            for batch in itertools.islice(order, 1 + AHEAD - len(prefetched)):
                prefetched.append((batch, [(one.shard, m.offset, m.length) for one in batch for m in one.members]))
            if not prefetched:
                return
            now, _ = prefetched.popleft()
            samples.announce([read for _, reads in prefetched for read in reads])
            yield now

    read = _reading(fill, lambda files: files.size, case, threads)
    return lambda epoch: read(planned(epoch))


def _reading(
    fill: Callable[[Sequence[T], memoryview], int],
    size: Callable[[T], int],
    case: Case,
    threads: int,
    buffers: int = 2,
) -> Callable[[Iterable[Sequence[T]]], Batches]:
    """Return a function that fills batches.

    One thread fills the batches in turn into the staging buffer. Several threads fill each batch together, into one of several
    buffers. The consumer of the batches holds one of these buffers.
    """
    if threads == 1:
        return lambda batches: (case.staging[: fill(batch, case.staging)] for batch in batches)
    pool = case.stack.enter_context(ThreadPoolExecutor(threads))
    memory = [case.staging, *(_staging(case.kind) for _ in range(1, buffers))]

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


def _loader(case: Case, sidecar: Path | None = None) -> Epochs:
    """Measure `FileLoader`, which delivers batches in its own memory."""
    from headrace.loaders import FileLoader

    options: dict[str, Any] = {"seed": 1, "sidecar": sidecar, "num_threads": 2, "drop_last": False}
    loader = case.stack.enter_context(
        FileLoader(case.dataset, case.kind.batch, files=sorted(case.kind.members), trust_mounts=True, **options)
    )
    states = dict[int, dict[str, Any]]()

    def batches(epoch: int) -> Batches:
        if loader.epoch != epoch:
            loader.load_state_dict(states[epoch])
        states[epoch] = loader.state_dict()
        return (memoryview(batch["bytes"].numpy()) for batch in loader)

    return batches


def _webdataset(case: Case, workers: int) -> Epochs:
    """Measure `WebLoader`."""
    import torch
    import webdataset as wds

    def join(samples: Sequence[Sequence[bytes]]) -> torch.Tensor:
        return torch.frombuffer(bytearray().join(itertools.chain.from_iterable(samples)), dtype=torch.uint8)

    shards = sorted(str(path) for path in (case.folder / "shards").iterdir())
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False, handler=wds.reraise_exception)
        .shuffle(MIXED)
        .to_tuple(*sorted(case.kind.members))
        .batched(case.kind.batch, collation_fn=join)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda epoch: (memoryview(batch.numpy()) for batch in loader)


def _staging(kind: Kind) -> memoryview:
    """Return a buffer for a batch. All its pages have been touched."""
    memory = memoryview(bytearray(kind.batch * kind.sample_bytes))
    memory[::4096] = bytes(len(memory[::4096]))
    return memory


def measure(name: str, folder: str, kind_name: str) -> dict[str, float]:
    """Measure one candidate: the first epoch separately, then the others."""
    kind = KINDS[kind_name]
    with contextlib.ExitStack() as stack:
        batches = CANDIDATES[name](Case(Path(folder), kind, _staging(kind), stack))
        began = time.perf_counter()
        first = sum(map(len, batches(0))) // kind.sample_bytes
        first_s = time.perf_counter() - began
        meter, of_children = Meter(), children_cpu_seconds()
        samples = sum(len(batch) for epoch in range(1, EPOCHS) for batch in batches(epoch)) // kind.sample_bytes
        read = meter.read()
        cpu_s = read["cpu_s"] + children_cpu_seconds() - of_children
        digest = sum(_digests(batches(1), kind.sample_bytes)) % (1 << 64)
    return {
        "samples_per_s": samples / read["wall_s"],
        "gb_per_s": samples * kind.sample_bytes / read["wall_s"] / 1e9,
        "cpu_s_per_1k": 1000 * cpu_s / samples,
        "first_epoch_per_s": first / first_s,
        "digest": float(digest >> 12),
    }


def _digests(batches: Batches, size: int) -> Iterator[int]:
    """Yield the digest of each sample. Their sum does not depend on the order."""
    for batch in batches:
        yield from (xxhash.xxh3_64_intdigest(batch[at : at + size]) for at in range(0, len(batch), size))


def _through_daemon(read: Callable[[Case, Path | None], Epochs]) -> Callable[[Case], Epochs]:
    """Return the same candidate, which reads through a daemon."""

    def epochs(case: Case) -> Epochs:
        place = case.stack.enter_context(tempfile.TemporaryDirectory(prefix="mr-"))
        running = case.stack.enter_context(daemon(Path(place) / "node", cache_bytes="4GiB"))
        return read(case, running.socket)

    return epochs


CANDIDATES: Mapping[str, Callable[[Case], Epochs]] = {
    PLAIN: _plain,
    PLAIN_TWO: lambda case: _plain(case, 2),
    PLAIN_CHECKED: lambda case: _plain(case, check=True),
    PLAIN_CHECKED_TWO: lambda case: _plain(case, 2, check=True),
    PLAIN_CHECKED_HELD: lambda case: _plain(case, 2, check=True, buffers=HELD),
    SIDECAR: _through_daemon(_headrace),
    ALONE: lambda case: _headrace(case, None),
    TWO: lambda case: _headrace(case, None, 2),
    LOADER: _loader,
    LOADER_SIDECAR: _through_daemon(_loader),
    WEBDATASET: lambda case: _webdataset(case, 0),
    WEBDATASET_TWO: lambda case: _webdataset(case, 2),
}
