"""Finds the samples that no epoch delivers, and logs how many there are.

Purpose: a loader leaves two kinds of samples out of every epoch, not only of one. A user must learn of both:

1. The clips of a bucket that has fewer clips than one of its global batches, with `drop_last` and without a mixture.
   A mixture begins the next epoch of a source in the middle of a batch, so it delivers all of them.
2. Images, if all clips have several frames.

Invariants: the counts depend on the index only. All ranks compute the same counts, and rank 0 of the job logs them, once.
The number of images costs a second pass over one column of the index. This pass is left out if the version document
already says that all samples are videos.
Failure behaviour: errors of the index are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.dataio.core.log import get_logger, warn_once
from headrace.loaders.sampling.columns import AllOf, HasFiles, HasValue, samples_where

if TYPE_CHECKING:
    from headrace.dataio.shards.dataset import Dataset

_NAMED = 8
_log = get_logger(__name__)


@dataclass(frozen=True)
class SmallBucket:
    """A bucket with fewer clips than one of its global batches.

    Args:
        bucket: number of the bucket.
        name: its shape, such as "336x192".
        clips: number of clips in it.
        batch: number of clips in a global batch of it.
    """

    bucket: int
    name: str
    clips: int
    batch: int


def small_buckets(names: Sequence[str], clips: Sequence[int], batches: Sequence[int]) -> list[SmallBucket]:
    """The buckets that have clips, but too few for a global batch. The arguments have an entry for each bucket."""
    found = map(SmallBucket, range(len(names)), names, clips, batches)
    return [one for one in found if 0 < one.clips < one.batch]


def list_small_buckets(small: Sequence[SmallBucket]) -> str:
    """List the buckets with their numbers of clips, at most the first eight."""
    named = [f"{one.name} has {one.clips}, and its global batch {one.batch}" for one in small[:_NAMED]]
    named += [f"and {len(small) - _NAMED} more buckets"] if len(small) > _NAMED else []
    return "; ".join(named)


def describe_small_buckets(url: str, small: Sequence[SmallBucket]) -> str:
    """Say which clips of the dataset at `url` are never delivered, and what to do. `small` is not empty."""
    total = sum(one.clips for one in small)
    return (
        f"{_counted(total, 'clip')} of {url} are never delivered, since a bucket has fewer clips than one global batch: "
        f"{list_small_buckets(small)}. Lower the budget, use fewer buckets, or give drop_last=False"
    )


def warn_of_small_buckets(url: str, small: Sequence[SmallBucket]) -> None:
    """Log which clips are never delivered, once for each job."""
    if small:
        warn_once(_log, describe_small_buckets(url, small), "job")


def images_left_out(dataset: Dataset, condition: AllOf, taken: int) -> int:
    """The number of samples that meet `condition`, apart from being images.

    Args:
        dataset: the dataset.
        condition: the loader's condition. It excludes images if one of its parts has `without`.
        taken: number of samples that meet `condition`.
    """
    relaxed = tuple(_with_images(part) for part in condition.conditions)
    if relaxed == condition.conditions or taken == len(dataset):
        return 0
    return len(samples_where(dataset, AllOf(relaxed))) - taken


def describe_images(url: str, images: int) -> str:
    """Say that images of the dataset at `url` are left out, and what to do."""
    return (
        f"{_counted(images, 'image')} of {url} are left out, since all clips have several frames. "
        "Clip(frames=1), or a bucket with frames=1, takes images"
    )


def warn_of_images(dataset: Dataset, condition: AllOf, taken: int) -> int:
    """Log how many images are left out, once for each job, and return the number.

    The arguments are those of `images_left_out`.
    """
    if images := images_left_out(dataset, condition, taken):
        warn_once(_log, describe_images(dataset.url, images), "job")
    return images


def _with_images(part: HasValue | HasFiles) -> HasValue | HasFiles:
    return replace(part, without=()) if isinstance(part, HasValue) else part


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
