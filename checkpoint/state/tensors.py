"""PyTorch objects in a checkpoint: storable tensors, their bytes, and the states of modules and optimizers.

Invariant: `describe` accepts exactly the tensors whose bytes can be copied and restored bit for bit. These are dense
tensors with their own memory and the local parts of DTensors, of a type listed in
`headrace.checkpoint.format.chunking`.

Composite tensors are stored as their parts (`parts_of`). They are sparse tensors and wrapper subclasses that define
`__tensor_flatten__`. The parts share the tensor's memory, so nothing is copied. A sparse tensor can be built from saved
parts. A wrapper subclass is only filled in place, because building one would run code that the checkpoint names.

Failure behaviour: `UnsupportedError` names the path of any other tensor. PyTorch does not check the indices of a sparse
tensor before it uses them. `check_parts` therefore raises `CorruptionError` for indices that point outside the tensor.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headrace.checkpoint.format.chunking import ITEM_BYTES, Box, whole
from headrace.checkpoint.state import dtensors
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

T = TypeVar("T")

MODULE, OPTIMIZER, SCHEDULER, OTHER = "module", "optimizer", "scheduler", "other"
_INT64 = 1 << 63
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NAMES: dict[torch.dtype, str] = {}
_COMPRESSED: dict[str, tuple[torch.layout, bool]] = {
    "csr": (torch.sparse_csr, True),
    "csc": (torch.sparse_csc, False),
    "bsr": (torch.sparse_bsr, True),
    "bsc": (torch.sparse_bsc, False),
}
"""The layout of each kind, and whether its rows are compressed (else its columns)."""


_whole = functools.lru_cache(4096)(whole)
"""Many tensors have the same shape."""


class LocalTensor(msgspec.Struct, frozen=True, gc=False):
    """The part of a tensor that this rank holds. `tensor` has the elements `box` of the global tensor.

    `sharded`: the tensor is a DTensor, and belongs to all ranks of its mesh.
    `address`: where its first element is in memory. None for a tensor without elements.
    """

    tensor: Any
    dtype: str
    box: Box
    sharded: bool = False
    address: int | None = None

    @property
    def memory(self) -> Hashable:
        """Equal for tensors that are the same view of the same memory. None for a tensor without elements."""
        if self.address is None:
            return None
        tensor, shape = self.tensor, tuple(self.tensor.shape)
        view = shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        return tensor.device, self.address, tensor.dtype, view

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return self.box.shape


@dataclass(frozen=True, slots=True)
class Parts:
    """A composite tensor. `kind` and `values` are as in `tree.PartsNode`. `tensors` holds its parts by name."""

    kind: str
    values: object
    tensors: dict[str, Any]


def describe_plain(tensor: torch.Tensor) -> LocalTensor | None:
    """`describe` of an ordinary tensor, as nearly all are. None if it is another tensor, or cannot be stored."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    dtype = name_of(tensor.dtype)
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized or dtype not in ITEM_BYTES:
        return None
    address = _address(tensor)
    return None if address == 0 else LocalTensor(tensor, dtype, _whole(tensor.shape), False, address)


def describe(tensor: torch.Tensor, path: str) -> LocalTensor:
    """The part of `tensor` that this rank holds. Raises `UnsupportedError` with `path` if it cannot be stored."""
    sharded = isinstance(tensor, DTensor)
    if isinstance(tensor, DTensor):
        shard = dtensors.local_shard(tensor, path)
        tensor, box = shard.local, shard.box
    else:
        box = _whole(tensor.shape)
    dtype = name_of(tensor.dtype)
    _require_supported(tensor, dtype, path)
    if (address := _address(tensor)) == 0:
        raise UnsupportedError(
            f"{path}: the memory of the tensor was freed",
            hint="FSDP frees parameters between their uses: save what state_dict() of the wrapped module returns",
        )
    return LocalTensor(tensor, dtype, box, sharded, address)


def _address(tensor: torch.Tensor) -> int | None:
    """Where the first element is in memory. 0 if the memory was freed, and None for a tensor without elements."""
    return tensor.data_ptr() if tensor.numel() else None


