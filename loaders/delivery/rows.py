"""A batch whose rows hold several samples each, one after the other.

Purpose: what `headrace.loaders.delivery.batch.Batch` is for samples of one length, for pieces of recordings that were packed.
Invariants: a row has `layout.rows.capacity` samples of sound, or columns of spectrograms, in its last axis; what no piece covers
is silence. Every list of the batch has one entry
a row, with a value for each piece that is there, in the order in which they lie: "pieces" (int64, begin and end), "id",
"key", "text", and whatever else the samples carry.
Failure behaviour: a piece that was left out leaves silence, and is in no list; also where it was the only one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from headrace.loaders.contract import Finished, Layout, Place
from headrace.loaders.delivery.batch import Batch, Output
from headrace.loaders.delivery.buffers import Buffers


class RowBatch(Batch):
    """The pieces at `places`, which name their rows."""

    def __init__(self, places: Sequence[Place], layout: Layout, output: Output, buffers: Buffers) -> None:
        super().__init__(len(places), layout, output, buffers)
        self._fits = [place.fit for place in places]
        self._rows = 1 + max((fit.row for fit in self._fits if fit), default=-1)

    def put(self, slot: int, sample: Finished) -> None:
        """Write a piece into its stretch of its row; its tensor is let go."""
        fit = self._fits[slot]
        for name, tensor in sample.tensors.items():
            assert fit is not None
            row = self._target(name, tensor.shape, tensor.dtype)[fit.row]
            row[..., fit.at : fit.at + fit.length].copy_(tensor[..., : fit.length], non_blocking=True)
        left = dict.fromkeys(sample.tensors, torch.empty(0))
        self.samples[slot] = Finished(sample.sample, left, sample.values, sample.refusals)

    def tensors(self) -> dict[str, Any]:
        """The batch as the trainer sees it."""
        self._hold()
        rows: list[list[tuple[Any, Finished]]] = [[] for _ in range(self._rows)]
        for fit, sample in zip(self._fits, self.samples, strict=True):
            if fit and sample and sample.tensors:
                rows[fit.row].append((fit, sample))
        batch: dict[str, Any] = {name: self._tensors.get(name) for name in self._layout.tensors}
        if self._rows and not self._tensors:
            batch = dict.fromkeys(batch, self._silence())
        batch["pieces"] = [_int64([[fit.at, fit.at + fit.length] for fit, _ in row], 2) for row in rows]
        batch["id"] = [_int64([one.sample.id for _, one in row]) for row in rows]
        batch["key"] = [[one.sample.key for _, one in row] for row in rows]
        batch["text"] = [[one.sample.text for _, one in row] for row in rows]
        for name in self._layout.numbers:
            batch[name] = [[one.values[name] for _, one in row] for row in rows]
        return batch

    def _silence(self) -> torch.Tensor:
        """Rows of which no piece is left."""
        assert self._layout.rows is not None
        shape = self._shape_of("", (*self._layout.rows.shape, 0))
        return self._prepared(self._buffers.empty(shape, torch.float32))

    def _shape_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        assert self._layout.rows is not None
        return (self._rows, *shape[:-1], self._layout.rows.capacity)

    def _prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._layout.rows is not None
        return tensor.fill_(self._layout.rows.silence)


def _int64(values: Sequence[Any], columns: int = 0) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.view(-1, columns) if columns else tensor
