"""The part of a DTensor that this rank holds, and new DTensors with the placement of another.

Invariant: PyTorch computes the box, with the method that its own checkpoints use (`__create_chunk_list__`). A placement
is refused if its local part is not one box, or is a partial sum.

Failure behaviour: `UnsupportedError` names the tensor's path and says what to do.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor import DTensor, Placement, Shard

from headrace.checkpoint.format.chunking import Box
from headrace.dataio.core.errors import UnsupportedError

_MOST_BOXES = 16384
_boxes: dict[tuple[object, ...], tuple[Box, bool]] = {}
"""Cache by shape, mesh, this rank's coordinate and placements. Threads may write it: they write equal values."""


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of a global tensor."""

    local: torch.Tensor
    box: Box


def local_shard(tensor: DTensor, path: str) -> LocalShard:
    """The local part of `tensor` and its box. A rank outside the tensor's mesh holds an empty part."""
    box, holds = _box(tensor, path)
    local: torch.Tensor = tensor._local_tensor.detach()
    return LocalShard(local if holds else local.new_empty(box.local), box)


def _box(tensor: DTensor, path: str) -> tuple[Box, bool]:
    """The box of this rank, and whether it holds any element. Computed once for all DTensors with this placement."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    coordinate = mesh.get_coordinate()
    at = None if coordinate is None else tuple(coordinate)
    key = (shape, tuple(mesh.shape), at, tuple((type(p), p) for p in tensor.placements))
    if (cached := _boxes.get(key)) is not None:
        return cached
    _require_supported(tensor, path)
    holds = 0 not in shape and at is not None
    if not holds:
        box = Box(shape, (0,) * len(shape), shape if 0 in shape else (0,) * len(shape))
    else:
        chunk = tensor.__create_chunk_list__()[0]  # type: ignore[no-untyped-call]
        box = Box(shape, tuple(map(int, chunk.offsets)), tuple(map(int, chunk.sizes)))
    if len(_boxes) >= _MOST_BOXES:
        _boxes.clear()
    _boxes[key] = box, holds
    return box, holds


def like(model: DTensor, dtype: torch.dtype) -> DTensor:
    """A new DTensor with the shape and placement of `model`, and uninitialised elements of `dtype`."""
    local = torch.empty_like(model._local_tensor, dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, model.device_mesh, model.placements, run_check=False, shape=model.shape, stride=model.stride()
    )


def _require_supported(tensor: DTensor, path: str) -> None:
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(
            f"{path}: the DTensor is a partial sum ({placements})",
            hint="redistribute it to Shard or Replicate first",
        )
    for dim in range(tensor.ndim):
        if not _is_run(tensor.shape[dim], dim, tensor):
            raise UnsupportedError(
                f"{path}: the local part of the DTensor is not one block of it ({placements})",
                hint="order the mesh so that the outer dimension shards first, or redistribute the tensor",
            )


def _is_run(size: int, dim: int, tensor: DTensor) -> bool:
    steps: list[tuple[int, int, int]] = []
    coordinate = tensor.device_mesh.get_coordinate()
    for mesh_dim, placement in enumerate(tensor.placements if coordinate is not None else ()):
        if getattr(placement, "dim", None) == dim:
            assert coordinate is not None
            steps.append((tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim], _split_factor(placement)))
    if all(factor == 1 for _, _, factor in steps):
        return True
    return _picked_is_run(size, tuple(steps))


def _split_factor(placement: Placement) -> int:
    """1 for a Shard. PyTorch's strided shard (FSDP on a dimension that TP also shards) first splits by this factor."""
    return 1 if type(placement) is Shard else int(getattr(placement, "split_factor", 1))


@lru_cache(maxsize=4096)
def _picked_is_run(size: int, steps: tuple[tuple[int, int, int], ...]) -> bool:
    picked: list[range] = [range(size)]
    for count, at, factor in steps:
        picked = _chunk(picked, count, at, factor)
    nonempty = [part for part in picked if part]
    return all(a.stop == b.start for a, b in itertools.pairwise(nonempty))


def _chunk(parts: list[range], count: int, at: int, factor: int) -> list[range]:
    """Chunk number `at` of `count` of each of `factor` chunks, as torch.chunk cuts."""
    outer = _cut(parts, factor)
    return [part for own in outer for part in _cut(own, count)[at]]


def _cut(parts: list[range], count: int) -> list[list[range]]:
    size = sum(map(len, parts))
    step = max(math.ceil(size / count), 1)
    return [_part_of(parts, min(i * step, size), min((i + 1) * step, size)) for i in range(count)]


def _part_of(parts: list[range], start: int, stop: int) -> list[range]:
    selected, at = [], 0
    for part in parts:
        low, high = max(start - at, 0), min(stop - at, len(part))
        if low < high:
            selected.append(part[low:high])
        at += len(part)
    return selected
