"""The interface of all orders of samples: which rank gets which samples in global batch t.

Purpose: separate the computation of orders from the loader that reads, decodes and delivers. A loader has one or more
*streams* (a dataset, a source of a mixture, a bucket). Each is a list of samples with an `Order` of its own. A
`Schedule` computes which position of which stream fills each slot of a batch. This module contains two schedules:
`Plain` for one dataset, and `Evaluation`, which delivers every sample once.

How evaluation works. Padding the last batch would count samples twice, and dropping it would leave samples out, so
metrics would not be exact. Instead, samples are delivered in the order of their ids, in global batches of one size. The
last batch may be short, and is shared as evenly as possible. All ranks take the same number of steps, so collectives
and DDP stay synchronized. In a short step some ranks may get fewer samples, or none. Every
rank knows which ranks get none. Streams follow each other, and each ends with its own short batch. So every batch
belongs to one stream, and metrics per source need no sorting.

Invariants of every schedule: `share` is pure. The concatenated shares of ranks 0 … W-1 are the global batch, the same
for every W. The ranks' shares differ by one clip at most, and are equal if W divides the batch. In an evaluation, only
the last step of a stream has ranks without samples.
Failure behaviour: `UsageError` for a rank or a batch out of range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64, key_of, short

AT_ONCE = 1024
"""Number of a rank's positions that are computed together."""


class Share(msgspec.Struct, frozen=True):
    """One rank's part of a global batch.

    Args:
        stream: int64 array, the stream of each slot.
        epoch: int64 array, the epoch of that stream.
        virtual: int64 array, the virtual sample in the stream.
        sizes: the lengths of all ranks' shares.
        bucket: bucket of the batch, if there are buckets.
    """

    stream: I64
    epoch: I64
    virtual: I64
    sizes: tuple[int, ...]
    bucket: int | None = None

    def __len__(self) -> int:
        return len(self.virtual)

    @property
    def empty_ranks(self) -> list[int]:
        """The ranks that get no sample of this batch."""
        return [rank for rank, size in enumerate(self.sizes) if not size]


class Schedule(Protocol):
    """The global batches of the epochs 0, 1, …"""

    @property
    def batches(self) -> int: ...

    @property
    def orders(self) -> Sequence[Order]:
        """The orders of the streams, which also determine substitutes and the seed of clips."""
        ...

    @property
    def buckets(self) -> tuple[int, ...]:
        """The bucket of each stream; empty without buckets."""
        ...

    @property
    def evaluates(self) -> bool:
        """Whether every sample is taken once, so that some ranks may get no sample."""
        ...

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        """How many samples each source of a mixture has given before batch `number` of `epoch`.

        Empty without a mixture.
        """
        ...

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in global batch `number` of `epoch`."""
        ...

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        """Everything that determines the order up to batch `number` of `epoch`, except samples and seed.

        The description is short and has plain JSON types. Equal descriptions mean equal orders.
        """
        ...


class Population(msgspec.Struct, frozen=True):
    """The size of a stream.

    Args:
        samples: number of samples.
        sample_bytes: mean size of a sample in bytes.
        clips: approximate number of clips of each sample.
        total: number of clips. Default: samples * clips.
    """

    samples: int
    sample_bytes: float = 0.0
    clips: int = 1
    total: int | None = None

    @property
    def virtual(self) -> int:
        """The number of clips, which are the stream's virtual samples."""
        return self.samples * self.clips if self.total is None else self.total

    def order(self, batch: int, seed: int, shuffle: bool) -> Order:
        """The order of this population in batches of `batch`."""
        base = Order.of(
            self.samples, batch, sample_bytes=self.sample_bytes, seed=seed, shuffle=shuffle, clips=self.clips
        )
        return replace(base, samples=self.virtual)


class Plain(msgspec.Struct, frozen=True):
    """The schedule of one dataset: its order, with or without the incomplete last batch."""

    buckets: ClassVar[tuple[int, ...]] = ()
    evaluates: ClassVar[bool] = False

    order: Order
    drop_last: bool = True

    @property
    def batches(self) -> int:
        return self.order.full_batches + (not self.drop_last and self.order.tail > 0)

    @property
    def orders(self) -> Sequence[Order]:
        return (self.order,)

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        return ordered_share(self.order, 0, epoch, number, rank, world_size, ahead=True)

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        return {}

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        order = self.order
        return {
            "global_batch": order.batch,
            "order": [
                *((order.chunk, order.lanes, order.window) if order.shuffle else ()),
                *(("drop_last",) if self.drop_last else ()),
            ],
        }


