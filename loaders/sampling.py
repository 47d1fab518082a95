"""How batches are put together: from what is asked for to a plan.

Purpose: choose the schedule (plain, evaluation, mixture, buckets) and build its streams; the loaders say only which samples
they can use.
Invariant: nothing here depends on the rank but the share that it takes.
Failure behaviour: `UsageError` for what cannot be asked for together, and where there is nothing to deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataio.core.errors import UsageError
from dataio.shards.dataset import Dataset
from loaders.mixture import Mixture, Opened, Place, opened
from loaders.order.buckets import Bucketed
from loaders.order.evaluation import Evaluation
from loaders.order.mixture import Mixed
from loaders.order.permutation import I64
from loaders.order.schedule import Plain, Schedule
from loaders.packed import Pack, PackedPlan, PackedStream
from loaders.plan import OrderPlan, Stream

Find = Callable[[Dataset], tuple[I64, int | I64]]
"""The samples of a dataset that a loader can use, and how many parts each has."""
Sort = Callable[[Stream], I64]
"""The bucket of each sample of a stream."""


@dataclass(frozen=True, slots=True)
class Sampling:
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


@dataclass(frozen=True)
class Sorting:
    """How large the global batches of each bucket are, how samples are `sort`ed into them, and `numbers` that stand for both."""

    batches: Sequence[int]
    sort: Sort
    numbers: Sequence[int]


def plan(
    source: Opened, find: Find, what: Any, how: Sampling, sorting: Sorting | None = None, pack: Pack | None = None
) -> OrderPlan:
    """The plan of what `find` finds in each of the datasets; `what` describes the parts, for the state."""
    _check(source.mixture, how, sorting)
    streams: list[Stream] = [
        Stream.of(dataset, *find(dataset), source=number) for number, dataset in enumerate(source.datasets.values())
    ]
    if pack is not None:
        streams = [PackedStream.from_(stream, pack) for stream in streams]
    names: Sequence[str] = ()
    schedule: Schedule
    if source.mixture is not None:
        names = tuple(source.mixture.sources)
        schedule = _mixed(source.mixture, dict(zip(names, streams, strict=True)), how)
    elif sorting is not None:
        schedule, streams = _bucketed(sorting, streams[0], how)
    elif how.evaluate:
        schedule = Evaluation.of(streams[0].population, how.batch, seed=how.seed)
    else:
        schedule = Plain(streams[0].population.order(how.batch, how.seed, how.shuffle), how.drop_last)
    kind = OrderPlan if pack is None else PackedPlan
    return kind(tuple(streams), schedule, what, how.seed, how.rank, how.world_size, tuple(names))


def planned(
    place: Place | Mixture,
    version: int | str | None,
    options: Mapping[str, Any] | None,
    find: Find,
    what: Any,
    how: Sampling,
    sorting: Sorting | None = None,
    pack: Pack | None = None,
) -> tuple[OrderPlan, Sequence[Dataset]]:
    """The plan for what `place` names, and the datasets that were opened for it, to be closed with the loader."""
    source = opened(place, version, options)
    try:
        return plan(source, find, what, how, sorting, pack), source.owned
    except BaseException:
        source.close()
        raise


def _check(mixture: Mixture | None, how: Sampling, sorting: Sorting | None) -> None:
    asked = [
        name for name, there in (("a mixture", mixture), ("buckets", sorting), ("evaluate", how.evaluate)) if there
    ]
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} do not go together")
    if sorting is not None and how.batch_size is not None:
        raise UsageError("with buckets the budget says how large batches are", hint="leave batch_size out")


def _mixed(mixture: Mixture, streams: Mapping[str, Stream], how: Sampling) -> Mixed:
    return Mixed.of(
        {name: stream.population for name, stream in streams.items()},
        how.batch,
        weights=mixture.weights,
        temperature=mixture.temperature,
        seed=how.seed,
        shuffle=how.shuffle,
        epoch_batches=mixture.epoch_batches,
    )


def _bucketed(sorting: Sorting, stream: Stream, how: Sampling) -> tuple[Bucketed, list[Stream]]:
    chosen = sorting.sort(stream)
    every = [stream.choose(np.flatnonzero(chosen == bucket)) for bucket in range(len(sorting.batches))]
    schedule = Bucketed.of(
        sorting.batches,
        [one.population for one in every],
        sorting.numbers,
        seed=how.seed,
        shuffle=how.shuffle,
        drop_last=how.drop_last,
    )
    return schedule, [every[bucket] for bucket in schedule.buckets]
