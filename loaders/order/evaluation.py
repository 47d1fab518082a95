"""Every sample once, on any number of ranks, with no padding and no sample left over.

Purpose: metrics that are exact. Padding the last batch counts samples twice, dropping it leaves some out.

Samples come in the order of their numbers, in global batches of `batch`; the last one, which may be short, is shared as
evenly as it goes. All ranks take equally many steps, so collectives and DDP stay in step; in the last step some ranks may
get fewer samples, or none: they are *dry*, and every rank is told which.

Invariants: the shares of all ranks and steps together are 0 … samples-1, each once, whatever the world size. Only the last
step has dry ranks.
Failure behaviour: `UsageError` for a dataset without samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loaders.order.lanes import Order
from loaders.order.schedule import Population, Share, ordered_share


@dataclass(frozen=True)
class Evaluation:
    """A `Schedule`; its epochs are all the same. Make one with `Evaluation.of`."""

    order: Order

    @classmethod
    def of(cls, population: Population, batch: int, *, seed: int = 0) -> Evaluation:
        """The seed is for clips that begin at random."""
        return cls(population.order(batch, seed, shuffle=False))

    @property
    def batches(self) -> int:
        return self.order.full_batches + (self.order.tail > 0)

    @property
    def orders(self) -> Sequence[Order]:
        return (self.order,)

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in batch `number`, the same in every epoch."""
        return ordered_share(self.order, 0, 0, number, rank, world_size)

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        return {"global_batch": self.order.batch, "order": "evaluation"}


def dry(share: Share) -> list[int]:
    """The ranks that get nothing of this batch."""
    return [rank for rank, size in enumerate(share.sizes) if not size]
