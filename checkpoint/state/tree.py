"""The structure of a state and its Python values, as one msgpack document.

It holds everything in a checkpoint except tensor bytes.

Invariant: decoding returns equal values of the same types. Tuples stay tuples, and integer keys stay integers. NaN,
infinities and integers of any size are preserved. A subclass of a built-in type is refused, because it would lose its
type. Decoding creates only the types listed here, so an untrusted document cannot run code.

Failure behaviour: `UsageError` names the path of a value that cannot be encoded. A malformed document raises
`CorruptionError`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

from headrace.checkpoint.format.manifest import NEWER_TREE
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import MIB, format_bytes

MAX_DEPTH = 64
MAX_BYTES = 32 * MIB
"""The largest document: half of a manifest."""
MAX_CONTAINERS = 8_000_000
"""The maximum number of lists and dicts in a document. In memory, they take far more space than in the document.

The check compares an upper bound of their number with it.
"""
DCP_MARK = "torch.distributed.checkpoint"
"""The mark in the documents of steps that `headrace.checkpoint.dcp` saved."""
_INT64 = 1 << 63
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "c"}
_DICT_TYPES: dict[str, type[dict[Any, Any]]] = {"d": dict, "o": OrderedDict, "c": Counter}
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of values that a document holds unchanged."""
_OLD_KEYS, _KEYS = (str, int), (str, int, type(None), bool, float, bytes, tuple)
_encoder = msgspec.msgpack.Encoder()


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """A placeholder for the tensor of this name."""

    name: str


@dataclass(frozen=True, slots=True)
class ViewRef:
    """A placeholder for a view of the bytes of the tensor of this name.

    `stride` is in elements of `dtype`, `offset` in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class MetaNode:
    """A placeholder for a tensor on the meta device."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartsNode:
    """A placeholder for a composite tensor.

    `kind`: "coo", "csr", "csc", "bsr", "bsc", or "wrapper:" and a class. `values` are plain.
    """

    kind: str
    values: object
    parts: dict[str, object]


@dataclass(frozen=True, slots=True)
class ValueNode:
    """A placeholder for a value of a type listed in `headrace.checkpoint.state.values`.

    `about` is plain. Only `value` may hold tensors.
    """

    kind: str
    about: object
    value: object = None


@dataclass(frozen=True, slots=True)
class StatefulNode:
    """The result of an object's `state_dict()`. `kind` is module, optimizer, scheduler or other."""

    kind: str
    state: object


def join(path: str, key: object) -> str:
    """The path of `key` below `path`. A slash in a key is written `~1`, and a tilde `~0`."""
    text = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{text}" if path else text


def encode(tree: object, *, newer: bool = False) -> bytes:
    """Encode a tree of Python values and nodes as msgpack. `newer`: mark it as readable from manifest version 4 on."""
    packer = _Packer()
    packed = packer.pack(tree, "", 0)
    document = NEWER_TREE + _encoder.encode(packed) if packer.newer or newer else _encoder.encode(packed)
    if len(document) > MAX_BYTES or _containers(document) > MAX_CONTAINERS:
        raise _too_large(tree, len(document))
    return document


def decode(document: bytes) -> object:
    """The tree of a document."""
    if len(document) > MAX_BYTES:
        raise CorruptionError(f"the state's document has {len(document)} bytes, more than {MAX_BYTES}")
    if _containers(document) > MAX_CONTAINERS:
        raise CorruptionError(f"the state's document may hold more than {MAX_CONTAINERS} lists and dicts")
    document = document.removeprefix(NEWER_TREE)
    try:
        return _unpack(msgspec.msgpack.decode(document), 0)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError) as error:
        raise CorruptionError(f"the state's document cannot be read: {error}") from None


