"""The tensors of one batch, filled in any order by any thread.

Purpose: each thread writes its sample straight into the batch, converted on the way, so the trainer's thread copies nothing.
Where a batch holds pixels as decoders draw them, they draw in it.
Invariants: the first sample decides the shapes; a slot is put once, whatever was drawn in its room before. What was left out is
closed up when the batch is delivered. Batches of no samples have None in place of every tensor.
Failure behaviour: `UsageError` names the sample whose shape is another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from headrace.dataio.core.errors import UsageError
from headrace.loaders.contract import Finished, Layout, Room, Stretch
from headrace.loaders.delivery.buffers import Buffers

_IN_NUMPY = {torch.int64: np.int64, torch.float64: np.float64}
AXES: dict[str, tuple[int, int, int, int]] = {"TCHW": (0, 1, 2, 3), "CTHW": (1, 0, 2, 3), "THWC": (0, 2, 3, 1)}


class Output(msgspec.Struct, frozen=True):
    """What the tensors of a batch are like: where they are, and how pixels are written into "video".

    `dtype=None` keeps uint8, and is float32 with `mean` and `std` (3 values each, for pixels in 0 … 1). Pixels of a floating
    dtype are in 0 … 1 before they are normalised. `axes` are those of one clip, after the batch's.
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

    def __init__(self, size: int, layout: Layout, output: Output, buffers: Buffers) -> None:
        self._layout, self._output, self._buffers = layout, output, buffers
        self._lock = threading.Lock()
        self._tensors: dict[str, torch.Tensor] = {}
        self.samples: list[Finished | None] = [None] * size

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, as far as they are known."""
        return sum(tensor.nbytes for tensor in list(self._tensors.values()))

    def rooms(self, slots: Sequence[int]) -> Sequence[Room | Stretch | None]:
        """Where each of these samples may be made; None where it has to be put."""
        return [self.room(slot) for slot in slots]

    def room(self, slot: int) -> Room | None:
        """Where uint8 pixels may be drawn that are put into this slot next; None where they become something else."""

        def drawn(shape: tuple[int, ...]) -> npt.NDArray[np.uint8] | None:
            target = self._target("video", shape, torch.uint8)[slot]
            pixels: npt.NDArray[np.uint8] = target.numpy()
            return pixels if pixels.shape == shape and pixels.dtype == np.uint8 else None

        return drawn if self._output.is_plain and "video" in self._layout.tensors else None

    def put(self, slot: int, sample: Finished) -> None:
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
        none = torch.empty(0)
        left = dict.fromkeys(sample.tensors, none)
        self.samples[slot] = Finished(sample.sample, left, sample.values, sample.refusals)

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


def _other_shape(sample: Finished, name: str, tensor: torch.Tensor, target: torch.Tensor) -> UsageError:
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
