"""The published tensors of a step, block by block.

Purpose: `PublishedTensors` selects the tensors of a committed step, converts them, and yields their blocks. A publisher
reads the new and the old version by it, and a subscriber the blocks that no update holds.
Invariant: a block depends only on the step, the selection and the dtype. At most two pieces of `PIECE_BYTES` are in memory
for each reader.
Failure behaviour: `UsageError` if nothing is selected. Errors of the step are raised unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.checkpoint import sharding
from headrace.checkpoint.publishing.difference import Bytes
from headrace.checkpoint.publishing.records import is_float
from headrace.checkpoint.publishing.staged import StagedStep, StagedTensor
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
    """One tensor of the step, and the dtype in which it is published.

    Args:
        staged: its staging memory, if it was there.
        is_saved: whether it can be read from the step: not before the step is committed.
    """

    name: str
    lazy: LazyTensor
    dtype: torch.dtype
    staged: StagedTensor | None = None
    is_saved: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.lazy.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @contextmanager
    def staged_block(self, number: int) -> Iterator[tuple[Bytes, bytes] | None]:
        """A block in staging memory, and its digest, or b"" if it is not known. None if the memory has been taken."""
        assert self.staged is not None
        saved, end = self.lazy.dtype.itemsize, min((number + 1) * BLOCK_BYTES, self.nbytes)
        first, last = number * BLOCK_BYTES // self.dtype.itemsize, end // self.dtype.itemsize
        with self.staged.read(first * saved, last * saved, self.lazy.dtype, self.dtype) as block:
            yield block

    def blocks(self) -> Iterator[Bytes]:
        """All blocks, in order."""
        return (data for _, data in blocks_of([self]))

    def read_blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
        """These blocks, in ascending order. Blocks that follow one another are read together."""
        for first, count in _runs(numbers):
            start, end = first * BLOCK_BYTES, min((first + count) * BLOCK_BYTES, self.nbytes)
            data = self._read(start // self.dtype.itemsize, end // self.dtype.itemsize)
            yield from ((first + n, data[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES]) for n in range(count))

    def pieces(self) -> Iterator[Bytes]:
        """All bytes, in runs of at most `PIECE_BYTES`, which are whole rows if rows are shorter than that."""
        elements, row = math.prod(self.lazy.shape), math.prod(self.lazy.shape[1:])
        most = PIECE_BYTES // self.dtype.itemsize
        step = most // row * row if 0 < row <= most else most
        for first in range(0, elements, step):
            yield self._read(first, min(first + step, elements))

    def _read(self, first: int, last: int) -> Bytes:
        """The bytes of these elements: part of a row, whole rows, and part of a row."""
        shape = tuple(self.lazy.shape)
        if not shape:
            return _bytes_of(self.lazy.read(), self.dtype)
        boxes = sharding.run_parts(shape, first, last)
        parts = [
            _bytes_of(self.lazy[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))], self.dtype)
            for at, size in boxes
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


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


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Divide block numbers into runs of blocks that follow one another: the first number and how many there are."""
    first, count = 0, 0
    for number in numbers:
        if count and number == first + count and count < PIECE_BYTES // BLOCK_BYTES:
            count += 1
            continue
        if count:
            yield first, count
        first, count = number, 1
    if count:
        yield first, count


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


def in_staging(
    tensors: Iterable[PublishedTensor], staged: StagedStep, *, is_saved: bool = True
) -> list[PublishedTensor]:
    """The same tensors. Those that are in staging memory are read from there."""
    return [
        replace(
            tensor,
            staged=staged.tensor(tensor.lazy.name, name_of(tensor.lazy.dtype), tuple(tensor.shape)),
            is_saved=is_saved,
        )
        for tensor in tensors
    ]


def _dtype_of(saved: torch.dtype, wanted: str) -> torch.dtype:
    chosen = getattr(torch, wanted) if wanted and is_float(name_of(saved)) else saved
    assert isinstance(chosen, torch.dtype)
    return chosen


def check_dtype(dtype: torch.dtype | str | None) -> str:
    """Return the name of a floating-point dtype; "" for None. Raises `UsageError` for any other."""
    if dtype is None:
        return ""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not is_float(name_of(found)):
        raise UsageError(f"dtype is {dtype!r:.100}", hint="give a floating-point type, such as torch.bfloat16")
    return name_of(found)


def check_choice(include: str | Iterable[str], exclude: str | Iterable[str], dtype: torch.dtype | str | None) -> Choice:
    """The choice of a caller; `UsageError` for invalid patterns and types."""
    selection = Selection.of(include, exclude, strict=True, cast=False)
    return Choice(selection.include, selection.exclude, check_dtype(dtype))