def tensor_names(tree: object) -> Iterator[str]:
    """Names of all tensors that the tree refers to, in order."""
    if isinstance(tree, (TensorRef, ViewRef)):
        yield tree.name
    elif isinstance(tree, PartsNode):
        yield from tensor_names(tree.parts)
    elif isinstance(tree, StatefulNode):
        yield from tensor_names(tree.state)
    elif isinstance(tree, ValueNode):
        yield from tensor_names(tree.value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensor_names(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensor_names(value)


def _containers(document: bytes) -> int:
    """An upper bound on the lists and dicts in a document. Bytes of text or numbers may look like their headers."""
    if len(document) <= MAX_CONTAINERS:
        return 0
    data = np.frombuffer(document, np.uint8)
    return int(np.count_nonzero((data & 0xE0) == 0x80) + np.count_nonzero((data >= 0xDC) & (data <= 0xDF)))


class _Packer:
    """Packs a tree. `newer`: a packed value is unknown to readers of manifests up to version 3."""

    def __init__(self) -> None:
        self.newer = False

    def pack(self, value: object, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise UsageError(
                f"{path[:200]}: the state is nested deeper than {MAX_DEPTH}", hint="does it contain itself?"
            )
        kind = type(value)
        if kind in PLAIN:
            return _pack_plain(value, path)
        if isinstance(value, TensorRef):
            return ["T", value.name]
        if isinstance(value, (list, tuple)) and kind in (list, tuple):
            tag = "l" if kind is list else "t"
            return [tag, [self.pack(item, join(path, i), depth + 1) for i, item in enumerate(value)]]
        if isinstance(value, dict) and kind in _DICTS:
            return [_DICTS[kind], self._items(value, path, depth)]
        return self._node(value, path, depth)

    def _node(self, value: object, path: str, depth: int) -> object:
        if isinstance(value, StatefulNode):
            return ["S", value.kind, self.pack(value.state, path, depth + 1)]
        if isinstance(value, ViewRef):
            return ["V", value.name, value.dtype, list(value.shape), list(value.stride), value.offset]
        if isinstance(value, MetaNode):
            return ["M", value.dtype, list(value.shape)]
        if isinstance(value, PartsNode):
            values, parts = (self.pack(each, path, depth + 1) for each in (value.values, value.parts))
            return ["P", value.kind, values, parts]
        if isinstance(value, ValueNode):
            self.newer = True
            about, inner = (self.pack(each, path, depth + 1) for each in (value.about, value.value))
            return ["X", value.kind, about, inner]
        raise _unsupported_value(value, path)

    def _items(self, value: dict[Any, Any], path: str, depth: int) -> list[object]:
        items: list[object] = []
        for key, item in value.items():
            kind = type(key)
            if kind not in _KEYS:
                raise UsageError(
                    f"{path or 'the state'}: key {key!r:.60} is a {kind.__name__}",
                    hint="keys are text, numbers, bytes, None, or tuples of these",
                )
            self.newer = self.newer or kind not in _OLD_KEYS
            items.append(_pack_plain(key, path) if kind in PLAIN else self.pack(key, join(path, key), depth + 1))
            is_tensor = type(item) is TensorRef  # most items are; the path of others is for errors
            items.append(["T", item.name] if is_tensor else self.pack(item, join(path, key), depth + 1))
        return items


def _pack_plain(value: Any, path: str) -> object:
    kind = type(value)
    if kind is int:
        return value if -_INT64 <= value < _INT64 else ["i", hex(value)]
    if kind is complex:
        return ["z", value.real, value.imag]
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{path}: the text is not valid Unicode") from None
    return value


def _too_large(tree: object, size: int) -> UsageError:
    items = tree.items() if isinstance(tree, dict) else ()
    sizes = ((len(_encoder.encode(_Packer().pack(value, "", 0))), key) for key, value in items)
    largest = max(sizes, key=lambda found: found[0], default=(0, ""))[1]
    return UsageError(
        f"the state's values and names take {format_bytes(size)}, most of them under {largest!r:.60}; "
        f"at most {format_bytes(MAX_BYTES)} and {MAX_CONTAINERS} lists and dicts can be saved",
        hint="keep large values as tensors",
    )


def _unsupported_value(value: object, path: str) -> UsageError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = "save tensors, numbers, text, bytes, lists, tuples, dicts, or an object with state_dict and load_state_dict"
    like = next((base.__name__ for base in (dict, list, tuple, str, int, float) if isinstance(value, base)), None)
    if isinstance(value, Enum):
        hint = "define its class at module level, so that it is found by name, or save its value"
    elif like is not None:
        hint = f"it would be restored as a plain {like}: save {like}(...) of it"
    return UsageError(f"{path or 'the state'}: a value of type {kind} cannot be saved", hint=hint)


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
        case ["X", str(kind), about, value]:
            return ValueNode(kind, _unpack(about, depth + 1), _unpack(value, depth + 1))
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
        if type(key) not in _KEYS or key in result:
            raise ValueError(f"a bad or repeated key {key!r:.60}")
        result[key] = _unpack(items[i + 1], depth + 1)
    return result
