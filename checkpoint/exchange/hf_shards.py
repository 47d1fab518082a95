"""Reads a folder that `HuggingFaceStorageWriter(save_distributed=True)` of torch.distributed.checkpoint wrote.

Each rank has written files of safetensors with its shards of the tensors. The metadata of a file says where each shard
begins in its tensor. The files do not say how large a tensor is, so it ends where its last shard ends.
Invariant: the shards of a tensor fill it without gaps and overlaps. Tensors are not read: `JoinedTensors` reads them.
Failure behaviour: `CorruptionError` for files that are damaged, or that do not fit together.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.exchange import dcp_metadata, safetensors_format
from headrace.checkpoint.exchange.joined_tensors import ChunkFile, JoinedTensor, JoinedTensors, OpenFiles
from headrace.checkpoint.exchange.safetensors_format import StoredTensor
from headrace.checkpoint.format.chunking import Box
from headrace.dataio.core.errors import CorruptionError, UsageError

NAME = re.compile(r"shard-(\d{5,})-model-\d{5,}-of-\d{5,}\.safetensors")
"""The names of the files."""
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def load(paths: Sequence[Path], stack: contextlib.ExitStack) -> JoinedTensors:
    """The tensors whose shards are in these files. They are read until `stack` is closed."""
    files = OpenFiles(stack)
    found: dict[str, list[tuple[StoredTensor, tuple[int, ...], Path]]] = defaultdict(list)
    for path in paths:
        header = safetensors_format.read_header(files.fd(path), str(path))
        places = _places(path, header.metadata)
        for tensor in header.tensors:
            found[tensor.name].append((tensor, _offset(path, tensor, places), path))
    if not found:
        raise UsageError(f"{paths[0].parent} holds no tensors", hint="give another folder")
    return JoinedTensors({name: _joined(name, shards) for name, shards in found.items()}, files)


def refuse_alone(path: Path, metadata: Mapping[str, str]) -> None:
    """Raise `UsageError` for a file that has only a part of its tensors."""
    if _INFO in metadata and NAME.fullmatch(path.name):
        raise UsageError(f"{path} has the shards of one rank", hint="give the folder with the shards of all ranks")


def _places(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        places = json.loads(metadata[_INFO])
    except (KeyError, ValueError, RecursionError):
        places = None
    if not isinstance(places, dict):
        raise CorruptionError(f"{path} does not say which shards it has", hint="copy or download it again")
    return places


def _offset(path: Path, tensor: StoredTensor, places: Mapping[str, Any]) -> tuple[int, ...]:
    place = places.get(tensor.name)
    offset = place.get(_OFFSETS) if isinstance(place, dict) else None
    is_sound = isinstance(offset, list) and len(offset) == len(tensor.shape)
    if not isinstance(offset, list) or not is_sound or not all(type(n) is int and 0 <= n < 1 << 62 for n in offset):
        raise CorruptionError(f"{path}: the place of {tensor.name!r:.200} is malformed", hint="copy it again")
    return tuple(offset)


def _joined(name: str, shards: list[tuple[StoredTensor, tuple[int, ...], Path]]) -> JoinedTensor:
    dtype, dimensions = shards[0][0].dtype, len(shards[0][0].shape)
    if any((tensor.dtype, len(tensor.shape)) != (dtype, dimensions) for tensor, _, _ in shards):
        raise CorruptionError(f"the shards of {name!r:.200} have different types", hint="copy all files again")
    ends = [[at + n for at, n in zip(offset, tensor.shape, strict=True)] for tensor, offset, _ in shards]
    shape = tuple(map(max, zip(*ends, strict=True)))
    filled = {offset: (tensor, path) for tensor, offset, path in shards if math.prod(tensor.shape)}
    dcp_metadata.check_tiling(name, shape, [(offset, tensor.shape) for offset, (tensor, _) in filled.items()])
    chunks = [ChunkFile(Box(shape, offset, tensor.shape), path, tensor.at) for offset, (tensor, path) in filled.items()]
    return JoinedTensor(dtype, shape, chunks)
