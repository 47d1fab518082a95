"""The tensors of one batch: samples of one shape, packed rows, or files one after the other.

Purpose: decoding threads write their samples straight into the batch, converted on the way, so the trainer's thread
copies nothing. There are three kinds of batch:

- `Batch`: samples of one shape, stacked. The first sample decides the shape. Decoders may draw pixels directly in the
  batch.
- `RowBatch`: rows of packed recordings. Each row has `rows.capacity` samples in its last axis; stretches without a
  piece are silent. Every list of the batch has one entry a row, with a value for each piece in it.
- `JoinedBatch`: files as they are stored, one after the other in one run of bytes. The index gives their lengths, so
  each has its place before the first one is read.

Invariants: a slot is put once. Slots that were left out are closed up when the batch is delivered, which costs a copy.
A batch without samples has None in place of every tensor. A `RowBatch` is not closed up: a piece that was left out
leaves silence.
Failure behaviour: `UsageError` names a sample whose shape differs from the others'.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.dataio.core.errors import UsageError
from headrace.dataio.shards.contract import Files
from headrace.loaders.batch.memory import BufferPool
from headrace.loaders.interfaces import FileTarget, PixelTarget, ProcessedSample, SampleLayout, SampleRef

_GONE = torch.empty(0)
"""Replaces a sample's tensor once it is in the batch."""
_IN_NUMPY = {torch.int64: np.int64, torch.float64: np.float64}
AXES: dict[str, tuple[int, int, int, int]] = {"TCHW": (0, 1, 2, 3), "CTHW": (1, 0, 2, 3), "THWC": (0, 2, 3, 1)}


class Output(msgspec.Struct, frozen=True):
    """What the tensors of a batch are like: where they are, and how pixels are written into "video".

    `dtype=None` keeps uint8, and is float32 with `mean` and `std` (3 values each, for pixels in 0 … 1). Pixels of a
    floating dtype are in 0 … 1 before they are normalised. `axes` are those of one clip, after the batch's.
    """

    device: torch.device
    pinned: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: torch.dtype | None = None
    axes: str = "TCHW"

    def dtype_of(self, pixels: torch.dtype) -> torch.dtype:
        """What clips of such pixels become."""
        return self.dtype or (torch.float32 if self.mean else pixels)

    @property
    def is_plain(self) -> bool:
        """Whether uint8 pixels (T, 3, H, W) stay as they are."""
        return self.device.type == "cpu" and self.dtype_of(torch.uint8) == torch.uint8 and self.axes == "TCHW"


