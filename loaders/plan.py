"""Which samples each batch holds: a schedule, which knows numbers, joined with the datasets, which know samples.

Purpose: the one `Plan` there is. What differs between a single dataset, a mixture, buckets and an evaluation is its schedule.
Invariants: part n of a sample is number `before(sample) + n` of its stream. All rows that the trainer may see come from the
streams' `ids`. A sample's substitute is a neighbour in its chunk and stream, the same for every epoch and world size.
Failure behaviour: `UsageError` when there is nothing to deliver.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.contract import Place
from headrace.loaders.order.lanes import Order
from headrace.loaders.order.permutation import I64
from headrace.loaders.order.schedule import Population, Schedule
from headrace.loaders.state import Fingerprint, Identity

F64 = npt.NDArray[np.float64]


class Parts:
    """How many parts each sample has: as many for all, or each its own number (an array)."""

    def __init__(self, samples: int, each: int | I64) -> None:
        self.each = each
        self._ends: I64 | None = None if isinstance(each, int) else np.cumsum(each, dtype=np.int64)
        self.total = samples * each if isinstance(each, int) else int(each.sum())

    def split(self, virtual: I64) -> tuple[I64, I64]:
        """The samples of these numbers of the order, and which of their parts."""
        if self._ends is None:
            samples, numbers = np.divmod(virtual, self.each)
            return samples, numbers
        samples = np.searchsorted(self._ends, virtual, side="right").astype(np.int64)
        return samples, virtual - self._ends[samples] + self.of(samples)

    def of(self, samples: I64) -> I64:
        """How many parts these samples have."""
        return np.full(len(samples), self.each) if isinstance(self.each, int) else self.each[samples]

    def first(self, sample: int) -> int:
        """The number in the order of a sample's first part."""
        if self._ends is None or isinstance(self.each, int):
            return sample * int(self.each)
        return int(self._ends[sample] - self.each[sample])


