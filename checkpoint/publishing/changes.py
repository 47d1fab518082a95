"""Prepares the changes of tensors to a new version, verifies them, and applies them.

Purpose: `from_updates` takes the changes from the updates between two versions, `from_step` from the step.
Invariant: preparing changes no tensor. `commit` makes no request, and checks nothing.
Failure behaviour: `CorruptionError` if a block does not have the digest of the version's table.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint import sharding
from headrace.checkpoint.format.chunking import digest
from headrace.checkpoint.publishing.difference import Bytes, Change, decode
from headrace.checkpoint.publishing.records import Published
from headrace.checkpoint.publishing.source import Choice, PublishedTensor, published_tensors
from headrace.checkpoint.publishing.targets import I64, Target
from headrace.checkpoint.publishing.updates import Update, UpdateRow
from headrace.checkpoint.publishing.weights import BLOCK_BYTES, TensorBlocks, Weights
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.saved_step import SavedStep
from headrace.dataio.core.clock import Clock
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.base import Store

_POSITION_BYTES = 4
_INTEGERS: dict[int, Any] = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}


class OtherContentError(CorruptionError):
    """The tensors do not hold the version that the updates start from."""


class _Write(msgspec.Struct, frozen=True):
    """New elements of a target.

    `where`: their positions in the local part from `start` on, a range of them, or slices of each dimension
    (`Target.grid`).
    """

    target: Target
    values: torch.Tensor
    where: torch.Tensor | slice | tuple[slice, ...]
    start: int = 0

    def run(self) -> None:
        memory = self.target.grid() if isinstance(self.where, tuple) else self.target.flat()[self.start :]
        memory[self.where] = self.values


class PreparedChanges:
    """Verified changes, in order. With `at_once`, each is applied as soon as it is added."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._writes: list[_Write] = []
        self._at_once = at_once

    def add(self, target: Target, values: npt.NDArray[Any], where: I64 | slice | tuple[slice, ...]) -> None:
        """Add new elements of a target. They are moved to its device now, so that `commit` need not wait for it."""
        device, dtype, start = target.local.device, target.flat().dtype, 0
        moved = torch.from_numpy(values).to(device)
        at: Any = where
        if isinstance(where, np.ndarray):  # ascending, and of one block
            start = int(where[0])
            at = torch.from_numpy((where - start).astype(np.int32)).to(device)
        self._writes.append(_Write(target, moved if moved.dtype == dtype else moved.view(dtype), at, start))
        if self._at_once:
            self.commit()
            self._writes.clear()

    def commit(self) -> None:
        """Change the tensors."""
        with torch.no_grad():
            for write in self._writes:
                write.run()


Chain = Sequence[tuple[Update, Weights]]
"""Updates, oldest first, each with the table of the version that it leads to."""


def from_updates(chain: Chain, targets: Mapping[str, Target]) -> PreparedChanges:
    """Take the changes from these updates."""
    changes = defaultdict[tuple[str, int], list[Change]](list)
    for update, weights in chain:
        rows = [row for row in update.rows if _is_needed(row, weights.tensors[row.tensor], targets)]
        for row, stored in update.read(rows):
            form = weights.tensors[row.tensor]
            changes[form.name, row.block].append(_decoded(row, stored, form))
    prepared = PreparedChanges()
    for name, block in sorted(changes):
        target, several = targets[name], changes.pop((name, block))  # frees the memory of each block
        if target.is_whole:
            _add_whole_block(prepared, target, block, several)
        else:
            _add_changed_part(prepared, target, block, several)
    return prepared


def _is_needed(row: UpdateRow, form: TensorBlocks, targets: Mapping[str, Target]) -> bool:
    """Whether this process holds a part of the block. A tensor that changes its form later is stored whole then."""
    target = targets.get(form.name)
    return target is not None and target.form.same_form(form) and target.holds(row.block)


def _decoded(row: UpdateRow, stored: memoryview, form: TensorBlocks) -> Change:
    return decode(stored, row.how, form.size_of(row.block), form.item)


def _add_whole_block(prepared: PreparedChanges, target: Target, block: int, changes: Iterable[Change]) -> None:
    """Apply the changes to a copy of the block, verify it, and add the elements that differ.

    If their positions need more memory than the block, the block is added.
    """
    form = target.form
    old = target.read_block(block)
    new = old.copy()
    for change in changes:
        change.apply(new, form.item)
    if digest(new.data) != form.digest_of(block):
        raise OtherContentError(f"block {block} of {form.name!r:.200} was changed since the last apply")
    unit = _INTEGERS[min(form.item, 8)]
    size = np.dtype(unit).itemsize
    positions, first = np.flatnonzero(old.view(unit) != new.view(unit)), block * BLOCK_BYTES // size
    if len(positions) * (_POSITION_BYTES + size) > len(new):
        prepared.add(target, new.view(unit), slice(first, first + len(new) // size))
    elif len(positions):
        prepared.add(target, new.view(unit)[positions], positions + first)


def _add_changed_part(prepared: PreparedChanges, target: Target, block: int, changes: Iterable[Change]) -> None:
    """Add the elements of the changes that this process holds.

    New values are added, not differences: tensors may share memory, and a difference must not be applied twice.
    """
    form = target.form
    replaced, block_bytes = False, np.zeros(form.size_of(block), np.uint8)
    for change in changes:
        replaced = replaced or (change.positions is None and not change.xor)
        change.apply(block_bytes, form.item)
    if replaced:
        _add_part(prepared, target, block, block_bytes)
        return
    unit = _INTEGERS[min(form.item, 8)]
    differences = block_bytes.view(unit)
    positions = np.flatnonzero(differences)
    first = block * BLOCK_BYTES // np.dtype(unit).itemsize
    inside, local = target.local_positions(positions + first, form.item // np.dtype(unit).itemsize)
    if len(inside):
        prepared.add(target, target.read_integers(local).view(unit) ^ differences[positions[inside]], local)


def _add_part(prepared: PreparedChanges, target: Target, block: int, data: Bytes) -> None:
    """Add the elements of a block that this process holds."""
    item = min(target.form.item, 8)  # an element of 16 bytes counts as two
    values: npt.NDArray[Any] = data.view(_INTEGERS[item])
    first = block * BLOCK_BYTES // item
    if (start := target.run_start(item)) is not None:
        low, high = max(first, start), min(first + len(values), start + target.flat().numel())
        if low < high:
            prepared.add(target, values[low - first : high - first], slice(low - start, high - start))
        return
    per_element = target.form.item // item
    for at, extent, from_, to in sharding.overlap_blocks(target.form.box, target.box, per_element, first, len(values)):
        part = values[at : at + math.prod(extent)].reshape(extent)[from_]
        prepared.add(target, np.ascontiguousarray(part), to)


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
                _add_part(prepared, target, block, data)
    return prepared


def _read(tensor: PublishedTensor, blocks: Sequence[int]) -> Iterable[tuple[int, Bytes]]:
    if len(blocks) == 0:
        return ()
    if len(blocks) * BLOCK_BYTES * 2 >= tensor.nbytes:
        wanted = set(blocks)
        return ((n, data) for n, data in enumerate(tensor.blocks()) if n in wanted)
    return tensor.read_blocks(blocks)
