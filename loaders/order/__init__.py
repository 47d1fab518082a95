"""Which samples make the t-th global batch: pure arithmetic, with no files, no threads and no torch.

Start with `lanes` (the order of one dataset); the others build on it. Everything here is a function of a description and a
position, so seeking costs what going on costs, and no rank has to be told what another one does.
The public names load their modules on first use: a plain order needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.lazy import exports

if TYPE_CHECKING:
    from headrace.loaders.order.buckets import Bucket, Bucketed, Buckets, Durations
    from headrace.loaders.order.evaluation import Evaluation
    from headrace.loaders.order.lanes import MAX_LANES, Order, lanes_for
    from headrace.loaders.order.mixed_buckets import MixedBuckets
    from headrace.loaders.order.mixture import Mixed
    from headrace.loaders.order.packing import Packing
    from headrace.loaders.order.quality import Quality
    from headrace.loaders.order.schedule import Plain, Population, Schedule, Share

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
    "MAX_LANES": "headrace.loaders.order.lanes",
    "Bucket": "headrace.loaders.order.buckets",
    "Bucketed": "headrace.loaders.order.buckets",
    "Buckets": "headrace.loaders.order.buckets",
    "Durations": "headrace.loaders.order.buckets",
    "Evaluation": "headrace.loaders.order.evaluation",
    "Mixed": "headrace.loaders.order.mixture",
    "MixedBuckets": "headrace.loaders.order.mixed_buckets",
    "Order": "headrace.loaders.order.lanes",
    "Packing": "headrace.loaders.order.packing",
    "Plain": "headrace.loaders.order.schedule",
    "Population": "headrace.loaders.order.schedule",
    "Quality": "headrace.loaders.order.quality",
    "Schedule": "headrace.loaders.order.schedule",
    "Share": "headrace.loaders.order.schedule",
    "lanes_for": "headrace.loaders.order.lanes",
}

__getattr__, __dir__ = exports(__name__, _HOME)
