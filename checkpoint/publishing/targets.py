"""The tensors that a subscriber changes: their memory in this process, and their box in the published tensor.

Invariant: a target has the published dtype and the published global shape. Its changes are written without conversion.
Targets that share memory get equal bytes.
Failure behaviour: `UsageError` that names the tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.checkpoint import sharding
from headrace.checkpoint.format.chunking import Box, run_start, whole
from headrace.checkpoint.publishing.difference import I64, Bytes
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights
from headrace.checkpoint.state.tensors import as_bits, byte_range, is_wrapper, name_of, overlapping
from headrace.dataio.core.errors import UsageError

Place = tuple[StorageWeakRef, int]


@dataclass(frozen=True)
class Target:
    """The part of a published tensor that this process holds.

    Args:
        local: its memory, on any device.
        box: its place in the published tensor.
        form: the published tensor.
    """

    local: torch.Tensor
    box: Box
    form: TensorBlocks

    @property
    def is_whole(self) -> bool:
        """Whether this process holds the whole tensor."""
        return self.box.local == self.box.shape

    @property
    def place(self) -> Place:
        """Its memory. It differs from that of a later tensor also if the allocator uses the address again."""
        return StorageWeakRef(self.local.untyped_storage()), self.local.data_ptr()  # type: ignore[no-untyped-call]

    def run_start(self, unit: int) -> int | None:
        """Where the part begins in the bytes of the published tensor, in units of `unit` bytes; None if it is no run."""
        start = run_start(self.box, self.form.item)
        return None if start is None else start // unit

    @cached_property
    def flat(self) -> torch.Tensor:
        """The local elements as integers, in one dimension. Shares memory if the tensor is contiguous."""
        bits = as_bits(self.local.detach()).reshape(-1)
        return bits if bits.element_size() <= 8 and not bits.is_complex() else bits.view(torch.int64)

    def grid(self) -> torch.Tensor:
        """`flat` in the dimensions of the local part, and one more: the integers of an element."""
        return self.flat.reshape(*self.box.local, -1)

    def holds(self, block: int) -> bool:
        """Whether this process holds any element of the block."""
        start, size = block * BLOCK_BYTES, self.form.size_of(block)
        return self.is_whole or (
            math.prod(self.box.local) > 0 and sharding.overlaps(self.form.box, self.box, self.form.item, start, size)
        )

    def view_block(self, block: int) -> Bytes:
        """The bytes of a block of a whole tensor: its memory, or a copy in main memory."""
        unit = min(self.form.item, 8)
        start, size = block * BLOCK_BYTES // unit, self.form.size_of(block) // unit
        array: Bytes = self.flat[start : start + size].cpu().view(torch.uint8).numpy()
        return array

    def read_integers(self, positions: I64) -> npt.NDArray[Any]:
        """A copy of these integers of the local part."""
        found: npt.NDArray[Any] = self.flat[torch.from_numpy(positions).to(self.local.device)].cpu().numpy()
        return found

    def local_positions(self, positions: I64, per_element: int = 1) -> tuple[I64, I64]:
        """Which integers of the published tensor this process holds, and where.

        Args:
            positions: numbers of integers in the published tensor.
            per_element: integers that form an element.

        Returns:
            The indices in `positions` of those that it holds, and their numbers in the local part.
        """
        if self.is_whole:
            return np.arange(len(positions)), positions
        elements, rest = np.divmod(positions, per_element)
        place = np.unravel_index(elements, self.box.shape)
        edges = list(zip(place, self.box.offset, self.box.local, strict=True))
        inside = np.flatnonzero(np.all([(at >= low) & (at < low + n) for at, low, n in edges], axis=0))
        if not len(inside):
            return inside, inside
        local = np.ravel_multi_index([at[inside] - low for at, low, _ in edges], self.box.local)
        return inside, local * per_element + rest[inside]


def targets_of(weights: Weights, tensors: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    """The target of each published tensor. Entries of `tensors` that are not published are left out."""
    missing = [tensor.name for tensor in weights.tensors if tensor.name not in tensors]
    if missing:
        raise UsageError(
            f"{len(missing)} published tensors are not among the given ones, such as {missing[0]!r:.200}",
            hint="give a state_dict with the published names; publish(include=...) chooses them",
        )
    targets = {tensor.name: _target(tensor, tensors[tensor.name]) for tensor in weights.tensors}
    _require_equal_if_shared(targets.values())
    return targets


def _require_equal_if_shared(targets: Iterable[Target]) -> None:
    """Tied tensors share memory, and are published with equal bytes. Otherwise the last one written would win."""
    by_storage = defaultdict[tuple[torch.device, int], list[Target]](list)
    for target in targets:
        by_storage[target.local.device, target.local.untyped_storage().data_ptr()].append(target)
    for several in by_storage.values():
        for group in overlapping((target, byte_range(target.local)) for target in several):
            first = group[0]
            for other in group[1:]:
                same_memory = byte_range(first.local) == byte_range(other.local) and first.box == other.box
                if not same_memory or first.form.digests != other.form.digests or not first.form.same_form(other.form):
                    raise UsageError(
                        f"{first.form.name:.200} and {other.form.name:.200} share memory, but other bytes are published",
                        hint="give tensors with memory of their own, or leave one out with publish(exclude=...)",
                    )


def _target(form: TensorBlocks, tensor: torch.Tensor) -> Target:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{form.name} is {type(tensor).__name__}, not a tensor", hint="give a state_dict")
    local, box = _local(tensor, form.name)
    if local.device.type == "meta" or local.layout is not torch.strided or local.is_nested or local.is_quantized:
        raise UsageError(f"{form.name}: the tensor has no memory of its own", hint="give dense tensors on a device")
    given = (name_of(local.dtype), box.shape)
    if given != (form.dtype, form.shape):
        raise UsageError(
            f"{form.name}: {form.dtype} {list(form.shape)} is published, the tensor is {given[0]} {list(given[1])}",
            hint="publish(dtype=...) converts what is published",
        )
    if not local.is_contiguous() or local.is_conj() or local.is_neg() or is_wrapper(local):
        raise UsageError(f"{form.name}: the tensor is not contiguous", hint="give tensors with memory of their own")
    return Target(local, box, form)


def _local(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
    if type(tensor).__name__ == "DTensor":
        from headrace.checkpoint.state.dtensors import local_shard

        shard = local_shard(tensor, name)  # type: ignore[arg-type]
        return shard.local, shard.box
    return tensor.detach(), whole(tuple(tensor.shape))
