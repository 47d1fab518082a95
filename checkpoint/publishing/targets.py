"""The tensors that a subscriber changes: their memory in this process, and their box in the published tensor.

Invariant: a target has the published dtype and the published global shape. Its changes are written without conversion.
Failure behaviour: `UsageError` that names the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from headrace.checkpoint import sharding
from headrace.checkpoint.format.chunking import Box, run_start, whole
from headrace.checkpoint.publishing.difference import Bytes
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights
from headrace.checkpoint.state.tensors import as_bits, name_of
from headrace.dataio.core.errors import UsageError

I64 = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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

    def run_start(self, unit: int) -> int | None:
        """Where the part begins in the bytes of the published tensor, in units of `unit` bytes; None if it is no run."""
        start = run_start(self.box, self.form.item)
        return None if start is None else start // unit

    def flat(self) -> torch.Tensor:
        """The local elements as integers, in one dimension. Shares memory if the tensor is contiguous."""
        bits = as_bits(self.local.detach()).reshape(-1)
        return bits if bits.element_size() <= 8 and not bits.is_complex() else bits.view(torch.int64)

    def holds(self, block: int) -> bool:
        """Whether this process holds any element of the block."""
        start, size = block * BLOCK_BYTES, self.form.size_of(block)
        return self.is_whole or (
            math.prod(self.box.local) > 0 and sharding.overlaps(self.form.box, self.box, self.form.item, start, size)
        )

    def read_block(self, block: int) -> Bytes:
        """A copy of the bytes of a block of a whole tensor."""
        unit = min(self.form.item, 8)
        start, size = block * BLOCK_BYTES // unit, self.form.size_of(block) // unit
        part = self.flat()[start : start + size]
        array: Bytes = part.cpu().contiguous().view(torch.uint8).numpy().copy()
        return array

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
    return {tensor.name: _target(tensor, tensors[tensor.name]) for tensor in weights.tensors}


def _target(form: TensorBlocks, tensor: torch.Tensor) -> Target:
    local, box = _local(tensor, form.name)
    given = (name_of(local.dtype), box.shape)
    if given != (form.dtype, form.shape):
        raise UsageError(
            f"{form.name}: {form.dtype} {list(form.shape)} is published, the tensor is {given[0]} {list(given[1])}",
            hint="publish(dtype=...) converts what is published",
        )
    if not local.is_contiguous():
        raise UsageError(f"{form.name}: the tensor is not contiguous", hint="give tensors with memory of their own")
    return Target(local, box, form)


def _local(tensor: torch.Tensor, name: str) -> tuple[torch.Tensor, Box]:
    if type(tensor).__name__ == "DTensor":
        from headrace.checkpoint.state.dtensors import local_shard

        shard = local_shard(tensor, name)  # type: ignore[arg-type]
        return shard.local, shard.box
    return tensor.detach(), whole(tuple(tensor.shape))
