"""`map_location` as `torch.load` has it, for states that were read into main memory.

Invariant: tensors that share memory share it afterwards too; what stays where it is is not copied. Containers are made anew.
Failure behaviour: what torch raises for a device that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Where = str | torch.device | dict[str, str] | Callable[[torch.UntypedStorage, str], Any] | None


def mapped(state: Any, where: Where) -> Any:
    """`state` with its tensors where `where` puts what was saved from main memory."""
    return state if where is None else _mapped(state, where, {})


def _mapped(value: Any, where: Where, moved: dict[int, torch.Tensor | None]) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, where, moved) if value.layout == torch.strided and value.device.type == "cpu" else value
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: _mapped(item, where, moved) for key, item in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, where, moved) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(_mapped(item, where, moved) for item in value)
    return value


def _tensor(tensor: torch.Tensor, where: Where, moved: dict[int, torch.Tensor | None]) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        moved[storage._cdata] = _memory(storage, where)
    memory = moved[storage._cdata]
    if memory is None:
        return tensor
    elements = memory[: len(memory) - len(memory) % tensor.element_size()].view(tensor.dtype)
    return elements.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _memory(storage: torch.UntypedStorage, where: Where) -> torch.Tensor | None:
    """The storage's bytes where they are to be; None: they are there."""
    if isinstance(where, dict):
        where = where.get("cpu")
    found = where(storage, "cpu") if callable(where) else where
    if isinstance(found, torch.TypedStorage):
        found = found._untyped_storage
    if isinstance(found, torch.UntypedStorage):
        return None if found is storage else _bytes(found)
    return None if found is None or torch.device(found).type == "cpu" else _bytes(storage).to(found)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
