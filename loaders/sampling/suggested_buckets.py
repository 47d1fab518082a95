"""Suggests buckets for the videos and images of a dataset, from their shapes in the index.

Purpose: `headrace order --suggest-buckets` prints shapes for `Buckets`, the share of the samples in each, and how much
of the pixels they crop.
Method: an aspect ratio is a point on the line of its logarithm. The ratios of the samples are divided into intervals,
so that the sum of the squared distances to the mean of an interval is the smallest. Dynamic programming finds this
division exactly. The side of a bucket is then a multiple of `multiple`, and its area is that of `size`.
Invariants: the result depends on the shapes and their counts, and not on their order. Memory does not grow with the
number of samples: the shapes are counted part by part, and at most `MAX_RATIOS` different ratios are kept.
Failure behaviour: `UsageError` if there is no sample with pixels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.media.container import IMAGE_EXTENSIONS
from headrace.loaders.sampling.buckets import Bucket, Buckets

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

MAX_RATIOS = 1024
Shapes = Mapping[tuple[int, int], int]
"""Number of samples of each (height, width)."""
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SuggestedBucket:
    """One bucket.

    Args:
        size: height and width in pixels.
        share: share of the samples that go to it.
        waste: share of the pixels of these samples that is cropped.
        enlarged: share of these samples that are smaller than the bucket, so they are enlarged.
    """

    size: tuple[int, int]
    share: float
    waste: float
    enlarged: float


@dataclass(frozen=True)
class CountedShapes:
    """The displayed shapes of a dataset's samples. An image is a clip of one frame."""

    videos: Counter[tuple[int, int]]
    images: Counter[tuple[int, int]]


def is_image(table: Any) -> npt.NDArray[np.bool_]:
    """Which rows are images. `table` has the column `video_ext`."""
    import pyarrow as pa  # imported late: not all loaders need it

    from headrace.dataio.shards.index import arrow as pc

    found: npt.NDArray[np.bool_] = pc.is_in(
        table["video_ext"], pa.array(sorted(IMAGE_EXTENSIONS), pa.string())
    ).to_numpy()
    return found


def shapes_of(dataset: Dataset) -> CountedShapes:
    """Count the displayed shapes of the samples that have pixels."""
    counted = CountedShapes(Counter(), Counter())
    for table in dataset.index.tables(["height", "width", "rotation", "video_ext"]):
        height, width, rotation = (
            np.nan_to_num(table[name].to_numpy().astype(np.float64)) for name in ("height", "width", "rotation")
        )
        turned, image = rotation % 180 == 90, is_image(table)
        sides = np.stack([np.where(turned, width, height), np.where(turned, height, width)], axis=1).astype(np.int64)
        has_pixels = (sides > 0).all(axis=1)
        for shapes, chosen in ((counted.videos, has_pixels & ~image), (counted.images, has_pixels & image)):
            kinds, counts = np.unique(sides[chosen], axis=0, return_counts=True)
            for (tall, wide), count in zip(kinds.tolist(), counts.tolist(), strict=True):
                shapes[tall, wide] += count
    return counted


def suggest(shapes: Shapes, buckets: int, size: tuple[int, int], multiple: int = 16) -> list[SuggestedBucket]:
    """Return up to `buckets` buckets for samples of these shapes, the one with most samples first.

    Args:
        shapes: number of samples of each shape.
        buckets: number of buckets; fewer are returned if there are fewer different ones.
        size: height and width whose product is the area of each bucket, in pixels.
        multiple: each side is a multiple of it, in pixels.
    """
    if not shapes:
        raise UsageError("the dataset has no videos or images", hint="`headrace info` lists its contents")
    heights, widths = (np.array(sides, np.float64) for sides in zip(*shapes, strict=True))
    counts = np.array(list(shapes.values()), np.float64)
    ratios, weights = _binned(np.log(widths / heights), counts)
    sizes = {_size(ratio, size[0] * size[1], multiple): None for ratio in _centres(ratios, weights, buckets)}
    return _measured(list(sizes), heights, widths, counts)


def _binned(logs: F64, counts: F64) -> tuple[F64, F64]:
    """Different ratios in ascending order, and the samples of each. Many are joined to at most `MAX_RATIOS`."""
    span = float(logs.max() - logs.min())
    width = max(1e-6, span / (MAX_RATIOS - 1))
    number = np.rint((logs - logs.min()) / width).astype(np.int64)
    weights: F64 = np.bincount(number, counts).astype(np.float64)
    sums: F64 = np.bincount(number, counts * logs).astype(np.float64)
    used = weights > 0
    return sums[used] / weights[used], weights[used]


def _centres(points: F64, weights: F64, groups: int) -> F64:
    """The means of the best division of these ascending points into at most `groups` intervals."""
    count = len(points)
    groups = min(groups, count)
    total, first, second = (
        np.concatenate([[0.0], np.cumsum(weights * points**power)]) for power in (0, 1, 2)
    )  # fmt: skip

    def cost(start: npt.NDArray[np.int64], end: int) -> F64:
        """The squared distances of the points from `start` to `end` to their mean."""
        mass, moment = total[end] - total[start], first[end] - first[start]
        distances: F64 = np.maximum(second[end] - second[start] - moment**2 / mass, 0.0)
        return distances

    best = np.full((groups + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    begin = np.zeros((groups + 1, count + 1), np.int64)
    for group in range(1, groups + 1):
        for end in range(group, count + 1):
            starts = np.arange(group - 1, end)
            costs = best[group - 1, starts] + cost(starts, end)
            chosen = int(costs.argmin())
            best[group, end], begin[group, end] = costs[chosen], starts[chosen]
    centres, end = list[float](), count
    for group in range(groups, 0, -1):
        start = int(begin[group, end])
        centres.append(float((first[end] - first[start]) / (total[end] - total[start])))
        end = start
    return np.array(centres[::-1])


def _size(log_ratio: float, area: int, multiple: int) -> tuple[int, int]:
    """The sides of a bucket with this ratio and about this area."""
    wide, tall = (area * np.exp(log_ratio)) ** 0.5, (area * np.exp(-log_ratio)) ** 0.5
    height, width = (max(multiple, round(side / multiple) * multiple) for side in (tall, wide))
    return int(height), int(width)


def _measured(sizes: list[tuple[int, int]], heights: F64, widths: F64, counts: F64) -> list[SuggestedBucket]:
    """What `Buckets.assign` makes of these sizes."""
    buckets = Buckets(tuple(map(Bucket, sizes)), budget=max(height * width for height, width in sizes))
    lengths = np.ones(len(counts))
    chosen = buckets.assign(heights.astype(np.int64), widths.astype(np.int64), lengths, frames=1)
    suggested = list[SuggestedBucket]()
    for number, (height, width) in enumerate(sizes):
        inside = chosen == number
        weight = counts[inside]
        if not weight.sum():
            continue
        ratio = (widths[inside] / heights[inside]) / (width / height)
        waste = 1 - np.minimum(ratio, 1 / ratio)
        enlarged = (heights[inside] < height) | (widths[inside] < width)
        share, lost, grown = weight.sum() / counts.sum(), (weight * waste).sum(), (weight * enlarged).sum()
        suggested.append(
            SuggestedBucket((height, width), float(share), float(lost / weight.sum()), float(grown / weight.sum()))
        )
    return sorted(suggested, key=lambda one: -one.share)
