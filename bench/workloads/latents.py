"""`headrace bench latents`: latents, embeddings and captions, compared with other loaders and a plain loop of `preadv`.

A sample is a latent of 100 kB and an embedding of 10 kB, both .npy files, and a caption, in tars on local disk. The page
cache holds everything. Each candidate runs some epochs in two threads or two workers, in batches of 32.

- The plain loop does the least work. It knows all offsets and captions, keeps the shards open, reads each file into a
  staging buffer, and makes an array of it with `np.frombuffer`. It does not stack the arrays.
- With digests, the plain loop checks what Headrace checks. Its 4 buffers hold the batches that `Loader` has in memory
  at once, so the processor's cache holds them as little. This loop is the lower bound of `Loader`.
- Headrace takes the captions from the index. The peers read them from the .txt files.
- Peers that are not installed are skipped and named.

Invariant: all candidates deliver the same arrays and captions, which their digests show.

Failure behaviour: a candidate that fails is named, and the others continue. A candidate fails if an epoch has too few
samples.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from headrace.bench.core.command import Job, benchmark
from headrace.bench.core.measure import Candidate, Meter, alternate, children
from headrace.bench.core.results import Metric, Part
from headrace.bench.workloads.loader import installed
from headrace.bench.workloads.raw import HELD, require_equal_digests, shard_path
from headrace.dataio import Dataset
from headrace.dataio.core.cli import argument, positive_int
from headrace.dataio.core.errors import UsageError

if TYPE_CHECKING:
    from headrace.bench.peers.latents import Batch, Epochs

EPOCHS = 4
OURS, PLAIN = "Loader in one process, 2 threads", "preadv and np.frombuffer"
PLAIN_TWO = f"{PLAIN}, 2 threads"
PLAIN_CHECKED_TWO = f"{PLAIN_TWO}, with digests"
PLAIN_CHECKED_HELD = f"{PLAIN_CHECKED_TWO}, {HELD} buffers"
METRICS = {
    "samples_per_s": Metric("samples/s", "1/s", "higher"),
    "cpu_s_per_1k": Metric("CPU s per 1k", "s", "lower"),
    "first_batch_s": Metric("first batch s", "s", "lower"),
}


@benchmark(
    "latents",
    "Latents, embeddings and captions, compared with other loaders and a plain loop of preadv.",
    argument("--samples", type=positive_int, default=5000, help="of 110 kB (default: %(default)s)"),
    argument("--only", action="append", help="a candidate's name; may be repeated (default: all)"),
    rounds=5,
)
def latents(job: Job, part: Part) -> None:
    """Make the samples in every format, and measure all candidates in turn."""
    from headrace.bench.peers import latents as peers

    missing = sorted({package for _, package in peers.PEERS.values() if not installed(package)})
    names = _names(job.args.only, missing)
    peers.make(job.scratch, job.args.samples, job.progress)
    converts = {"litdata": peers.to_litdata, "lancedb": peers.to_lancedb, "energon": peers.to_energon}
    for start, convert in converts.items():
        if any(name.startswith(start) for name in names):
            convert(job.scratch)
    part.title = f"Latents: {job.args.samples} samples of 110 kB and a caption, shuffled, batches of {peers.BATCH}"
    part.settings = {
        "samples": job.args.samples,
        "batch": peers.BATCH,
        "epochs": EPOCHS,
        "threads": peers.WORKERS,
        "missing": missing,
    }
    part.metrics, part.against = METRICS, PLAIN_CHECKED_HELD
    if missing:
        part.notes.append(f"Skipped, since they are not installed: {', '.join(missing)}.")
    candidates = [
        Candidate(name, "headrace.bench.workloads.latents:measure", (name, str(job.scratch), job.args.samples))
        for name in names
    ]
    alternate(candidates, job.rounds, job.progress, part.candidates)
    require_equal_digests(part)


def _names(only: Sequence[str] | None, missing: Sequence[str]) -> list[str]:
    """Return the names of the candidates to measure."""
    from headrace.bench.peers.latents import PEERS

    names = [*CANDIDATES, *(name for name, (_, package) in PEERS.items() if package not in missing)]
    for name in only or ():
        if name not in names:
            raise UsageError(f"there is no candidate {name!r:.200}", hint=f"there are {', '.join(map(repr, names))}")
    return [name for name in names if not only or name in only]


# --- the candidates


def _loader(folder: Path, epochs: int) -> Iterator[Batch]:
    from headrace.bench.peers import latents as peers
    from headrace.loaders.field_loader import Loader
    from headrace.loaders.fields.arrays import Npy
    from headrace.loaders.fields.text import Text

    fields = {"latent": Npy(peers.LATENT), "embedding": Npy(peers.EMBEDDING), "caption": Text()}
    options: dict[str, Any] = {"seed": 1, "sidecar": None, "num_threads": peers.WORKERS, "drop_last": False}
    with Loader(str(folder / "dataset"), peers.BATCH, fields=fields, trust_mounts=True, **options) as loader:
        for _ in range(epochs):
            for batch in loader:
                yield peers.Batch(batch["latent"], batch["embedding"], batch["caption"])


class _Wanted(NamedTuple):
    """A sample that the plain loop reads: the shard's descriptor, its caption, and (offset, length, digest) of files."""

    fd: int
    caption: str
    files: Sequence[tuple[int, int, int]]


