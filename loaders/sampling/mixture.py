"""Several sources in one stream, with weights that may change during the run.

Purpose: `Mixture` describes several datasets as one. `Mixed` is its schedule: it computes which sample of which source
fills any slot of any step, exactly and without earlier steps. Each source keeps its own size and its own epochs.

How it works. The stream has K lanes, as in `Order`; slot s of a global batch of G belongs to lane floor(s * K / G).
Every source with enough chunks is divided into the same lanes, so a node reads the same chunks of it in every epoch.
`Strata` computes which source fills each slot of a step, and how often that source was in the slot's lane before. The
y-th sample that a source gives to lane k is position y * K + k of the source's own stream. That stream is the source's
epochs 0, 1, 2, … in a row. A change of weights begins a segment, which continues the counts of the segment before it.

Invariants, for any weights and changes:
- No position of a source is skipped or taken twice, so each epoch of a source takes every sample once. At the boundary
  of two epochs, samples may be taken a few positions early or late, since lanes do not advance in step.
- Every batch holds the share of each source, rounded down or up. Consecutive steps together, and the parts of ranks,
  hold their shares to within a few samples.
- The position is one number, the step. The world size is not a parameter.
- Sources are identified by their names, which are part of the order and of the loader's state. The order in which
  sources are given does not matter.

A mixture never ends, so the length of its epoch is a definition: as many batches as all sources' samples fill once, or
`epoch_batches`. If the weights are in proportion to the sizes, that is one epoch of each source. The step count
continues from one epoch of the mixture to the next, also for changes of weights.

Failure behaviour: `UsageError` for impossible mixtures and weights, with the source's name.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.loaders.sampling.interleave import Strata, totals
from headrace.loaders.sampling.order import Order, lanes_for
from headrace.loaders.sampling.permutation import I64, key_of, short
from headrace.loaders.sampling.plan import DatasetLike
from headrace.loaders.sampling.schedule import Population, Share, orders_digest, part, sizes
from headrace.loaders.validation import checked

MAX_NAME, MAX_SOURCES = 64, 1024
MAX_SEGMENTS = 64
RESOLUTION = 832_040
"""Weights are multiples of 1 / RESOLUTION. It is a Fibonacci number; see `Interleave`."""
_SOURCE, _START = 6, 7  # purposes of `key_of` that no other module uses
MERGED = 2
"""Version of the merging method, part of the state. Version 1, which states do not name, missed the shares of a batch
by a few samples."""

Weights = Mapping[str, float]


@suggests_arguments()
@dataclass(frozen=True)
class Mixture:
    """Several datasets as one, with weights.

    Each source has its own epochs: a small source begins again while others continue. The epoch of the mixture, after
    which a `for` loop ends, has `epoch_batches` batches.

    Args:
        sources (Mapping[str, Dataset | str | os.PathLike]): datasets, views (`dataset.where(...)`), URLs or
            directories, by name.
        weights (Mapping[str, float] | Sequence[tuple[int, Mapping[str, float]]] | None): relative number of samples
            taken from each source. A list of (step, weights), the first at step 0, is a curriculum; steps are global
            batches since the start of the run. Default: the numbers of clips.
        temperature (float): shares are proportional to weight ** (1 / temperature), so a high temperature increases the
            shares of small sources. Default: 1.0.
        epoch_batches (int | None): global batches of an epoch. Default: as many as all sources' clips fill once.

    Raises:
        UsageError: for an impossible mixture, with the source's name.

    Example:
        >>> mixture = Mixture({"films": clips, "shorts": clips}, weights={"films": 1, "shorts": 3})
        >>> list(mixture.sources)
        ['films', 'shorts']
    """

    sources: Mapping[str, DatasetLike]
    weights: Weights | Sequence[tuple[int, Weights]] | None = None
    temperature: float = 1.0
    epoch_batches: int | None = None

    def __post_init__(self) -> None:
        if not self.sources or not isinstance(self.sources, Mapping):
            raise UsageError(
                "a mixture needs sources by name", hint='give datasets by name: Mixture({"a": ..., "b": ...})'
            )
        for name in self.sources:
            if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
                raise UsageError(f"{name!r} cannot be the name of a source", hint=f"use 1 to {MAX_NAME} characters")
        object.__setattr__(self, "sources", dict(sorted(self.sources.items())))
        weights = dict.fromkeys(self.sources, 1.0) if self.weights is None else self.weights
        segments_of(tuple(self.sources), weights, self.temperature)
        length_of(self.epoch_batches, 1)


@dataclass(frozen=True)
class Segment:
    """The weights from global step `step` on.

    `quotas` are whole numbers that sum to `RESOLUTION`, in the order of the sources' names.
    """

    step: int
    quotas: tuple[int, ...]


@dataclass(frozen=True)
class Mixed:
    """A `Schedule` over the sources `names`. Create one with `Mixed.of`.

    `batch` is the global batch. The batch size of each source's own order is `lanes`.
    """

    buckets: ClassVar[tuple[int, ...]] = ()
    evaluates: ClassVar[bool] = False

    names: tuple[str, ...]
    orders: tuple[Order, ...]
    batch: int
    lanes: int
    segments: tuple[Segment, ...]
    batches: int
    seed: int = 0

    @classmethod
    def of(
        cls,
        sources: Mapping[str, Population],
        batch: int,
        *,
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        shuffle: bool = True,
        epoch_batches: int | None = None,
    ) -> Mixed:
        """The schedule for sources by name, in global batches of `batch`.

        `weights` default to the numbers of clips. A list of (step, weights) changes them at those steps, the first of
        which is 0. A source's share is proportional to weight ** (1 / temperature).
        """
        counts = {name: population.virtual for name, population in sources.items()}
        segments = segments_of(tuple(sources), counts if weights is None else weights, temperature)
        length = length_of(epoch_batches, sum(counts.values()) // batch)
        return cls.by_segments(sources, batch, segments, seed=seed, shuffle=shuffle, batches=length)

    @classmethod
    def by_segments(
        cls,
        sources: Mapping[str, Population],
        batch: int,
        segments: tuple[Segment, ...],
        *,
        seed: int,
        shuffle: bool,
        batches: int,
    ) -> Mixed:
        """Create one from known segments, with epochs of `batches` batches. The other arguments are those of `of`."""
        unshuffled = [population.order(batch, 0, False) for population in sources.values()]
        lanes = lanes_for(batch, max(-(-order.samples // order.chunk) for order in unshuffled))
        orders = tuple(
            population.order(lanes, int(key_of(_SOURCE, seed, *name.encode())[0]), shuffle)
            for name, population in sources.items()
        )
        return cls(tuple(sources), orders, batch, lanes, segments, batches, seed)

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in batch `number` of the mixture's `epoch`. `Share.epoch` holds the sources' epochs."""
        if not 0 <= number < self.batches:
            raise UsageError(f"batch {number} is outside the epoch's {self.batches} batches")
        slots = np.asarray(part(self.batch, rank, world_size), np.int64)
        lane_slots = self.batch // self.lanes
        step = epoch * self.batches + number
        segment = segment_at(self.segments, step)
        strata, elapsed = self._strata[segment], step - self.segments[segment].step
        lane = slots // lane_slots
        lanes, row = np.unique(lane, return_inverse=True)
        streams = strata.streams(elapsed, lanes)
        stream, earlier = streams[row, slots % lane_slots], _earlier_in_row(streams)[row, slots % lane_slots]
        pick = self._bases[segment][lane, stream] + strata.before(stream, elapsed, lane) + earlier
        own_epoch, virtual = self._epochs_and_samples(stream, pick, lane)
        return Share(stream, own_epoch, virtual, sizes=sizes(self.batch, world_size))

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        """How many samples each source has given before batch `number` of `epoch`."""
        return dict(zip(self.names, taken_before([(self, epoch * self.batches + number)])[0].tolist(), strict=True))

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        step = epoch * self.batches + number
        return {
            "global_batch": self.batch,
            "order": [self.batches, self._order_digest],
            "weights": weights_digest(self.segments, step),
        }

    # -- inside

    @cached_property
    def _order_digest(self) -> str:
        return orders_digest(self.orders, self.lanes, MERGED)

    def _epochs_and_samples(self, stream: I64, pick: I64, lane: I64) -> tuple[I64, I64]:
        """Epoch and virtual sample of the `pick`-th sample that `lane` takes from each `stream`."""
        epochs, virtual = np.empty_like(stream), np.empty_like(stream)
        for source in np.unique(stream).tolist():
            at = stream == source
            epochs[at], virtual[at] = _across_epochs(self.orders[source], pick[at] * self.lanes + lane[at])
        return epochs, virtual

    @cached_property
    def _strata(self) -> list[Strata]:
        start = int(key_of(_START, self.seed)[0])
        return [Strata(segment.quotas, self.batch, lanes=self.lanes, start=start) for segment in self.segments]

    @cached_property
    def _bases(self) -> list[I64]:
        """For each segment, (lanes, sources): the number of samples taken before it."""
        bases = [np.zeros((self.lanes, len(self.names)), np.int64)]
        for number, segment in enumerate(self.segments[1:]):
            bases.append(bases[-1] + self._counts(number, segment.step))
        return bases

    def _counts(self, segment: int, step: int) -> I64:
        """(lanes, sources): the number of samples taken from the start of `segment` up to `step`."""
        every, lanes = np.arange(len(self.names)), np.arange(self.lanes)
        return self._strata[segment].before(every[None, :], step - self.segments[segment].step, lanes[:, None])


