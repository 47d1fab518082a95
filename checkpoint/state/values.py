"""Python values that msgpack has no form for: an explicit list of types, each taken apart into plain values and made again.

Enum members and named tuples are found again by the name of their class, among the modules that are loaded already. Nothing is
imported or unpickled.
Invariant: `made(taken(x))` equals `x` and has its type.
Failure behaviour: `taken` returns None for any other value, which the document then refuses by its path. `made` raises
`MismatchError` for a class that is not loaded here or has changed, and `CorruptionError` for a node that no save has written.
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

from checkpoint.state.tree import ValueNode
from dataio.core.errors import CorruptionError, MismatchError, UnsupportedError

_FACTORIES = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufc][0-9]{1,2}|[SU][0-9]{1,9}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")


def taken(value: Any) -> ValueNode | None:
    """The value as a node, None when its type is not listed. What `value` of the node holds is yet to be taken."""
    kind = type(value)
    if kind in _HOLDERS:
        return _HOLDERS[kind](value)
    if kind in _LEAVES:
        node = ValueNode(*_LEAVES[kind](value))
    elif isinstance(value, Enum):
        names = [member.name for member in value] if isinstance(value, Flag) else [value.name]
        node = ValueNode("enum", [_name(kind), names])
    elif isinstance(value, tuple) and hasattr(kind, "_fields"):
        known = _find(_name(kind)) is kind
        return ValueNode("namedtuple", [_name(kind), list(kind._fields)], list(value)) if known else None
    elif isinstance(value, np.generic):
        text = isinstance(value, np.str_ | np.bytes_)
        node = ValueNode(
            *(("numpy.text", value.item()) if text else ("numpy.scalar", [value.dtype.str, value.tobytes()]))
        )
    else:
        return None
    return node if _comes_back(node, value) else None


def made(node: ValueNode) -> Any:
    """The value of a node of which `value` was made already."""
    if node.kind not in _MAKING:
        raise UnsupportedError(f"values of kind {node.kind!r:.60} are not known here", hint="install a newer Millrace")
    try:
        return _MAKING[node.kind](node.about, node.value)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CorruptionError(f"a saved value of kind {node.kind} cannot be made again: {error}") from None


def _comes_back(node: ValueNode, value: Any) -> bool:
    try:
        again = made(node)
    except (CorruptionError, MismatchError):
        return False
    if type(again) is not type(value):
        return False
    if isinstance(value, np.ndarray | np.generic):
        return bool(again.dtype == value.dtype and again.tobytes() == value.tobytes())
    return isinstance(value, io.BytesIO) or repr(again) == repr(value)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find(name: str) -> type | None:
    """The class of this name, None when it is not loaded. Looks into namespaces only: asking for attributes could import."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found if isinstance(found, type) else None


def _loaded(name: Any, base: type) -> Any:
    found = _find(str(name))
    if found is None or not issubclass(found, base):
        raise MismatchError(
            f"the checkpoint holds a value of the class {name!s:.200}, which is not loaded here",
            hint="import its module before restoring",
        )
    return found


def _changed(name: object) -> MismatchError:
    return MismatchError(
        f"the class {name!s:.200} is not the one that was saved: a member or field has another name",
        hint="restore with the class as it was, or save the step again without it",
    )


def _enum(about: Any, _: object) -> object:
    kind, names = _loaded(about[0], Enum), about[1]
    members = [kind.__members__.get(name) for name in names]
    if None in members or (not issubclass(kind, Flag) and len(members) != 1):
        raise _changed(about[0])
    return functools.reduce(lambda a, b: a | b, members, kind(0)) if issubclass(kind, Flag) else members[0]


def _namedtuple(about: Any, items: Any) -> object:
    kind, fields = _loaded(about[0], tuple), tuple(about[1])
    if getattr(kind, "_fields", None) != fields or len(items) != len(fields):
        raise _changed(about[0])
    return tuple.__new__(kind, items)


def _defaultdict(value: defaultdict[Any, Any]) -> ValueNode | None:
    name = next((name for name, kind in _FACTORIES.items() if kind is value.default_factory), None)
    if name is None and value.default_factory is not None:
        return None
    return ValueNode("collections.defaultdict", name, dict(value))


def _of_torch(name: Any, kind: type) -> object:
    found = vars(torch).get(name)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {name!s:.60}")
    return found


def _numpy(about: Any, _: object) -> Any:
    text, shape, data = about
    if not _NUMPY_DTYPE.fullmatch(text):
        raise ValueError(f"{text!r:.60} is no type of numbers or text")
    return np.frombuffer(data, np.dtype(text)).reshape(shape).copy()


def _stream(about: Any, _: object) -> object:
    stream = io.BytesIO(about[0])
    stream.seek(about[1])
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
    "torch.device": lambda about, _: torch.device(about),
    "torch.Size": lambda about, _: torch.Size(about),
    "torch.TorchVersion": lambda about, _: TorchVersion(about),
    "numpy.array": _numpy,
    "numpy.scalar": lambda about, _: _numpy([about[0], [], about[1]], None)[()],
    "numpy.text": lambda about, _: np.str_(about) if isinstance(about, str) else np.bytes_(about),
    "io.BytesIO": _stream,
    "bytearray": lambda about, _: bytearray(memoryview(about)),
    "range": lambda about, _: range(*about),
    "slice": lambda about, _: slice(*about),
    "fractions.Fraction": lambda about, _: fractions.Fraction(*about),
    "decimal.Decimal": lambda about, _: decimal.Decimal(about),
    "datetime.datetime": lambda about, _: datetime.datetime.fromisoformat(about),
    "datetime.date": lambda about, _: datetime.date.fromisoformat(about),
    "datetime.time": lambda about, _: datetime.time.fromisoformat(about),
    "datetime.timedelta": lambda about, _: datetime.timedelta(*about),
    "pathlib.Path": lambda about, _: pathlib.Path(about),
    "set": lambda _, items: set(items),
    "frozenset": lambda _, items: frozenset(items),
    "collections.deque": lambda maxlen, items: deque(items, maxlen),
    "collections.defaultdict": lambda name, items: defaultdict(None if name is None else _FACTORIES[name], items),
    "enum": _enum,
    "namedtuple": _namedtuple,
}
