"""Checks of arguments: values are converted to their annotated types, or an error is raised.

Purpose: every field of an options class has its annotated type. So neither arithmetic in a thread nor the JSON encoding
of a state meets another type. No torch.
Invariants: an int is accepted for a float, numpy scalars become Python scalars, and lists become tuples where a tuple
is annotated. Nothing else is converted.
Failure behaviour: `UsageError` with the argument, its value, and what to give instead.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError


def checked(name: str, value: object, kind: Any, expected: str = "") -> Any:
    """Convert `value` to this type.

    Args:
        name: name of the argument, for the error.
        value: the value that the caller gave.
        kind: a type, or a union of types.
        wanted: what to give instead, for the error. Default: the name of the type.
    """
    python_value = _without_numpy_scalars(value)
    try:
        converted = msgspec.convert(python_value, kind)
    except msgspec.ValidationError:
        raise UsageError(f"{name} cannot be {value!r:.200}", hint=f"give {expected or _type_name(kind)}") from None
    return converted if isinstance(python_value, list) else python_value


def check_fields(description: Any) -> None:
    """Convert the fields of a frozen dataclass to their annotated types. Call this in `__post_init__`."""
    cls: Any = type(description)
    for name, kind in _kinds(cls).items():
        value = getattr(description, name)
        converted = checked(f"{cls.__name__}'s {name}", value, kind)
        if converted is not value:
            object.__setattr__(description, name, converted)


def check_count(name: str, value: int, maximum: int) -> int:
    """Return `value` if it is an integer from 1 to `maximum`."""
    number: int = checked(name, value, int)
    if not 1 <= number <= maximum:
        raise UsageError(f"{name} is a number from 1 to {maximum}, not {number}")
    return number


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise `UsageError` unless `value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{name}={value!r} is not known", hint=f"use {', '.join(map(repr, choices))}")


def check_type(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    """Raise `UsageError` unless `value` is None or of one of these types."""
    if value is not None and not isinstance(value, kinds):
        raise UsageError(f"{name} cannot be {value!r}", hint=f"give {example}")


def _type_name(kind: Any) -> str:
    """The type as text for an error: `int or None`, `'mix' or 'first'`."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type_name, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is NoneType:
        return "None"
    return kind.__name__ if type(kind) is type else re.sub(r"[a-z_]+\.", "", str(kind))


@functools.cache
def _kinds(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _without_numpy_scalars(value: object) -> object:
    """`value` with Python scalars in place of numpy scalars."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_without_numpy_scalars(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _without_numpy_scalars(one) for name, one in value.items()}
    return value