def taken_before(mixtures: Sequence[tuple[Mixed, int]]) -> list[I64]:
    """For each (mixture, step), the number of samples that each of its sources has given before the step."""
    parts = list[tuple[Strata, int]]()  # every earlier segment to its end, and the current one to the step
    segments = [segment_at(mixed.segments, step) for mixed, step in mixtures]
    for (mixed, step), last in zip(mixtures, segments, strict=True):
        ends = [*(segment.step for segment in mixed.segments[1 : last + 1]), step]
        parts += [(mixed._strata[number], end - mixed.segments[number].step) for number, end in enumerate(ends)]
    counted = iter(totals(parts))
    return [np.sum([next(counted) for _ in range(last + 1)], axis=0) for last in segments]


def _earlier_in_row(streams: I64) -> I64:
    """How often each slot's stream occurs in earlier slots of its row."""
    order = np.argsort(streams, axis=1, kind="stable")
    ordered = np.take_along_axis(streams, order, axis=1)
    places = np.broadcast_to(np.arange(streams.shape[1]), streams.shape)
    run_starts = np.where(np.diff(ordered, axis=1, prepend=-1) != 0, places, 0)
    earlier = np.empty_like(streams)
    np.put_along_axis(earlier, order, places - np.maximum.accumulate(run_starts, axis=1), axis=1)
    return earlier


