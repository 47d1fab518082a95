"""Reads `.metadata` of a folder of torch.distributed.checkpoint (DCP): its tensors, their chunks, and its other values.

The file is a pickle of DCP's classes. It is read by `pickle_reader`, which runs no code. The classes have changed since
torch 2.1, so each field is found by its name, and fields that are not needed are ignored.

Invariant: the chunks of a tensor fill it without gaps and overlaps. A file is a plain name in the folder. No size is
trusted: they are compared with the files by `dcp_source`.
Failure behaviour: `UnsupportedError` names a class or a feature that is not read. `CorruptionError` for anything that
does not fit together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.checkpoint.exchange import pickle_reader
from headrace.checkpoint.exchange.pickle_reader import Name, Record
from headrace.checkpoint.format.chunking import ITEM_BYTES
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

METADATA = ".metadata"
"""The name of the file."""
MAX_BYTES = 1 << 30
"""The largest `.metadata`, in bytes."""
MAX_CELLS = 1 << 24
"""The largest grid on which the chunks of one tensor are compared. A regular grid has one cell for each chunk."""
_MAX_DIMENSIONS, _MAX_SIZE = 64, 1 << 62
_DCP = "torch.distributed.checkpoint.metadata."
_OLD = "torch.distributed._shard.sharded_tensor.metadata."
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
ALLOWED = frozenset(
    [
        *(f"{_DCP}{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(f"{_DCP}{name}" for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
        *(f"{place}TensorProperties" for place in (_DCP, _OLD)),
        f"{_OLD}MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(f"torch.{name}" for name in ("Size", "device", "serialization._get_layout", *ITEM_BYTES)),
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
        "collections.OrderedDict",
        "builtins.getattr",  # in this way Python 3.11.0 to 3.11.3 name a member of an enumeration
    ]
)
"""The classes and functions that DCP's metadata names. None of them is imported or called."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The bytes of one archive: `length` bytes from byte `at` of a file in the folder."""

    file: str
    at: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: `local` elements from `offset` in each dimension."""

    offset: tuple[int, ...]
    local: tuple[int, ...]
    place: Slice


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, and the chunks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True)
class Contents:
    """The tensors and the other values by DCP's names, and the paths of the names in the state."""

    tensors: dict[str, StoredTensor]
    values: dict[str, Slice]
    paths: dict[str, tuple[str | int, ...]]


def read_metadata(data: bytes, limits: pickle_reader.Limits | None = None) -> Contents:
    """The contents of a `.metadata` file.

    Args:
        data (bytes): The file.
        limits (Limits | None): Limits of the pickle. Default: None, those of `pickle_reader`.

    Returns:
        Contents: Tensors, values and paths.

    Raises:
        UnsupportedError: The file names a class that is not DCP's, or uses a transformation of its files.
        CorruptionError: The file is damaged, or its parts do not fit together.
    """
    fields = _fields(pickle_reader.read_pickle(data, ALLOWED, limits), "Metadata")
    places = _places(_mapping(fields, "storage_data"))
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Slice] = {}
    for name, entry in _mapping(fields, "state_dict_metadata").items():
        if not isinstance(name, str):
            raise CorruptionError("an entry has no name")
        if isinstance(entry, Record) and entry.name == f"{_DCP}BytesStorageMetadata":
            values[name] = _place(places, name, None)
        else:
            tensors[name] = _tensor(name, _fields(entry, "TensorStorageMetadata"), places)
    return Contents(tensors, values, _all_paths(fields.get("planner_data"), tensors.keys() | values.keys()))


def _fields(value: object, kind: str) -> dict[str, Any]:
    """The fields of a record of this class, by name."""
    if not isinstance(value, Record) or value.name.rpartition(".")[2] != kind:
        raise CorruptionError(f"a {kind} is missing")
    state = value.state
    if isinstance(state, tuple) and len(state) == 2 and state[0] is None:
        state = state[1]  # that of a class with slots
    if value.args or not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise CorruptionError(f"a {kind} is malformed")
    return state


def _mapping(fields: Mapping[str, Any], name: str) -> dict[Any, Any]:
    found = fields.get(name)
    if not isinstance(found, dict):
        raise CorruptionError(f"{name} is not a dict")
    return found


def _size(value: object) -> tuple[int, ...]:
    """A `torch.Size`, or a tuple or list of sizes."""
    if isinstance(value, Record) and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIMENSIONS:
        raise CorruptionError("a size is malformed")
    if not all(type(n) is int and 0 <= n < _MAX_SIZE for n in value):
        raise CorruptionError("a size is malformed")
    return tuple(value)


_Key = tuple[str, str]


def _key(name: str, offset: tuple[int, ...] | None) -> _Key:
    """The key of a place. It holds only texts: equal hashes of tuples of numbers are easy to construct."""
    return name, str(offset)


def _places(stored: Mapping[Any, Any]) -> dict[_Key, Slice]:
    """The places of all chunks and values, by name and offset."""
    places: dict[_Key, Slice] = {}
    for index, info in stored.items():
        key, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
        name, offset = key.get("fqn"), key.get("offset")
        if not isinstance(name, str):
            raise CorruptionError("a place has no name")
        if place.get("transform_descriptors"):
            raise UnsupportedError(
                f"{name!r:.200} is stored with a transformation such as compression, which is not read",
                hint="load it where you trust its author, and save it again without extensions",
            )
        places[_key(name, None if offset is None else _size(offset))] = _slice(name, place)
    return places


