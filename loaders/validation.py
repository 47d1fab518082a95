"""Values of the kinds that their annotations say: what comes from configurations and from numpy, made plain or refused.

Purpose: a description holds what its fields promise, so that nothing of another kind is met later: by arithmetic in a thread, or
by JSON when a state is saved.
Invariants: a whole number may stand for a float, numpy's scalars become Python's, and lists become tuples where those are meant;
nothing else is converted. No torch.
Failure behaviour: `UsageError` naming the field, what it is, and what it should be.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from headrace.dataio.core.errors import UsageError


def plain(name: str, value: object, kind: Any, wanted: str = "") -> Any:
    """`value`, if it is of this kind; what is `wanted` in words, where those of the kind would not do."""
    found = _python(value)
    try:
        converted = msgspec.convert(found, kind)
    except msgspec.ValidationError:
        raise UsageError(f"{name} cannot be {value!r:.200}", hint=f"give {wanted or _said(kind)}") from None
    return converted if isinstance(found, list) else found


def validate_fields(description: Any) -> None:
    """Bring the fields of a frozen dataclass to the kinds of its annotations; for its `__post_init__`."""
    cls: Any = type(description)
    for name, kind in _kinds(cls).items():
        value = getattr(description, name)
        found = plain(f"{cls.__name__}'s {name}", value, kind)
        if found is not value:
            object.__setattr__(description, name, found)


def _said(kind: Any) -> str:
    """As people would: `int or None`, `'mix' or 'first'`."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_said, get_args(kind)))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if kind is NoneType:
        return "None"
    return kind.__name__ if type(kind) is type else re.sub(r"[a-z_]+\.", "", str(kind))


@functools.cache
def _kinds(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _python(value: object) -> object:
    """Without numpy's scalars."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_python(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _python(one) for name, one in value.items()}
    return value
