"""What comes next, started ahead of the trainer and announced to the cache further ahead.

Purpose: the running half of a loader, which can be thrown away and made again at any position.
Invariants: batches follow each other over the ends of epochs without a pause; `prefetch` of them are in the making while the
trainer works, and the bytes of `ANNOUNCED_BATCHES` more are named to the reader, soonest first. Nothing here refers to
the loader.
Failure behaviour: what `next` raises makes the whole unusable; the loader closes it and makes another.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dataio.shards.contract import Sample
from dataio.shards.dataset import Dataset
from loaders.batch import Batch, Prefetcher
from loaders.clips import Look, Place, members_of
from loaders.decode.contract import Decoder
from loaders.order import Order
from loaders.permutation import I64
from loaders.source import Source

ANNOUNCED_BATCHES = 8


@dataclass(frozen=True)
class Plan:
    """One rank's share of the order. `ids` are the sample numbers that the order permutes; `batches` are in an epoch."""

    dataset: Dataset
    ids: I64
    order: Order
    clips: int
    rank: int
    world_size: int
    batches: int

    def sample(self, number: int) -> Sample:
        """The sample that the order calls `number`."""
        return self.dataset.sample(int(self.ids[number]))

    def places(self, epoch: int, batch: int) -> list[Place]:
        """This rank's part of a global batch."""
        virtual = self.order.batch_of(epoch, batch, self.rank, self.world_size)
        samples = self.dataset.samples(self.ids[virtual // self.clips].tolist())
        return [Place(epoch, int(v), sample) for v, sample in zip(virtual, samples, strict=True)]

    def from_(self, epoch: int, batch: int) -> Iterator[list[Place]]:
        """This rank's batches from a position on, without end."""
        for later in itertools.count(epoch):
            yield from (self.places(later, number) for number in range(batch, self.batches))
            batch = 0


class Ahead:
    """Delivers a rank's batches from a position on. Used by one thread at a time."""

    def __init__(
        self,
        batches: Iterator[Sequence[Place]],
        look: Look,
        source: Source,
        decoder: Decoder,
        prefetcher: Prefetcher,
        prefetch: int,
    ) -> None:
        self._batches, self._look, self._source = batches, look, source
        self._decoder, self._prefetcher, self._prefetch = decoder, prefetcher, prefetch
        self._planned: deque[Sequence[Place]] = deque()

    def next(self) -> Batch:
        """The next batch, whole."""
        while len(self._prefetcher) <= self._prefetch:
            self._prefetcher.start(self._planned.popleft() if self._planned else next(self._batches))
        if len(self._planned) < ANNOUNCED_BATCHES:
            self._announce()
        return self._prefetcher.next()

    def close(self) -> None:
        """End the threads; nothing is delivered afterwards."""
        self._prefetcher.close()
        self._decoder.close()
        self._source.close()

    def _announce(self) -> None:
        while len(self._planned) < ANNOUNCED_BATCHES:
            self._planned.append(next(self._batches))
        places = itertools.chain.from_iterable(self._planned)
        self._source.announce([(place.sample, members_of(place.sample, self._look)) for place in places])
