"""The state's shape and its Python values as one msgpack document: everything of a checkpoint that is not tensor bytes.

Invariant: decoding gives back what was encoded, types included: tuples stay tuples, integer keys stay integers, NaN and
infinities and integers of any size survive. Decoding builds nothing but the types named here, so a document from
outside cannot run code.
Failure behaviour: a value that cannot be encoded is a `UsageError` naming its path in the state; a document that is not
of this form is a `CorruptionError`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from dataio.core.errors import CorruptionError, UsageError
from dataio.core.limits import MIB, format_bytes

MAX_DEPTH = 64
MAX_BYTES = 8 * MIB
"""The most that a document may hold: half of a manifest."""
_INT64 = 1 << 63
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "c", defaultdict: "d"}
_DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"d": dict, "o": OrderedDict, "c": Counter}
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands for the tensor of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class ViewRef:
    """Stands for a view of the bytes of the tensor of this name. `stride` in elements of `dtype`, `offset` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class MetaNode:
    """Stands for a tensor without bytes."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartsNode:
    """Stands for a tensor made of others. `kind` is coo, csr, csc, bsr, bsc, or wrapper: and a class; `values` are plain."""

    kind: str
    values: object
    parts: dict[str, object]


@dataclass(frozen=True, slots=True)
class StatefulNode:
    """What an object's `state_dict()` returned. `kind` is module, optimizer, scheduler or other."""

    kind: str
    state: object


def join(path: str, key: object) -> str:
    """The path of `key` below `path`; a slash in a key is written `~1` and a tilde `~0`."""
    text = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{text}" if path else text


def encode(tree: object) -> bytes:
    """msgpack of a tree of Python values, `TensorRef` and `StatefulNode`."""
    packed = _pack(tree, "", 0)
    document = _encoder.encode(packed)
    if len(document) > MAX_BYTES:
        raise _too_large(tree, len(document))
    return document


def decode(document: bytes) -> object:
    """The tree of a document."""
    try:
        return _unpack(msgspec.msgpack.decode(document), 0)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptionError(f"the state's document cannot be read: {error}") from None


def tensor_names(tree: object) -> Iterator[str]:
    """Names of all tensors that the tree stands for, in order."""
    if isinstance(tree, (TensorRef, ViewRef)):
        yield tree.name
    elif isinstance(tree, PartsNode):
        yield from tensor_names(tree.parts)
    elif isinstance(tree, StatefulNode):
        yield from tensor_names(tree.state)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensor_names(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensor_names(value)


def _pack(value: object, path: str, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise UsageError(f"{path[:200]}: the state is nested deeper than {MAX_DEPTH}", hint="does it contain itself?")
    if value is None or isinstance(value, (bool, bytes)):
        return value
    if isinstance(value, (int, float, str, complex)):
        return _pack_scalar(value, path)
    if isinstance(value, TensorRef):
        return ["T", value.name]
    if isinstance(value, StatefulNode):
        return ["S", value.kind, _pack(value.state, path, depth + 1)]
    if isinstance(value, ViewRef):
        return ["V", value.name, value.dtype, list(value.shape), list(value.stride), value.offset]
    if isinstance(value, MetaNode):
        return ["M", value.dtype, list(value.shape)]
    if isinstance(value, PartsNode):
        return ["P", value.kind, _pack(value.values, path, depth + 1), _pack(value.parts, path, depth + 1)]
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        tag = "l" if isinstance(value, list) else "t"
        return [tag, [_pack(item, join(path, i), depth + 1) for i, item in enumerate(value)]]
    if type(value) in _DICTS:
        return [_DICTS[type(value)], _pack_items(value, path, depth)]
    raise _refused(value, path)


def _pack_items(value: object, path: str, depth: int) -> list[object]:
    assert isinstance(value, dict)
    items: list[object] = []
    for key, item in value.items():
        if type(key) not in (str, int):
            raise UsageError(
                f"{path or 'the state'}: key {key!r:.60} is a {type(key).__name__}", hint="keys are strings or integers"
            )
        items += [_pack_scalar(key, join(path, key)), _pack(item, join(path, key), depth + 1)]
    return items


def _pack_scalar(value: int | float | str | complex, path: str) -> object:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{path}: the text is not valid Unicode") from None
        return str(value)
    if isinstance(value, int):
        return int(value) if -_INT64 <= value < _INT64 else ["i", hex(value)]
    if isinstance(value, complex):
        return ["z", value.real, value.imag]
    return float(value)


def _too_large(tree: object, size: int) -> UsageError:
    items = tree.items() if isinstance(tree, dict) else ()
    largest = max(((len(_encoder.encode(_pack(value, "", 0))), key) for key, value in items), default=(0, ""))[1]
    return UsageError(
        f"the state's values other than tensors take {format_bytes(size)}, most of them under {largest!r:.60}; "
        f"at most {format_bytes(MAX_BYTES)} can be saved",
        hint="keep large values as tensors",
    )


def _refused(value: object, path: str) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UsageError(
        f"{path or 'the state'}: a value of type {kind} cannot be saved",
        hint="save tensors, numbers, text, bytes, lists, tuples, dicts, or an object with state_dict and load_state_dict",
    )


def _unpack(node: object, depth: int) -> object:
    if not isinstance(node, list):
        if isinstance(node, dict):
            raise ValueError("a bare map")
        return node
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    match node:
        case ["T", str(name)]:
            return TensorRef(name)
        case ["S", str(kind), state]:
            return StatefulNode(kind, _unpack(state, depth + 1))
        case ["V", str(name), str(dtype), list(shape), list(stride), int(offset)]:
            return ViewRef(name, dtype, _sizes(shape), _sizes(stride), *_sizes([offset]))
        case ["M", str(dtype), list(shape)]:
            return MetaNode(dtype, _sizes(shape))
        case ["P", str(kind), values, ["d", list(items)]]:
            return PartsNode(kind, _unpack(values, depth + 1), _unpack_parts(items, depth + 1))
        case ["l", list(items)]:
            return [_unpack(item, depth + 1) for item in items]
        case ["t", list(items)]:
            return tuple(_unpack(item, depth + 1) for item in items)
        case ["i", str(digits)]:
            return int(digits, 16)
        case ["z", float(real), float(imag)]:
            return complex(real, imag)
        case [str(tag), list(items)] if tag in _DICT_TYPES:
            return _unpack_items(_DICT_TYPES[tag], items, depth)
    raise ValueError("an unknown tag")


def _unpack_parts(items: list[object], depth: int) -> dict[str, object]:
    parts = _unpack_items(dict, items, depth)
    if not all(isinstance(key, str) for key in parts):
        raise ValueError("a part without a name")
    return {str(key): value for key, value in parts.items()}


def _sizes(numbers: list[object]) -> tuple[int, ...]:
    if len(numbers) > MAX_DEPTH or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("a bad shape")
    return tuple(n for n in numbers if isinstance(n, int))


def _unpack_items(kind: type[dict[Any, Any]], items: list[object], depth: int) -> dict[object, object]:
    result = kind()
    if len(items) % 2:
        raise ValueError("a key without a value")
    for i in range(0, len(items), 2):
        key = _unpack(items[i], depth + 1)
        if type(key) not in (str, int) or key in result:
            raise ValueError(f"a bad or repeated key {key!r:.60}")
        result[key] = _unpack(items[i + 1], depth + 1)
    return result
