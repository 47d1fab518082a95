"""What torch's objects are, for `checkpoint.state`; and the bytes of a tensor in main memory.

Invariant: `describe` accepts exactly the tensors whose bytes can be copied and restored bit for bit: dense ones with memory
of their own, of a type in `checkpoint.dtypes`.
Failure behaviour: `UnsupportedError` naming the path of any other tensor.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpoint import state
from checkpoint.dtypes import ITEM_BYTES
from dataio.core.errors import UnsupportedError

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TorchKinds:
    """See `checkpoint.state.Kinds`."""

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def describe(self, tensor: torch.Tensor, path: str) -> tuple[str, tuple[int, ...]]:
        dtype = str(tensor.dtype).removeprefix("torch.")
        why = ""
        if is_wrapper(tensor):
            why = f"a {type(tensor).__name__}, which is not one dense tensor"
        elif tensor.layout != torch.strided or tensor.is_nested:
            why = f"a tensor of layout {tensor.layout}"
        elif tensor.is_meta:
            why = "on the meta device and has no bytes"
        elif dtype not in ITEM_BYTES:
            why = f"of type {dtype}"
        if why:
            raise UnsupportedError(
                f"{path}: the tensor is {why}", hint="save a dense tensor with memory of its own instead"
            )
        return dtype, tuple(tensor.shape)

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

    def empty(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return empty(getattr(torch, dtype), shape)

    def load(self, kind: str, value: Any, loaded: object) -> None:
        value.load_state_dict(loaded)
        if kind == state.OPTIMIZER and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict:
            _undo_casts(value, loaded)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """torch casts an optimizer's tensors to the type of their parameter on loading, which loses bits: put them back."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [i for group in loaded["param_groups"] for i in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, saved in loaded["state"].get(number, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != saved.dtype:
                optimizer.state[param][key] = saved.to(now.device)


def is_wrapper(tensor: object) -> bool:
    """Whether this is a tensor made of other tensors, such as a DTensor."""
    return bool(is_traceable_wrapper_subclass(tensor))


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's row-major bytes are one run of main memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor with plain memory, writable; the caller keeps the tensor alive."""
    size = math.prod(tensor.shape) * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def empty(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor in main memory; made as integers, since some types warn when they are made."""
    same = _SAME_SIZE.get(dtype.itemsize, dtype)
    return torch.empty(shape, dtype=same).view(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements as integers of their size where there are such, since not every type can be copied as it is."""
    same = _SAME_SIZE.get(tensor.element_size())
    return tensor if same is None or tensor.dtype == same else tensor.view(same)


class TensorSink:
    """Puts a tensor's bytes into `tensor`: at once where it is plain memory, else through a copy of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._copy: torch.Tensor | None = None

    def open(self) -> memoryview:
        if has_plain_memory(self._tensor):
            return memory_of(self._tensor)
        self._copy = empty(self._tensor.dtype, tuple(self._tensor.shape))
        return memory_of(self._copy)

    def close(self) -> None:
        if self._copy is not None:
            as_bits(self._tensor).copy_(as_bits(self._copy))
            self._copy = None