class Stream(msgspec.Struct, frozen=True, eq=False):
    """A list of samples of one dataset: `ids`, of which each has its `parts`. `source` is the dataset's number in the
    plan."""

    dataset: Dataset
    ids: I64
    parts: Parts
    source: int = 0

    @classmethod
    def of(cls, dataset: Dataset, ids: I64, parts: int | I64, source: int = 0) -> Stream:
        return cls(dataset, ids, Parts(len(ids), parts), source)

    @property
    def population(self) -> Population:
        """What the order needs to know of it."""
        each = max(1, self.parts.total // max(1, len(self.ids)))
        return Population(len(self.ids), self.dataset.total_bytes / len(self.dataset), each, self.parts.total)

    def choose(self, rows: I64) -> Stream:
        """The stream of some of these samples, given by their places in `ids`."""
        parts = self.parts.each if isinstance(self.parts.each, int) else self.parts.each[rows]
        return Stream.of(self.dataset, self.ids[rows], parts, self.source)

    def substitute(self, order: Order, place: Place, attempt: int) -> Place | None:
        """The same part of a neighbour, as the chunks of `order` group the samples."""
        (number,), (part,) = self.parts.split(np.array([place.virtual]))
        each = max(1, self.parts.total // len(self.ids))
        alone = Order(len(self.ids), order.batch, max(1, order.chunk // each), order.lanes, order.window)
        other = alone.substitute(int(number), attempt)
        if other is None:
            return None
        part = int(part) % int(self.parts.of(np.array([other]))[0])
        sample = self.dataset.sample(int(self.ids[other]))
        virtual = self.parts.first(other) + part
        return replace(place, virtual=virtual, sample=sample, number=part, attempt=attempt + 1)


class OrderPlan(msgspec.Struct, frozen=True, eq=False):
    """A `Plan`: the share of `rank` in what `schedule` takes from `streams`.

    `what` describes the parts, for the fingerprint. `names` are those of the sources of a mixture.
    """

    streams: tuple[Stream, ...]
    schedule: Schedule
    what: Any
    seed: int
    rank: int
    world_size: int
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.schedule.batches:
            order = self.schedule.orders[0]
            raise UsageError(
                f"{self.datasets[0].url} makes fewer clips than one global batch of {order.batch}: {order.samples}",
                hint="use a smaller batch_size, more clips of each sample, or drop_last=False",
            )

    @property
    def datasets(self) -> Sequence[Dataset]:
        by_number = {stream.source: stream.dataset for stream in self.streams}
        return [by_number[number] for number in sorted(by_number)]

    @property
    def order(self) -> Order:
        """The order of the first stream."""
        return self.schedule.orders[0]

    def of(self, epoch: int) -> OrderPlan:
        """The plan of this epoch; most plans are the same in all."""
        return self

    def batches_in(self, epoch: int) -> int:
        return self.of(epoch).schedule.batches

    @property
    def buckets(self) -> tuple[int, ...]:
        """Which bucket each stream is; none without buckets."""
        return self.schedule.buckets

    @property
    def samples(self) -> int:
        """Samples of all streams, each counted once."""
        return sum(len(stream.ids) for stream in self.streams)

    def places(self, epoch: int, batches: range) -> list[list[Place]]:
        """Looked up for all batches at once: for each by itself it takes twice as long."""
        shares = [self.schedule.share(epoch, batch, self.rank, self.world_size) for batch in batches]
        streams, epochs, everything = (
            np.concatenate([getattr(share, name) for share in shares]) for name in ("stream", "epoch", "virtual")
        )
        places = dict[int, Place]()
        for number in np.flatnonzero(np.bincount(streams)).tolist():  # np.unique would import masked arrays
            slots = np.flatnonzero(streams == number)
            stream, seed, virtual = self.streams[number], self.schedule.orders[number].seed, everything[slots]
            rows, parts = stream.parts.split(virtual)
            samples = stream.dataset.samples(stream.ids[rows].tolist())
            columns = (slots.tolist(), epochs[slots].tolist(), virtual.tolist(), samples, parts.tolist())
            for slot, own_epoch, v, sample, part in zip(*columns, strict=True):
                places[slot] = Place(
                    own_epoch, v, sample, part, source=stream.source, seed=seed, stream=number
                )  # fmt: skip
        in_order = iter([places[slot] for slot in range(len(places))])
        return [list(islice(in_order, len(share))) for share in shares]

    def substitute(self, place: Place, attempt: int) -> Place | None:
        return self.streams[place.stream].substitute(self.schedule.orders[place.stream], place, attempt)

    def about(self, epoch: int, batch: int) -> dict[str, Any]:
        """What the trainer is told of a batch as a whole."""
        if not self.schedule.buckets and not self.schedule.evaluates:
            return {}
        share = self.schedule.share(epoch, batch, self.rank, self.world_size)
        told: dict[str, Any] = {} if share.bucket is None else {"bucket": share.bucket}
        if self.schedule.evaluates:
            told |= {"sizes": list(share.sizes), "dry": share.dry}
        return told

    def fingerprint(self, epoch: int, batch: int) -> Fingerprint:
        """What else than the position makes the batches what they are, up to this position."""
        taken = self.schedule.taken(epoch, batch)
        sources = [
            Identity(one.version, one.digest, taken.get(name))
            for one, name in zip(self.datasets, self._named, strict=True)
        ]
        described = self.schedule.described(epoch, batch)
        named = dict(zip(self.names, sources, strict=True)) if self.names else sources[0]
        return Fingerprint(named, self.seed, described, self.what)

    @property
    def _named(self) -> Sequence[str]:
        return self.names or ("",)


def having(dataset: Dataset, column: str, what: str, *, without: Collection[str] = ()) -> I64:
    """The numbers of the samples of which `column` is neither null nor one of `without`; `what` names it in the error
    when there are none."""
    if not len(dataset):
        raise UsageError(f"no sample of {dataset.url} is left", hint="loosen the condition of the view")
    only = dataset.only(column)
    if only is not None and only not in without:
        return np.arange(len(dataset), dtype=np.int64)
    import pyarrow as pa  # which loaders of samples that are all alike do without

    from headrace.dataio.shards.index import kernels as pc

    values = dataset.columns([column])[column]
    chosen = pc.is_valid(values)
    if without:
        chosen = pc.and_(chosen, pc.invert(pc.is_in(values, pa.array(sorted(without), pa.string()))))
    ids: I64 = np.flatnonzero(chosen.to_numpy()).astype(np.int64)
    if not len(ids):
        hint = "`headrace info` says what it holds" + (
            "; pictures are clips of one frame: Clip(frames=1)" if without else ""
        )
        raise UsageError(f"{dataset.url} holds no {what}", hint=hint)
    return ids


def column(dataset: Dataset, name: str, ids: I64) -> F64:
    """A column of numbers of these samples, in float64."""
    values = dataset.columns([name])[name].combine_chunks()
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)[ids]
