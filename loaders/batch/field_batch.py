"""A batch of fields: each entry is stacked, padded, concatenated or listed.

Purpose: the values of all fields of `Loader` become the entries of a batch, in the threads that decode. So the
trainer's thread copies nothing. Values that are stacked are written into the batch when they are put. All others wait
for the last sample of the batch; the thread that puts it makes their entries.
Invariants: those of `Batch`. Entries depend only on the samples, in the order of their slots. Slots that were left out
are not part of any entry.
Failure behaviour: `UsageError` names the entry whose values differ in shape or type, or that some samples lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from headrace.dataio.core.errors import UsageError
from headrace.loaders.batch.batch import AXES, Batch, Output, without_data
from headrace.loaders.batch.memory import BufferPool
from headrace.loaders.interfaces import (
    IN_PLACE,
    ArrayPlace,
    ArrayTargets,
    Collate,
    FieldsLayout,
    FileTarget,
    PixelTarget,
    ProcessedSample,
    SampleLayout,
)


class FieldBatch(Batch):
    """A batch of `size` samples. `layout.fields` says how each entry is made."""

    def __init__(self, size: int, *, layout: SampleLayout, output: Output, buffers: BufferPool) -> None:
        assert layout.fields is not None
        self._fields: FieldsLayout = layout.fields
        super().__init__(size, layout=layout, output=output, buffers=buffers)
        self._kept: list[dict[str, Any]] = [{} for _ in range(size)]
        """For each slot, the values that are not stacked."""
        self._places: dict[str, ArrayPlace] = {}
        """Where arrays can be read directly into the batch, by the extension of their file."""
        self._unfinished = size
        self._entries: dict[str, Any] = {}
        if not size:
            self._finish()

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(getattr(value, "nbytes", 0) for kept in self._kept for value in kept.values())

    def parts(self, slots: Sequence[int]) -> Sequence[Sequence[int]]:
        """The first sample alone if it shows where the arrays of the others belong."""
        return [slots[:1], slots[1:]] if self._fields.in_place and not self._places and len(slots) > 1 else [slots]

    def targets(self, slots: Sequence[int]) -> Sequence[PixelTarget | FileTarget | ArrayTargets | None]:
        if not self._places:
            return super().targets(slots)
        places = self._places.copy()
        return [ArrayTargets(places, slot) for slot in slots]

    def put(self, slot: int, sample: ProcessedSample) -> None:
        """Write the values that are stacked, and keep the others until the last sample is put."""
        kept = dict[str, Any]()
        for name, value in sample.tensors.items():
            if value is IN_PLACE:
                continue
            if value is not None and self._collation(name, value) == "stack":
                self._stack_value(name, slot, value, sample)
                if name in sample.prefixes:
                    self._add_place(name, value, *sample.prefixes[name])
            else:
                kept[name] = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
        self._kept[slot], self.samples[slot] = kept, without_data(sample)
        with self._lock:
            self._unfinished -= 1
            is_last = not self._unfinished
        if is_last:
            self._finish()

    def tensors(self) -> dict[str, Any]:
        batch = super().tensors()
        del batch["text"]
        return {**self._entries, **{name: value for name, value in batch.items() if name not in self._layout.tensors}}

    def _pixel_entry(self) -> str | None:
        name = self._fields.drawn
        if name is None or name in self._fields.planes:
            return name if self._output.device.type == "cpu" else None
        return name if self._fields.pixels[name].is_plain else None

    def _pixel_dtype(self, name: str) -> torch.dtype:
        return self._fields.planes.get(name, torch.uint8)

    def _pixels(self, name: str) -> Output | None:
        return self._fields.pixels.get(name)

    def _shape_hint(self, name: str) -> str:
        if name in self._fields.pixels:
            return "give the field a size=(height, width); a transform must return one shape for all samples"
        return (
            f'give the field {name!r} collate="pad" if only the length of the first axis differs, else collate="list";'
            " a transform must return one shape for all samples"
        )

    def _all_tensors(self) -> list[torch.Tensor]:
        entries = [value for value in self._entries.values() if isinstance(value, torch.Tensor) and value.is_cuda]
        return [*super()._all_tensors(), *entries]

    def _collation(self, name: str, value: Any) -> Collate:
        """How the entry `name` is made, which may depend on its first value."""
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        return self._fields.collate.get(name, "stack" if is_array else "list")

    def _stack_value(self, name: str, slot: int, value: Any, sample: ProcessedSample) -> None:
        is_array = isinstance(value, np.ndarray)
        tensor = torch.from_numpy(np.empty(0, value.dtype)) if is_array else torch.as_tensor(value)
        target = self._target(name, value.shape if is_array else tensor.shape, tensor.dtype)[slot]
        if name not in self._fields.pixels and target.dtype != tensor.dtype:
            raise UsageError(
                f"sample {sample.sample.key!r} has {name} of {tensor.dtype}, others in its batch of {target.dtype}",
                hint="give the field a dtype",
            )
        if is_array and target.shape == value.shape and target.device.type == "cpu":
            np.copyto(target.numpy(), value)  # the bytes of a file are read-only, and torch takes no such arrays
        else:
            self._stack(name, slot, torch.from_numpy(value.copy()) if is_array else tensor, sample)

    def _add_place(self, name: str, value: Any, ext: str, prefix: bytes) -> None:
        """Read the arrays of files that begin with `prefix` into the entry `name` from now on."""
        entry = self._tensors[name]
        if ext not in self._places and entry.dtype == torch.from_numpy(np.empty(0, value.dtype)).dtype:
            memory = entry.numpy().reshape(-1).view(np.uint8).data
            self._places[ext] = ArrayPlace(prefix, memory, value.nbytes)

    def _finish(self) -> None:
        """Make all entries. Runs in the thread that put the last sample."""
        slots = [slot for slot, sample in enumerate(self.samples) if sample and sample.tensors]
        for name in self._names(slots):
            if name not in self._fields.optional:
                self._check_present(name, slots)
            if name in self._tensors:
                self._entries[name] = self._stacked(name, slots)
            else:
                self._collect(name, [self._kept[slot][name] for slot in slots])
            if name in self._fields.optional:
                present = [self._is_present(slot, name) for slot in slots]
                self._entries[f"{name}.present"] = torch.tensor(present, dtype=torch.bool)
        self._kept = [{} for _ in self._kept]

    def _names(self, slots: Sequence[int]) -> Sequence[str]:
        """The names of the entries: those of the samples, which must agree, else those of the layout."""
        samples = [sample for slot in slots if (sample := self.samples[slot])]
        for sample in samples:
            if other := sample.tensors.keys() ^ samples[0].tensors.keys():
                keys = f"{sample.sample.key!r} and {samples[0].sample.key!r}"
                raise UsageError(
                    f"of the samples {keys}, only one has {', '.join(map(repr, sorted(other)))}",
                    hint="a transform must return the same names for each sample",
                )
        return list(samples[0].tensors) if samples else self._layout.tensors

    def _is_present(self, slot: int, name: str) -> bool:
        return self._kept[slot].get(name, ...) is not None

    def _check_present(self, name: str, slots: Sequence[int]) -> None:
        """Raise `UsageError` if the entry is a tensor and one of its values is None."""
        is_tensor = name in self._tensors or self._fields.collate.get(name) in ("stack", "pad", "concat")
        for slot in slots:
            sample = self.samples[slot]
            if is_tensor and sample is not None and not self._is_present(slot, name):
                raise UsageError(
                    f"sample {sample.sample.key!r} has None as {name}, but the entry is a tensor",
                    hint='only a field with required=False may return None; or use collate="list"',
                )

    def _stacked(self, name: str, slots: list[int]) -> torch.Tensor | None:
        """The stacked tensor, with zeros for samples that lack an optional field."""
        tensor = self._tensors[name]
        for slot in slots:
            if not self._is_present(slot, name):
                tensor[slot].zero_()
        compacted = self._compact(name, slots)
        if compacted is not None and name in self._fields.images:
            pixels = self._fields.pixels.get(name)
            return compacted.squeeze(1 if pixels is None else 1 + AXES[pixels.axes].index(0))
        return compacted

    def _collect(self, name: str, values: list[Any]) -> None:
        """Make the entry of values that are not stacked."""
        first = next((value for value in values if value is not None), None)
        collation = self._collation(name, first)
        if collation == "list":
            self._entries[name] = values
        elif first is None:
            self._collect_nothing(name, collation, len(values))
        elif callable(collation):
            self._entries[name] = collation(values)
        else:
            join = {"pad": self._pad, "concat": self._concat}[collation]
            join(name, self._as_tensors(name, values))

    def _collect_nothing(self, name: str, collation: Collate, count: int) -> None:
        """Make the entry of a batch in which no sample has the value, so that its shape is not known."""
        self._entries[name] = None
        if collation == "pad":
            self._entries[f"{name}.lengths"] = torch.zeros(count, dtype=torch.int64)
        elif collation == "concat":
            self._entries[f"{name}.offsets"] = torch.zeros(count + 1, dtype=torch.int64)

    def _as_tensors(self, name: str, values: Sequence[Any]) -> list[torch.Tensor]:
        """The values as tensors that differ only in their length. A value that a sample lacks has length 0."""
        first = next(tensor for tensor in values if tensor is not None)
        for tensor in values:
            if tensor is not None and (
                not tensor.ndim or tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype
            ):
                raise UsageError(
                    f"{name}: a value of {tuple(tensor.shape)}, {tensor.dtype} cannot be joined with one of "
                    f"{tuple(first.shape)}, {first.dtype}",
                    hint='values may differ only in the length of their first axis; collate="list" takes any values',
                )
        return [first[:0] if tensor is None else tensor for tensor in values]

    def _pad(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        lengths = [len(tensor) for tensor in tensors]
        shape = (len(tensors), max(lengths), *tensors[0].shape[1:])
        padded = self._buffers.empty(shape, tensors[0].dtype)
        for row, tensor in zip(padded, tensors, strict=True):
            row[: len(tensor)].copy_(tensor, non_blocking=True)
            row[len(tensor) :].zero_()
        self._entries[name] = padded
        self._entries[f"{name}.lengths"] = torch.tensor(lengths, dtype=torch.int64)

    def _concat(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        offsets = np.cumsum([0, *(len(tensor) for tensor in tensors)], dtype=np.int64)
        joined = self._buffers.empty((int(offsets[-1]), *tensors[0].shape[1:]), tensors[0].dtype)
        for start, tensor in zip(offsets.tolist(), tensors, strict=False):
            joined[start : start + len(tensor)].copy_(tensor, non_blocking=True)
        self._entries[name] = joined
        self._entries[f"{name}.offsets"] = torch.from_numpy(offsets)
