"""The folder format of torch.distributed.checkpoint (DCP): `.metadata` and files with one small archive per entry.

Writing `.metadata` means writing a pickle of DCP's own classes, because the format is one. `dcp_source` reads such
folders without running pickles.
Invariant: `.metadata` is the last file, so a folder that is incomplete cannot be loaded. Tensors that share memory in
the state share their bytes in the folder.
Failure behaviour: `UsageError` for two entries with one name.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.checkpoint.exchange import torch_format
from headrace.checkpoint.exchange.dcp_metadata import METADATA
from headrace.checkpoint.exchange.output import OutputFile, Part
from headrace.checkpoint.exchange.torch_format import Storage, TensorStub, row_major
from headrace.checkpoint.format.chunking import ITEM_BYTES
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB

_DATA = "__0_0.distcp"
CHUNK_BYTES = 256 * MIB
"""The largest chunk of a tensor, if its rows are smaller."""


def output_files(state: Mapping[str, Any]) -> list[OutputFile]:
    """The files for a nested state whose tensors are `TensorStub`s."""
    flat, paths = _flattened(state)
    parts: list[Part] = []
    at, places = 0, dict[object, tuple[int, int]]()
    storage: dict[MetadataIndex, _StorageInfo] = {}
    entries: dict[str, Any] = {}
    for name, value in flat.items():
        chunks = list(_chunks(value))
        entries[name] = _entry(value, [chunk for chunk, _ in chunks])
        for number, (chunk, content) in enumerate(chunks):
            key = _identity(value, name), number
            if key not in places:
                padding = b"\0" * (-at % torch_format.ALIGN)
                added = torch_format.parts(content, len(parts) + 1)
                length = sum(len(part) for part in added)
                parts += [padding, *added]
                places[key] = at + len(padding), length
                at += len(padding) + length
            index = MetadataIndex(name) if chunk is None else MetadataIndex(name, chunk.offsets, number)
            storage[index] = _StorageInfo(_DATA, *places[key])
    meta = Metadata(entries, paths, storage, StorageMeta())
    return [OutputFile(_DATA, parts, checksums=True), OutputFile(METADATA, [pickle.dumps(meta)])]


def _chunks(value: object) -> Iterator[tuple[ChunkStorageMetadata | None, object]]:
    """The contents of an entry. A large tensor is cut into rows, because DCP loads a chunk of a tensor as a whole."""
    if not isinstance(value, TensorStub):
        yield None, value
        return
    data, origin = value.storage.data, (0,) * len(value.shape)
    is_whole = value.storage.dtype == value.dtype and value.offset == 0 and value.stride == row_major(value.shape)
    if not value.shape or not is_whole or len(data) <= CHUNK_BYTES:
        yield ChunkStorageMetadata(torch.Size(origin), torch.Size(value.shape)), value
        return
    inner = data.count // value.shape[0]
    rows = max(CHUNK_BYTES // (inner * data.item), 1)
    for first in range(0, value.shape[0], rows):
        count = min(rows, value.shape[0] - first)
        start = data.start + first * inner * ITEM_BYTES[data.dtype]
        part = Storage(dataclasses.replace(data, count=count * inner, start=start), value.dtype)
        shape = count, *value.shape[1:]
        offsets = torch.Size((first, *origin[1:]))
        yield ChunkStorageMetadata(offsets, torch.Size(shape)), TensorStub(part, value.dtype, shape, value.stride)


def _flattened(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries by DCP's names, and their paths. DCP cuts a list if it holds tensors, so stand-ins must be tensors."""
    stubs: dict[int, tuple[torch.Tensor, TensorStub]] = {}

    def stand_in(node: Any) -> Any:
        if isinstance(node, TensorStub):
            tensor = torch.empty(0, device="meta")
            stubs[id(tensor)] = tensor, node
            return tensor
        if isinstance(node, dict):
            return {key: stand_in(value) for key, value in node.items()}
        if isinstance(node, (list, tuple)) and not hasattr(node, "_fields"):
            return type(node)([stand_in(value) for value in node])
        return node

    def back(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return stubs[id(node)][1]
        if isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            return type(node)(back(value) for value in node)
        return node

    try:
        flat, paths = flatten_state_dict(stand_in(state))
    except ValueError as error:
        raise UsageError(f"DCP would give two entries one name: {error}", hint="rename or exclude one") from None
    return {name: back(value) for name, value in flat.items()}, dict(paths)


def _identity(value: object, name: str) -> object:
    """Equal for tensors that are the same view of the same memory."""
    if isinstance(value, TensorStub):
        return id(value.storage), value.dtype, value.shape, value.stride, value.offset
    return name


def _entry(value: object, chunks: list[ChunkStorageMetadata | None]) -> object:
    if not isinstance(value, TensorStub):
        return BytesStorageMetadata()
    properties = TensorProperties(dtype=getattr(torch, value.dtype))
    return TensorStorageMetadata(properties, torch.Size(value.shape), [chunk for chunk in chunks if chunk is not None])