def _across_epochs(order: Order, places: I64) -> tuple[I64, I64]:
    """Epoch and sample at `places` of all epochs in a row.

    Each batch is rotated, so that place i always belongs to lane i mod batch.
    """
    epochs, positions = places // order.samples, places % order.samples
    turned = positions // order.batch * order.batch + places % order.batch
    positions = np.where(positions < order.full_batches * order.batch, turned, positions)
    samples = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
        at = epochs == epoch
        samples[at] = order.take(epoch, positions[at])
    return epochs, samples


def segment_at(segments: Sequence[Segment], step: int) -> int:
    """The index of the segment that contains `step`."""
    return bisect_right(segments, step, key=lambda segment: segment.step) - 1


def length_of(epoch_batches: int | None, filled: int) -> int:
    """Number of batches in an epoch: `epoch_batches`, or as many as all samples fill."""
    epoch_batches = checked("epoch_batches", epoch_batches, int | None)
    if epoch_batches is not None and epoch_batches < 1:
        raise UsageError(
            f"epoch_batches is at least 1, not {epoch_batches}", hint="None is as many as all clips fill once"
        )
    return epoch_batches or max(1, filled)


def weights_digest(segments: Sequence[Segment], step: int) -> str:
    """Identifies the weights before `step`. Later weights may still be changed."""
    return _segments_digest(tuple(segment for segment in segments if segment.step < step))


@lru_cache(maxsize=16)
def _segments_digest(used: tuple[Segment, ...]) -> str:
    return short(key_of(*(n for s in used for n in (s.step, *s.quotas)))) if used else "0"


def segments_of(
    names: Sequence[str], weights: Weights | Sequence[tuple[int, Weights]], temperature: float
) -> tuple[Segment, ...]:
    """The segments of `weights`, one for each change."""
    if not 1 <= len(names) <= MAX_SOURCES:
        raise UsageError(f"a mixture has 1 to {MAX_SOURCES} sources, not {len(names)}")
    temperature = checked("temperature", temperature, float)
    if not 0 < temperature < math.inf:
        raise UsageError(
            f"temperature is a positive number, not {temperature!r}", hint="1.0 leaves the weights as they are"
        )
    if isinstance(weights, Mapping):
        changes = [(0, checked("weights", weights, dict[str, float]))]
    else:
        expected = "a dict such as {'a': 1, 'b': 3}, or a list of (step, dict)"
        changes = checked("weights", weights, list[tuple[int, dict[str, float]]], expected)
    if not 1 <= len(changes) <= MAX_SEGMENTS:
        raise UsageError(f"weights change {len(changes)} times", hint=f"1 to {MAX_SEGMENTS} segments can be")
    steps = [step for step, _ in changes]
    if steps[0] != 0 or any(later <= step for step, later in pairwise(steps)):
        raise UsageError(f"weights begin at the steps {steps}", hint="the first is 0, and they grow")
    return tuple(Segment(step, quotas(names, values, temperature)) for step, values in changes)


def quotas(names: Sequence[str], weights: Weights, temperature: float = 1.0) -> tuple[int, ...]:
    """weight ** (1 / temperature) of each source as whole numbers that sum to `RESOLUTION`.

    Rounding is by largest remainders.
    """
    for name in (*weights, *names):
        if name not in names or name not in weights:
            raise UsageError(
                f"the weights and the sources differ in {name!r}", hint=f"give a weight for each of {', '.join(names)}"
            )
        if not (math.isfinite(weights[name]) and weights[name] >= 0):
            raise UsageError(f"the weight of {name!r} is {weights[name]!r}", hint="weights are numbers from 0 on")
    largest = max(weights.values())
    if largest <= 0:
        raise UsageError("all weights are 0", hint="give some source a positive one")
    shares = np.array([(weights[name] / largest) ** (1 / temperature) if weights[name] else 0.0 for name in names])
    exact = shares / shares.sum() * RESOLUTION
    counts = np.floor(exact).astype(np.int64)
    for source in np.argsort(counts - exact, kind="stable")[: RESOLUTION - int(counts.sum())]:
        counts[source] += 1
    for name, quota in zip(names, counts.tolist(), strict=True):
        if weights[name] and not quota:
            raise UsageError(
                f"the weight of {name!r} is below one in {RESOLUTION} of all", hint="leave it out, or raise it"
            )
    return tuple(counts.tolist())
