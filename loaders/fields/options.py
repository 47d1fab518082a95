"""The options that several fields share: files, dtypes and the way a batch holds the values.

Purpose: every field checks its arguments when it is created, with the same messages. No torch.
Invariants: a dtype is stored as its name, such as "float16". So equal fields have an equal `repr`, whether they were
created from a torch dtype or from its name.
Failure behaviour: `UsageError` with the argument, its value, and what to give instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataio.core.errors import MissingValueError, UnsupportedError, UsageError
from headrace.dataio.core.suggestions import did_you_mean
from headrace.loaders.fields.base import Field
from headrace.loaders.validation import checked

NUMPY_DTYPES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""The dtypes that both numpy and torch have, and the bytes of an item."""
TORCH_DTYPES = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""The dtypes that only torch has, and the bytes of an item."""
ITEM_BYTES = NUMPY_DTYPES | TORCH_DTYPES
COLLATES = ("stack", "pad", "concat", "list")
KEEPS = "required=False keeps such samples"
"""The hint of an error that the option `required=False` avoids."""
_OTHER_NAMES = {"half": "float16", "float": "float32", "double": "float64", "int": "int32", "long": "int64"}


def check_options(field: Field, *files: str, collates: Sequence[str] = COLLATES) -> None:
    """Check `collate` and `required` of a field, and set its `files`. Call this in `__post_init__`.

    Args:
        field: the field, a frozen dataclass.
        files: extensions of the files that the field needs.
        collates: the values of `collate` that the field allows. A function is always allowed.
    """
    kind = type(field).__name__
    object.__setattr__(field, "files", files)
    object.__setattr__(field, "required", checked(f"{kind}'s required", field.required, bool))
    if not callable(field.collate) and field.collate not in collates:
        allowed = ", ".join(map(repr, collates))
        raise UsageError(f"{kind}'s collate cannot be {field.collate!r:.80}", hint=f"give {allowed} or a function")


def check_file(field: Field, file: str) -> str:
    """Return the extension without a leading dot, and store it as the field's `file`."""
    kind = type(field).__name__
    name: str = checked(f"{kind}'s file", file, str, 'an extension, such as "latent.npy"').removeprefix(".")
    if not name or "/" in name:
        raise UsageError(f"{kind}'s file cannot be {file!r:.200}", hint='give an extension, such as "latent.npy"')
    object.__setattr__(field, "file", name)
    return name


def check_dtype(field: Field, dtype: Any, known: Sequence[str] = tuple(ITEM_BYTES)) -> str | None:
    """Return the name of a torch dtype, and store it as the field's `dtype`. `known` are the names that it allows."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        meant = did_you_mean(name, known, _OTHER_NAMES)
        raise UsageError(
            f"{type(field).__name__}'s dtype cannot be {dtype!r:.80}{meant}",
            hint=f"give a torch dtype or its name: {', '.join(known)}",
        )
    object.__setattr__(field, "dtype", name)
    return name


def keepable(error: MissingValueError) -> MissingValueError:
    """The error with the hint that `required=False` keeps such samples."""
    return MissingValueError(error.message, hint=f"{error.hint}; {KEEPS}")


def converted(value: Any, dtype: str | None) -> Any:
    """The array or tensor in another dtype, converted as `torch.Tensor.to` does. Without a dtype, `value` itself.

    numpy converts to its own dtypes, in the calling thread. torch would start threads of its own for large tensors, and
    they would compete with the loader's.

    Raises:
        UnsupportedError: complex numbers have no real dtype.
    """
    if dtype is None:
        return value
    found = dtype_of(value)
    if dtype == found:
        return value
    if found.startswith("complex") and not dtype.startswith("complex"):
        raise UnsupportedError(f"{found} cannot be converted to {dtype}", hint="leave dtype out, or give complex64")
    if isinstance(value, np.ndarray) and dtype in NUMPY_DTYPES:
        with np.errstate(all="ignore"):  # too large numbers become infinite, as in torch
            return value.astype(dtype)
    import torch

    tensor: torch.Tensor = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value
    return tensor.to(getattr(torch, dtype))


def dtype_of(value: Any) -> str:
    """The name of an array's or tensor's dtype."""
    return str(value.dtype).removeprefix("torch.")


def checked_bools(array: npt.NDArray[Any]) -> bool:
    """Whether all items of a bool array are 0 or 1. Other bytes have no defined meaning in numpy and torch."""
    return array.dtype != np.bool_ or not (array.view(np.uint8) > 1).any()


_SHOWN = 8


def listed(names: Iterable[str]) -> str:
    """The first names in alphabetical order, as text for an error: `'a', 'b' and 3 more`."""
    known = sorted(names)
    shown = ", ".join(f"{name[:40]!r}" for name in known[:_SHOWN]) or "none"
    return shown if len(known) <= _SHOWN else f"{shown} and {len(known) - _SHOWN} more"