def _slice(name: str, place: Mapping[str, Any]) -> Slice:
    file, at, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(at) is not int or type(length) is not int:
        raise CorruptionError(f"the place of {name!r:.200} is malformed")
    if file in ("", ".", "..") or "/" in file or "\0" in file or len(os.fsencode(file)) > 255:
        raise CorruptionError(f"{name!r:.200} is in {file!r:.200}, which is not a file of the folder")
    if at < 0 or length <= 0:
        raise CorruptionError(f"{name!r:.200} has {length} bytes at byte {at} of its file")
    return Slice(file, at, length)


def _place(places: Mapping[_Key, Slice], name: str, offset: tuple[int, ...] | None) -> Slice:
    place = places.get(_key(name, offset))
    if place is None:
        where = "" if offset is None else f" at {offset!s:.200}"
        raise CorruptionError(f"no file has {name!r:.200}{where}")
    return place


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[_Key, Slice]) -> StoredTensor:
    dtype, shape = _dtype(name, fields.get("properties")), _size(fields.get("size"))
    found = fields.get("chunks")
    if not isinstance(found, list):
        raise CorruptionError(f"{name!r:.200} has no chunks")
    if math.prod(n or 1 for n in shape) * ITEM_BYTES[dtype] >= _MAX_SIZE:
        raise CorruptionError(f"{name!r:.200} is too large")
    chunks: dict[_Key, Chunk] = {}
    for each in found:
        box = _fields(each, "ChunkStorageMetadata")
        offset, local = _size(box.get("offsets")), _size(box.get("sizes"))
        if len(offset) != len(shape) or len(local) != len(shape):
            raise CorruptionError(f"{name!r:.200} has a chunk with another number of dimensions")
        if math.prod(local):
            chunk = Chunk(offset, local, _place(places, name, offset))
            if chunks.setdefault(_key(name, offset), chunk).local != local:
                raise CorruptionError(f"{name!r:.200} has two chunks at {offset!s:.200}")
    check_tiling(name, shape, [(chunk.offset, chunk.local) for chunk in chunks.values()])
    return StoredTensor(dtype, shape, list(chunks.values()))


def _dtype(name: str, properties: object) -> str:
    """The type of a tensor. Its properties are a tuple in all versions: dtype, layout, requires_grad, ..."""
    state = properties.state if isinstance(properties, Record) else None
    found = state.get("dtype") if isinstance(state, dict) else state[0] if isinstance(state, tuple) and state else None
    kind = found.text.removeprefix("torch.") if isinstance(found, Name) else ""
    if kind not in ITEM_BYTES:
        raise CorruptionError(f"{name!r:.200} has no type of elements")
    return kind


_Box = tuple[tuple[int, ...], tuple[int, ...]]


def check_tiling(name: str, shape: tuple[int, ...], chunks: list[_Box]) -> None:
    """Refuse chunks, as (offset, size), that overlap, that leave gaps, or that reach outside of the tensor."""
    for offset, local in chunks:
        if any(at + n > size for at, n, size in zip(offset, local, shape, strict=True)):
            raise CorruptionError(f"{name!r:.200} has a chunk that reaches outside of it")
    if sum(math.prod(local) for _, local in chunks) != math.prod(shape):
        raise CorruptionError(f"the chunks of {name!r:.200} do not fill it")
    if len(chunks) > 1 and _overlap(name, shape, chunks):
        raise CorruptionError(f"{name!r:.200} has chunks that overlap")


def _overlap(name: str, shape: tuple[int, ...], chunks: list[_Box]) -> bool:
    """Whether two chunks overlap. They are drawn into a grid whose lines are the edges of all chunks."""
    first, local = (np.array(part, np.int64) for part in zip(*chunks, strict=True))
    edges = [np.unique_inverse(np.stack([first[:, d], first[:, d] + local[:, d]])) for d in range(len(shape))]
    cells = [max(len(lines) - 1, 1) for lines, _ in edges]
    if math.prod(cells) > MAX_CELLS:
        raise UnsupportedError(
            f"{name!r:.200} has {len(chunks)} chunks that form no grid",
            hint="convert it where you trust it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch",
        )
    drawn = np.zeros([n for n in cells if n > 1], np.bool_)
    lines = [numbers.tolist() for n, (_, numbers) in zip(cells, edges, strict=True) if n > 1]
    for number in range(len(chunks)):
        box = drawn[tuple(slice(begins[number], ends[number]) for begins, ends in lines)]
        if box.any():
            return True
        box[...] = True
    return False


def _all_paths(data: object, known: set[str]) -> dict[str, tuple[str | int, ...]]:
    """The path of each name. Planners that do not flatten the state have no paths, and a name is then a path of one."""
    paths: dict[str, tuple[str | int, ...]] = {}
    if isinstance(data, dict):
        for name, path in data.items():
            if name not in known:
                continue
            if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
                raise CorruptionError(f"the path of {name!r:.200} is malformed")
            paths[name] = path
    return paths
