"""The quality of a shuffle, compared with a full shuffle, and its cost in reads.

Purpose: a windowed shuffle trades randomness for locality. This module measures both.

The metrics are computed over `batches` evenly spaced batches of an epoch, for the order and for a full shuffle of the
same samples:

- `distance`: the distance between a sample's position and its id, as a fraction of the epoch (mean; 1/3 if positions
  are independent).
- `spread`: the distance between the ids of two samples of a batch, as a fraction of the dataset (mean over pairs; also
  1/3 if independent).
- `neighbours`: the fraction of a batch's samples for which the sample with the next id is in the same batch.
- `entropy`: the entropy of the groups (shards, or sources) of a batch's samples, in bits (mean over batches). It is 0
  for a batch from one shard.
- `reads`: the number of chunks that all nodes together read in an epoch, divided by the number of chunks, for each
  number of nodes. With a full shuffle, nearly every node reads nearly every chunk, so it is close to the number of
  nodes.

Invariant: the metrics depend only on the arguments. The full shuffle is a keyed permutation, so results repeat.
Failure behaviour: `UsageError` for groups that do not match the order. `reads` is empty above `MAX_READS` samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.mixed_buckets import MixedBuckets
from headrace.loaders.sampling.mixture import RESOLUTION, Mixed
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64, key_of, permute

MAX_READS = 1 << 22
_FULL = 9  # a purpose of `key_of` that no other module uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The metrics of one shuffle."""

    distance: float
    spread: float
    neighbours: float
    entropy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """The metrics of an order and of a `full` shuffle, over `batches` batches.

    `picture[y][x]` counts the samples of the y-th part of the dataset that are in the x-th part of the epoch.
    """

    samples: int
    batch: int
    batches: int
    groups: int
    order: Figures
    full: Figures
    reads: dict[int, float]
    full_reads: dict[int, float]
    picture: tuple[tuple[int, ...], ...]


