"""Which samples make the t-th global batch: pure arithmetic, with no files, no threads and no torch.

Start with `lanes` (the order of one dataset); the others build on it. Everything here is a function of a description and a
position, so seeking costs what going on costs, and no rank has to be told what another one does.
"""

from __future__ import annotations

from loaders.order.buckets import Bucket, Bucketed, Buckets, Durations
from loaders.order.evaluation import Evaluation
from loaders.order.lanes import MAX_LANES, Order, lanes_for
from loaders.order.mixed_buckets import MixedBuckets
from loaders.order.mixture import Mixed
from loaders.order.packing import Packing
from loaders.order.quality import Quality, quality
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
    "quality",
]
