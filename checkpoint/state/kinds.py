"""What torch's objects are, for `headrace.checkpoint.state.flatten`; and the bytes of a tensor in main memory.

Invariant: `describe` accepts exactly the tensors whose bytes can be copied and restored bit for bit: dense ones with memory
of their own, of a type in `headrace.checkpoint.format.chunking`, and this rank's part of a DTensor. Tensors that are made
of such ones
come with their parts: sparse ones, and wrapper subclasses that say what they are made of (`__tensor_flatten__`).
Failure behaviour: `UnsupportedError` naming the path of any other tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from headrace.checkpoint.format.chunking import ITEM_BYTES, whole
from headrace.checkpoint.sharding import placement
from headrace.checkpoint.state import flatten as state
from headrace.checkpoint.state import parts, values
from headrace.checkpoint.state.flatten import Parts, Seen
from headrace.checkpoint.state.tree import ValueNode
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

_INT64 = 1 << 63
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchKinds:
    """See `headrace.checkpoint.state.flatten.Kinds`."""

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def describe(self, tensor: torch.Tensor, path: str) -> Seen:
        box, sharded = whole(tuple(tensor.shape)), isinstance(tensor, DTensor)
        if isinstance(tensor, DTensor):
            place = placement.place(tensor, path)
            tensor, box = place.local, place.box
        dtype = name_of(tensor.dtype)
        _refuse(tensor, dtype, path)
        return Seen(tensor, dtype, box, sharded, _memory(tensor))

    def taken(self, value: object) -> ValueNode | None:
        return values.taken(value)

    def made(self, node: ValueNode) -> Any:
        return values.made(node)

    def parts(self, tensor: torch.Tensor, path: str) -> Parts | None:
        return None if isinstance(tensor, DTensor) else parts.parts(tensor, path)

    def assemble(self, given: Parts) -> torch.Tensor | None:
        return parts.assemble(given)

    def check(self, given: Parts, path: str) -> None:
        parts.check(given, path)

    def assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        with torch.no_grad():
            if tensor.layout == value.layout == torch.strided and tensor.dtype == value.dtype:
                as_bits(tensor.detach()).copy_(as_bits(value))
            else:
                parts.assign(tensor, value)  # a detached sparse tensor would be another one

    def bare(self, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
        return (name_of(tensor.dtype), tuple(tensor.shape)) if tensor.is_meta else None

    def nothing(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype) or math.prod(shape) >= _INT64:
            raise CorruptionError(
                f"the checkpoint holds a tensor without bytes of type {dtype!r:.60} and shape {shape}"
            )
        return torch.empty(shape, dtype=kind, device="meta")

    def parameters(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [param for group in optimizer.param_groups for param in group["params"]]

    def unwrap(self, value: object) -> object:
        while isinstance(value, (DistributedDataParallel, DataParallel)):
            value = value.module
        return getattr(value, "_orig_mod", value) if isinstance(value, torch.nn.Module) else value

    def kind(self, value: object) -> str:
        if isinstance(value, torch.nn.Module):
            return state.MODULE
        if isinstance(value, torch.optim.Optimizer):
            return state.OPTIMIZER
        return state.SCHEDULER if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else state.OTHER

    def buffers(self, module: torch.nn.Module) -> list[str]:
        return [name for name, _ in module.named_buffers(remove_duplicate=False)]

    def empty(self, dtype: str, shape: tuple[int, ...], model: torch.Tensor | None = None) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if isinstance(model, DTensor):
            return placement.like(model, kind)
        return empty(kind, shape, model.device if model is not None else None)

    def storage(self, tensor: torch.Tensor) -> Hashable:
        return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def reach(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
            return None
        last = tensor.numel() - 1
        if not tensor.is_contiguous():
            last = sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
        return start, start + (last + 1) * size

    def storage_bytes(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return made.set_(tensor.untyped_storage(), start, (stop - start,), (1,))

    def view(
        self, base: torch.Tensor, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        made = empty(getattr(torch, dtype), (0,), base.device)
        start = base.storage_offset() + offset
        return made.set_(base.untyped_storage(), start // made.element_size(), shape, stride)

    def load(self, kind: str, value: Any, loaded: object) -> None:
        value.load_state_dict(loaded)
        if kind == state.OPTIMIZER and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict:
            _undo_casts(value, loaded)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """torch casts an optimizer's tensors to the type of their parameter on loading, which loses bits: put them back."""
    params = TorchKinds().parameters(optimizer)
    numbers = [i for group in loaded["param_groups"] for i in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, saved in loaded["state"].get(number, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != saved.dtype:
                optimizer.state[param][key] = saved.to(now.device)


def name_of(dtype: torch.dtype) -> str:
    """The name of an element type, as in `headrace.checkpoint.format.chunking`."""
    return str(dtype).removeprefix("torch.")


def _refuse(tensor: torch.Tensor, dtype: str, path: str) -> None:
    if parts.is_plain(tensor) and dtype in ITEM_BYTES and not tensor.is_quantized:
        return
    why, hint = "", "save a dense tensor with memory of its own instead"
    if parts.is_wrapper(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        why = f"a {type(tensor).__name__} of layout {tensor.layout}"
    elif tensor.is_quantized:
        why, hint = f"of type {dtype}", "save int_repr(), q_scale() and q_zero_point() of a quantized tensor instead"
    elif dtype not in ITEM_BYTES:
        why = f"of type {dtype}"
    if why:
        raise UnsupportedError(f"{path}: the tensor is {why}", hint=hint)


def _memory(tensor: torch.Tensor) -> Hashable:
    if not tensor.numel():
        return None
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major bytes are one run of main memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor with plain memory, writable; the caller keeps the tensor alive."""
    size = math.prod(tensor.shape) * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def empty(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None) -> torch.Tensor:
    """A new tensor, in main memory if nothing else is said; made as integers, since some types warn when they are made."""
    same = _SAME_SIZE.get(dtype.itemsize, dtype)
    return torch.empty(shape, dtype=same, device=device or "cpu").view(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size where there are such, since not every type can be copied as it is."""
    same = _SAME_SIZE.get(tensor.element_size())
    return tensor if same is None or tensor.dtype == same else tensor.view(same)


def settle(devices: Iterable[torch.device]) -> None:
    """Return when nothing that this thread gave GPUs to do uses tensors there any more: sinks are filled by other threads, on
    streams that do not wait for this one's."""
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class TensorSink:
    """Puts a tensor's bytes into `tensor`: at once where it is plain memory, else through a copy of its own.

    `dtype`: that of the bytes, when it is not that of the tensor; they are then converted as torch's `copy_` does.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensor = tensor.detach()
        self._dtype = dtype or tensor.dtype
        self._copy: torch.Tensor | None = None

    @property
    def straight(self) -> torch.Tensor | None:
        """The tensor, where the bytes are just those of its memory: whoever can write there need not open the sink."""
        return self._tensor if self._dtype == self._tensor.dtype and self._tensor.is_contiguous() else None

    def open(self) -> memoryview:
        if self._dtype == self._tensor.dtype and has_plain_memory(self._tensor):
            return memory_of(self._tensor)
        self._copy = empty(self._dtype, tuple(self._tensor.shape))
        return memory_of(self._copy)

    def close(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None and copy.dtype != self._tensor.dtype:
            self._tensor.copy_(copy)
        elif copy is not None:
            as_bits(self._tensor).copy_(as_bits(copy))