def quality(
    order: Order,
    groups: Sequence[int] | I64 | None = None,
    *,
    epoch: int = 0,
    batches: int = 256,
    nodes: Sequence[int] = (1, 2, 4, 8),
    clips: int = 1,
) -> Quality:
    """Measure `order` in `epoch`. `groups` holds the group of each sample, such as its shard. Default: its chunk."""
    labels = _labels(order, groups, clips)
    size = min(order.batch, order.samples)
    count = max(1, min(batches, order.full_batches))
    numbers = np.linspace(0, max(0, order.full_batches - 1), count).astype(np.int64)
    positions = (numbers[:, None] * size + np.arange(size)).ravel()
    key = key_of(_FULL, order.seed, epoch)

    def full(places: I64) -> I64:
        return permute(places, order.samples, key)

    def ours(places: I64) -> I64:
        return order.take(epoch, places)

    taken = ours(positions)
    measures_reads = order.samples <= MAX_READS
    return Quality(
        samples=order.samples,
        batch=size,
        batches=count,
        groups=int(labels.max()) + 1,
        order=_figures(positions, taken, size, labels, order.samples),
        full=_figures(positions, full(positions), size, labels, order.samples),
        reads={n: _reads(order, ours, n) for n in nodes if measures_reads},
        full_reads={n: _reads(order, full, n) for n in nodes if measures_reads},
        picture=_picture(positions, taken, order.samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How evenly the batches of a mixture hold its sources, compared with drawing every sample at random.

    `entropy` is the mean entropy of the sources in a batch, in bits. `away` is the largest difference, over all batches
    and sources, between a source's number of samples in a batch and its share of the batch. `drawn_entropy` and
    `drawn_away` are the same for random draws.
    """

    batch: int
    batches: int
    shares: dict[str, float]
    entropy: float
    drawn_entropy: float
    away: float
    drawn_away: float


def balance(mixed: Mixed, *, batches: int = 256) -> Balance:
    """Measure evenly spaced batches of the first epoch of a mixture, with the weights of its first segment."""
    weights = mixed.segments[0]
    batch_count = mixed.batches if len(mixed.segments) == 1 else min(mixed.batches, mixed.segments[1].step)
    numbers = np.unique(np.linspace(0, batch_count - 1, min(batches, batch_count)).astype(np.int64)).tolist()
    taken = np.concatenate([mixed.share(0, number).stream for number in numbers])
    draws = key_of(_FULL, mixed.seed, np.arange(len(taken))) % np.uint64(RESOLUTION)
    drawn = np.searchsorted(np.cumsum(weights.quotas), draws.astype(np.int64), side="right").astype(np.int64)
    shares = np.array(weights.quotas) / RESOLUTION
    return Balance(
        batch=mixed.batch,
        batches=len(numbers),
        shares=dict(zip(mixed.names, shares.tolist(), strict=True)),
        entropy=batch_entropy(taken, mixed.batch),
        drawn_entropy=batch_entropy(drawn, mixed.batch),
        away=_largest_deviation(taken, mixed.batch, shares),
        drawn_away=_largest_deviation(drawn, mixed.batch, shares),
    )


@dataclass(frozen=True, slots=True)
class BucketBalance:
    """One bucket of a mixture: its `share` of the steps, and how evenly its batches hold the sources."""

    bucket: int
    share: float
    balance: Balance


def bucket_balances(mixed: MixedBuckets, *, batches: int = 256) -> list[BucketBalance]:
    """Measure every bucket that has a batch in the first epoch, with the weights of the first segment."""
    batch_count = mixed.batches if len(mixed.segments) == 1 else min(mixed.batches, mixed.segments[1].step)
    turns = mixed.turns.counts(batch_count).tolist()
    return [
        BucketBalance(bucket, count / batch_count, balance(replace(inside, batches=count), batches=batches))
        for bucket, count, inside in zip(mixed.numbers, turns, mixed.mixtures, strict=True)
        if count
    ]


def _largest_deviation(streams: I64, size: int, shares: npt.NDArray[np.float64]) -> float:
    """The largest difference between a source's number of samples in a batch and its share of the batch."""
    rows = streams.reshape(-1, size)
    counts = np.stack([(rows == source).sum(axis=1) for source in range(len(shares))], axis=1)
    return float(np.abs(counts - shares * size).max())


def batch_entropy(labels: I64, size: int) -> float:
    """Mean entropy in bits of the labels of `size` consecutive samples."""
    rows = labels.reshape(-1, size)
    entropies = []
    for row in rows:
        _, counts = np.unique(row, return_counts=True)
        shares = counts / size
        entropies.append(float(-(shares * np.log2(shares)).sum()))
    return float(np.mean(entropies))


def _labels(order: Order, groups: Sequence[int] | I64 | None, clips: int) -> I64:
    """The group of every virtual sample."""
    if groups is None:
        return np.arange(order.samples, dtype=np.int64) // order.chunk
    labels = np.repeat(np.asarray(groups, np.int64), clips)
    if len(labels) != order.samples or labels.min() < 0:
        raise UsageError(f"{len(labels)} groups were given for {order.samples} places of the order")
    return labels


def _figures(positions: I64, taken: I64, size: int, labels: I64, samples: int) -> Figures:
    rows = np.sort(taken.reshape(-1, size), axis=1)
    ranks = 2 * np.arange(size) - size + 1  # the sum over pairs of differences of sorted values
    pairs = max(1, size * (size - 1) // 2)
    together = (np.diff(rows, axis=1) == 1).sum(axis=1) / size
    return Figures(
        distance=float(np.abs(taken - positions).mean() / samples),
        spread=float(((rows * ranks).sum(axis=1) / pairs).mean() / samples),
        neighbours=float(together.mean()),
        entropy=batch_entropy(labels[taken], size),
    )


def _reads(order: Order, take: Callable[[I64], I64], nodes: int) -> float:
    """Number of chunks that all nodes together read in an epoch, divided by the number of different chunks."""
    positions = np.arange(order.full_batches * order.batch or order.samples, dtype=np.int64)
    bounds = np.array([order.batch * node // nodes for node in range(1, nodes)], np.int64)
    node = np.searchsorted(bounds, positions % order.batch, side="right")
    chunks = -(-order.samples // order.chunk)
    was_read = np.zeros(nodes * chunks, np.bool_)
    was_read[node * chunks + take(positions) // order.chunk] = True
    chunk_count = len(np.unique(take(positions) // order.chunk))
    return float(was_read.sum() / chunk_count)


def _picture(
    positions: I64, taken: I64, samples: int, width: int = 64, height: int = 16
) -> tuple[tuple[int, ...], ...]:
    grid: npt.NDArray[np.int64] = np.zeros((height, width), np.int64)
    np.add.at(grid, (taken * height // samples, positions * width // samples), 1)
    return tuple(tuple(row) for row in grid.tolist())
