"""What a loader gives, taken and compared."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Batch = dict[str, Any]


def take(loader: Iterable[Batch], count: int) -> list[Batch]:
    """So many batches, over the ends of epochs."""
    batches: list[Batch] = []
    while len(batches) < count:
        for batch in loader:
            batches.append(batch)
            if len(batches) == count:
                break
    return batches


def same(one: Batch, other: Batch) -> bool:
    """Whether all of it is equal to the bit."""
    return one.keys() == other.keys() and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one.values(), other.values(), strict=True)
    )
