"""Prepares the changes of tensors to a new version, verifies them, and applies them.

Purpose: `from_updates` takes the changes from the updates between two versions, `from_step` from the step.
Invariant: preparing changes no tensor. `commit` makes no request, and checks nothing.
Failure behaviour: `CorruptionError` if a block does not have the digest of the version's table.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint import sharding
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.publishing.difference import I64, Bytes, Change, changed_positions, decode
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, published_tensors
from headrace.checkpoint.publishing.targets import Target
from headrace.checkpoint.publishing.updates import Update, UpdateRow
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights
from headrace.checkpoint.repository.fetch import in_order
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.checkpoint.saving.copy_threads import num_copy_threads
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

_POSITION_BYTES = 8
_MOST_THREADS = 4
_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class OtherContentError(CorruptionError):
    """The tensors do not hold the version that the updates start from."""


class _Write(msgspec.Struct, frozen=True):
    """New elements of a target, in integers of its element size.

    `where`: their positions in the local part, a range of them, or slices of each dimension (`Target.grid`).
    """

    target: Target
    values: torch.Tensor
    where: torch.Tensor | slice | tuple[slice, ...]

    def joins(self, other: _Write) -> bool:
        """Whether both change single elements of one target."""
        by_position = isinstance(self.where, torch.Tensor) and isinstance(other.where, torch.Tensor)
        return by_position and self.target is other.target

    def run(self) -> None:
        if isinstance(self.where, torch.Tensor):
            self.target.flat.scatter_(0, self.where, self.values)  # faster than an assignment by index
        elif isinstance(self.where, slice):
            self.target.flat[self.where] = self.values
        else:
            self.target.grid()[self.where] = self.values


def _write(target: Target, values: npt.NDArray[Any], where: I64 | slice | tuple[slice, ...]) -> _Write:
    """New elements of a target. They are moved to its device now, so that `commit` need not wait for it."""
    device, dtype = target.local.device, target.flat.dtype
    moved = torch.from_numpy(values).to(device)
    at = torch.from_numpy(where).to(device) if isinstance(where, np.ndarray) else where
    return _Write(target, moved if moved.dtype == dtype else moved.view(dtype), at)


def _joined(writes: Sequence[_Write]) -> _Write:
    if len(writes) == 1:
        return writes[0]
    where = torch.cat([write.where for write in writes if isinstance(write.where, torch.Tensor)])
    return _Write(writes[0].target, torch.cat([write.values for write in writes]), where)


class PreparedChanges:
    """Verified changes, in order. With `at_once`, each is applied as soon as it is added."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._writes: list[_Write] = []
        self._at_once = at_once

    def add(self, writes: Iterable[_Write]) -> None:
        """Add new elements of targets."""
        self._writes += writes
        if self._at_once:
            self.commit()
            self._writes.clear()

    def merge(self) -> None:
        """Join neighbouring changes of a tensor, so that `commit` makes few calls."""
        pending, self._writes = deque(self._writes), []
        while pending:
            group = [pending.popleft()]
            while pending and group[0].joins(pending[0]):
                group.append(pending.popleft())
            self._writes.append(_joined(group))

    def commit(self) -> None:
        """Change the tensors."""
        with torch.no_grad():
            for write in self._writes:
                write.run()


Chain = Sequence[tuple[Update, Weights]]
"""Updates, oldest first, each with the table of the version that it leads to."""
_Stored = tuple[int, memoryview, TensorBlocks]
"""A stored change of a block: how it is stored, its bytes, and its tensor."""
_Task = tuple[Target, int, list[_Stored]]
"""A block of a target, and its changes in order."""


def from_updates(chain: Chain, targets: Mapping[str, Target]) -> PreparedChanges:
    """Take the changes from these updates. Threads decode and verify blocks while the next ones are read."""
    prepared, threads = PreparedChanges(), min(num_copy_threads(), _MOST_THREADS)
    with ThreadPoolExecutor(threads, "headrace-apply") as pool:
        for writes in in_order(pool, _changed_block, _tasks(chain, targets), 4 * threads):
            prepared.add(writes)
    prepared.merge()
    return prepared


def _tasks(chain: Chain, targets: Mapping[str, Target]) -> Iterator[_Task]:
    """Yield each block once all of its changes are read: those that the last update changes first."""
    earlier, (last, newest) = defaultdict[tuple[str, int], list[_Stored]](list), chain[-1]
    for update, weights in chain[:-1]:
        for name, block, stored in _read_update(update, weights, targets):
            earlier[name, block].append(stored)
    for name, block, stored in _read_update(last, newest, targets):
        yield targets[name], block, [*earlier.pop((name, block), ()), stored]
    for (name, block), several in earlier.items():
        yield targets[name], block, several


def _read_update(update: Update, weights: Weights, targets: Mapping[str, Target]) -> Iterator[tuple[str, int, _Stored]]:
    rows = [row for row in update.rows if _is_needed(row, weights.tensors[row.tensor], targets)]
    for row, data in update.read(rows):
        form = weights.tensors[row.tensor]
        yield form.name, row.block, (row.how, data, form)


def _is_needed(row: UpdateRow, form: TensorBlocks, targets: Mapping[str, Target]) -> bool:
    """Whether this process holds a part of the block. A tensor that changes its form later is stored whole then."""
    target = targets.get(form.name)
    return target is not None and target.form.same_form(form) and target.holds(row.block)


