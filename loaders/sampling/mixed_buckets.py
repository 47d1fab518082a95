"""Several sources in batches of one shape each: every bucket has its own mixture.

Purpose: combine mixtures and buckets, exactly and for any world size, with a position that is one number.

How it works. Let a source have the share w of all samples, and n of its N clips in a bucket. In that bucket, its
samples are in proportion to w * n / N. The sum of these numbers over the sources, divided by the clips in a batch of
the bucket, determines how often the bucket has a turn. `Turns` uses `Interleave` to compute which bucket has its turn
in a step, and how often it had a turn before. That count is the batch number in the bucket's own `Mixed`, in which the
sources have these shares. A change of weights begins a new segment of the turns, and a new segment in every bucket. The
bucket's segment begins at the number of batches that the bucket has given by then, so counts continue without a gap.

Invariants:
- Those of `Mixed` hold in each bucket: no clip of a source in a bucket is taken again before all were taken once.
- Buckets advance at different rates, so the epochs of a source in different buckets are not synchronized.
- All counts are integers, so they are the same on every machine.
- The position is one number, the step. The world size is not a parameter. A seek costs O(log) of buckets and sources.

Failure behaviour: `UsageError` for impossible weights and buckets. A cell (source and bucket) with a share of less than
one in `RESOLUTION` gets one in `RESOLUTION`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.interleave import Interleave
from headrace.loaders.sampling.mixture import (
    MERGED,
    RESOLUTION,
    Mixed,
    Segment,
    Weights,
    length_of,
    segment_at,
    segments_of,
    taken_before,
    weights_digest,
)
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64, key_of, short
from headrace.loaders.sampling.schedule import Population, Share, orders_digest

_START = 10  # a purpose of `key_of` that no other module uses
_ENDLESS = 1 << 60
_SCALE = 1 << 64
Rates = list[list[int]]
"""For each bucket, the relative number of samples of each source."""


@dataclass(frozen=True)
class Turns:
    """Which bucket has its turn in each step. The quotas may change at a step, and sum to `RESOLUTION`."""

    segments: tuple[Segment, ...]
    offset: int = 0

    def at(self, step: int) -> tuple[int, int]:
        """The bucket that has its turn, and its number of earlier turns."""
        number = segment_at(self.segments, step)
        place = np.array([step - self.segments[number].step])
        stream = self._interleaves[number].stream(place, self.offset)
        earlier_turns = self._interleaves[number].before(stream, place, self.offset)
        return int(stream[0]), int(self._bases[number][stream[0]] + earlier_turns[0])

    def counts(self, step: int) -> I64:
        """The number of turns that each bucket had before `step`."""
        number = segment_at(self.segments, step)
        return self._bases[number] + self._turns_since(number, step)

    def _turns_since(self, number: int, step: int) -> I64:
        every = np.arange(len(self.segments[number].quotas))
        return self._interleaves[number].before(every, np.array(step - self.segments[number].step), self.offset)

    @cached_property
    def _interleaves(self) -> list[Interleave]:
        return [Interleave(segment.quotas) for segment in self.segments]

    @cached_property
    def _bases(self) -> list[I64]:
        bases = [np.zeros(len(self.segments[0].quotas), np.int64)]
        for number, segment in enumerate(self.segments[1:]):
            bases.append(bases[-1] + self._turns_since(number, segment.step))
        return bases


@dataclass(frozen=True)
class MixedBuckets:
    """A `Schedule` whose streams are cells: the samples of one source in one bucket. Create one with `MixedBuckets.of`.

    `numbers` are the buckets that have samples, and `mixtures` are their mixtures. `name` identifies all buckets in
    states.
    """

    evaluates: ClassVar[bool] = False

    names: tuple[str, ...]
    mixtures: tuple[Mixed, ...]
    numbers: tuple[int, ...]
    turns: Turns
    segments: tuple[Segment, ...]
    batches: int
    name: str

    @classmethod
    def of(
        cls,
        sources: Mapping[str, Sequence[Population]],
        batches: Sequence[int],
        numbers: Sequence[int],
        *,
        weights: Weights | Sequence[tuple[int, Weights]] | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        shuffle: bool = True,
        epoch_batches: int | None = None,
    ) -> MixedBuckets:
        """The schedule for the part of each source in each bucket.

        `batches` and `numbers` are as in `Bucketed.of`, and the other arguments as in `Mixed.of`.
        """
        totals = {name: sum(cell.virtual for cell in cells) for name, cells in sources.items()}
        segments = segments_of(tuple(sources), totals if weights is None else weights, temperature)
        used_buckets = [b for b in range(len(batches)) if any(cells[b].samples for cells in sources.values())]
        amounts = [[cells[b].virtual for cells in sources.values()] for b in used_buckets]
        rates = [_rates(amounts, list(totals.values()), segment.quotas) for segment in segments]
        turns = Turns(
            tuple(
                Segment(
                    segment.step,
                    apportion([sum(row) * _SCALE // batches[b] for row, b in zip(rate, used_buckets, strict=True)]),
                )
                for segment, rate in zip(segments, rates, strict=True)
            ),
            int(key_of(_START, seed)[0]) % RESOLUTION,
        )
        mixtures = tuple(
            Mixed.by_segments(
                {name: cells[b] for name, cells in sources.items() if cells[b].samples},
                batches[b],
                _segments_in_bucket(turns, segments, [rate[place] for rate in rates], place, amounts[place]),
                seed=seed,
                shuffle=shuffle,
                batches=_ENDLESS,
            )
            for place, b in enumerate(used_buckets)
        )
        fill = sum(sum(row) // batches[b] for row, b in zip(amounts, used_buckets, strict=True))
        length = length_of(epoch_batches, fill)
        return cls(tuple(sources), mixtures, tuple(used_buckets), turns, segments, length, short(key_of(*numbers)))

    @property
    def streams(self) -> list[tuple[str, int]]:
        """Source and bucket of each stream."""
        return [
            (name, b) for mixed, b in zip(self.mixtures, self.numbers, strict=True) for name in mixed.names
        ]  # fmt: skip

    @property
    def buckets(self) -> tuple[int, ...]:
        """The bucket of each stream."""
        return tuple(bucket for _, bucket in self.streams)

    @cached_property
    def orders(self) -> tuple[Order, ...]:
        return tuple(order for mixed in self.mixtures for order in mixed.orders)

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in batch `number` of the mixture's `epoch`. All of it belongs to one bucket."""
        if not 0 <= number < self.batches:
            raise UsageError(f"batch {number} is outside the epoch's {self.batches} batches")
        place, batch = self.turns.at(epoch * self.batches + number)
        inside = self.mixtures[place].share(0, batch, rank, world_size)
        first_stream = sum(len(mixed.names) for mixed in self.mixtures[:place])
        return Share(
            inside.stream + first_stream, inside.epoch, inside.virtual, sizes=inside.sizes, bucket=self.numbers[place]
        )

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        """How many samples each source has given before batch `number` of `epoch`."""
        turns = self.turns.counts(epoch * self.batches + number).tolist()
        counts = np.zeros(len(self.names), np.int64)
        np.add.at(counts, self._sources, np.concatenate(taken_before(list(zip(self.mixtures, turns, strict=True)))))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        return {
            "buckets": self.name,
            "order": [self.batches, self._order_digest],
            "weights": weights_digest(self.segments, epoch * self.batches + number),
        }

    @cached_property
    def _sources(self) -> I64:
        """The source of each stream."""
        numbers = {name: number for number, name in enumerate(self.names)}
        return np.array([numbers[name] for name, _ in self.streams], np.int64)

    @cached_property
    def _order_digest(self) -> str:
        return orders_digest(self.orders, *(mixed.lanes for mixed in self.mixtures), MERGED)


