"""Which samples make the t-th global batch: pure arithmetic, with no files, no threads and no torch.

Start with `lanes` (the order of one dataset); the others build on it. Everything here is a function of a description
and a position, so seeking costs what going on costs, and no rank has to be told what another one does. The public names
load their modules on first use: a plain order needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.dataio.core.lazy import exports

if TYPE_CHECKING:
    from headrace.loaders.sampling.buckets import Bucket, Bucketed, Buckets, Durations
    from headrace.loaders.sampling.mixed_buckets import MixedBuckets
    from headrace.loaders.sampling.mixture import Mixed
    from headrace.loaders.sampling.order import MAX_LANES, Order, lanes_for
    from headrace.loaders.sampling.packing import Packing
    from headrace.loaders.sampling.quality import Quality
    from headrace.loaders.sampling.schedule import Evaluation, Plain, Population, Schedule, Share

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
    "MAX_LANES": "headrace.loaders.sampling.order",
    "Bucket": "headrace.loaders.sampling.buckets",
    "Bucketed": "headrace.loaders.sampling.buckets",
    "Buckets": "headrace.loaders.sampling.buckets",
    "Durations": "headrace.loaders.sampling.buckets",
    "Evaluation": "headrace.loaders.sampling.schedule",
    "Mixed": "headrace.loaders.sampling.mixture",
    "MixedBuckets": "headrace.loaders.sampling.mixed_buckets",
    "Order": "headrace.loaders.sampling.order",
    "Packing": "headrace.loaders.sampling.packing",
    "Plain": "headrace.loaders.sampling.schedule",
    "Population": "headrace.loaders.sampling.schedule",
    "Quality": "headrace.loaders.sampling.quality",
    "Schedule": "headrace.loaders.sampling.schedule",
    "Share": "headrace.loaders.sampling.schedule",
    "lanes_for": "headrace.loaders.sampling.order",
}

__getattr__, __dir__ = exports(__name__, _HOME)
