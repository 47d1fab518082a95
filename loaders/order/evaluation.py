"""Every sample once, on any number of ranks, with no padding and no sample left over.

Purpose: metrics that are exact. Padding the last batch counts samples twice, dropping it leaves some out.

Samples come in the order of their numbers, in global batches of one size; the last one, which may be short, is shared as
evenly as it goes. All ranks take equally many steps, so collectives and DDP stay in step; in a short step some ranks may
get fewer samples, or none: they are *dry*, and every rank is told which. Several streams (sources of a mixture, buckets) come
one after the other, each with a tail of its own, so every batch is of one stream and figures by source need no sorting.

Invariants: the shares of all ranks and steps together are each stream's 0 … samples-1, each once, whatever the world size. Only
the last step of a stream has dry ranks.
Failure behaviour: `UsageError` for a dataset without samples, and a batch out of range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

from headrace.dataio.core.errors import UsageError
from headrace.loaders.order.lanes import Order
from headrace.loaders.order.permutation import key_of, short
from headrace.loaders.order.schedule import Population, Share, ordered_share


@dataclass(frozen=True)
class Evaluation:
    """A `Schedule`; its epochs are all the same. Make one with `Evaluation.of`. `buckets` says which each stream is, and
    `name` stands for all buckets there are."""

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
        """Streams, and the sizes of their global batches. The seed is for clips that begin at random; `numbers` stand for
        the buckets."""
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
        first = self._ends[stream - 1] if stream else 0
        bucket = self.buckets[stream] if self.buckets else None
        return ordered_share(self.orders[stream], stream, 0, number - first, rank, world_size, bucket)

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        return {}

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        if not self.buckets:
            return {"global_batch": self.orders[0].batch, "order": ["evaluation"]}
        return {"buckets": self.name, "order": ["evaluation"]}

    @cached_property
    def _ends(self) -> list[int]:
        """The batch after the last one of each stream."""
        return list(accumulate(order.full_batches + (order.tail > 0) for order in self.orders))