def apportion(values: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers in proportion to `values` that sum to `RESOLUTION`, rounded by largest remainders.

    A value above 0 gets at least 1.
    """
    total = sum(values)
    parts = [value * RESOLUTION // total for value in values]
    by_rest = sorted(range(len(values)), key=lambda n: (-(values[n] * RESOLUTION % total), n))
    for number in by_rest[: RESOLUTION - sum(parts)]:
        parts[number] += 1
    for number, value in enumerate(values):
        if value and not parts[number]:
            parts[number] = 1
            parts[parts.index(max(parts))] -= 1
    return tuple(parts)


def _rates(amounts: Rates, totals: Sequence[int], quotas: Sequence[int]) -> Rates:
    """The relative number of samples of each source in each bucket.

    It is at least one if the source has samples in the bucket and a quota above 0.
    """
    return [
        [
            max(1, quota * amount * _SCALE // total) if quota and amount else 0
            for amount, total, quota in zip(row, totals, quotas, strict=True)
        ]
        for row in amounts
    ]


def _segments_in_bucket(
    turns: Turns, segments: Sequence[Segment], rates: Rates, place: int, amounts: Sequence[int]
) -> tuple[Segment, ...]:
    """The segments of the mixture in the bucket at `place`.

    A segment's step is the batch of the bucket from which the sources have these shares.
    """
    has_samples = [amount > 0 for amount in amounts]
    bucket_segments = list[Segment]()
    for segment, rate in zip(segments, rates, strict=True):
        shares = [value for value, mine in zip(rate, has_samples, strict=True) if mine]
        if not any(shares):
            continue  # the bucket has no turns in this segment
        step = int(turns.counts(segment.step)[place])
        if bucket_segments and bucket_segments[-1].step == step:
            bucket_segments.pop()  # the bucket had no turns in that segment
        bucket_segments.append(Segment(step, apportion(shares)))
    return tuple(bucket_segments) or (Segment(0, apportion([value for value in amounts if value])),)
