"""A batch whose samples lie one after the other in one run of bytes, each as long as it is.

Purpose: what `headrace.loaders.delivery.batch.Batch` is for samples of one shape, for files as they are stored.
Invariants: samples lie in the order of their slots without gaps; the index says how long each will be, so all have their place
before the first is read.
Failure behaviour: where a sample was left out, or one of another length stands in for it, the batch is put together anew when
it is delivered, which costs a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from headrace.dataio.shards.contract import Files
from headrace.loaders.contract import IN_PLACE, Finished, Layout, Stretch
from headrace.loaders.delivery.batch import Batch, Output
from headrace.loaders.delivery.buffers import Buffers


class JoinedBatch(Batch):
    """Samples that are these `files`; each gives one tensor of their bytes."""

    def __init__(self, files: Sequence[Files], layout: Layout, output: Output, buffers: Buffers) -> None:
        super().__init__(len(files), layout, output, buffers)
        self._files = files
        self._ends = list(itertools.accumulate([one.size for one in files], initial=0))
        self._name = layout.tensors[0]
        self._other: dict[int, torch.Tensor] = {}

    def rooms(self, slots: Sequence[int]) -> Sequence[Stretch | None]:
        """Where the samples of these slots belong; None where the processor cannot write them there."""
        if self._output.device.type != "cpu":
            return [None] * len(slots)
        memory, ends = self._joined().numpy().data, self._ends
        return [Stretch(self._files[slot], memory[ends[slot] : ends[slot + 1]]) for slot in slots]

    def put(self, slot: int, sample: Finished) -> None:
        """Write `sample` into its stretch, or beside it where it is of another length, and let its tensor go."""
        tensor = sample.tensors.get(self._name, IN_PLACE)
        if tensor is not IN_PLACE:
            start, end = self._ends[slot], self._ends[slot + 1]
            if len(tensor) == end - start:
                self._joined()[start:end].copy_(tensor, non_blocking=True)
            else:
                self._other[slot] = tensor.to(self._output.device, copy=True)
            sample = Finished(sample.sample, {self._name: IN_PLACE}, sample.values, sample.refusals)
        self.samples[slot] = sample

    def _held(self) -> list[torch.Tensor]:
        return [*super()._held(), *self._other.values()]

    def _joined(self) -> torch.Tensor:
        with self._lock:
            if self._name not in self._tensors:
                self._tensors[self._name] = self._buffers.empty((self._ends[-1],), torch.uint8)
            return self._tensors[self._name]

    def _close_up(self, name: str, whole: list[int]) -> torch.Tensor | None:
        joined = self._tensors.get(name)
        if joined is None or (len(whole) == len(self.samples) and not self._other):
            return joined
        pieces = [self._other.get(slot, joined[self._ends[slot] : self._ends[slot + 1]]) for slot in whole]
        closer = self._buffers.empty((sum(map(len, pieces)),), torch.uint8)
        return torch.cat(pieces, out=closer) if pieces else None