def _batch_from_block(order: Order, epoch: int, number: int, rank: int, world_size: int) -> I64:
    """The result of `order.batch_of`, computed for several batches together.

    numpy needs as long for one position as for a hundred.
    """
    block_size = max(1, AT_ONCE * world_size // order.batch)
    block = _batch_block(order, epoch, number // block_size * block_size, block_size, rank, world_size)
    at = number % block_size
    return block[at] if at < len(block) else order.batch_of(epoch, number, rank, world_size)


@lru_cache(maxsize=8)
def _batch_block(order: Order, epoch: int, first: int, count: int, rank: int, world_size: int) -> tuple[I64, ...]:
    """`count` batches from batch `first` on, or as many as exist."""
    end = min(first + count, order.full_batches + bool(order.tail))
    slots = [order.slots(number, rank, world_size) for number in range(first, end)]
    if not slots:
        return ()
    virtual = order.take(epoch, np.concatenate(slots))
    virtual.flags.writeable = False
    return tuple(np.split(virtual, np.cumsum([len(one) for one in slots])[:-1]))


def ordered_share(
    order: Order,
    stream: int,
    epoch: int,
    number: int,
    rank: int,
    world_size: int,
    bucket: int | None = None,
    *,
    ahead: bool = False,
) -> Share:
    """The share of a batch that comes from one stream.

    With `ahead`, the following batches are computed too, and cached.
    """
    position = (epoch, number, rank, world_size)
    virtual = _batch_from_block(order, *position) if ahead else order.batch_of(*position)
    size = order.batch if number < order.full_batches else order.tail
    return Share(
        np.full(len(virtual), stream, np.int64),
        np.full(len(virtual), epoch, np.int64),
        virtual,
        sizes=sizes(size, world_size),
        bucket=bucket,
    )


def orders_digest(orders: Sequence[Order], *values: int) -> str:
    """A digest of the orders of several streams, without their number of samples and seed."""
    return short(key_of(*(n for o in orders for n in (o.chunk, o.lanes, o.window, o.shuffle)), *values))


def part(size: int, rank: int, world_size: int) -> range:
    """The slots of `rank` in a batch of `size`: contiguous, and as even as possible."""
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is outside a world of {world_size}")
    return range(size * rank // world_size, size * (rank + 1) // world_size)


def sizes(size: int, world_size: int) -> tuple[int, ...]:
    """Return the number of samples that each rank gets of a batch of `size`."""
    return tuple(len(part(size, rank, world_size)) for rank in range(world_size))


@dataclass(frozen=True)
class Evaluation:
    """A `Schedule` that is the same in every epoch. Create one with `Evaluation.of`.

    `buckets` are the buckets of the streams. `name` identifies all buckets in states.
    """

    evaluates: ClassVar[bool] = True

    orders: tuple[Order, ...]
    buckets: tuple[int, ...] = ()
    name: str = ""

    @classmethod
    def of(
        cls,
        populations: Sequence[Population],
        batches: Sequence[int],
        *,
        seed: int = 0,
        buckets: Sequence[int] = (),
        numbers: Sequence[int] = (),
    ) -> Evaluation:
        """The schedule for these streams, with these global batch sizes.

        The seed is used for clips with a random start. `numbers` identify the buckets in states.
        """
        pairs = zip(populations, batches, strict=True)
        orders = tuple(one.order(batch, seed, shuffle=False) for one, batch in pairs)
        return cls(orders, tuple(buckets), short(key_of(*numbers)) if numbers else "")

    @property
    def batches(self) -> int:
        return self._ends[-1]

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in batch `number`, the same in every epoch."""
        if not 0 <= number < self.batches:
            raise UsageError(f"batch {number} is outside the epoch's {self.batches} batches")
        stream = bisect_right(self._ends, number)
        first_batch = self._ends[stream - 1] if stream else 0
        bucket = self.buckets[stream] if self.buckets else None
        return ordered_share(self.orders[stream], stream, 0, number - first_batch, rank, world_size, bucket)

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        return {}

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        if not self.buckets:
            return {"global_batch": self.orders[0].batch, "order": ["evaluation"]}
        return {"buckets": self.name, "order": ["evaluation"]}

    @cached_property
    def _ends(self) -> list[int]:
        """For each stream, the number of the batch after its last batch."""
        return list(accumulate(order.full_batches + (order.tail > 0) for order in self.orders))
