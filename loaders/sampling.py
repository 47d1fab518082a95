"""How batches are put together: from what is asked for to a plan.

Purpose: choose the schedule (plain, mixture, buckets, both, or an evaluation of any of them) and build its streams; the loaders
say only which samples they can use.
Invariant: nothing here depends on the rank but the share that it takes.
Failure behaviour: `UsageError` for a batch size beside buckets, and where there is nothing to deliver.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.mixture import Mixture, Opened
from headrace.loaders.order.permutation import I64, U64, key_of
from headrace.loaders.order.schedule import Plain, Schedule
from headrace.loaders.plan import OrderPlan, Stream

if TYPE_CHECKING:  # what few loaders need is imported where they need it
    from headrace.loaders.packed import Pack, RepackedPlan

_PACK = 11  # keeps the key apart from those of the other rooms
Find = Callable[[Dataset], tuple[I64, int | I64]]
"""The samples of a dataset that a loader can use, and how many parts each has."""
Sort = Callable[[Stream], I64]
"""The bucket of each sample of a stream."""


class Sampling(msgspec.Struct, frozen=True):
    """`batch_size` is per rank, and None with buckets. `evaluate` takes every sample once, in order, tail and all."""

    batch_size: int | None
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = True
    evaluate: bool = False

    @property
    def batch(self) -> int:
        """The size of the global batch."""
        if self.batch_size is None:
            raise UsageError("batch_size is missing", hint="it may be left out only with buckets")
        return self.batch_size * self.world_size


class Sorting(msgspec.Struct, frozen=True):
    """How large the global batches of each bucket are, how samples are `sort`ed into them, and `numbers` that stand for both."""

    batches: Sequence[int]
    sort: Sort
    numbers: Sequence[int]


def plan(
    source: Opened, find: Find, what: Any, how: Sampling, sorting: Sorting | None = None, pack: Pack | None = None
) -> OrderPlan:
    """The plan of what `find` finds in each of the datasets; `what` describes the parts, for the state."""
    if sorting is not None and how.batch_size is not None:
        raise UsageError("with buckets the budget says how large batches are", hint="leave batch_size out")
    streams: dict[str, Stream] = {
        name: Stream.of(dataset, *find(dataset), source=number)
        for number, (name, dataset) in enumerate(source.datasets.items())
    }
    if pack is not None and pack.packing.anew and source.mixture is None:
        return _repacked(streams, what, how, pack)
    kind = OrderPlan
    if pack is not None:
        from headrace.loaders.packed import PackedPlan

        kind, streams = PackedPlan, _packed(streams, how, pack)
    schedule, chosen = _scheduled(streams, source.mixture, how, sorting)
    names = tuple(streams) if source.mixture is not None else ()
    return kind(tuple(chosen), schedule, what, how.seed, how.rank, how.world_size, names)


def _packed(streams: Mapping[str, Stream], how: Sampling, pack: Pack) -> dict[str, Stream]:
    """The streams' recordings packed: once, or anew in each of their epochs."""
    from headrace.loaders.packed import PackedStream, RepackedStream

    if pack.packing.anew and not how.evaluate:
        return {name: RepackedStream.anew(stream, pack, _keys(how, name)) for name, stream in streams.items()}
    return {name: PackedStream.from_(stream, pack) for name, stream in streams.items()}


def _keys(how: Sampling, name: str) -> Callable[[int], U64]:
    """The keys by which a source of a mixture is packed in each of its own epochs."""
    return lambda epoch: key_of(_PACK, how.seed, epoch, *name.encode())


def _repacked(streams: Mapping[str, Stream], what: Any, how: Sampling, pack: Pack) -> RepackedPlan:
    """A plan of other sequences in every epoch; those of two epochs are kept. Of a tiny dataset another packing may fill no
    batch: such an epoch has the first one's, or who looks ahead would have to search for one that does."""
    from headrace.loaders.packed import PackedPlan, PackedStream, RepackedPlan

    (stream,) = streams.values()

    @functools.lru_cache(maxsize=2)
    def of(epoch: int) -> PackedPlan:
        packed = PackedStream.from_(stream, pack, key_of(_PACK, how.seed, 0 if how.evaluate else epoch))
        schedule, chosen = _scheduled({"": packed}, None, how, None)
        if epoch and not schedule.batches:
            return first
        return PackedPlan(tuple(chosen), schedule, what, how.seed, how.rank, how.world_size)

    first = of(0)
    return RepackedPlan(first.streams, first.schedule, what, how.seed, how.rank, how.world_size, epochs=of)


def _scheduled(
    streams: Mapping[str, Stream], mixture: Mixture | None, how: Sampling, sorting: Sorting | None
) -> tuple[Schedule, Sequence[Stream]]:
    """The schedule over these sources, and its streams: the sources, or what each of them has in each bucket."""
    if sorting is not None:
        return _bucketed(streams, mixture, how, sorting)
    populations = {name: stream.population for name, stream in streams.items()}
    every = list(streams.values())
    if how.evaluate:
        from headrace.loaders.order.evaluation import Evaluation

        return Evaluation.of(list(populations.values()), [how.batch] * len(every), seed=how.seed), every
    if mixture is not None:
        from headrace.loaders.order.mixture import Mixed

        return Mixed.of(populations, how.batch, **_weighed(mixture, how)), every
    (only,) = populations.values()
    return Plain(only.order(how.batch, how.seed, how.shuffle), how.drop_last), every


def _bucketed(
    streams: Mapping[str, Stream], mixture: Mixture | None, how: Sampling, sorting: Sorting
) -> tuple[Schedule, Sequence[Stream]]:
    cells = {name: _sorted(stream, sorting) for name, stream in streams.items()}
    populations = {name: [cell.population for cell in row] for name, row in cells.items()}
    sizes, numbers = sorting.batches, sorting.numbers
    if how.evaluate:
        from headrace.loaders.order.evaluation import Evaluation

        there = [(name, b) for name, row in cells.items() for b, cell in enumerate(row) if len(cell.ids)]
        evaluation = Evaluation.of(
            [populations[name][b] for name, b in there],
            [sizes[b] for _, b in there],
            seed=how.seed,
            buckets=[b for _, b in there],
            numbers=numbers,
        )
        return evaluation, [cells[name][b] for name, b in there]
    if mixture is not None:
        from headrace.loaders.order.mixed_buckets import MixedBuckets

        mixed = MixedBuckets.of(populations, sizes, numbers, **_weighed(mixture, how))
        return mixed, [cells[name][b] for name, b in mixed.streams]
    from headrace.loaders.order.buckets import Bucketed

    (name,) = streams
    schedule = Bucketed.of(
        sizes, populations[name], numbers, seed=how.seed, shuffle=how.shuffle, drop_last=how.drop_last
    )
    return schedule, [cells[name][b] for b in schedule.buckets]


def _sorted(stream: Stream, sorting: Sorting) -> list[Stream]:
    """What of a stream is in each bucket."""
    chosen = sorting.sort(stream)
    return [stream.choose(np.flatnonzero(chosen == bucket)) for bucket in range(len(sorting.batches))]


def _weighed(mixture: Mixture, how: Sampling) -> dict[str, Any]:
    return {
        "weights": mixture.weights,
        "temperature": mixture.temperature,
        "epoch_batches": mixture.epoch_batches,
        "seed": how.seed,
        "shuffle": how.shuffle,
    }
