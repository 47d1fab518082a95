"""Encode Python values that msgpack cannot represent. The list of types is fixed, and each is encoded as plain values.

Enum members and named tuples are stored with the name of their class. `decode` looks the class up in modules that are
already loaded. It imports and unpickles nothing.

Invariant: `decode(encode(x))` equals `x` and has the same type.

Failure behaviour: `encode` returns None for any other value. `tree.encode` then raises an error that names its path.
`decode` raises `MismatchError` for a class that is not loaded or has changed, and `CorruptionError` for a malformed
node.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import io
import pathlib
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from enum import Enum, Flag
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from headrace.checkpoint.state.tree import PLAIN, ValueNode
from headrace.dataio.core.errors import CorruptionError, MismatchError, UnsupportedError

_MAX_BITS = 14_284
"""The largest integer in such a value, in bits. Division of larger integers is slow.

It corresponds to Python's limit on the length of number strings, 4,300 digits.
"""
_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")


def encode(value: Any) -> ValueNode | None:
    """The value as a node, or None if its type is not listed. The caller then encodes the node's `value`."""
    kind = type(value)
    if kind in _HOLDERS:
        return _HOLDERS[kind](value)
    if kind in _LEAVES:
        node = ValueNode(*_LEAVES[kind](value))
    elif isinstance(value, Enum):
        names = [member.name for member in value] if isinstance(value, Flag) else [value.name]
        node = ValueNode("enum", [_name(kind), names])
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        restorable = _find(_name(kind)) is kind and not getattr(value, "__dict__", None)
        return ValueNode("namedtuple", [_name(kind), list(kind._fields)], list(value)) if restorable else None
    elif isinstance(value, np.generic):
        text = isinstance(value, np.str_ | np.bytes_)
        node = ValueNode(
            *(("numpy.text", value.item()) if text else ("numpy.scalar", [value.dtype.str, value.tobytes()]))
        )
    else:
        return None
    return node if _round_trips(node, value) else None


def decode(node: ValueNode) -> Any:
    """The value of a node. The caller has already decoded the node's `value`."""
    if node.kind not in _MAKING:
        raise UnsupportedError(
            f"values of kind {node.kind!r:.60} are unknown to this Headrace", hint="install a newer Headrace"
        )
    try:
        return _MAKING[node.kind](node.about, node.value)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CorruptionError(f"a saved value of kind {node.kind} cannot be decoded: {error!s:.200}") from None


def _round_trips(node: ValueNode, value: Any) -> bool:
    try:
        decoded = decode(node)
    except (CorruptionError, MismatchError):
        return False
    if type(decoded) is not type(value):
        return False
    if isinstance(value, np.ndarray | np.generic):
        return bool(decoded.dtype == value.dtype and decoded.tobytes() == value.tobytes())
    return isinstance(value, io.BytesIO) or repr(decoded) == repr(value)


def _exact(value: Any, *kinds: type) -> Any:
    """The value, if its type is exactly one of `kinds`. A subclass is refused, so no constructor receives one."""
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} instead of {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _integer(value: Any) -> int:
    if _exact(value, int).bit_length() > _MAX_BITS:
        raise ValueError(f"an integer of more than {_MAX_BITS} bits")
    return int(value)


def _integers(about: Any, count: int | None = None) -> list[int]:
    return [_integer(value) for value in _list_of(about, count)]


def _list_of(about: Any, count: int | None = None) -> list[Any]:
    items: list[Any] = _exact(about, list)
    if count is not None and len(items) != count:
        raise ValueError(f"{len(items)} values instead of {count}")
    return items


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> type | None:
    """The class of this name, or None if it is not loaded.

    The function reads namespaces only, because attribute access could import a module.
    """
    module, _, path = name.partition(":")
    value: object = sys.modules.get(module)
    for part in path.split("."):
        value = vars(value).get(part) if isinstance(value, ModuleType | type) else None
    return value if isinstance(value, type) else None


def _loaded(name: Any, base: type) -> Any:
    kind = _find(_exact(name, str))
    if kind is None or not issubclass(kind, base):
        raise MismatchError(
            f"the checkpoint holds a value of the class {name!s:.200}, which is not loaded in this process",
            hint="import its module before restoring",
        )
    return kind


def _changed(name: object) -> MismatchError:
    return MismatchError(
        f"the class {name!s:.200} differs from the one that was saved: a member or field has another name",
        hint="restore with the class as it was, or save the step again without it",
    )


def _enum(about: Any, _: object) -> object:
    name, names = _list_of(about, 2)
    kind = _loaded(name, Enum)
    members = [kind.__members__.get(_exact(each, str)) for each in _list_of(names)]
    if None in members or (not issubclass(kind, Flag) and len(members) != 1):
        raise _changed(name)
    return functools.reduce(lambda a, b: a | b, members, kind(0)) if issubclass(kind, Flag) else members[0]


def _namedtuple(about: Any, items: Any) -> object:
    name, fields = _list_of(about, 2)
    kind = _loaded(name, tuple)
    if getattr(kind, "_fields", None) != tuple(_list_of(fields)) or len(_list_of(items)) != len(fields):
        raise _changed(name)
    return tuple.__new__(kind, items)


def _defaultdict(value: defaultdict[Any, Any]) -> ValueNode | None:
    name = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), None)
    if name is None and value.default_factory is not None:
        return None
    return ValueNode("collections.defaultdict", name, dict(value))


