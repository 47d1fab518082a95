"""Reads columns of the index to choose a loader's samples, and to compute a number for each of them.

Purpose: a loader takes the samples that have a stream, and needs a number of clips or a bucket for each.
Invariants: columns are read part by part. Only results are kept: ids (`SampleIds`) and small integers (`SmallArray`).
Failure behaviour: `UsageError` if no sample is left. Errors of the index are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.dataset import Dataset
from headrace.loaders.sampling.sample_ids import AllIds, IdsBuilder, SampleIds, Small, SmallArray

F64 = npt.NDArray[np.float64]


def samples_with(dataset: Dataset, column: str, what: str, *, without: Collection[str] = ()) -> SampleIds:
    """The ids of the samples whose `column` is neither null nor in `without`.

    `what` describes them in the error if there are none.
    """
    if not len(dataset):
        raise UsageError(f"no sample of {dataset.url} is left", hint="loosen the condition of the view")
    only = dataset.constant_value(column)
    if only is not None and only not in without:
        return AllIds(len(dataset))
    import pyarrow as pa  # imported late: not all loaders need it

    from headrace.dataio.shards.index import arrow as pc

    builder, left_out = IdsBuilder(len(dataset)), pa.array(sorted(without), pa.string())
    for table in dataset.index.tables([column]):
        values = table[column]
        chosen = pc.is_valid(values)
        if without:
            chosen = pc.and_(chosen, pc.invert(pc.is_in(values, left_out)))
        builder.add(chosen.to_numpy())
    ids = builder.ids()
    if not len(ids):
        hint = "`headrace info` lists its contents" + (
            "; pictures are clips of one frame: Clip(frames=1)" if without else ""
        )
        raise UsageError(f"{dataset.url} has no {what}", hint=hint)
    return ids


def column_chunks(dataset: Dataset, names: Sequence[str], ids: SampleIds) -> Iterator[list[F64]]:
    """The values of these columns as float64, some samples at a time, in the order of `ids`.

    Memory does not grow with the dataset.
    """
    start = 0
    for table in dataset.index.tables(names):
        rows = ids.between(start, start + table.num_rows) - start
        start += table.num_rows
        arrays = (table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in names)
        yield [np.asarray(values, np.float64)[rows] for values in arrays]


def small_numbers(dataset: Dataset, names: Sequence[str], ids: SampleIds, compute: Callable[..., Any]) -> Small:
    """What `compute` makes of the values of these columns: a non-negative integer for each sample, stored compactly."""
    found = SmallArray(len(ids))
    for values in column_chunks(dataset, names, ids):
        found.add(compute(*values))
    return found.values


def column(dataset: Dataset, name: str, ids: SampleIds) -> F64:
    """The values of a column for these samples, as float64."""
    return np.concatenate([np.empty(0), *(values for (values,) in column_chunks(dataset, [name], ids))])
