"""The plan of a loader: connects a schedule, which computes positions, with the datasets, which contain the samples.

Purpose: choose the schedule (plain, mixture, buckets, both, or an evaluation of any of them), build its streams, and
look samples up in the datasets. All of these use one class, `OrderPlan`, with different schedules.
Invariants: part n of a sample is number `Parts.first(sample) + n` of its stream. Trainers see only the samples in the
streams' `ids`. A sample's substitute belongs to the same stream and is stored close to it (see `Order.substitute`). It
is the same for every epoch and world size. The rank decides only which share of a batch it takes.
Failure behaviour: `UsageError` if there is nothing to deliver, or if both a batch size and buckets are given.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.interfaces import SampleRef
from headrace.loaders.sampling.columns import counts_by_bucket
from headrace.loaders.sampling.order import Order
from headrace.loaders.sampling.permutation import I64, U64, key_of
from headrace.loaders.sampling.sample_ids import BucketNumbers, SampleIds, Small, SmallCounts
from headrace.loaders.sampling.schedule import Plain, Population, Schedule
from headrace.loaders.sampling.state import Fingerprint, Identity

if TYPE_CHECKING:  # few loaders need these, so they are imported where they are used
    from headrace.loaders.sampling.mixture import Mixture
    from headrace.loaders.sampling.packing import Pack, RepackedPlan


class Parts:
    """The number of parts of each sample: one number for all samples, or an array with one number for each.

    The parts of all samples are numbered in sequence. This number of a part is called `virtual`.
    """

    def __init__(self, samples: int, each: int | Small) -> None:
        self.each = each
        self._counts: SmallCounts | None = None
        if isinstance(each, int):
            self.total = samples * each
        else:
            self._counts = SmallCounts(each)
            self.total = self._counts.total

    def split(self, virtual: I64) -> tuple[I64, I64]:
        """The sample of each of these parts, and the part's number within its sample."""
        if self._counts is None:
            samples, numbers = np.divmod(virtual, self.each)
            return samples, numbers
        return self._counts.split(virtual)

    def of(self, samples: I64) -> I64:
        """The number of parts of each of these samples."""
        if isinstance(self.each, int):
            return np.full(len(samples), self.each)
        return self.each[samples].astype(np.int64)

    def first(self, sample: int) -> int:
        """The number of a sample's first part among all parts."""
        if self._counts is None:
            return sample * int(self.each)
        return self._counts.first(sample)