def _of_torch(name: Any, kind: type) -> object:
    value = vars(torch).get(_exact(name, str))
    if not isinstance(value, kind):
        raise ValueError(f"torch has no {name!s:.60}")
    return value


def _numpy(about: Any, _: object) -> Any:
    text, shape, data = _list_of(about, 3)
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r:.60} is not a type of numbers or text")
    return np.frombuffer(_exact(data, bytes), np.dtype(text)).reshape(_integers(shape)).copy()


def _stream(about: Any, _: object) -> object:
    data, position = _list_of(about, 2)
    stream = io.BytesIO(_exact(data, bytes))
    stream.seek(_integer(position))
    return stream


_LEAVES: dict[type, Callable[[Any], tuple[str, object]]] = {
    torch.dtype: lambda v: ("torch.dtype", str(v).removeprefix("torch.")),
    torch.device: lambda v: ("torch.device", str(v)),
    torch.Size: lambda v: ("torch.Size", list(v)),
    TorchVersion: lambda v: ("torch.TorchVersion", str(v)),
    np.ndarray: lambda v: ("numpy.array", [v.dtype.str, list(v.shape), b"" if v.dtype.hasobject else v.tobytes()]),
    io.BytesIO: lambda v: ("io.BytesIO", [v.getvalue(), v.tell()]),
    bytearray: lambda v: ("bytearray", bytes(v)),
    range: lambda v: ("range", [v.start, v.stop, v.step]),
    slice: lambda v: ("slice", [v.start, v.stop, v.step]),
    fractions.Fraction: lambda v: ("fractions.Fraction", [v.numerator, v.denominator]),
    decimal.Decimal: lambda v: ("decimal.Decimal", str(v)),
    datetime.datetime: lambda v: ("datetime.datetime", v.isoformat()),
    datetime.date: lambda v: ("datetime.date", v.isoformat()),
    datetime.time: lambda v: ("datetime.time", v.isoformat()),
    datetime.timedelta: lambda v: ("datetime.timedelta", [v.days, v.seconds, v.microseconds]),
    type(pathlib.Path()): lambda v: ("pathlib.Path", str(v)),
}
_HOLDERS: dict[type, Callable[[Any], ValueNode | None]] = {
    set: lambda v: ValueNode("set", None, list(v)),
    frozenset: lambda v: ValueNode("frozenset", None, list(v)),
    deque: lambda v: ValueNode("collections.deque", v.maxlen, list(v)),
    defaultdict: _defaultdict,
}
_MAKING: dict[str, Callable[[Any, Any], object]] = {
    "torch.dtype": lambda about, _: _of_torch(about, torch.dtype),
    "torch.device": lambda about, _: torch.device(_exact(about, str)),
    "torch.Size": lambda about, _: torch.Size(_integers(about)),
    "torch.TorchVersion": lambda about, _: TorchVersion(_exact(about, str)),
    "numpy.array": _numpy,
    "numpy.scalar": lambda about, _: _numpy([about[0], [], about[1]], None)[()],
    "numpy.text": lambda about, _: (np.str_ if type(about) is str else np.bytes_)(_exact(about, str, bytes)),
    "io.BytesIO": _stream,
    "bytearray": lambda about, _: bytearray(_exact(about, bytes)),
    "range": lambda about, _: range(*_integers(about, 3)),
    "slice": lambda about, _: slice(*(_exact(each, *PLAIN) for each in _list_of(about, 3))),
    "fractions.Fraction": lambda about, _: fractions.Fraction(*_integers(about, 2)),
    "decimal.Decimal": lambda about, _: decimal.Decimal(_exact(about, str)),
    "datetime.datetime": lambda about, _: datetime.datetime.fromisoformat(_exact(about, str)),
    "datetime.date": lambda about, _: datetime.date.fromisoformat(_exact(about, str)),
    "datetime.time": lambda about, _: datetime.time.fromisoformat(_exact(about, str)),
    "datetime.timedelta": lambda about, _: datetime.timedelta(*_integers(about, 3)),
    "pathlib.Path": lambda about, _: pathlib.Path(_exact(about, str)),
    "set": lambda _, items: set(_list_of(items)),
    "frozenset": lambda _, items: frozenset(_list_of(items)),
    "collections.deque": lambda most, items: deque(_list_of(items), None if most is None else _integer(most)),
    "collections.defaultdict": lambda name, items: defaultdict(
        None if name is None else _FACTORIES[name], _exact(items, dict)
    ),
    "enum": _enum,
    "namedtuple": _namedtuple,
}
