"""The few functions of Arrow that opening a dataset takes, without the module that has them all.

Purpose: `pyarrow.compute` writes some three hundred documented functions when it is imported, which takes longer than everything
else of pyarrow together; a process that reads a dataset would wait for that before its first sample.
Invariant: each function is the one of `pyarrow.compute` of the same name, with its defaults. Methods of arrays and tables such
as `take` and `filter` import `pyarrow.compute`, so they have no place on the way to the first sample.
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
    """Of a type that is told: to find one out, Arrow imports more modules than it needs otherwise."""
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
    """Where there is no value."""
    return _call("is_null", [values], _compute.NullOptions(nan_is_null=False))


def index(values: Any, value: Any) -> Any:
    """Where `value` is first, or -1."""
    return _call("index", [values], _compute.IndexOptions(_scalar(value)))


def index_in(values: Any, among: Any) -> Any:
    """The place of each value `among` others, or null."""
    return _call("index_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def is_in(values: Any, among: Any) -> Any:
    """Whether each value is `among` these."""
    return _call("is_in", [values], _compute.SetLookupOptions(among, skip_nulls=False))


def struct_field(values: Any, names: Sequence[str]) -> Any:
    """A field of structs."""
    return _call("struct_field", [values], _compute.StructFieldOptions(list(names)))


def rows(table: Any, numbers: Any) -> Any:
    """These rows of a table."""
    return _call("take", [table, numbers])
