"""The cache's policy under the real order of samples: simulated epochs, no disk and no store."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from headrace.dataio.cache.plan import CachePlan
from headrace.dataio.cache.plan.events import Bypass, Fetch, Instruction, ObjectId, Ready, Want
from headrace.dataio.cache.plan.ring import Ring
from headrace.loaders.sampling.order import Order

pytestmark = pytest.mark.slow

KIB = 1024
SAMPLE, PER_SHARD, SHARDS, BLOCK = 450 * KIB, 64, 16, 512 * KIB
SAMPLES = PER_SHARD * SHARDS
DATASET = SAMPLES * SAMPLE
BATCH, AHEAD = 48, 8


@dataclass
class Node:
    """All ranks of a node, each with its loader, on one plan whose fetches land as soon as they are started."""

    plan: CachePlan
    ranks: int
    fetched: int = 0
    bypassed: int = 0
    tickets: int = 0
    todo: deque[Instruction] = field(default_factory=deque)

    def do(self, out: list[Instruction]) -> None:
        self.todo.extend(out)
        while self.todo:
            match self.todo.popleft():
                case Fetch(file, block, _, length, here):
                    self.fetched += length - sum(size for _, _, size in here)
                    self.todo.extend(self.plan.fetched((file, block)))
                case Ready(_, file):
                    self.todo.extend(self.plan.released(file))
                case Bypass():
                    self.bypassed += SAMPLE

    def read(self, rank: int, want: Want) -> None:
        self.tickets += 1
        self.do(self.plan.request(self.tickets, want.object, want.ranges, rank + 1))

    def epoch(self, order: Order, epoch: int) -> float:
        """Bytes from the store in this epoch, per byte of the dataset."""
        before = self.fetched + self.bypassed
        coming = [deque(self.share(order, epoch, rank)) for rank in range(self.ranks)]
        while any(coming):
            for rank, batches in enumerate(coming):
                if batches:
                    now = batches.popleft()
                    ahead = [want for n in range(min(AHEAD, len(batches))) for want in batches[n]]
                    self.do(self.plan.announce(rank + 1, "s", ahead))
                    for want in now:
                        self.read(rank, want)
        return (self.fetched + self.bypassed - before) / DATASET

    def share(self, order: Order, epoch: int, rank: int) -> Iterator[list[Want]]:
        for number in range(order.full_batches + bool(order.tail)):
            yield [want_of(int(s)) for s in order.batch_of(epoch, number, rank, self.ranks)]


def want_of(sample: int) -> Want:
    shard, place = divmod(sample, PER_SHARD)
    size = PER_SHARD * SAMPLE
    return Want(
        ObjectId("s", f"{shard}.tar", size, 0.0), ((place * SAMPLE, 300 * KIB), (place * SAMPLE + 300 * KIB, 150 * KIB))
    )


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        *((1, 0.25), (8, 0.25), (2, 0.5), (4, 0.9)),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, 0.25), (4, 0.25), (1, 0.5), (4, 0.5), (8, 0.5))),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((1, 0.9), (2, 0.9), (8, 0.9))),
    ],
)
def test_in_later_epochs_the_hit_rate_is_the_cached_fraction(ranks: int, share: float) -> None:
    node = Node(CachePlan(int(DATASET * share), block_bytes=BLOCK, prefetch_parts=8), ranks)
    order = Order.of(SAMPLES, BATCH, sample_bytes=SAMPLE, seed=3)
    first, *later = (node.epoch(order, epoch) for epoch in range(3))
    assert first <= 1.02, "the first epoch fetches every byte once"
    for missed in later:
        assert 1 - missed == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("shares", [(0.2, 0.3), (0.1, 0.1, 0.4)])
def test_tiers_together_hit_as_one_cache_of_their_size_does(shares: tuple[float, ...]) -> None:
    node = Node(CachePlan([int(DATASET * share) for share in shares], block_bytes=BLOCK, prefetch_parts=8), 2)
    order = Order.of(SAMPLES, BATCH, sample_bytes=SAMPLE, seed=3)
    first, *later = (node.epoch(order, epoch) for epoch in range(3))
    assert first <= 1.02
    for missed in later:
        assert 1 - missed == pytest.approx(sum(shares), abs=0.02)


def test_what_fits_is_fetched_once_and_never_again() -> None:
    node = Node(CachePlan(int(DATASET * 1.2), block_bytes=BLOCK, prefetch_parts=8), 4)
    order = Order.of(SAMPLES, BATCH, sample_bytes=SAMPLE)
    assert [node.epoch(order, epoch) for epoch in range(2)] == [1.0, 0.0]


def test_without_announcements_the_same_epochs_are_lost_on_least_recently_used() -> None:
    node = Node(CachePlan(DATASET // 2, block_bytes=BLOCK, prefetch_parts=8), 1)
    order = Order.of(SAMPLES, BATCH, sample_bytes=SAMPLE)
    for batches in (node.share(order, epoch, 0) for epoch in range(2)):
        for want in (want for batch in batches for want in batch):
            node.read(0, want)
    assert node.fetched > 2.5 * DATASET, "1.5 with announcements"


REPEATED = 48
"""Samples that are read as often as all others together."""


def mixture(samples: list[int], number: int) -> Iterator[list[Want]]:
    """Batches of which every other sample is one of the few that are weighted up, in turn."""
    few, many, taken = itertools.cycle(range(REPEATED)), iter(samples), 0
    while taken < number:
        yield [want_of(next(few if n % 2 else many)) for n in range(BATCH)]
        taken += 1


def missed_in_mixture(budget: int) -> float:
    """The share of bytes that come from the store, in a mixture that follows a stage in which the cache was filled."""
    node = Node(CachePlan(budget, block_bytes=BLOCK, prefetch_parts=8), 1)
    others = [sample for sample in range(SAMPLES) if sample >= 2 * PER_SHARD]
    for batch in (others[n : n + BATCH] for n in range(0, len(others) // 2, BATCH)):
        node.do(node.plan.announce(1, "s", [want_of(sample) for sample in batch]))
        for sample in batch:
            node.read(0, want_of(sample))
    before, batches = node.fetched + node.bypassed, deque(mixture(others[len(others) // 2 :], 16))
    read = len(batches) * BATCH * SAMPLE
    while batches:
        now = batches.popleft()
        node.do(node.plan.announce(1, "s", [want for batch in list(batches)[:AHEAD] for want in batch]))
        for want in now:
            node.read(0, want)
    return (node.fetched + node.bypassed - before) / read


def test_what_is_weighted_up_is_kept_where_pinning_alone_would_fetch_it_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missed = missed_in_mixture(DATASET // 4)
    monkeypatch.setattr(Ring, "_keep", lambda self, file: None)
    alone = missed_in_mixture(DATASET // 4)
    assert alone > 0.95, "the cache is full of what came first"
    assert missed < 0.60, "half of the reads are of samples that come once, and must be fetched"