class _Plain:
    """The plain loop.

    Args:
        threads: number of threads that fill a batch together.
        check: whether to check the digests of the files.
        buffers: number of batches in memory. The consumer holds one of them.
    """

    def __init__(self, threads: int = 1, *, check: bool = False, buffers: int = 2) -> None:
        self._threads, self._check, self._buffers = threads, check, buffers

    def __call__(self, folder: Path, epochs: int) -> Iterator[Batch]:
        from headrace.bench.peers.latents import BATCH

        with contextlib.ExitStack() as stack:
            samples = _wanted(folder, stack)
            size = BATCH * max(sum(length for _, length, _ in sample.files) for sample in samples)
            memory = [_touched(size) for _ in range(self._buffers if self._threads > 1 else 1)]
            batches = _shuffled_batches(samples, epochs)
            if self._threads == 1:
                yield from (_batch([self._fill(batch, memory[0])]) for batch in batches)
                return
            pool = stack.enter_context(ThreadPoolExecutor(self._threads))
            filling, turns = deque[list[Future[Any]]](), itertools.cycle(memory)
            for batch in batches:
                filling.append(self._begin(pool, batch, next(turns)))
                if len(filling) == self._buffers:
                    yield _batch([part.result() for part in filling.popleft()])
            yield from (_batch([part.result() for part in parts]) for parts in filling)

    def _begin(self, pool: ThreadPoolExecutor, batch: Sequence[_Wanted], memory: memoryview) -> list[Future[Any]]:
        """Let all threads fill the batch."""
        share, at, parts = -(-len(batch) // self._threads), 0, list[Future[Any]]()
        for first in range(0, len(batch), share):
            part = batch[first : first + share]
            parts.append(pool.submit(self._fill, part, memory[at:]))
            at += sum([length for sample in part for _, length, _ in sample.files])
        return parts

    def _fill(self, batch: Sequence[_Wanted], memory: memoryview) -> list[tuple[Any, ...]]:
        """Read the samples into `memory`, and return their values."""
        at, filled, check = 0, list[tuple[Any, ...]](), self._check
        for fd, caption, files in batch:
            arrays = list[Any]()
            for offset, length, xxh3 in files:
                view = memory[at : at + length]
                os.preadv(fd, [view], offset)
                assert not check or xxhash.xxh3_64_intdigest(view) == xxh3
                arrays.append(np.frombuffer(view, np.float16, offset=_HEADER_BYTES))
                at += length
            filled.append((*arrays, caption))
        return filled


_HEADER_BYTES = 128
"""Of a .npy file, as `np.save` writes it."""


def _wanted(folder: Path, stack: contextlib.ExitStack) -> list[_Wanted]:
    """Look up all samples, and open the shards."""
    from headrace.bench.peers.latents import EMBEDDING, LATENT

    with Dataset(str(folder / "dataset"), trust_mounts=True) as dataset:
        samples = list(dataset)
    opened = {
        key: stack.enter_context(shard_path(folder, key).open("rb", buffering=0)).fileno()
        for key in {sample.shard for sample in samples}
    }
    wanted = list[_Wanted]()
    for sample in samples:
        member = {one.ext: (one.offset, one.length, one.xxh3) for one in sample.members}
        wanted.append(_Wanted(opened[sample.shard], sample.text or "", [member[LATENT], member[EMBEDDING]]))
    return wanted


def _shuffled_batches(samples: list[_Wanted], epochs: int) -> Iterator[Sequence[_Wanted]]:
    from headrace.bench.peers.latents import BATCH

    for epoch in range(epochs):
        shuffled = random.Random(epoch).sample(samples, len(samples))
        yield from (shuffled[first : first + BATCH] for first in range(0, len(shuffled), BATCH))


def _batch(parts: Sequence[list[tuple[Any, ...]]]) -> Batch:
    from headrace.bench.peers.latents import Batch

    return Batch(*zip(*itertools.chain.from_iterable(parts), strict=True))


def _touched(size: int) -> memoryview:
    """Return a buffer. All its pages have been touched."""
    memory = memoryview(bytearray(size))
    memory[::4096] = bytes(len(memory[::4096]))
    return memory


CANDIDATES: Mapping[str, Epochs] = {
    OURS: _loader,
    PLAIN: _Plain(),
    PLAIN_TWO: _Plain(2),
    PLAIN_CHECKED_TWO: _Plain(2, check=True),
    PLAIN_CHECKED_HELD: _Plain(2, check=True, buffers=HELD),
}


# --- one candidate, in its own process


def measure(name: str, folder: str, samples: int) -> dict[str, float]:
    """Measure one candidate. `samples_per_s` excludes everything up to the first batch."""
    import torch

    from headrace.bench.peers.latents import PEERS

    torch.set_num_threads(1)
    run = CANDIDATES[name] if name in CANDIDATES else PEERS[name][0]
    others, meter, count, before, first, last = set(children()), Meter(), 0, 0, 0.0, 0.0
    began = time.perf_counter()
    for batch in run(Path(folder), EPOCHS):
        count += len(batch.captions)
        last = time.perf_counter() - began
        if not before:
            before, first = count, last
    gc.collect()  # ends workers of loaders that are part of reference cycles
    if left := set(children()) - others:
        raise AssertionError(f"{name} left {len(left)} processes running, whose CPU time would not count")
    read = meter.read()
    if count != EPOCHS * samples:
        raise AssertionError(f"{name} delivered {count} of {EPOCHS * samples} samples")
    return {
        "samples_per_s": (count - before) / (last - first),
        "cpu_s_per_1k": 1000 * read["cpu_s"] / count,
        "first_batch_s": first,
        "digest": float(_digest(run(Path(folder), 1)) >> 12),
    }


def _digest(batches: Iterator[Batch]) -> int:
    """Return the sum of the samples' digests, which does not depend on their order."""
    total = 0
    for batch in batches:
        for latent, embedding, caption in zip(*batch, strict=True):
            digest = xxhash.xxh3_64(caption.encode())
            for array in (latent, embedding):
                digest.update(np.ascontiguousarray(array).data.cast("B"))
            total += digest.intdigest()
    return total % (1 << 64)
