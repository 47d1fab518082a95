"""Reads columns of the index to choose a loader's samples, and to compute a number for each of them.

Purpose: a loader takes the samples that meet its condition, and needs a number of clips or a bucket for each.
Invariants:

* Columns are read part by part. Only results are kept: ids (`SampleIds`) and small integers.
* The processes of a machine divide the parts, and share the results (`shared_arrays`). The key of the results has the
  dataset, the ids and the function. A function is therefore a frozen dataclass, whose `repr` describes it completely.
  Results of classes that are not Headrace's, such as a subclass of `Buckets`, are not shared, because their code may
  change between two runs.

Failure behaviour: `UsageError` if the dataset has no samples. Errors of the index are raised unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.sampling.sample_ids import (
    AllIds,
    BucketNumbers,
    IdsBuilder,
    Mask,
    SampleIds,
    Small,
    SmallArray,
    bucket_ends,
    ids_from,
)
from headrace.loaders.sampling.shared_arrays import Arrays, NewArray, Work, compute, content_key

F64 = npt.NDArray[np.float64]
PIECE_SAMPLES = 1 << 19
"""Parts with about this many samples are one piece of the work that the processes of a machine divide."""
_OWN_PACKAGES: tuple[str, ...] = ("headrace.",)
"""The packages whose classes compute the same results in every process with this version of Headrace."""


_MISSING = "missing"


@dataclasses.dataclass(frozen=True)
class HasValue:
    """Whether a column of strings is neither null nor one of `without`."""

    column: str
    without: tuple[str, ...] = ()

    @property
    def columns(self) -> Sequence[str]:
        return (self.column,)

    def __call__(self, table: Any) -> Mask:
        import pyarrow as pa  # imported late: not all loaders need it

        from headrace.dataio.shards.index import arrow as pc

        values = table[self.column]
        chosen = pc.is_valid(values)
        if self.without:
            chosen = pc.and_(chosen, pc.invert(pc.is_in(values, pa.array(self.without, pa.string()))))
        mask: Mask = chosen.to_numpy()
        return mask

    def is_true_of_all(self, dataset: Dataset) -> bool:
        """Whether the version document says that all samples have such a value."""
        value = dataset.constant_value(self.column)
        return value is not None and value not in self.without


@dataclasses.dataclass(frozen=True)
class HasFiles:
    """Whether samples have files with all of these extensions."""

    extensions: tuple[str, ...]
    columns: Sequence[str] = ("members",)

    def __call__(self, table: Any) -> Mask:
        from headrace.dataio.shards.index import rows

        members = table["members"].combine_chunks()
        mask: Mask = np.logical_and.reduce([rows.has_file(members, ext) for ext in self.extensions])
        return mask

    def is_true_of_all(self, dataset: Dataset) -> bool:
        """Whether the version document says that all samples have these files."""
        return dataset.index.files_of_all.issuperset(self.extensions)


@dataclasses.dataclass(frozen=True)
class AllOf:
    """Whether all of these conditions hold."""

    conditions: tuple[HasValue | HasFiles, ...]

    @property
    def columns(self) -> Sequence[str]:
        return tuple(dict.fromkeys(column for condition in self.conditions for column in condition.columns))


def samples_where(dataset: Dataset, condition: HasValue | HasFiles | AllOf) -> SampleIds:
    """The ids of the samples for which `condition` holds.

    Raises:
        UsageError: the dataset or view is empty.
    """
    ids, _ = samples_and_missing(dataset, condition if isinstance(condition, AllOf) else AllOf((condition,)))
    return ids


def samples_and_missing(dataset: Dataset, condition: AllOf) -> tuple[SampleIds, dict[HasValue | HasFiles, int]]:
    """The ids of the samples for which `condition` holds, and the number of samples for which a part of it does not.

    Parts that hold for all samples are left out.

    Raises:
        UsageError: the dataset or view is empty.
    """
    if not len(dataset):
        raise UsageError(f"no sample of {dataset.url} is left", hint="use a less strict condition for the view")
    unknown = tuple(part for part in condition.conditions if not part.is_true_of_all(dataset))
    if not unknown:
        return AllIds(len(dataset)), {}
    arrays = _samples_that_hold(dataset, AllOf(unknown))
    missing = {part: int(count) for part, count in zip(unknown, arrays[_MISSING], strict=True) if count}
    return ids_from(arrays, len(dataset)), missing


def _samples_that_hold(dataset: Dataset, condition: AllOf) -> Arrays:
    """The arrays of the ids, and `_MISSING`: for each part, the number of samples for which it does not hold.

    A piece has these numbers as int64, and then the packed mask of its samples.
    """
    pieces, head = _pieces(dataset), 8 * len(condition.conditions)

    def piece(number: int) -> Any:
        masks, missing = [np.zeros(0, np.bool_)], np.zeros(len(condition.conditions), np.int64)
        for table in dataset.index.tables(condition.columns, pieces[number]):
            each = [part(table) for part in condition.conditions]
            missing += [np.count_nonzero(~mask) for mask in each]
            masks.append(np.logical_and.reduce(each))
        return np.concatenate([missing.view(np.uint8), np.packbits(np.concatenate(masks), bitorder="little")])

    def combine(computed: Iterable[Any], new: NewArray) -> None:
        builder, missing = IdsBuilder(len(dataset)), np.zeros(len(condition.conditions), np.int64)
        for array, parts in zip(computed, pieces, strict=True):
            first, last = _samples_of(dataset, parts)
            missing += array[:head].copy().view(np.int64)
            builder.add(np.unpackbits(array[head:], count=last - first, bitorder="little").view(np.bool_))
        arrays = {**builder.ids().arrays(), _MISSING: missing}
        for name, array in arrays.items():
            new(name, array.shape, array.dtype)[...] = array

    key = _key("ids and missing", dataset, condition)
    return compute(_work(dataset, key, pieces, piece, combine))


def small_numbers(dataset: Dataset, names: Sequence[str], ids: SampleIds, function: Callable[..., Any]) -> Small:
    """The results of `function` for the values of these columns: a non-negative integer for each of `ids`."""
    return _numbers(dataset, names, ids, function, 0)["numbers"]


def bucket_numbers(
    dataset: Dataset, names: Sequence[str], ids: SampleIds, function: Callable[..., Any], buckets: int
) -> BucketNumbers:
    """The bucket of each of `ids`. `function` computes it from the values of these columns."""
    arrays = _numbers(dataset, names, ids, function, buckets)
    return BucketNumbers(arrays["numbers"], arrays["ends"])


def counts_by_bucket(counts: Small, chosen: BucketNumbers) -> list[Small]:
    """The counts of the samples in each bucket. `counts` and `chosen` have a number for each sample."""
    sizes = np.array([chosen.samples_in(bucket) for bucket in range(len(chosen.ends))], np.int64)
    ends = np.cumsum(sizes)

    def combine(_: Iterable[Any], new: NewArray) -> None:
        sorted_counts, at = new("counts", len(counts), counts.dtype), ends - sizes
        for first in range(0, len(counts), PIECE_SAMPLES):
            numbers = chosen.numbers[first : first + PIECE_SAMPLES]
            own = counts[first : first + PIECE_SAMPLES][np.argsort(numbers, kind="stable")]
            each = np.bincount(numbers, minlength=len(sizes))
            for bucket, values in enumerate(np.split(own, np.cumsum(each)[:-1])):
                sorted_counts[at[bucket] : at[bucket] + len(values)] = values
            at += each

    key = ["counts by bucket", content_key({"counts": counts, "numbers": chosen.numbers}), str(len(chosen.ends))]
    work = Work(key=key, samples=len(counts), pieces=0, piece=lambda _: counts, combine=combine)
    return np.split(compute(work)["counts"], ends[:-1])


def column(dataset: Dataset, name: str, ids: SampleIds) -> F64:
    """The values of a column for these samples, as float64."""
    every_part = range(len(dataset.index.ends))
    return np.concatenate([np.empty(0), *(values for (values,) in _values(dataset, [name], ids, every_part))])


def _numbers(
    dataset: Dataset, names: Sequence[str], ids: SampleIds, function: Callable[..., Any], buckets: int
) -> Arrays:
    """The arrays "numbers" and, with buckets, "ends"."""
    pieces = _pieces(dataset)

    def piece(number: int) -> Small:
        first, last = _samples_of(dataset, pieces[number])
        numbers = SmallArray(ids.rows_below(last) - ids.rows_below(first))
        for values in _values(dataset, names, ids, pieces[number]):
            numbers.add(function(*values))
        return numbers.values

    def combine(computed: Iterable[Small], new: NewArray) -> None:
        numbers = SmallArray(len(ids), lambda size, dtype: new("numbers", size, dtype))
        for array in computed:
            numbers.add(array)
        if buckets:
            bucket_ends(numbers.values, buckets, lambda shape, dtype: new("ends", shape, dtype))

    key = _key("numbers", dataset, function, *names, content_key(ids.arrays()), str(buckets))
    return compute(_work(dataset, key, pieces, piece, combine))


def _work(dataset: Dataset, key: Sequence[str] | None, pieces: Sequence[range], piece: Any, combine: Any) -> Work:
    return Work(
        key=key,
        samples=len(dataset),
        pieces=len(pieces),
        piece=piece,
        combine=combine,
        release=dataset.index.close_tables,
    )


def _values(dataset: Dataset, names: Sequence[str], ids: SampleIds, parts: range) -> Iterator[list[F64]]:
    """The values of these columns as float64, part by part, in the order of `ids`."""
    start, _ = _samples_of(dataset, parts)
    for table in dataset.index.tables(names, parts):
        rows = ids.between(start, start + table.num_rows) - start
        start += table.num_rows
        arrays = (table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in names)
        yield [np.asarray(values, np.float64)[rows] for values in arrays]


def _pieces(dataset: Dataset) -> list[range]:
    """Divide the index parts into ranges with about `PIECE_SAMPLES` samples."""
    ends, pieces, first = dataset.index.ends, list[range](), 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + PIECE_SAMPLES, side="right")))
        pieces.append(range(first, last))
        first = last
    return pieces


def _samples_of(dataset: Dataset, parts: range) -> tuple[int, int]:
    """The first sample of these parts, and the one after their last."""
    ends = dataset.index.ends
    return (int(ends[parts.start - 1]) if parts.start else 0), (int(ends[parts.stop - 1]) if parts.stop else 0)


def _key(kind: str, dataset: Dataset, function: Callable[..., Any] | AllOf, *more: str) -> Sequence[str] | None:
    """The key of the results of `function`. None if its classes are not Headrace's."""
    if not dataclasses.is_dataclass(function) or " at 0x" in repr(function):
        raise TypeError(f"{function!r} is not a dataclass whose repr describes what it computes")
    modules = sorted({type(part).__module__ for part in _dataclasses_in(function)})
    if not all(f"{module}.".startswith(_OWN_PACKAGES) for module in modules):
        return None
    return [kind, dataset.digest, f"{type(function).__module__}.{function!r}", *more]


def _dataclasses_in(value: Any) -> Iterator[Any]:
    """Yield `value` and all dataclasses in its fields."""
    if isinstance(value, tuple):
        for item in value:
            yield from _dataclasses_in(item)
    elif dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from _dataclasses_in(getattr(value, field.name))
