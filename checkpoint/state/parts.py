"""Tensors that are made of other tensors: sparse ones, and subclasses that wrap tensors (`__tensor_flatten__`).

Invariant: the parts are the memory that the tensor lives on, so nothing is copied; putting equal parts together gives an
equal tensor. A sparse tensor can be made anew; a wrapper is only ever filled in place, since making one would need code that a
checkpoint names.
Failure behaviour: `UnsupportedError` naming the path of one that does not say what it is made of. torch reads and writes wherever
the indices of a sparse tensor point; `check` raises `CorruptionError` for indices that point outside of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headrace.checkpoint.state.flatten import Parts
from headrace.dataio.core.errors import CorruptionError, UnsupportedError

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_COMPRESSED: dict[str, tuple[torch.layout, bool]] = {
    "csr": (torch.sparse_csr, True),
    "csc": (torch.sparse_csc, False),
    "bsr": (torch.sparse_bsr, True),
    "bsc": (torch.sparse_bsc, False),
}
"""Layout of each kind, and whether its rows are what is compressed."""


def is_wrapper(tensor: object) -> bool:
    """Whether this is a subclass that says which tensors it wraps."""
    return bool(is_traceable_wrapper_subclass(tensor))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is just a dense tensor, as nearly all are: found out without asking torch all that it could be."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def parts(tensor: torch.Tensor, path: str) -> Parts | None:
    """What `tensor` is made of; None for a dense tensor with memory of its own."""
    if is_plain(tensor):
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


def assemble(given: Parts) -> torch.Tensor | None:
    """A tensor on the memory of its parts, whose elements may be set later; None for a wrapper."""
    return _assembled(given, check_invariants=False)


def check(given: Parts, path: str) -> None:
    """`CorruptionError` if the parts, whose elements are set by now, are not those of a sparse tensor."""
    try:
        _assembled(given, check_invariants=True)
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
            parts = (tensors["compressed"], tensors["plain"], tensors["values"])
            layout = _COMPRESSED[given.kind][0]
            return torch.sparse_compressed_tensor(*parts, shape, layout=layout, check_invariants=check_invariants)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptionError(f"the checkpoint's {given.kind} tensor is not sound: {str(error)[:300]}") from None
    return None


def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give `tensor` the elements of `value`, which may have another number of them where both are sparse."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor.resize_as_sparse_(value)
    tensor.copy_(value)


def _of_wrapper(tensor: Any) -> Parts:
    names, _ = tensor.__tensor_flatten__()
    kind = f"wrapper:{type(tensor).__module__}.{type(tensor).__qualname__}"
    return Parts(kind, {"shape": list(tensor.shape)}, {name: getattr(tensor, name) for name in names})


def _of_compressed(tensor: torch.Tensor, kind: str, rows: bool) -> Parts:
    compressed = tensor.crow_indices() if rows else tensor.ccol_indices()
    plain = tensor.col_indices() if rows else tensor.row_indices()
    inner = {"compressed": compressed, "plain": plain, "values": tensor.values()}
    return Parts(kind, {"shape": list(tensor.shape)}, inner)