class Batch:
    """`size` samples of `layout`."""

    def __init__(self, size: int, layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        self._layout, self._output, self._buffers = layout, output, buffers
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self.samples: list[ProcessedSample | None] = [None] * size

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as far as they are known."""
        return sum(tensor.nbytes for tensor in list(self._tensors.values()))

    def targets(self, slots: Sequence[int]) -> Sequence[PixelTarget | FileTarget | None]:
        """Where each of these samples may be made; None where it has to be put."""
        return [self.target(slot) for slot in slots]

    def target(self, slot: int) -> PixelTarget | None:
        """Where uint8 pixels may be drawn that are put into this slot next; None where they become something else."""

        def drawn(shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
            target = self._target("video", shape, torch.uint8)[slot]
            pixels: npt.NDArray[np.uint8] = target.numpy()
            return pixels if pixels.shape == shape and pixels.dtype == np.uint8 else None

        return drawn if self._output.is_plain and "video" in self._layout.tensors else None

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write `sample` into its place, unless it was drawn there; its tensors are let go."""
        for name, tensor in sample.tensors.items():
            target = self._target(name, tensor.shape, tensor.dtype)[slot]
            if target.shape != _shape(name, tensor.shape, self._output):
                raise _other_shape(sample, name, tensor, target)
            if tensor.data_ptr() == target.data_ptr():
                continue
            if name == "video" and tensor.ndim == 4:
                write_pixels(target, tensor, self._output)
            else:
                target.copy_(tensor, non_blocking=True)
        left = dict.fromkeys(sample.tensors, _GONE)
        self.samples[slot] = ProcessedSample(sample.sample, left, sample.values, sample.skipped)

    def tensors(self) -> dict[str, Any]:
        """The batch as the trainer sees it, on the current CUDA stream if it is on a GPU."""
        self._hold()
        whole = [slot for slot, sample in enumerate(self.samples) if sample and sample.tensors]
        samples = [sample for sample in self.samples if sample and sample.tensors]
        batch: dict[str, Any] = {name: self._close_up(name, whole) for name in self._layout.tensors}
        batch["id"] = torch.from_numpy(np.array([one.sample.id for one in samples], np.int64))
        batch["key"] = [one.sample.key for one in samples]
        batch["text"] = [one.sample.text for one in samples]
        for name, dtype in self._layout.numbers.items():
            values = [one.values[name] for one in samples]
            batch[name] = values if dtype is None else torch.from_numpy(np.array(values, _IN_NUMPY[dtype]))
        return batch

    def _hold(self) -> None:
        """Device memory is not used again before the current stream is done with it."""
        for tensor in self._held():
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _held(self) -> list[torch.Tensor]:
        """All that the loader's stream wrote, and the trainer's reads."""
        return list(self._tensors.values())

    def _target(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What all samples' tensors of this name are written into; the first one's shape and dtype decide."""
        with self._lock:
            if name not in self._tensors:
                dtype = self._output.dtype_of(dtype) if name == "video" else dtype
                self._tensors[name] = self._prepared(self._buffers.empty(self._shape_of(name, shape), dtype))
            return self._tensors[name]

    def _shape_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        return (len(self.samples), *_shape(name, shape, self._output))

    def _prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _close_up(self, name: str, whole: list[int]) -> torch.Tensor | None:
        tensor = self._tensors.get(name)
        if tensor is None or len(whole) == len(self.samples):
            return tensor
        if not whole:
            return None
        closer = self._buffers.empty((len(whole), *tensor.shape[1:]), tensor.dtype)  # pinned, where all is
        return torch.index_select(tensor, 0, torch.tensor(whole, device=tensor.device), out=closer)


def _shape(name: str, shape: Sequence[int], output: Output) -> torch.Size:
    if name != "video" or len(shape) != 4:
        return torch.Size(shape)
    return torch.Size(shape[axis] for axis in AXES[output.axes])


def _other_shape(sample: ProcessedSample, name: str, tensor: torch.Tensor, target: torch.Tensor) -> UsageError:
    return UsageError(
        f"sample {sample.sample.key!r} has {name} of {tuple(tensor.shape)}, others in its batch of {tuple(target.shape)}",
        hint="give the loader a size=(height, width); what a transform returns is of one shape too",
    )


def write_pixels(target: torch.Tensor, video: torch.Tensor, output: Output) -> None:
    """(T, 3, H, W) into `target`, whose axes and dtype are those of `output`."""
    axes = AXES[output.axes]
    target = target.permute(*(axes.index(axis) for axis in range(4)))  # seen as (T, 3, H, W)
    if not target.dtype.is_floating_point or video.dtype != torch.uint8:
        if output.mean is not None:
            raise UsageError(
                f"normalize works on uint8 pixels, and the transform returned {video.dtype}",
                hint="normalize in the transform, or return uint8 from it",
            )
        target.copy_(video, non_blocking=True)
        return
    mean, std = output.mean or (0.0, 0.0, 0.0), output.std or (1.0, 1.0, 1.0)
    video = video.to(target.device, non_blocking=True)  # bytes go there, not floats of them
    numbers = (torch.tensor(mean) * 255, 1 / (torch.tensor(std) * 255))
    shift, scale = (three.view(3, 1, 1).to(video.device, non_blocking=True) for three in numbers)
    if target.dtype == torch.float32:  # computed in place, without a copy between
        target.copy_(video).sub_(shift).mul_(scale)
    else:
        target.copy_(video.float().sub_(shift).mul_(scale), non_blocking=True)


class RowBatch(Batch):
    """The pieces at `refs`, which name their rows."""

    def __init__(self, refs: Sequence[SampleRef], layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        super().__init__(len(refs), layout, output, buffers)
        self._spans = [ref.span for ref in refs]
        self._rows = 1 + max((span.row for span in self._spans if span), default=-1)

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write a piece into its stretch of its row; its tensor is let go."""
        span = self._spans[slot]
        for name, tensor in sample.tensors.items():
            assert span is not None
            row = self._target(name, tensor.shape, tensor.dtype)[span.row]
            row[..., span.at : span.at + span.length].copy_(tensor[..., : span.length], non_blocking=True)
        left = dict.fromkeys(sample.tensors, _GONE)
        self.samples[slot] = ProcessedSample(sample.sample, left, sample.values, sample.skipped)

    def tensors(self) -> dict[str, Any]:
        """The batch as the trainer sees it."""
        self._hold()
        rows: list[list[tuple[Any, ProcessedSample]]] = [[] for _ in range(self._rows)]
        for span, sample in zip(self._spans, self.samples, strict=True):
            if span and sample and sample.tensors:
                rows[span.row].append((span, sample))
        batch: dict[str, Any] = {name: self._tensors.get(name) for name in self._layout.tensors}
        if self._rows and not self._tensors:
            batch = dict.fromkeys(batch, self._silence())
        batch["pieces"] = [_int64([[span.at, span.at + span.length] for span, _ in row], 2) for row in rows]
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


class JoinedBatch(Batch):
    """Samples that are these `files`; each gives one tensor of their bytes."""

    def __init__(self, files: Sequence[Files], layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        super().__init__(len(files), layout, output, buffers)
        self._files = files
        self._ends = list(itertools.accumulate([one.size for one in files], initial=0))
        self._name = layout.tensors[0]
        self._other: dict[int, torch.Tensor] = {}

    def targets(self, slots: Sequence[int]) -> Sequence[FileTarget | None]:
        """Where the samples of these slots belong; None where the processor cannot write them there."""
        if self._output.device.type != "cpu":
            return [None] * len(slots)
        memory, ends = self._joined().numpy().data, self._ends
        return [FileTarget(self._files[slot], memory[ends[slot] : ends[slot + 1]]) for slot in slots]

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write `sample` into its stretch, or beside it where it is of another length, and let its tensor go."""
        tensor = sample.tensors.get(self._name)
        if tensor is not None and not sample.in_place:
            start, end = self._ends[slot], self._ends[slot + 1]
            if len(tensor) == end - start:
                self._joined()[start:end].copy_(tensor, non_blocking=True)
            else:
                self._other[slot] = tensor.to(self._output.device, copy=True)
            sample = ProcessedSample(sample.sample, {self._name: _GONE}, sample.values, sample.skipped)
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