def meta_shape(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
    """(dtype, shape) of a tensor on the meta device. None for any other tensor."""
    return (name_of(tensor.dtype), tuple(tensor.shape)) if tensor.is_meta else None


def meta_tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor on the meta device. Raises `CorruptionError` for an unknown type or a shape that is too large."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or math.prod(shape) >= _INT64:
        raise CorruptionError(f"the checkpoint holds a meta tensor of type {dtype!r:.60} and shape {shape}")
    return torch.empty(shape, dtype=kind, device="meta")


def kind_of(value: object) -> str:
    """`MODULE`, `OPTIMIZER`, `SCHEDULER` or `OTHER`, for an object with a state."""
    if isinstance(value, torch.nn.Module):
        return MODULE
    if isinstance(value, torch.optim.Optimizer):
        return OPTIMIZER
    return SCHEDULER if isinstance(value, torch.optim.lr_scheduler.LRScheduler) else OTHER


def unwrap(value: object) -> Any:
    """The module inside DistributedDataParallel, DataParallel or torch.compile; else the object itself."""
    while isinstance(value, (DistributedDataParallel, DataParallel)):
        value = value.module
    return getattr(value, "_orig_mod", value) if isinstance(value, torch.nn.Module) else value


def buffer_names(module: torch.nn.Module) -> list[str]:
    """Names of the module's buffers. Buffers may differ between ranks, and the lowest rank's are saved."""
    return [name for name, _ in module.named_buffers(remove_duplicate=False)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def load_state(kind: str, value: Any, loaded: object) -> None:
    """Call `value.load_state_dict(loaded)`, and preserve every element's bits."""
    value.load_state_dict(loaded)
    if kind == OPTIMIZER and type(value).load_state_dict is torch.optim.Optimizer.load_state_dict:
        _undo_casts(value, loaded)


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """Restore the saved types of an optimizer's tensors.

    PyTorch casts these tensors to their parameter's type on load, which loses bits.
    """
    params = parameters_of(optimizer)
    numbers = [i for group in loaded["param_groups"] for i in group["params"]]
    for param, number in zip(params, numbers, strict=True):
        for key, saved in loaded["state"].get(number, {}).items():
            now = optimizer.state[param].get(key)
            if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != saved.dtype:
                optimizer.state[param][key] = saved.to(now.device)


def empty_like(dtype: str, shape: tuple[int, ...], model: torch.Tensor | None = None) -> torch.Tensor:
    """A new tensor, on the device and with the placement of `model`. Without a `model`, it is in main memory."""
    kind: torch.dtype = getattr(torch, dtype)
    if isinstance(model, DTensor):
        return dtensors.like(model, kind)
    return empty(kind, shape, model.device if model is not None else None)


def storage_of(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors that are views of the same memory. None for a tensor without elements."""
    return (tensor.device, tensor.untyped_storage().data_ptr()) if tensor.numel() else None


def byte_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """The bytes [start, stop) of its storage that the tensor uses, or None if unknown."""
    if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return None
    last = tensor.numel() - 1
    if not tensor.is_contiguous():
        last = sum((n - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
    return start, start + (last + 1) * size


def overlapping(ranges: Iterable[tuple[T, tuple[int, int] | None]]) -> Iterator[list[T]]:
    """Group items whose byte ranges overlap, each given with its `byte_range`. Items without a range are left out.

    The items of a group, and the groups, are in the order of their first bytes. An item that overlaps no other is a
    group of its own.
    """
    with_range = [(item, reach) for item, reach in ranges if reach is not None]
    group: list[T] = []
    end = 0
    for item, (start, stop) in sorted(with_range, key=lambda each: each[1]):
        if group and start >= end:
            yield group
            group, end = [], 0
        group.append(item)
        end = max(end, stop)
    if group:
        yield group


def storage_bytes(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The bytes [start, stop) of the tensor's storage, as a view. It shares the tensor's version counter."""
    return tensor.detach().as_strided((1,), (1,), 0).view(torch.uint8).as_strided((stop - start,), (1,), start)


def view_of(
    base: torch.Tensor, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """A view of the bytes `base` from byte `offset`. `stride` is in elements."""
    view = empty(getattr(torch, dtype), (0,), base.device)
    start = base.storage_offset() + offset
    return view.set_(base.untyped_storage(), start // view.element_size(), shape, stride)


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy the elements of `value` into `tensor`. Sparse tensors may differ in their number of elements."""
    with torch.no_grad():
        if tensor.layout == value.layout == torch.strided and tensor.dtype == value.dtype:
            _copy_bits(tensor.detach(), value)
            return
        if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
            tensor.resize_as_sparse_(value)
        tensor.copy_(value)  # not detached: detach() returns another sparse tensor


def name_of(dtype: torch.dtype) -> str:
    """The name of an element type, as in `headrace.checkpoint.format.chunking`."""
    if (name := _NAMES.get(dtype)) is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def _require_supported(tensor: torch.Tensor, dtype: str, path: str) -> None:
    if is_plain(tensor) and dtype in ITEM_BYTES and not tensor.is_quantized:
        return
    why, hint = "", "save a dense tensor with memory of its own instead"
    if is_wrapper(tensor) or tensor.layout != torch.strided or tensor.is_nested:
        why = f"a {type(tensor).__name__} of layout {tensor.layout}"
    elif tensor.is_quantized:
        why, hint = f"of type {dtype}", "save int_repr(), q_scale() and q_zero_point() of a quantized tensor instead"
    elif dtype not in ITEM_BYTES:
        why = f"of type {dtype}"
    if why:
        raise UnsupportedError(f"{path}: the tensor is {why}", hint=hint)


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor is in main memory, contiguous and row-major."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of the bytes of a tensor in contiguous main memory. The caller keeps the tensor alive."""
    size = math.prod(tensor.shape) * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() if size else 0)).cast("B")


def empty(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None = None) -> torch.Tensor:
    """A new tensor, in main memory by default. It is created as integers, because PyTorch warns about some types."""
    same = _SAME_SIZE.get(dtype.itemsize, dtype)
    return torch.empty(shape, dtype=same, device=device or "cpu").view(dtype)


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the elements as integers of the same size, because PyTorch cannot copy every type."""
    same = _SAME_SIZE.get(tensor.element_size())
    return tensor if same is None or tensor.dtype == same else tensor.view(same)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until the GPUs have finished the work that this thread queued.

    Other threads fill the sinks on their own streams. These streams do not wait for this thread's stream.
    """
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


class TensorSink:
    """Receives a tensor's bytes.

    If the tensor is in contiguous main memory, its bytes are written there directly. Otherwise they are written to a
    copy first. `dtype` is the type of the bytes, if it differs from the tensor's. PyTorch's `copy_` then converts them.
    """

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._tensor = tensor
        self._dtype = dtype or tensor.dtype
        self._copy: torch.Tensor | None = None

    @property
    def direct_target(self) -> torch.Tensor | None:
        """The tensor, if the bytes are exactly its memory; else None.

        A reader that can write into the tensor does not need to open the sink.
        """
        tensor = self._tensor
        return tensor.detach() if self._dtype == tensor.dtype and tensor.is_contiguous() else None

    def open(self) -> memoryview:
        if self._dtype == self._tensor.dtype and has_plain_memory(self._tensor):
            return memory_of(self._tensor)
        self._copy = empty(self._dtype, tuple(self._tensor.shape))
        return memory_of(self._copy)

    def close(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None:
            return
        tensor = self._tensor.detach()
        if copy.dtype != tensor.dtype:
            tensor.copy_(copy)
        else:
            _copy_bits(tensor, copy)


def _copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_conj() or target.is_neg():  # such views cannot be viewed as integers
        target.copy_(source)
    else:
        as_bits(target).copy_(as_bits(source))


def is_wrapper(tensor: object) -> bool:
    """Whether this is a tensor subclass with `__tensor_flatten__`."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is an ordinary dense tensor. The check is fast, because nearly all tensors are."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def parts_of(tensor: torch.Tensor, path: str) -> Parts | None:
    """The parts of a composite tensor. None for a dense tensor with its own memory, and for a DTensor."""
    if is_plain(tensor) or isinstance(tensor, DTensor):
        return None
    if is_wrapper(tensor) and not tensor.is_nested:
        return _of_wrapper(tensor)
    if tensor.layout == torch.sparse_coo:
        inner = {"indices": tensor._indices(), "values": tensor._values()}
        return Parts("coo", {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}, inner)
    for kind, (layout, rows) in _COMPRESSED.items():
        if tensor.layout == layout:
            return _of_compressed(tensor, kind, rows)
    if tensor.layout != torch.strided or tensor.is_nested:
        raise UnsupportedError(
            f"{path}: the tensor is nested, of layout {tensor.layout}", hint="save its values and offsets instead"
        )
    return None


def assemble(parts: Parts) -> torch.Tensor | None:
    """A sparse tensor on the memory of its parts, which may be filled later. None for a wrapper subclass."""
    return _assembled(parts, check_invariants=False)


def check_parts(parts: Parts, path: str) -> None:
    """Check the parts of a sparse tensor after they are filled. Raises `CorruptionError` for invalid indices."""
    try:
        _assembled(parts, check_invariants=True)
    except CorruptionError as error:
        raise CorruptionError(f"{path}: {error.message}") from None


def _assembled(given: Parts, check_invariants: bool) -> torch.Tensor | None:
    if not isinstance(given.values, dict):
        return None
    shape, tensors = given.values.get("shape"), given.tensors
    try:
        if given.kind == "coo":
            indices, values, coalesced = tensors["indices"], tensors["values"], given.values["coalesced"]
            return torch.sparse_coo_tensor(
                indices, values, shape, check_invariants=check_invariants, is_coalesced=coalesced
            )
        if given.kind in _COMPRESSED:
            components = (tensors["compressed"], tensors["plain"], tensors["values"])
            layout = _COMPRESSED[given.kind][0]
            return torch.sparse_compressed_tensor(*components, shape, layout=layout, check_invariants=check_invariants)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptionError(f"the checkpoint's {given.kind} tensor is not valid: {str(error)[:300]}") from None
    return None


def _of_wrapper(tensor: Any) -> Parts:
    names, _ = tensor.__tensor_flatten__()
    kind = f"wrapper:{type(tensor).__module__}.{type(tensor).__qualname__}"
    return Parts(kind, {"shape": list(tensor.shape)}, {name: getattr(tensor, name) for name in names})


def _of_compressed(tensor: torch.Tensor, kind: str, rows: bool) -> Parts:
    compressed = tensor.crow_indices() if rows else tensor.ccol_indices()
    plain = tensor.col_indices() if rows else tensor.row_indices()
    inner = {"compressed": compressed, "plain": plain, "values": tensor.values()}
    return Parts(kind, {"shape": list(tensor.shape)}, inner)