class Stream(msgspec.Struct, frozen=True, eq=False):
    """Samples of one dataset. `ids` are the samples' ids, and `source` is the index of the dataset in the plan."""

    dataset: Dataset
    ids: SampleIds
    parts: Parts
    source: int = 0

    @classmethod
    def of(cls, dataset: Dataset, ids: SampleIds, parts: int | Small, source: int = 0) -> Stream:
        return cls(dataset, ids, Parts(len(ids), parts), source)

    @property
    def population(self) -> Population:
        """The numbers from which the stream's order is computed."""
        each = max(1, self.parts.total // max(1, len(self.ids)))
        return Population(
            len(self.ids), sample_bytes=self.dataset.total_bytes / len(self.dataset), clips=each, total=self.parts.total
        )

    def divide(self, chosen: BucketNumbers) -> list[Stream]:
        """The streams of the samples in each bucket. `chosen` has the bucket of each sample."""
        buckets, each = range(len(chosen.ends)), self.parts.each
        parts = [each] * len(buckets) if isinstance(each, int) else counts_by_bucket(each, chosen)
        return [
            Stream.of(self.dataset, chosen.ids_in(bucket, self.ids), parts[bucket], self.source) for bucket in buckets
        ]

    def substitute(self, order: Order, ref: SampleRef, attempt: int) -> SampleRef | None:
        """A part of another sample, which the chunks of `order` determine (see `Order.substitute`)."""
        (number,), (part,) = self.parts.split(np.array([ref.virtual]))
        each = max(1, self.parts.total // len(self.ids))
        sample_order = Order(
            len(self.ids), order.batch, max(1, order.chunk // each), lanes=order.lanes, window=order.window
        )
        other = sample_order.substitute(int(number), attempt)
        if other is None:
            return None
        part = int(part) % int(self.parts.of(np.array([other]))[0])
        sample = self.dataset.sample(self.ids[other])
        virtual = self.parts.first(other) + part
        return replace(ref, virtual=virtual, sample=sample, number=part, attempt=attempt + 1)


class OrderPlan(msgspec.Struct, frozen=True, eq=False):
    """A `Plan`: one rank's share of a schedule.

    Args:
        streams: the streams of the schedule.
        schedule: computes which position of which stream fills each slot.
        what: description of the parts, for the fingerprint.
        seed: seed of the order.
        rank: this rank.
        world_size: number of ranks.
        names: names of the sources of a mixture.
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
                f"{self.datasets[0].url} has fewer clips than one global batch of {order.batch}: {order.samples}",
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
        """The plan of this epoch. Most plans are the same in all epochs."""
        return self

    def batches_in(self, epoch: int) -> int:
        return self.of(epoch).schedule.batches

    @property
    def buckets(self) -> tuple[int, ...]:
        """The bucket of each stream; empty without buckets."""
        return self.schedule.buckets

    @property
    def samples(self) -> int:
        """The number of samples in all streams."""
        return sum(len(stream.ids) for stream in self.streams)

    def refs(self, epoch: int, batches: range) -> list[list[SampleRef]]:
        """The samples of all batches are looked up together, since one lookup for each batch takes twice as long."""
        shares = [self.schedule.share(epoch, batch, self.rank, self.world_size) for batch in batches]
        streams, epochs, virtuals = (
            np.concatenate([getattr(share, name) for share in shares]) for name in ("stream", "epoch", "virtual")
        )
        refs = dict[int, SampleRef]()
        for number in np.flatnonzero(np.bincount(streams)).tolist():  # np.unique would import masked arrays
            slots = np.flatnonzero(streams == number)
            stream, seed, virtual = self.streams[number], self.schedule.orders[number].seed, virtuals[slots]
            rows, parts = stream.parts.split(virtual)
            samples = stream.dataset.samples(stream.ids.take(rows).tolist())
            columns = (slots.tolist(), epochs[slots].tolist(), virtual.tolist(), samples, parts.tolist())
            for slot, source_epoch, v, sample, part in zip(*columns, strict=True):
                refs[slot] = SampleRef(
                    source_epoch, v, sample, number=part, source=stream.source, seed=seed, stream=number
                )  # fmt: skip
        in_order = iter([refs[slot] for slot in range(len(refs))])
        return [list(islice(in_order, len(share))) for share in shares]

    def substitute(self, ref: SampleRef, attempt: int) -> SampleRef | None:
        return self.streams[ref.stream].substitute(self.schedule.orders[ref.stream], ref, attempt)

    def about(self, epoch: int, batch: int) -> dict[str, Any]:
        """Entries that describe a batch as a whole."""
        if not self.schedule.buckets and not self.schedule.evaluates:
            return {}
        share = self.schedule.share(epoch, batch, self.rank, self.world_size)
        entries: dict[str, Any] = {} if share.bucket is None else {"bucket": share.bucket}
        if self.schedule.evaluates:
            entries |= {"samples_per_rank": list(share.sizes), "empty_ranks": share.empty_ranks}
        return entries

    def fingerprint(self, epoch: int, batch: int) -> Fingerprint:
        """Everything that determines the batches up to this position, except the position."""
        taken = self.schedule.taken(epoch, batch)
        sources = [
            Identity(one.version, one.digest, taken.get(name))
            for one, name in zip(self.datasets, self._named, strict=True)
        ]
        described = self.schedule.described(epoch, batch)
        named = dict(zip(self.names, sources, strict=True)) if self.names else sources[0]
        return Fingerprint(named, self.seed, order=described, clip=self.what)

    @property
    def _named(self) -> Sequence[str]:
        return self.names or ("",)


_PACK = 11  # the purpose of these keys; no other module uses the number
Find = Callable[[Dataset], tuple[SampleIds, int | Small]]
"""Returns the ids of the samples that a loader can use, and the number of parts of each."""
Sort = Callable[[Stream], BucketNumbers]
"""Returns the bucket of each sample of a stream."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How batches are composed.

    Args:
        batch_size: samples in a rank's batch; None with buckets.
        rank, world_size: rank of this process, and number of ranks.
        seed: seed of all random numbers.
        shuffle: shuffle in every epoch.
        drop_last: drop the epoch's last global batch if it is incomplete.
        evaluate: deliver every sample once, in order, including the last incomplete batch.
    """

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


class Bucketing(msgspec.Struct, frozen=True):
    """How samples are assigned to buckets.

    Args:
        batches: the global batch size of each bucket.
        sort: returns the bucket of each sample of a stream.
        numbers: identify the buckets in states.
        names: name the buckets in messages.
    """

    batches: Sequence[int]
    sort: Sort
    numbers: Sequence[int]
    names: Sequence[str]


def make_plan(
    source: OpenDatasets,
    find: Find,
    what: Any,
    sampling: Sampling,
    buckets: Bucketing | None = None,
    pack: Pack | None = None,
) -> OrderPlan:
    """Plan the samples that `find` returns for each dataset. `what` describes their parts in the state."""
    if buckets is not None and sampling.batch_size is not None:
        raise UsageError("with buckets, their budget determines the batch sizes", hint="leave batch_size out")
    streams: dict[str, Stream] = {
        name: Stream.of(dataset, *find(dataset), source=number)
        for number, (name, dataset) in enumerate(source.datasets.items())
    }
    if pack is not None and pack.packing.repack_each_epoch and source.mixture is None:
        return _repacked(streams, what, sampling, pack)
    kind = OrderPlan
    if pack is not None:
        from headrace.loaders.sampling.packing import PackedPlan

        kind, streams = PackedPlan, _packed(streams, sampling, pack)
    schedule, chosen = _scheduled(streams, source.mixture, sampling, buckets)
    names = tuple(streams) if source.mixture is not None else ()
    return kind(tuple(chosen), schedule, what, sampling.seed, sampling.rank, sampling.world_size, names)


def _packed(streams: Mapping[str, Stream], sampling: Sampling, pack: Pack) -> dict[str, Stream]:
    """Pack the recordings of the streams, once or in each of their epochs."""
    from headrace.loaders.sampling.packing import PackedStream, RepackedStream

    if pack.packing.repack_each_epoch and not sampling.evaluate:
        return {name: RepackedStream.repacked(stream, pack, _keys(sampling, name)) for name, stream in streams.items()}
    return {name: PackedStream.from_(stream, pack) for name, stream in streams.items()}


def _keys(sampling: Sampling, name: str) -> Callable[[int], U64]:
    """A function that returns the packing key of a mixture's source for one of the source's own epochs."""
    return lambda epoch: key_of(_PACK, sampling.seed, epoch, *name.encode())


def _repacked(streams: Mapping[str, Stream], what: Any, sampling: Sampling, pack: Pack) -> RepackedPlan:
    """A plan with different sequences in every epoch. The plans of two epochs are cached.

    With a very small dataset, a packing may fill no batch. Such an epoch uses the first packing, so planning ahead does
    not have to search for an epoch with batches.
    """
    from headrace.loaders.sampling.packing import PackedPlan, PackedStream, RepackedPlan

    (stream,) = streams.values()

    @functools.lru_cache(maxsize=2)
    def of(epoch: int) -> PackedPlan:
        packed = PackedStream.from_(stream, pack, key_of(_PACK, sampling.seed, 0 if sampling.evaluate else epoch))
        schedule, chosen = _scheduled({"": packed}, None, sampling, None)
        if epoch and not schedule.batches:
            return first
        return PackedPlan(
            tuple(chosen), schedule, what, seed=sampling.seed, rank=sampling.rank, world_size=sampling.world_size
        )

    first = of(0)
    return RepackedPlan(
        first.streams,
        first.schedule,
        what,
        seed=sampling.seed,
        rank=sampling.rank,
        world_size=sampling.world_size,
        epochs=of,
    )


def _scheduled(
    streams: Mapping[str, Stream], mixture: Mixture | None, sampling: Sampling, buckets: Bucketing | None
) -> tuple[Schedule, Sequence[Stream]]:
    """The schedule over these sources, and its streams: the sources, or the part of each source in each bucket."""
    if buckets is not None:
        return _bucketed(streams, mixture, sampling, buckets)
    populations = {name: stream.population for name, stream in streams.items()}
    every = list(streams.values())
    if sampling.evaluate:
        from headrace.loaders.sampling.schedule import Evaluation

        return Evaluation.of(list(populations.values()), [sampling.batch] * len(every), seed=sampling.seed), every
    if mixture is not None:
        from headrace.loaders.sampling.mixture import Mixed

        return Mixed.of(populations, sampling.batch, **_mixture_options(mixture, sampling)), every
    (only,) = populations.values()
    return Plain(only.order(sampling.batch, sampling.seed, sampling.shuffle), sampling.drop_last), every


def _bucketed(
    streams: Mapping[str, Stream], mixture: Mixture | None, sampling: Sampling, buckets: Bucketing
) -> tuple[Schedule, Sequence[Stream]]:
    cells = {name: _sorted(stream, buckets) for name, stream in streams.items()}
    populations = {name: [cell.population for cell in row] for name, row in cells.items()}
    sizes, numbers = buckets.batches, buckets.numbers
    if sampling.evaluate:
        from headrace.loaders.sampling.schedule import Evaluation

        with_samples = [(name, b) for name, row in cells.items() for b, cell in enumerate(row) if len(cell.ids)]
        evaluation = Evaluation.of(
            [populations[name][b] for name, b in with_samples],
            [sizes[b] for _, b in with_samples],
            seed=sampling.seed,
            buckets=[b for _, b in with_samples],
            numbers=numbers,
        )
        return evaluation, [cells[name][b] for name, b in with_samples]
    if mixture is not None:
        from headrace.loaders.sampling.mixed_buckets import MixedBuckets

        mixed = MixedBuckets.of(populations, sizes, numbers, **_mixture_options(mixture, sampling))
        return mixed, [cells[name][b] for name, b in mixed.streams]
    from headrace.loaders.sampling.buckets import Bucketed

    (name,) = streams
    schedule = Bucketed.of(
        sizes,
        populations[name],
        numbers,
        seed=sampling.seed,
        shuffle=sampling.shuffle,
        drop_last=sampling.drop_last,
        names=buckets.names,
    )
    if sampling.drop_last:
        from headrace.loaders.sampling.never_delivered import small_buckets, warn_of_small_buckets

        clips = [population.virtual for population in populations[name]]
        warn_of_small_buckets(streams[name].dataset.url, small_buckets(buckets.names, clips, sizes))
    return schedule, [cells[name][b] for b in schedule.buckets]


def _sorted(stream: Stream, buckets: Bucketing) -> list[Stream]:
    """The part of a stream in each bucket."""
    return stream.divide(buckets.sort(stream))


def _mixture_options(mixture: Mixture, sampling: Sampling) -> dict[str, Any]:
    return {
        "weights": mixture.weights,
        "temperature": mixture.temperature,
        "epoch_batches": mixture.epoch_batches,
        "seed": sampling.seed,
        "shuffle": sampling.shuffle,
    }


DatasetLike = str | os.PathLike[str] | Dataset


class OpenDatasets(msgspec.Struct, frozen=True):
    """The open datasets of a loader, by name. Without a mixture there is one dataset, named "".

    `owned` are the datasets that `open_datasets` opened; `close` closes only these.
    """

    datasets: Mapping[str, Dataset]
    mixture: Mixture | None = None
    owned: list[Dataset] = []

    def close(self) -> None:
        for dataset in self.owned:
            dataset.close()


def open_datasets(
    source: DatasetLike | Mixture, version: int | str | None, options: Mapping[str, Any] | None, trust_mounts: bool
) -> OpenDatasets:
    """Open every dataset that `source` names. If one cannot be opened, those that this call opened are closed.

    Args:
        source: URL, directory, open dataset, or a mixture of these.
        version: number or tag; only with a single URL.
        options: options for the stores; only with URLs.
        trust_mounts: allow datasets to refer to shards in other stores.
    """
    mixture: Mixture | None = None
    sources: Mapping[str, DatasetLike]
    if isinstance(source, str | os.PathLike | Dataset):
        sources = {"": source}
    else:
        from headrace.loaders.sampling.mixture import Mixture

        if not isinstance(source, Mixture):
            raise UsageError(f"{source!r} is not a dataset", hint="give its URL or folder, or an open Dataset")
        mixture, sources = source, source.sources
        if version is not None:
            raise UsageError(
                "version cannot be used with a mixture", hint="open its sources as Dataset(url, version=...)"
            )
    opened = OpenDatasets({}, mixture, [])
    try:
        found = {name: _open(one, version, options, trust_mounts, opened.owned) for name, one in sources.items()}
    except BaseException:
        opened.close()
        raise
    return replace(opened, datasets=found)


def _open(
    source: DatasetLike,
    version: int | str | None,
    options: Mapping[str, Any] | None,
    trust_mounts: bool,
    owned: list[Dataset],
) -> Dataset:
    given: object = source
    if not isinstance(given, str | os.PathLike | Dataset):
        raise UsageError(f"{given!r} is not a dataset", hint="give its URL or folder, or an open Dataset")
    if not isinstance(source, Dataset):
        owned.append(Dataset.open_lazy(os.fspath(source), version, trust_mounts=trust_mounts, storage_options=options))
        return owned[-1]
    if options or version not in (None, source.version):
        raise UsageError(
            "version and storage_options apply to a URL, not to an open dataset",
            hint="pass them to Dataset(...)",
        )
    return source
