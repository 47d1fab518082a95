"""Headrace without decoding: the samples of a dataset as bytes in host memory, in the loaders' order, checked, ahead of time.

Invariant: every sample of an epoch once over all ranks; bytes equal the index's digests. At most `depth` batches wait.
Failure behaviour: an error of the source is raised at the batch it belongs to; leaving the loop early stops the thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import closing

from headrace.dataio import Dataset
from headrace.dataio.shards.contract import Sample
from headrace.dataio.sidecar.client import open_reader
from headrace.loaders.fetch.sample_reader import SampleReader
from headrace.loaders.sampling.order import Order

DEPTH = 4
_END = None


def batches(
    url: str,
    batch: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    epoch: int = 0,
    seed: int = 0,
    sidecar: str | None = None,
    depth: int = DEPTH,
) -> Iterator[list[bytearray]]:
    """This rank's batches of `epoch`: `batch` samples each, the last one may be shorter."""
    waiting: queue.Queue[list[bytearray] | BaseException | None] = queue.Queue(depth)
    stop = threading.Event()
    arguments = (url, batch, rank, ranks, epoch, seed, sidecar, waiting, stop)
    thread = threading.Thread(target=_read, args=arguments, name="headrace-raw", daemon=True)
    thread.start()
    try:
        while (found := waiting.get()) is not _END:
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stop.set()
        while thread.is_alive():
            while not waiting.empty():
                waiting.get_nowait()
            thread.join(0.01)


def _read(
    url: str,
    batch: int,
    rank: int,
    ranks: int,
    epoch: int,
    seed: int,
    sidecar: str | None,
    waiting: queue.Queue[list[bytearray] | BaseException | None],
    stop: threading.Event,
) -> None:
    try:
        with Dataset(url, trust_mounts=True) as dataset, closing(open_reader(dataset.store, sidecar)) as reader:
            source = SampleReader(reader, dataset.store)
            order = Order.of(
                len(dataset), batch * ranks, sample_bytes=dataset.total_bytes / max(1, len(dataset)), seed=seed
            )
            numbers = (order.batch_of(epoch, n, rank, ranks) for n in range(order.full_batches + bool(order.tail)))
            coming = (dataset.samples([int(n) for n in chosen]) for chosen in numbers)
            ahead = deque(itertools.islice(coming, DEPTH))
            while ahead and not stop.is_set():
                later = (source.ranges(sample, _needs(sample)) for samples in ahead for sample in samples)
                source.announce(list(itertools.chain.from_iterable(later)))
                found = [bytearray(view) for sample in ahead.popleft() for view in _members(source, sample)]
                ahead.extend(itertools.islice(coming, 1))
                if found:
                    waiting.put(found)
        waiting.put(_END)
    except BaseException as error:
        waiting.put(error)


def _members(source: SampleReader, sample: Sample) -> list[memoryview]:
    return [data[:] for data in source.fetch(sample, _needs(sample)).values()]


def _needs(sample: Sample) -> dict[str, None]:
    return dict.fromkeys(member.ext for member in sample.members)
