"""The Arrow compute functions that opening a dataset needs, without importing `pyarrow.compute`.

Purpose: `pyarrow.compute` generates about three hundred documented functions at import. This takes longer than
importing the rest of pyarrow, and it would delay the first sample of every process that reads a dataset.
Invariants: each function does the same as the `pyarrow.compute` function of the same name with its default options.
Code that runs before the first sample must not call methods such as `take` and `filter`: they import `pyarrow.compute`.
Failure behaviour: Arrow's own errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import _compute

_call: Callable[..., Any] = _compute.call_function


_TYPES = {bool: pa.bool_(), int: pa.int64(), str: pa.string()}


def _scalar(value: Any) -> Any:
    """Convert a value with an explicit type. To infer the type, Arrow would import more modules."""
    kind = _TYPES.get(type(value))
    return value if kind is None else pa.scalar(value, kind)


def _named(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return _call(name, [_scalar(one) for one in arguments])

    return call


and_, equal, invert, less, less_equal, xor = map(_named, ("and", "equal", "invert", "less", "less_equal", "xor"))
binary_length, count_distinct, is_valid, min_max, sum_, unique = map(
    _named, ("binary_length", "count_distinct", "is_valid", "min_max", "sum", "unique")
)
list_element, list_flatten, list_parent_indices, list_value_length, take = map(
    _named, ("list_element", "list_flatten", "list_parent_indices", "list_value_length", "array_take")
)


def is_null(values: Any) -> Any:
    """A mask of the null values. NaN is not null."""
    return _call("is_null", [values], _compute.NullOptions(nan_is_null=False))


def index(values: Any, value: Any) -> Any:
    """The position of the first `value`, or -1."""
    return _call("index", [values], _compute.IndexOptions(_scalar(value)))


def index_in(values: Any, among: Any) -> Any:
    """For each value, its position in `among`, or null."""
    return _call("index_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def is_in(values: Any, among: Any) -> Any:
    """For each value, whether `among` contains it."""
    return _call("is_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def struct_field(values: Any, names: Sequence[str]) -> Any:
    """The field at the path `names` of each struct."""
    return _call("struct_field", [values], _compute.StructFieldOptions(list(names)))


def rows(table: Any, numbers: Any) -> Any:
    """The rows `numbers` of a table, in this order."""
    return _call("take", [table, numbers])
