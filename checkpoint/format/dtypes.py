"""Element types by the names torch gives them, and their sizes: what a manifest may say of a tensor without torch.

Invariant: a type that is listed here is saved and restored bit for bit; the sizes are bytes per element as torch counts
elements (a float4 pair counts as one).
Failure behaviour: `nbytes` raises `CorruptionError` for sizes that no memory holds, before anything is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.dataio.core.errors import CorruptionError

ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
MAX_DIMENSIONS = 64
MAX_TENSOR_BYTES = 1 << 50


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor of this type and shape."""
    total = math.prod(shape) * ITEM_BYTES[dtype]
    if len(shape) > MAX_DIMENSIONS or total > MAX_TENSOR_BYTES:
        raise CorruptionError(f"a tensor of shape {list(shape)[:8]} and type {dtype} is too large to be true")
    return total
