"""Which samples make the t-th global batch: pure arithmetic, with no files, no threads and no torch.

Start with `lanes` (the order of one dataset); the others build on it. Everything here is a function of a description and a
position, so seeking costs what going on costs, and no rank has to be told what another one does.
The public names load their modules on first use: a plain order needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loaders.order.buckets import Bucket, Bucketed, Buckets, Durations
    from loaders.order.evaluation import Evaluation
    from loaders.order.lanes import MAX_LANES, Order, lanes_for
    from loaders.order.mixed_buckets import MixedBuckets
    from loaders.order.mixture import Mixed
    from loaders.order.packing import Packing
    from loaders.order.quality import Quality
    from loaders.order.schedule import Plain, Population, Schedule, Share

__all__ = [
    "MAX_LANES",
    "Bucket",
    "Bucketed",
    "Buckets",
    "Durations",
    "Evaluation",
    "Mixed",
    "MixedBuckets",
    "Order",
    "Packing",
    "Plain",
    "Population",
    "Quality",
    "Schedule",
    "Share",
    "lanes_for",
]

_HOME = {
    "MAX_LANES": "lanes",
    "Bucket": "buckets",
    "Bucketed": "buckets",
    "Buckets": "buckets",
    "Durations": "buckets",
    "Evaluation": "evaluation",
    "Mixed": "mixture",
    "MixedBuckets": "mixed_buckets",
    "Order": "lanes",
    "Packing": "packing",
    "Plain": "schedule",
    "Population": "schedule",
    "Quality": "quality",
    "Schedule": "schedule",
    "Share": "schedule",
    "lanes_for": "lanes",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
