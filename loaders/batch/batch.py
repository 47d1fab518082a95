"""The tensors of one batch: samples of one shape, packed rows, or concatenated files.

Purpose: decoding threads convert their samples and write them directly into the batch, so the trainer's thread copies
nothing. There are three kinds of batch:

- `Batch`: stacked samples of one shape. The first sample determines the shape. Decoders may write pixels directly into
  the batch.
- `RowBatch`: rows of packed recordings. The last axis of a row has length `rows.capacity`; parts without a piece are
  silent. Every list of the batch has one entry for each row, with a value for each piece in the row.
- `JoinedBatch`: files as they are stored, concatenated. The index gives their lengths, so the offset of every file is
  known before the first one is read.

Invariants: each slot is written once. Slots that were left out are removed when the batch is delivered, which costs a
copy. A batch without samples has None in place of every tensor. In a `RowBatch` nothing is removed: a piece that was
left out leaves silence.
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
from headrace.dataio.shards.sample import Files
from headrace.loaders.batch.memory import BufferPool
from headrace.loaders.interfaces import ArrayTargets, FileTarget, PixelTarget, ProcessedSample, SampleLayout, SampleRef

_RELEASED = torch.empty(0)
"""Replaces a sample's tensor once it is in the batch."""
_IN_NUMPY = {torch.int64: np.int64, torch.float64: np.float64}
AXES: dict[str, tuple[int, int, int, int]] = {"TCHW": (0, 1, 2, 3), "CTHW": (1, 0, 2, 3), "THWC": (0, 2, 3, 1)}


class Output(msgspec.Struct, frozen=True):
    """Where the tensors of a batch are, and how pixels are written into "video".

    Args:
        device: device of the tensors.
        pinned: whether the tensors are in pinned memory.
        mean, std: three values each, for pixels in 0 to 1. Default: no normalization.
        dtype: dtype of "video". Pixels of a floating-point dtype are in 0 to 1. Default: uint8, or float32 with `mean`
            and `std`.
        axes: order of a clip's axes, which follow the batch axis.
    """

    device: torch.device
    pinned: bool
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: torch.dtype | None = None
    axes: str = "TCHW"

    def dtype_of(self, pixels: torch.dtype) -> torch.dtype:
        """The dtype in the batch of a clip whose pixels have this dtype."""
        return self.dtype or (torch.float32 if self.mean else pixels)

    @property
    def is_plain(self) -> bool:
        """Whether uint8 pixels (T, 3, H, W) are stored unchanged."""
        return self.device.type == "cpu" and self.dtype_of(torch.uint8) == torch.uint8 and self.axes == "TCHW"


