"""The published tensors of a step, block by block.

Purpose: `PublishedTensors` selects the tensors of a committed step, converts them, and yields their blocks. A publisher
reads the new and the old version by it, and a subscriber the blocks that no update holds.
Invariant: a block depends only on the step, the selection and the dtype. At most `PIECE_BYTES` of a tensor, or one row
of it, are in memory for each reader.
Failure behaviour: `UsageError` if nothing is selected. Errors of the step are raised unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from headrace.checkpoint.publishing.difference import Bytes
from headrace.checkpoint.publishing.weights import BLOCK_BYTES
from headrace.checkpoint.restoring.saved_step import LazyTensor, SavedStep
from headrace.checkpoint.state.fit import Selection
from headrace.checkpoint.state.tensors import name_of
from headrace.dataio.core.errors import UsageError
from headrace.dataio.core.limits import MIB

PIECE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Choice:
    """Which tensors of a step are published, and how.

    Args:
        include (tuple[str, ...]): patterns on paths, as in `Checkpointer.restore`.
        exclude (tuple[str, ...]): patterns of tensors to leave out.
        dtype (str): the name of a dtype, such as "bfloat16", to which floating-point tensors are converted; "" for none.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class PublishedTensor:
    """One tensor of the step, and the dtype in which it is published."""

    name: str
    lazy: LazyTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.lazy.shape) * self.dtype.itemsize

    def blocks(self) -> Iterator[Bytes]:
        """All blocks, in order."""
        return (data for _, data in blocks_of([self]))

    def read_blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
        """These blocks, in ascending order. Only the rows that hold them are read."""
        rows, row_bytes = self._rows()
        if not rows:
            wanted = set(numbers)
            yield from ((n, block) for n, block in enumerate(self.blocks()) if n in wanted)
            return
        for number in numbers:
            start, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.nbytes)
            first, last = start // row_bytes, -(-end // row_bytes)
            data = _bytes_of(self.lazy[first:last], self.dtype)
            yield number, data[start - first * row_bytes : end - first * row_bytes]

    def _rows(self) -> tuple[int, int]:
        """Number of rows and bytes of one; (0, 0) if the tensor has no rows."""
        shape = self.lazy.shape
        return (shape[0], math.prod(shape[1:]) * self.dtype.itemsize) if len(shape) and self.nbytes else (0, 0)

    def pieces(self) -> Iterator[Bytes]:
        """All bytes, in runs of about `PIECE_BYTES`."""
        rows, row_bytes = self._rows()
        if not rows:
            yield _bytes_of(self.lazy.read(), self.dtype)
            return
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(0, rows, step):
            yield _bytes_of(self.lazy[first : min(first + step, rows)], self.dtype)


def blocks_of(tensors: Sequence[PublishedTensor]) -> Iterator[tuple[int, Bytes]]:
    """Yield the blocks of all tensors, each with the number of its tensor. A thread reads one piece ahead."""
    pieces = ((number, piece) for number, tensor in enumerate(tensors) for piece in tensor.pieces())
    current, rest = -1, np.empty(0, np.uint8)
    for number, piece in _one_ahead(pieces):
        if number != current and len(rest):
            yield current, rest
            rest = rest[:0]
        current, data = number, np.concatenate([rest, piece]) if len(rest) else piece
        whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
        yield from ((number, data[at : at + BLOCK_BYTES]) for at in range(0, whole, BLOCK_BYTES))
        rest = data[whole:]
    if len(rest):
        yield current, rest


def _one_ahead(pieces: Iterator[tuple[int, Bytes]]) -> Iterator[tuple[int, Bytes]]:
    with ThreadPoolExecutor(1, "headrace-weights") as pool:
        coming = pool.submit(next, pieces, None)
        while (piece := coming.result()) is not None:
            coming = pool.submit(next, pieces, None)
            yield piece


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> Bytes:
    array: Bytes = tensor.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def published_tensors(step: SavedStep, choice: Choice) -> tuple[str, list[PublishedTensor]]:
    """The selected tensors, sorted by their published names, and the prefix of their paths that the names leave out.

    If all paths have the same first part, such as "model/", that is the prefix.
    """
    selection = Selection.of(choice.include or None, choice.exclude, strict=True, cast=False)
    chosen = {path: step[path] for path in step if selection.selects(path)}
    lazy = {path: value for path, value in chosen.items() if isinstance(value, LazyTensor)}
    if unmatched := selection.unmatched:
        argument, patterns = next(iter(unmatched.items()))
        raise UsageError(
            f"{argument}={patterns[0]!r:.200} matches nothing in step {step.step}",
            hint="list(read(...)) names all entries",
        )
    if not lazy:
        raise UsageError(f"no tensor of step {step.step} is selected", hint='give include="model/*"')
    parts = {path.partition("/")[0] for path in lazy}
    prefix = f"{parts.pop()}/" if len(parts) == 1 and all("/" in path for path in lazy) else ""
    tensors = [
        PublishedTensor(path.removeprefix(prefix), value, _dtype_of(value.dtype, choice.dtype))
        for path, value in lazy.items()
    ]
    return prefix, sorted(tensors, key=lambda tensor: tensor.name)


def _dtype_of(saved: torch.dtype, wanted: str) -> torch.dtype:
    chosen = getattr(torch, wanted) if wanted and saved.is_floating_point else saved
    assert isinstance(chosen, torch.dtype)
    return chosen


def check_dtype(dtype: torch.dtype | str | None) -> str:
    """Return the name of a floating-point dtype; "" for None. Raises `UsageError` for any other."""
    if dtype is None:
        return ""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"dtype is {dtype!r:.100}", hint="give a floating-point type, such as torch.bfloat16")
    return name_of(found)


def check_choice(include: str | Iterable[str], exclude: str | Iterable[str], dtype: torch.dtype | str | None) -> Choice:
    """The choice of a caller; `UsageError` for invalid patterns and types."""
    selection = Selection.of(include, exclude, strict=True, cast=False)
    return Choice(selection.include, selection.exclude, check_dtype(dtype))
