"""Convert small Python objects to values that a document can hold.

Tensors, arrays and byte streams become tagged bytes. The Megatron-Core adapter uses this module for generator states
and quantisation scales. Large tensors should be tensors of the state.

Invariant: `unpacked(packed(x))` equals `x` and has the same types. Nothing is pickled. Tensors are returned in main
memory.

Failure behaviour: `UsageError` for a dict that uses the tag's key. Other objects are passed through, and `tree.encode`
then refuses them with an error that names their path.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from headrace.checkpoint.state.tensors import empty, memory_of, name_of
from headrace.dataio.core.errors import CorruptionError, UsageError

_TAG = "headrace:plain"


def packed(value: Any) -> Any:
    """`value` as plain values."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        return {
            _TAG: "tensor",
            "dtype": name_of(tensor.dtype),
            "shape": tuple(tensor.shape),
            "bytes": bytes(memory_of(tensor)),
        }
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UsageError("an array of Python objects cannot be saved", hint="save a list")
        return {_TAG: "array", "dtype": value.dtype.str, "shape": tuple(value.shape), "bytes": value.tobytes()}
    if isinstance(value, np.generic):
        return packed(np.asarray(value)) | {_TAG: "number"}
    if isinstance(value, io.BytesIO):
        return {_TAG: "stream", "bytes": value.getvalue()}
    if isinstance(value, dict):
        if _TAG in value:
            raise UsageError(f"a dict with the key {_TAG!r} cannot be saved", hint="rename that key; Headrace uses it")
        return {key: packed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(packed(item) for item in value)
    return value


def unpacked(value: Any) -> Any:
    """The value that `packed` was given."""
    if isinstance(value, dict):
        if _TAG not in value:
            return {key: unpacked(item) for key, item in value.items()}
        try:
            return _tagged_value(value)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptionError(f"a saved {value[_TAG]!r:.40} cannot be decoded: {error}") from None
    if isinstance(value, (list, tuple)):
        return type(value)(unpacked(item) for item in value)
    return value


def _tagged_value(value: dict[str, Any]) -> Any:
    kind, data = value[_TAG], value["bytes"]
    if kind == "stream":
        return io.BytesIO(data)
    if kind == "tensor":
        tensor = empty(getattr(torch, value["dtype"]), value["shape"])
        memory_of(tensor)[:] = data
        return tensor
    array = np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    return array[()] if kind == "number" else array