class Batch:
    """A batch of `size` samples of one shape. Any thread may fill a slot."""

    def __init__(self, size: int, *, layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        self._layout, self._output, self._buffers = layout, output, buffers
        self._drawn = self._pixel_entry()
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self.samples: list[ProcessedSample | None] = [None] * size

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that were allocated so far."""
        return sum([tensor.nbytes for tensor in list(self._tensors.values())])

    def parts(self, slots: Sequence[int]) -> Sequence[Sequence[int]]:
        """Which of these slots are built together, in this order."""
        return [slots]

    def targets(self, slots: Sequence[int]) -> Sequence[PixelTarget | FileTarget | ArrayTargets | None]:
        """Where each of these samples may be written directly. None if it must be passed to `put`."""
        return [self.target(slot) for slot in slots]

    def target(self, slot: int) -> PixelTarget | None:
        """Where pixels for this slot may be written before `put`.

        None if the batch stores the pixels in another form.
        """

        if (name := self._drawn) is None:
            return None

        dtype = self._pixel_dtype(name)

        def drawn(shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
            pixels = self._target(name, shape, dtype)[slot]
            return pixels.numpy() if pixels.shape == shape and pixels.dtype == dtype else None

        return drawn

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write `sample` into its slot, unless its pixels are there already. Its tensors are released."""
        for name, tensor in sample.tensors.items():
            self._stack(name, slot, tensor, sample)
        self.samples[slot] = without_data(sample)

    def _stack(self, name: str, slot: int, tensor: torch.Tensor, sample: ProcessedSample) -> None:
        """Write one tensor of a sample into its slot."""
        target = self._target(name, tensor.shape, tensor.dtype)[slot]
        if tensor.shape == target.shape and tensor.data_ptr() == target.data_ptr():
            return
        if target.shape != self._shape(name, tensor.shape):
            raise self._shape_error(sample, name, tensor, target)
        pixels = self._pixels(name)
        if pixels is not None and tensor.ndim == 4:
            write_pixels(target, tensor, pixels)
        else:
            target.copy_(tensor, non_blocking=True)

    def tensors(self) -> dict[str, Any]:
        """The batch as the trainer receives it, for the current CUDA stream if it is on a GPU."""
        self._record_stream()
        slots = [slot for slot, sample in enumerate(self.samples) if sample and sample.tensors]
        samples = [sample for sample in self.samples if sample and sample.tensors]
        batch: dict[str, Any] = {name: self._compact(name, slots) for name in self._layout.tensors}
        batch["id"] = torch.from_numpy(np.array([one.sample.id for one in samples], np.int64))
        batch["key"] = [one.sample.key for one in samples]
        batch["text"] = [one.sample.text for one in samples]
        for name, dtype in self._layout.numbers.items():
            values = [one.values[name] for one in samples]
            batch[name] = values if dtype is None else torch.from_numpy(np.array(values, _IN_NUMPY[dtype]))
        return batch

    def _pixel_entry(self) -> str | None:
        """The entry into which decoders may write pixels, if any."""
        return "video" if "video" in self._layout.tensors and self._output.is_plain else None

    def _pixel_dtype(self, name: str) -> torch.dtype:
        """The dtype of the pixels that decoders write into this entry."""
        return torch.uint8

    def _pixels(self, name: str) -> Output | None:
        """The format of an entry of pixels. None for other entries."""
        return self._output if name == "video" else None

    def _shape_error(
        self, sample: ProcessedSample, name: str, tensor: torch.Tensor, target: torch.Tensor
    ) -> UsageError:
        return UsageError(
            f"sample {sample.sample.key!r} has {name} of {tuple(tensor.shape)}, others in its batch of {tuple(target.shape)}",
            hint=self._shape_hint(name),
        )

    def _shape_hint(self, name: str) -> str:
        """What to do if the values of this entry have different shapes."""
        return "give the loader a size=(height, width); a transform has to return one shape, too"

    def _record_stream(self) -> None:
        """Prevent the reuse of device memory until the current stream has finished with it."""
        if self._output.device.type == "cuda":
            for tensor in self._all_tensors():
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _all_tensors(self) -> list[torch.Tensor]:
        """All tensors that the loader's stream wrote and the trainer's stream reads."""
        return list(self._tensors.values())

    def _target(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor of this name. The first sample determines its shape and dtype."""
        with self._lock:
            tensor = self._tensors.get(name)
            if tensor is None:
                pixels = self._pixels(name)
                dtype = dtype if pixels is None else pixels.dtype_of(dtype)
                tensor = self._tensors[name] = self._empty(name, shape, dtype)
            return tensor

    def _empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._buffers.empty((len(self.samples), *self._shape(name, shape)), dtype)

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that a sample's tensor has in the batch."""
        pixels = self._pixels(name)
        if pixels is None or len(shape) != 4:
            return tuple(shape)
        first, second, third, fourth = AXES[pixels.axes]
        return shape[first], shape[second], shape[third], shape[fourth]

    def _compact(self, name: str, slots: list[int]) -> torch.Tensor | None:
        """The tensor without the slots that were left out."""
        tensor = self._tensors.get(name)
        if tensor is None or len(slots) == len(self.samples):
            return tensor
        if not slots:
            return None
        # pinned if the other tensors are
        compacted = self._buffers.empty((len(slots), *tensor.shape[1:]), tensor.dtype)
        return torch.index_select(tensor, 0, torch.tensor(slots, device=tensor.device), out=compacted)


def without_data(sample: ProcessedSample) -> ProcessedSample:
    """The sample with its tensors' names but without their data."""
    return ProcessedSample(
        sample.sample, dict.fromkeys(sample.tensors, _RELEASED), sample.values, skipped=sample.skipped
    )


def write_pixels(target: torch.Tensor, video: torch.Tensor, output: Output) -> None:
    """Write (T, 3, H, W) into `target`, which has the axes and dtype of `output`."""
    axes = AXES[output.axes]
    target = target.permute(*(axes.index(axis) for axis in range(4)))  # viewed as (T, 3, H, W)
    if not target.dtype.is_floating_point or video.dtype != torch.uint8:
        if output.mean is not None:
            raise UsageError(
                f"normalize works on uint8 pixels, and the transform returned {video.dtype}",
                hint="normalize in the transform, or return uint8 from it",
            )
        target.copy_(video, non_blocking=True)
        return
    mean, std = output.mean or (0.0, 0.0, 0.0), output.std or (1.0, 1.0, 1.0)
    video = video.to(target.device, non_blocking=True)  # copy bytes to the device, not floats
    numbers = (torch.tensor(mean) * 255, 1 / (torch.tensor(std) * 255))
    shift, scale = (three.view(3, 1, 1).to(video.device, non_blocking=True) for three in numbers)
    if target.dtype == torch.float32:  # in place, without a copy in between
        target.copy_(video).sub_(shift).mul_(scale)
    else:
        target.copy_(video.float().sub_(shift).mul_(scale), non_blocking=True)


class RowBatch(Batch):
    """A batch of packed rows. Each `SampleRef.span` is the place of a piece."""

    def __init__(self, refs: Sequence[SampleRef], *, layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        super().__init__(len(refs), layout=layout, output=output, buffers=buffers)
        self._spans = [ref.span for ref in refs]
        self._rows = 1 + max((span.row for span in self._spans if span), default=-1)

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write a piece into its place in its row. Its tensor is released."""
        span = self._spans[slot]
        for name, tensor in sample.tensors.items():
            assert span is not None
            row = self._target(name, tensor.shape, tensor.dtype)[span.row]
            row[..., span.at : span.at + span.length].copy_(tensor[..., : span.length], non_blocking=True)
        self.samples[slot] = without_data(sample)

    def tensors(self) -> dict[str, Any]:
        self._record_stream()
        rows: list[list[tuple[Any, ProcessedSample]]] = [[] for _ in range(self._rows)]
        for span, sample in zip(self._spans, self.samples, strict=True):
            if span and sample and sample.tensors:
                rows[span.row].append((span, sample))
        batch: dict[str, Any] = {name: self._tensors.get(name) for name in self._layout.tensors}
        if self._rows and not self._tensors:
            assert self._layout.rows is not None  # every piece was left out
            batch = dict.fromkeys(batch, self._empty("", (*self._layout.rows.shape, 0), torch.float32))
        batch["pieces"] = [_int64([[span.at, span.at + span.length] for span, _ in row], 2) for row in rows]
        batch["id"] = [_int64([one.sample.id for _, one in row]) for row in rows]
        batch["key"] = [[one.sample.key for _, one in row] for row in rows]
        batch["text"] = [[one.sample.text for _, one in row] for row in rows]
        for name in self._layout.numbers:
            batch[name] = [[one.values[name] for _, one in row] for row in rows]
        return batch

    def _empty(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Rows filled with silence."""
        rows = self._layout.rows
        assert rows is not None
        return self._buffers.empty((self._rows, *shape[:-1], rows.capacity), dtype).fill_(rows.silence)


def _int64(values: Sequence[Any], columns: int = 0) -> torch.Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    return tensor.view(-1, columns) if columns else tensor


class JoinedBatch(Batch):
    """A batch of files as they are stored. Each sample provides one tensor with the bytes of its `files`."""

    def __init__(self, files: Sequence[Files], *, layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        super().__init__(len(files), layout=layout, output=output, buffers=buffers)
        self._files = files
        self._ends = list(itertools.accumulate([one.size for one in files], initial=0))
        self._name = layout.tensors[0]
        self._separate: dict[int, torch.Tensor] = {}

    def targets(self, slots: Sequence[int]) -> Sequence[FileTarget | None]:
        """The memory of these samples; None if the batch is on a GPU."""
        if self._output.device.type != "cpu":
            return [None] * len(slots)
        memory, ends = self._joined().numpy().data, self._ends
        return [FileTarget(self._files[slot], memory[ends[slot] : ends[slot + 1]]) for slot in slots]

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write `sample` into its place. Its tensor is released.

        If a substitute has another length, its bytes are kept separately.
        """
        tensor = sample.tensors.get(self._name)
        if tensor is not None and not sample.in_place:
            start, end = self._ends[slot], self._ends[slot + 1]
            if len(tensor) == end - start:
                self._joined()[start:end].copy_(tensor, non_blocking=True)
            else:
                self._separate[slot] = tensor.to(self._output.device, copy=True)
        self.samples[slot] = without_data(sample)

    def _all_tensors(self) -> list[torch.Tensor]:
        return [*super()._all_tensors(), *self._separate.values()]

    def _joined(self) -> torch.Tensor:
        with self._lock:
            if self._name not in self._tensors:
                self._tensors[self._name] = self._buffers.empty((self._ends[-1],), torch.uint8)
            return self._tensors[self._name]

    def _compact(self, name: str, slots: list[int]) -> torch.Tensor | None:
        joined = self._tensors.get(name)
        if joined is None or (len(slots) == len(self.samples) and not self._separate):
            return joined
        pieces = [self._separate.get(slot, joined[self._ends[slot] : self._ends[slot + 1]]) for slot in slots]
        compacted = self._buffers.empty((sum(map(len, pieces)),), torch.uint8)
        return torch.cat(pieces, out=compacted) if pieces else None
