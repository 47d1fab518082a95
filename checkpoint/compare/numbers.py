"""Numbers about two tensors of the same type and shape: norms, the largest difference, and how many elements changed.

Invariant: elements are compared by their bits, so a NaN equals itself and -0.0 differs from 0.0. Norms and the largest
difference cover the elements that are finite in both tensors. `nonfinite` counts the other elements. Sums are kept in
64-bit floats. `Change` objects of parts of a tensor add up to that of the tensor.
Failure behaviour: none. Types without a numeric meaning ("bits16") count as unsigned integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.format.chunking import ITEM_BYTES

_BLOCK = 1 << 16
"""Elements that are converted at a time. The converted values stay in the processor's caches."""
_SAME = {"bool": "u1", "float16": "f2", "float32": "f4", "float64": "f8", "complex64": "f4", "complex128": "f8"}
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
"""For each type: bits of the exponent and of the mantissa, the bias, and which codes are not finite."""
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Change:
    """Sums over the elements of two tensors, or of parts of them.

    `elements` were compared and `changed` of them differ. `square_a`, `square_b` and `square_diff` are sums of squares
    of the first tensor, of the second, and of their difference.
    """

    elements: int = 0
    changed: int = 0
    nonfinite: int = 0
    square_a: float = 0.0
    square_b: float = 0.0
    square_diff: float = 0.0
    largest: float = 0.0

    def add(self, other: Change) -> None:
        """Add the sums of another part."""
        self.elements += other.elements
        self.changed += other.changed
        self.nonfinite += other.nonfinite
        self.square_a += other.square_a
        self.square_b += other.square_b
        self.square_diff += other.square_diff
        self.largest = max(self.largest, other.largest)

    @property
    def norm_a(self) -> float:
        return math.sqrt(self.square_a)

    @property
    def norm_b(self) -> float:
        return math.sqrt(self.square_b)

    @property
    def norm_diff(self) -> float:
        return math.sqrt(self.square_diff)

    @property
    def relative(self) -> float | None:
        """The norm of the difference, divided by that of the first tensor. None if the first norm is zero."""
        if self.square_a > 0:
            return self.norm_diff / self.norm_a
        return 0.0 if self.square_diff == 0 else None


def compare(a: memoryview, b: memoryview, dtype: str) -> Change:
    """Compare the bytes of the same elements of two tensors of type `dtype`."""
    item, total = ITEM_BYTES[dtype], Change()
    one, two = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    for at in range(0, len(one), _BLOCK * item):
        total.add(_block(one[at : at + _BLOCK * item], two[at : at + _BLOCK * item], dtype, item))
    return total


def _block(one: npt.NDArray[np.uint8], two: npt.NDArray[np.uint8], dtype: str, item: int) -> Change:
    elements = len(one) // item
    word = min(item, 8)
    unequal = one.view(f"<u{word}") != two.view(f"<u{word}")
    if item > word:  # a complex number of 16 bytes
        unequal = unequal.reshape(-1, item // word).any(axis=1)
    a, b = _values(one, dtype), _values(two, dtype)
    nonfinite = 0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        finite = np.isfinite(a) & np.isfinite(b)
        nonfinite = len(a) - int(np.count_nonzero(finite))
        a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):  # squares of 64-bit floats may be infinite
        difference = b - a
        return Change(
            elements,
            int(np.count_nonzero(unequal)),
            nonfinite,
            _square(a),
            _square(b),
            _square(difference),
            float(np.abs(difference).max(initial=0.0)),
        )


def _square(values: Floats) -> float:
    """The sum of squares. BLAS, behind `@`, would start a thread for each core in each of the reader's threads."""
    return float(np.einsum("i,i->", values, values))


def _values(data: npt.NDArray[np.uint8], dtype: str) -> Floats:
    """The values as 64-bit floats. A complex number gives two, and a byte with two 4-bit floats gives two as well."""
    if dtype == "bfloat16":
        wide = data.view("<u2").astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    table = _table(dtype)
    if table is not None:
        return table[data].reshape(-1)
    return data.view(_numpy_type(dtype)).astype(np.float64)


def _numpy_type(dtype: str) -> str:
    if dtype in _SAME:
        return "<" + _SAME[dtype]
    if dtype == "complex32":
        return "<f2"
    signed = "i" if dtype.startswith("int") and dtype[3:] in ("8", "16", "32", "64") else "u"
    return f"<{signed}{ITEM_BYTES[dtype]}"


@cache
def _table(dtype: str) -> npt.NDArray[Any] | None:
    """The value of each of the 256 codes, for types of one byte that NumPy does not have."""
    if dtype == "float4_e2m1fn_x2":
        values = [*_FLOAT4, *(-each for each in _FLOAT4)]
        return np.array([(values[code & 15], values[code >> 4]) for code in range(256)], np.float64)
    if dtype == "float8_e8m0fnu":
        return np.array([*(2.0 ** (code - 127) for code in range(255)), math.nan], np.float64)
    if dtype not in _FLOAT8:
        return None
    return np.array([_float8(code, *_FLOAT8[dtype]) for code in range(256)], np.float64)


def _float8(code: int, exponent_bits: int, mantissa_bits: int, bias: int, kind: str) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    top = exponent == (1 << exponent_bits) - 1
    if kind == "fnuz" and code == 0x80:
        return math.nan
    if kind == "fn" and code & 0x7F == 0x7F:
        return math.nan
    if kind == "ieee" and top:
        return math.nan if mantissa else sign * math.inf
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (fraction * 2.0 ** (1 - bias) if not exponent else (1 + fraction) * 2.0 ** (exponent - bias))
