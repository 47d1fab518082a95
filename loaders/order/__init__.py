"""Which samples make the t-th global batch: pure arithmetic, with no files, no threads and no torch.

Start with `lanes` (the order of one dataset); the others build on it. Everything here is a function of a description and a
position, so seeking costs what going on costs, and no rank has to be told what another one does.
The public names load their modules on first use: a plain order needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataio.core.lazy import exports

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
    "MAX_LANES": "loaders.order.lanes",
    "Bucket": "loaders.order.buckets",
    "Bucketed": "loaders.order.buckets",
    "Buckets": "loaders.order.buckets",
    "Durations": "loaders.order.buckets",
    "Evaluation": "loaders.order.evaluation",
    "Mixed": "loaders.order.mixture",
    "MixedBuckets": "loaders.order.mixed_buckets",
    "Order": "loaders.order.lanes",
    "Packing": "loaders.order.packing",
    "Plain": "loaders.order.schedule",
    "Population": "loaders.order.schedule",
    "Quality": "loaders.order.quality",
    "Schedule": "loaders.order.schedule",
    "Share": "loaders.order.schedule",
    "lanes_for": "loaders.order.lanes",
}

__getattr__, __dir__ = exports(__name__, _HOME)
