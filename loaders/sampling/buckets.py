"""Batches of clips of one shape: buckets by size, aspect ratio and length, with a token budget for each batch.

Purpose: train on every clip close to its own shape, without padding, and with about the same work in every step.

Rules choose the bucket of a clip. Each rule chooses among the buckets that the rule before it left:

0. If some buckets have one frame and others more: those of one frame for images and for videos that provide one
   frame only, and the others for all other videos.
1. The nearest aspect ratio.
2. The largest size that does not enlarge the clip; if there is none, the smallest.
3. The longest length that the video fills; if there is none, the shortest.

The budget counts tokens of the *global* batch, so a batch does not depend on the world size. A clip costs the product
of its frames, height and width, each divided by `patch` and rounded up. A bucket's global batch has floor(budget /
cost) clips, rounded down to a multiple of `multiple`. Ranks share it in contiguous parts that differ by one clip at
most, and are equal for every world size that divides `multiple`.

Invariants:
- Each bucket is a stream with an `Order` of its own.
- `Interleave` distributes the batches of the buckets evenly over the epoch, with a different start in every epoch.
- Each clip is taken once in an epoch. With `drop_last`, clips that fill no complete batch of their bucket are dropped.
  Every epoch drops others, except in a bucket with fewer clips than one batch: these are never taken (see `left_out`).
- The result is pure and does not depend on the world size. A seek costs O(log buckets).

Failure behaviour: `UsageError` for impossible buckets, for a budget below one clip of a bucket, and for a dataset that
fills no batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.loaders.sampling.interleave import Interleave
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64, key_of, short
from headrace.loaders.sampling.schedule import Population, Share, ordered_share, orders_digest
from headrace.loaders.validation import check_fields, checked

MAX_BUCKETS = 256
MAX_SIDE = 16_384
_START = 8  # a purpose of `key_of` that no other module uses
_SAME = 1e-6  # aspect ratios that differ by less are treated as equal

F64 = npt.NDArray[np.float64]


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape of clips.

    Args:
        size (tuple[int, int]): height and width in pixels, 1 to 16384 each.
        frames (int | None): number of frames of a clip. Default: the loader's `Clip.frames`.

    Raises:
        UsageError: for an impossible shape.

    Example:
        >>> Bucket((256, 448), frames=16).size
        (256, 448)
    """

    size: tuple[int, int]
    frames: int | None = None

    def __post_init__(self) -> None:
        checked("Bucket's size", self.size, tuple[int, int], "a height and a width, such as Bucket((192, 336))")
        check_fields(self)
        if not all(1 <= n <= MAX_SIDE for n in (*self.size, 1 if self.frames is None else self.frames)):
            raise UsageError(
                f"{self} is not a bucket", hint=f"height, width and frames are numbers from 1 to {MAX_SIDE}"
            )


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Buckets:
    """Batches of clips of one shape each, with as many clips as a budget of tokens allows.

    Args:
        buckets (tuple[Bucket, ...]): the shapes, all different, at most 256.
        budget (int): maximum number of tokens in a global batch.
        patch (tuple[int, int, int]): frames, height and width of a token, in frames and pixels. Default: (1, 1, 1), one
            token per pixel.
        multiple (int): the number of clips in a global batch is a multiple of this. Default: 1.
        short_as_images (bool): where some buckets have one frame and others more, give one-frame buckets also the
            videos that are too short for all others. With False, such a video repeats its last frame. Default: False.

    Raises:
        UsageError: for impossible buckets, or a budget below one batch.

    Example:
        >>> shapes = Buckets((Bucket((256, 256)), Bucket((256, 448))), budget=32 * 256 * 448)
        >>> shapes.batches(frames=4)
        [14, 8]
    """

    buckets: tuple[Bucket, ...]
    budget: int
    patch: tuple[int, int, int] = (1, 1, 1)
    multiple: int = 1
    short_as_images: bool = False

    def __post_init__(self) -> None:
        example = "the buckets as (Bucket((256, 256)), Bucket((192, 336)))"
        checked("Buckets's buckets", self.buckets, tuple[Bucket, ...], example)
        check_fields(self)
        if not 1 <= len(self.buckets) <= MAX_BUCKETS:
            raise UsageError(f"there are {len(self.buckets)} buckets", hint=f"give 1 to {MAX_BUCKETS}")
        if twice := [name for name, count in Counter(self.names()).items() if count > 1]:
            raise UsageError(f"the bucket {twice[0]} is given twice", hint="give each bucket once")
        if min(self.budget, self.multiple, *self.patch) < 1:
            raise UsageError(f"{self} is not possible", hint="budget, multiple and patch are positive numbers")

    def cost(self, bucket: int, frames: int) -> int:
        """Tokens of a clip. `frames` is the loader's number of frames, for buckets without their own."""
        one = self.buckets[bucket]
        sides = (one.frames or frames, *one.size)
        tokens = [-(-side // patch) for side, patch in zip(sides, self.patch, strict=True)]
        return tokens[0] * tokens[1] * tokens[2]

    def batch(self, bucket: int, frames: int) -> int:
        """Number of clips in a global batch of this bucket."""
        cost = self.cost(bucket, frames)
        count = self.budget // cost // self.multiple * self.multiple
        if count < 1:
            raise UsageError(
                f"the budget of {self.budget} pays for no batch of {self.buckets[bucket]}: a clip costs {cost}, "
                f"and {self.multiple} are needed",
                hint="raise the budget, or drop the bucket",
            )
        return count

    def batches(self, frames: int) -> list[int]:
        """Number of clips in a global batch of each bucket."""
        return [self.batch(bucket, frames) for bucket in range(len(self.buckets))]

    def numbers(self, frames: int) -> list[int]:
        """Numbers that identify these buckets in states."""
        shapes = [n for bucket in self.buckets for n in (*bucket.size, bucket.frames or frames)]
        images = [1 + self.short_as_images] if self._divides_images(frames) else []
        return [*shapes, self.budget, *self.patch, self.multiple, *images]

    def names(self) -> list[str]:
        """The shape of each bucket as text, such as "192x336", or "192x336x32" if it has its own number of frames."""
        return ["x".join(map(str, (*one.size, *([one.frames] if one.frames else [])))) for one in self.buckets]

    def takes_images(self, frames: int) -> bool:
        """Whether a bucket has one frame, which an image fills. `frames` is as in `cost`."""
        return any((bucket.frames or frames) == 1 for bucket in self.buckets)

    def _divides_images(self, frames: int) -> bool:
        """Whether some buckets have one frame and others more."""
        return len({(bucket.frames or frames) == 1 for bucket in self.buckets}) == 2

    def assign(self, heights: I64, widths: I64, lengths: F64, frames: int) -> I64:
        """The bucket of each video, from its displayed height and width and the number of frames that it provides.

        Videos that have the same size, and fill the same lengths, are in the same bucket. So only one of them is
        assigned by the rules.
        """
        lengths_of_buckets = sorted({bucket.frames or frames for bucket in self.buckets})
        lengths_of_buckets += [2] * self._divides_images(frames)  # images provide one frame
        filled = (np.array(lengths_of_buckets)[None, :] <= lengths[:, None]).sum(axis=1)
        kind = (heights * (int(widths.max(initial=0)) + 1) + widths) * (len(lengths_of_buckets) + 1) + filled
        _, first, kind_of_video = np.unique(kind, return_index=True, return_inverse=True)
        chosen: I64 = self._assign_by_rules(heights[first], widths[first], lengths[first], frames)[kind_of_video]
        return chosen

    def _assign_by_rules(self, heights: I64, widths: I64, lengths: F64, frames: int) -> I64:
        """The bucket of each video, by the rules."""
        shapes = np.array([bucket.size for bucket in self.buckets], np.float64)
        wanted = np.array([bucket.frames or frames for bucket in self.buckets], np.float64)
        away = np.abs(np.log(widths / heights)[:, None] - np.log(shapes[:, 1] / shapes[:, 0])[None, :])
        if self._divides_images(frames):
            shortest = wanted[wanted > 1].min()
            is_image = ~(lengths >= (shortest if self.short_as_images else 2))
            away[is_image[:, None] != (wanted == 1)[None, :]] = np.inf
        left = away <= away.min(axis=1, keepdims=True) + _SAME
        enlarged = (shapes[None, :, 0] > heights[:, None]) | (shapes[None, :, 1] > widths[:, None])
        left = _largest(left, ~enlarged, np.broadcast_to(shapes.prod(axis=1), left.shape))
        left = _largest(left, wanted[None, :] <= lengths[:, None], np.broadcast_to(wanted, left.shape))
        chosen: I64 = left.argmax(axis=1).astype(np.int64)
        return chosen


def _largest(left: npt.NDArray[np.bool_], fits: npt.NDArray[np.bool_], value: F64) -> npt.NDArray[np.bool_]:
    """In each row, the candidates `left` with the largest value that fits, or with the smallest if none fits."""
    some = (left & fits).any(axis=1, keepdims=True)
    largest = np.where(left & fits, value, -np.inf).max(axis=1, keepdims=True)
    smallest = np.where(left, value, np.inf).min(axis=1, keepdims=True)
    kept: npt.NDArray[np.bool_] = left & (value == np.where(some, largest, smallest))
    return kept


@suggests_arguments()
@dataclass(frozen=True, slots=True)
class Durations:
    """Batches of recordings of one length each, within a budget of seconds.

    A recording gets the shortest length that holds all of it. A recording that is longer than all lengths is cut to the
    longest one.

    Args:
        seconds (tuple[float, ...]): the lengths in seconds, in increasing order, at most 256.
        budget (float): maximum number of seconds of audio in a global batch, including the silence that pads its
            recordings.
        multiple (int): the number of recordings in a global batch is a multiple of this. Default: 1.

    Raises:
        UsageError: for impossible lengths, or a budget below one batch.

    Example:
        >>> Durations((2, 5, 15), budget=60).batches()
        [30, 12, 4]
    """

    seconds: tuple[float, ...]
    budget: float
    multiple: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        grows = all(0 < shorter < longer for shorter, longer in pairwise((*self.seconds, math.inf)))
        if not 1 <= len(self.seconds) <= MAX_BUCKETS or not grows or self.multiple < 1:
            raise UsageError(f"{self} is not possible", hint=f"1 to {MAX_BUCKETS} growing lengths, multiple at least 1")
        if not self.seconds[-1] * self.multiple <= self.budget < math.inf:
            raise UsageError(
                f"the budget of {self.budget} s pays for no batch of {self.seconds[-1]} s", hint="raise it"
            )

    def batches(self) -> list[int]:
        """Number of recordings in a global batch of each bucket."""
        return [int(self.budget / one + _SAME) // self.multiple * self.multiple for one in self.seconds]

    def numbers(self) -> list[int]:
        """Numbers that identify these buckets in states."""
        return [*(round(one * 1e6) for one in (*self.seconds, self.budget)), self.multiple]

    def names(self) -> list[str]:
        """The length of each bucket as text, such as "5 s"."""
        return [f"{one:g} s" for one in self.seconds]

    def assign(self, seconds: F64) -> I64:
        """The bucket of each recording."""
        chosen = np.searchsorted(np.asarray(self.seconds) + _SAME, seconds, side="left")
        return np.minimum(chosen, len(self.seconds) - 1).astype(np.int64)


@dataclass(frozen=True)
class Bucketed:
    """A `Schedule` whose streams are the buckets that have samples. `name` identifies the buckets in states."""

    evaluates: ClassVar[bool] = False

    orders: tuple[Order, ...]
    buckets: tuple[int, ...]
    """The bucket of each stream."""
    name: str
    drop_last: bool = True
    seed: int = 0

    @classmethod
    def of(
        cls,
        batches: Sequence[int],
        populations: Sequence[Population],
        numbers: Sequence[int],
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        names: Sequence[str] = (),
    ) -> Bucketed:
        """The schedule for buckets with these global batch sizes and populations.

        `numbers` identify the buckets in states, and `names` in errors.
        """
        there = tuple(bucket for bucket, population in enumerate(populations) if population.samples)
        orders = tuple(populations[bucket].order(batches[bucket], seed, shuffle) for bucket in there)
        made = cls(orders, there, short(key_of(*numbers)), drop_last, seed)
        if not made.batches:
            raise _no_batch_error(names or [str(bucket) for bucket in range(len(batches))], populations, batches)
        return made

    @property
    def batches(self) -> int:
        return sum(self._counts)

    def share(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> Share:
        """The part of `rank` in batch `number` of `epoch`, all of one bucket."""
        if not 0 <= number < self.batches:
            raise UsageError(f"batch {number} is outside the epoch's {self.batches} batches")
        offset = int(key_of(_START, self.seed, epoch)[0]) % self.batches
        place = np.array([number])
        stream = self._interleave.stream(place, offset)
        before = int(self._interleave.before(stream, place, offset)[0])
        only = int(stream[0])
        return ordered_share(self.orders[only], only, epoch, before, rank, world_size, self.buckets[only])

    def taken(self, epoch: int, number: int) -> dict[str, int]:
        return {}

    def described(self, epoch: int = 0, number: int = 0) -> dict[str, Any]:
        return {
            "buckets": self.name,
            "order": [orders_digest(self.orders), *(("drop_last",) if self.drop_last else ())],
        }

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(order.full_batches + (not self.drop_last and order.tail > 0) for order in self.orders)

    @cached_property
    def _interleave(self) -> Interleave:
        return Interleave(self._counts)


def _no_batch_error(names: Sequence[str], populations: Sequence[Population], batches: Sequence[int]) -> UsageError:
    """The error of buckets of which none fills a batch."""
    from headrace.loaders.sampling.never_delivered import list_small_buckets, small_buckets

    small = small_buckets(names, [population.virtual for population in populations], batches)
    counts = f": {list_small_buckets(small)}" if small else ""
    return UsageError(
        f"no bucket has enough clips for a whole batch{counts}",
        hint="lower the budget, use fewer buckets, or give drop_last=False",
    )