def _changed_block(task: _Task) -> list[_Write]:
    target, block, stored = task
    changes = [decode(data, how, form.size_of(block), form.item) for how, data, form in stored]
    if target.is_whole:
        return _change_of_whole_block(target, block, changes)
    return _change_of_part(target, block, changes)


class _Scratch(threading.local):
    """Memory for one block, once for each thread: new memory for each block would cost more than the copy into it."""

    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)

    def copy_of(self, block: Bytes) -> Bytes:
        """A copy that is valid until the next call in this thread."""
        if len(self.block) < len(block):
            self.block = np.empty(len(block), np.uint8)
        copy = self.block[: len(block)]
        np.copyto(copy, block)
        return copy


_scratch = _Scratch()


def _change_of_whole_block(target: Target, block: int, changes: Sequence[Change]) -> list[_Write]:
    """Apply the changes to a copy of the block, verify it, and take the elements that differ.

    If their positions need more memory than the block, take the block.
    """
    form = target.form
    old = target.view_block(block)
    new = _scratch.copy_of(old)
    for change in changes:
        change.apply(new, form.item)
    if digest(new.data) != form.digest_of(block):
        raise OtherContentError(f"block {block} of {form.name!r:.200} was changed since the last apply")
    unit = _INTEGERS[min(form.item, 8)]
    size = np.dtype(unit).itemsize
    values, first = new.view(unit), block * BLOCK_BYTES // size
    only = changes[0].positions if len(changes) == 1 else None
    positions = only if only is not None else changed_positions(values, old.view(unit))
    if len(positions) * (_POSITION_BYTES + size) > len(new):
        return [_write(target, values.copy(), slice(first, first + len(values)))]
    return [_write(target, values[positions], positions + first)] if len(positions) else []


def _change_of_part(target: Target, block: int, changes: Iterable[Change]) -> list[_Write]:
    """Take the elements of the changes that this process holds.

    They are new values, not differences: tensors may share memory, and a difference must not be applied twice.
    """
    form = target.form
    replaced, block_bytes = False, np.zeros(form.size_of(block), np.uint8)
    for change in changes:
        replaced = replaced or (change.positions is None and not change.xor)
        change.apply(block_bytes, form.item)
    if replaced:
        return _part_of(target, block, block_bytes)
    unit = _INTEGERS[min(form.item, 8)]
    differences = block_bytes.view(unit)
    positions = np.flatnonzero(differences)
    first = block * BLOCK_BYTES // np.dtype(unit).itemsize
    inside, local = target.local_positions(positions + first, form.item // np.dtype(unit).itemsize)
    if not len(inside):
        return []
    return [_write(target, target.read_integers(local).view(unit) ^ differences[positions[inside]], local)]


def _part_of(target: Target, block: int, data: Bytes) -> list[_Write]:
    """The elements of a block that this process holds."""
    item = min(target.form.item, 8)  # an element of 16 bytes counts as two
    values: npt.NDArray[Any] = data.view(_INTEGERS[item])
    first = block * BLOCK_BYTES // item
    if (start := target.run_start(item)) is not None:
        low, high = max(first, start), min(first + len(values), start + target.flat.numel())
        part = values[low - first : max(high - first, 0)]
        return [_write(target, part, slice(low - start, high - start))] if low < high else []
    per_element = target.form.item // item
    boxes = sharding.overlap_blocks(target.form.box, target.box, per_element, first, len(values))
    return [
        _write(target, np.ascontiguousarray(values[at : at + math.prod(extent)].reshape(extent)[from_]), to)
        for at, extent, from_, to in boxes
    ]


def _verify(form: TensorBlocks, block: int, data: Bytes) -> None:
    if digest(data.data) != form.digest_of(block):
        raise CorruptionError(
            f"block {block} of {form.name!r:.200} of the step does not have the digest of its version",
            hint="publish the step again",
        )


def from_step(
    store: Store,
    record: Published,
    targets: Mapping[str, Target],
    changed: Mapping[str, Sequence[int]] | None,
    *,
    at_once: bool,
    clock: Clock,
) -> PreparedChanges:
    """Read the changed blocks from the step, and verify them.

    `changed` are the blocks by name; None for all. With `at_once`, blocks are written as they are read.
    """
    prepared = PreparedChanges(at_once=at_once)
    with ExitStack() as stack:
        leased = chunk_reader.LeasedStep(store, record.run, record.base, clock, published_by=record.tag)
        step = SavedStep(store, stack.enter_context(leased), 0)
        choice = Choice(record.include, record.exclude, record.dtype)
        tensors = {tensor.name: tensor for tensor in published_tensors(step, choice)[1]}
        for name, target in targets.items():
            blocks = range(target.form.blocks) if changed is None else changed.get(name, ())
            held = [block for block in blocks if target.holds(block)]
            if name not in tensors:
                raise CorruptionError(
                    f"step {record.step} of run {record.run} has no tensor {name!r:.200}", hint="publish again"
                )
            for block, data in _read(tensors[name], held):
                _verify(target.form, block, data)
                prepared.add(_part_of(target, block, data))
    return prepared


def _read(tensor: PublishedTensor, blocks: Sequence[int]) -> Iterable[tuple[int, Bytes]]:
    if len(blocks) == 0:
        return ()
    if len(blocks) * BLOCK_BYTES * 2 >= tensor.nbytes:
        wanted = set(blocks)
        return ((n, data) for n, data in enumerate(tensor.blocks()) if n in wanted)
    return tensor.read_blocks(blocks)
