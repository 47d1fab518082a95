"""The global order of samples: a pure function of (dataset version, seed, epoch).

Purpose: compute which sample is at any position of any epoch, in O(1) and without a table of the samples.

The order is built in four steps:

1. The samples are cut into chunks of `chunk` consecutive samples, so a chunk is one or two short ranges of one shard.
2. A fixed permutation distributes the chunks over K `lanes`, in the same way in all epochs. So the same node reads a
   lane's chunks in every epoch, and its cache stays useful. Slot s of a batch of size G is in lane floor(s * K / G).
3. In each lane, the chunks are shuffled for every (seed, epoch).
4. The shuffled chunks are cut into windows of `window` chunks, and the samples of each window are shuffled. Windows of
   different lanes are staggered, so that they do not all begin in the same batch.

Invariants, for any number of samples n and any G:
- Positions 0 … n-1 of an epoch are a permutation of the samples. Position t * G + s is slot s of global batch t.
- World size and number of threads are not parameters. A rank takes a contiguous part of each batch's slots.
- K divides G. Every lane fills the same number of positions, q = floor(n / G) * G / K. If a lane has fewer samples, its
  last positions take samples that longer lanes have beyond q. Prefix sums over the lanes decide which.
- The remaining n mod G samples are the epoch's tail. They form its last, short batch, or are dropped.
- Memory is O(K). Seeking costs no more than continuing.

Failure behaviour: `UsageError` for an impossible description, or for a position or rank that is out of range.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB
from headrace.loaders.sampling.permutation import I64, U64, key_of, permute, unpermute

MAX_LANES = 240
"""Maximum number of lanes. There should be more lanes than nodes. 240 has more divisors than any smaller number."""
CHUNKS_PER_LANE = 16
"""Minimum number of chunks in a lane. With fewer chunks, a lane would shuffle poorly and lanes would differ in length.
Small datasets get fewer lanes instead."""
WINDOW_CHUNKS = 256
"""Chunks in the windows of all lanes together. With chunks of 8 MiB, samples are shuffled over 2 GiB."""
CHUNK_BYTES = 8 * MIB
NEIGHBOURS = 16
"""Minimum number of samples that can replace each other, if the dataset has that many."""

# purposes of `key_of`: each purpose has its own keys
_DEAL, _CHUNKS, _WINDOW, _SUBSTITUTE = 1, 2, 3, 4


@dataclass(frozen=True)
class Order:
    """The order of one dataset, as a frozen description. Its methods are pure. Create one with `Order.of`.

    Args:
        samples (int): number of virtual samples: samples times clips of each sample.
        batch (int): size of the global batch.
        chunk (int): virtual samples in a chunk.
        lanes (int): number of lanes; it divides `batch`.
        window (int): chunks in a window, whose samples are shuffled together.
        seed (int): seed of the shuffle. Default: 0.
        shuffle (bool): False keeps the samples in the order of their ids. Default: True.

    Raises:
        UsageError: for an impossible order.

    Example:
        >>> order = Order.of(1000, batch=8, seed=1)
        >>> len(order.batch_of(epoch=0, number=0))
        8
    """

    samples: int
    batch: int
    chunk: int
    lanes: int
    window: int
    seed: int = 0
    shuffle: bool = True

    @classmethod
    def of(
        cls, samples: int, batch: int, *, sample_bytes: float = 0.0, seed: int = 0, shuffle: bool = True, clips: int = 1
    ) -> Order:
        """The order of `samples` samples in batches of `batch`.

        `sample_bytes` is the mean size of a sample, and `clips` the number of clips of each sample.
        """
        if samples < 1 or batch < 1 or clips < 1:
            raise UsageError(
                f"no order of {samples} samples times {clips} clips in batches of {batch}",
                hint="all must be at least 1",
            )
        per_chunk = max(1, min(samples, int(CHUNK_BYTES // max(sample_bytes, 1.0))))
        lanes = lanes_for(batch, -(-samples // per_chunk))
        window = max(2, WINDOW_CHUNKS // lanes)
        return cls(samples * clips, batch, per_chunk * clips, lanes=lanes, window=window, seed=seed, shuffle=shuffle)

    def __post_init__(self) -> None:
        if min(self.samples, self.batch, self.chunk, self.lanes, self.window) < 1 or self.batch % self.lanes:
            raise UsageError(f"{self} is not an order", hint="all counts are positive and the lanes divide the batch")

    @property
    def full_batches(self) -> int:
        """Complete global batches in an epoch. The tail comes after them."""
        return self.samples // self.batch

    @property
    def tail(self) -> int:
        """Samples of an epoch that fill no complete batch."""
        return self.samples % self.batch

    def take(self, epoch: int, positions: I64) -> I64:
        """The samples at `positions` of `epoch`: int64, of the same length and in the same order."""
        positions = np.atleast_1d(np.asarray(positions, np.int64))
        if positions.size and (positions.min() < 0 or positions.max() >= self.samples):
            raise UsageError(f"a position outside the epoch's {self.samples} samples was asked for")
        if not self.shuffle or not positions.size:
            return positions.copy()
        lane, place = self._lane_and_place(positions)
        return self._in_lane(epoch, lane, place)

    def batch_of(self, epoch: int, number: int, rank: int = 0, world_size: int = 1) -> I64:
        """The samples of `rank` in global batch `number`.

        If `number` is `full_batches`, these are samples of the tail, maybe none.
        """
        return self.take(epoch, self.slots(number, rank, world_size))

    def slots(self, number: int, rank: int = 0, world_size: int = 1) -> I64:
        """The positions of `rank` in global batch `number`: contiguous, and shared as evenly as possible."""
        size = self.batch if number < self.full_batches else self.tail
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} is outside a world of {world_size}")
        if not 0 <= number < self.full_batches + bool(self.tail):
            raise UsageError(f"batch {number} is outside the epoch's {self.full_batches} batches and its tail")
        start = number * self.batch
        return np.arange(start + size * rank // world_size, start + size * (rank + 1) // world_size, dtype=np.int64)

    def substitute(self, sample: int, attempt: int, clips: int = 1) -> int | None:
        """The virtual sample that replaces a damaged `sample`: the same clip number of a sample in the same chunk.

        If chunks are small, the candidates are an aligned group of `NEIGHBOURS` samples instead. Attempts 0, 1, …
        return each candidate once, then None, in an order drawn for this sample. Seed and epoch do not matter, and no
        other position changes.
        """
        number, clip = divmod(sample, clips)
        total = self.samples // clips
        size = min(total, max(self.chunk // clips, NEIGHBOURS))
        start = min(number // size * size, total - size)
        if attempt >= size - 1:
            return None
        step = int(permute(np.array([attempt]), size - 1, key_of(_SUBSTITUTE, number))[0]) + 1
        return (start + (number - start + step) % size) * clips + clip

    # -- positions to lanes

    def _lane_and_place(self, positions: I64) -> tuple[I64, I64]:
        """The lane that each position reads, and the place in that lane.

        Places that a short lane lacks are taken from others.
        """
        owed, share = self._lane_quota, self.batch // self.lanes
        number, slot = positions // self.batch, positions % self.batch
        lane = slot // share
        place = number * share + slot % share
        in_tail = number >= self.full_batches
        extra = np.where(
            in_tail, self._deficit_before[-1] + slot, self._deficit_before[lane] + place - self._lane_samples[lane]
        )
        elsewhere = in_tail | (place >= self._lane_samples[lane])
        donor = np.searchsorted(self._surplus_before, extra, side="right") - 1
        donor = np.where(elsewhere, donor, 0)
        return (
            np.where(elsewhere, donor, lane),
            np.where(elsewhere, owed + extra - self._surplus_before[donor], place),
        )

    @cached_property
    def _lane_quota(self) -> int:
        return self.full_batches * self.batch // self.lanes

    @cached_property
    def _chunks(self) -> int:
        return -(-self.samples // self.chunk)

    @cached_property
    def _deal_key(self) -> U64:
        return key_of(_DEAL)

    @cached_property
    def _short_chunk(self) -> tuple[int, int, int]:
        """Lane of the last chunk, its number in that lane, and how many samples it lacks."""
        dealt = int(permute(np.array([self._chunks - 1]), self._chunks, self._deal_key)[0])
        return dealt % self.lanes, dealt // self.lanes, self._chunks * self.chunk - self.samples

    @cached_property
    def _lane_chunks(self) -> I64:
        return np.array([len(range(lane, self._chunks, self.lanes)) for lane in range(self.lanes)], np.int64)

    @cached_property
    def _lane_samples(self) -> I64:
        samples = self._lane_chunks * self.chunk
        lane, _, lacking = self._short_chunk
        samples[lane] -= lacking
        return samples

    @cached_property
    def _deficit_before(self) -> I64:
        return _sums_before(np.maximum(self._lane_quota - self._lane_samples, 0))

    @cached_property
    def _surplus_before(self) -> I64:
        return _sums_before(np.maximum(self._lane_samples - self._lane_quota, 0))

    # -- inside a lane

    def _in_lane(self, epoch: int, lane: I64, place: I64) -> I64:
        """The samples at `place` in the sequences of the lanes."""
        length = self._lane_samples[lane]
        short_at = self._short_place(epoch)
        chunk_at, _ = self._chunk_at(lane, place, short_at)
        phase = lane % self.window + 1  # the first window is this long, which staggers the lanes
        number = np.where(chunk_at < phase, 0, (chunk_at - phase) // self.window + 1)
        first_chunk = np.where(number == 0, 0, phase + (number - 1) * self.window)
        start = self._start_of(lane, first_chunk, short_at)
        end = np.minimum(self._start_of(lane, phase + number * self.window, short_at), length)
        key = key_of(_WINDOW, self.seed, epoch, lane, number)
        mixed = start + permute(place - start, end - start, key)
        chunk_at, offset = self._chunk_at(lane, mixed, short_at)
        inside = unpermute(chunk_at, self._lane_chunks[lane], key_of(_CHUNKS, self.seed, epoch, lane))
        return unpermute(inside * self.lanes + lane, self._chunks, self._deal_key) * self.chunk + offset

    def _short_place(self, epoch: int) -> int:
        """The place of the short chunk in its lane's chunk order of this epoch."""
        lane, inside, _ = self._short_chunk
        key = key_of(_CHUNKS, self.seed, epoch, lane)
        return int(permute(np.array([inside]), int(self._lane_chunks[lane]), key)[0])

    def _start_of(self, lane: I64, chunk_at: I64, short_at: int) -> I64:
        """The place in its lane at which the chunk at `chunk_at` begins."""
        short_lane, _, lacking = self._short_chunk
        return chunk_at * self.chunk - np.where((lane == short_lane) & (chunk_at > short_at), lacking, 0)

    def _chunk_at(self, lane: I64, place: I64, short_at: int) -> tuple[I64, I64]:
        """Which chunk in its lane's order holds `place`, and the offset in that chunk."""
        short_lane, _, lacking = self._short_chunk
        past_short_chunk = (lane == short_lane) & (place >= (short_at + 1) * self.chunk - lacking)
        place = place + np.where(past_short_chunk, lacking, 0)
        return place // self.chunk, place % self.chunk


def lanes_for(batch: int, chunks: int) -> int:
    """The largest divisor of the global batch that is at most `MAX_LANES` and gives each lane enough chunks."""
    limit = max(1, min(MAX_LANES, chunks // CHUNKS_PER_LANE))
    return max(divisor for divisor in range(1, limit + 1) if batch % divisor == 0)


def _sums_before(counts: I64) -> I64:
    """Prefix sums with a leading 0."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
