"""Arrays and tensors: `Npy` for .npy files, `Safetensors` for one tensor of a .safetensors file.

Purpose: deliver latents, embeddings and features as tensors.

Invariants:
- Nothing is unpickled. A header is bounded and parsed before any memory is allocated, so a header that claims 1 TB
  costs nothing.
- The shape's size equals the size of the stored data exactly.
- Arrays of dtypes that numpy has are read-only views of the file. Other byte orders, dtypes that only torch has
  (bfloat16, float8) and conversions make one copy.

Failure behaviour: damaged bytes raise `CorruptionError`. A dtype that torch lacks raises `UnsupportedError`.
"""

from __future__ import annotations

import functools
import io
import math
import re
import struct
from dataclasses import KW_ONLY, dataclass
from dataclasses import field as option
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from headrace.dataio.core.errors import CorruptionError, MissingValueError, UnsupportedError, UsageError
from headrace.dataio.core.json import parse_json
from headrace.dataio.core.limits import MIB, format_bytes
from headrace.dataio.core.suggestions import suggests_arguments
from headrace.dataio.shards.sample import Sample
from headrace.loaders.fields.base import Field, FieldInput
from headrace.loaders.fields.options import (
    ITEM_BYTES,
    KEEPS,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    check_dtype,
    check_file,
    check_options,
    checked_bools,
    converted,
    listed,
)
from headrace.loaders.interfaces import Collate
from headrace.loaders.validation import checked

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]

MAX_AXES = 64
"""The most axes of an array, in numpy and in torch."""
_MAX_BYTES = 1 << 63


@suggests_arguments()
@dataclass(frozen=True)
class Npy(Field):
    """The array of a .npy file, as `numpy.save` writes it.

    Args:
        file (str): extension of the file. Default: "npy".
        dtype (torch.dtype | str | None): convert the array to this dtype, as `Tensor.to` does. Default: None, the
            file's dtype.
        collate (str | Callable): how a batch holds the arrays: "stack", "pad", "concat", "list" or a function. Default:
            "stack", a tensor (B, ...).
        required (bool): leave out samples that lack the file. Default: True.

    Raises:
        UsageError: for an unknown dtype or `collate`.

    Example:
        >>> Npy("latent.npy", dtype="float16").files
        ('latent.npy',)
    """

    file: str = "npy"
    _: KW_ONLY
    dtype: torch.dtype | str | None = None
    collate: Collate = "stack"
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)
    in_place: bool = option(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, check_file(self, self.file))
        object.__setattr__(self, "in_place", check_dtype(self, self.dtype) is None)

    def decode(self, data: FieldInput) -> Any:
        return converted(read_npy(data.files[self.file], f".{self.file}"), _name(self.dtype))

    def nbytes(self, sample: Sample) -> int:
        return _nbytes(self, super().nbytes(sample))


@suggests_arguments(key="name", tensor="name")
@dataclass(frozen=True)
class Safetensors(Field):
    """One tensor of a .safetensors file.

    Args:
        file (str): extension of the file, such as "t5.safetensors".
        name (str): name of the tensor in the file.
        dtype (torch.dtype | str | None): convert the tensor to this dtype, as `Tensor.to` does. Default: None, the
            file's dtype.
        collate (str | Callable): how a batch holds the tensors: "stack", "pad", "concat", "list" or a function.
            Default: "stack", a tensor (B, ...).
        required (bool): leave out samples that lack the file. Default: True. A file without this tensor is a bad
            sample; with `required=False`, the sample has no value.

    Raises:
        UsageError: for an unknown dtype or `collate`.

    Example:
        >>> Safetensors("t5.safetensors", "emb", collate="pad").name
        'emb'
    """

    file: str
    name: str
    _: KW_ONLY
    dtype: torch.dtype | str | None = None
    collate: Collate = "stack"
    required: bool = True
    files: tuple[str, ...] = option(init=False, repr=False)

    def __post_init__(self) -> None:
        check_options(self, check_file(self, self.file))
        check_dtype(self, self.dtype)
        if not checked("Safetensors's name", self.name, str) or self.name == _METADATA:
            raise UsageError(f"Safetensors's name cannot be {self.name!r}", hint="give the name of a tensor")

    def decode(self, data: FieldInput) -> Any:
        contents, what = data.files[self.file], f".{self.file}"
        entries, start = read_entries(contents, what)
        if self.name not in entries:
            if not self.required:
                return None
            raise MissingValueError(
                f"{what} has no tensor {self.name!r:.80}", hint=f"it has {listed(entries)}; {KEEPS}"
            )
        return converted(read_tensor(contents, start, entries[self.name], what), _name(self.dtype))

    def nbytes(self, sample: Sample) -> int:
        return _nbytes(self, super().nbytes(sample))


def _name(dtype: torch.dtype | str | None) -> str | None:
    """A field's dtype. `check_dtype` has stored its name."""
    return None if dtype is None else str(dtype)


def _nbytes(field: Npy | Safetensors, size: int) -> int:
    """The memory of the value, if each byte of the files is an item."""
    return size if field.dtype is None else size * ITEM_BYTES[str(field.dtype)]


# --- .npy

_NPY_HEADER_BYTES = 10_000  # numpy's own limit
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
"""Bytes of the header's length, by version."""
_LONG = re.compile(rb"(\d)L(?=[,)])")
"""An integer as Python 2 wrote it. numpy reads it, but warns each time."""


def read_npy(data: memoryview, what: str = "the array") -> Array:
    """Parse a .npy file. The result is a read-only view of `data`, unless its byte order is converted.

    Args:
        data: the whole file.
        what: name of the file, for errors.

    Raises:
        CorruptionError: the header is not valid, or the file's size does not match its shape.
        UnsupportedError: torch has no type for the dtype, or the header is too large.
    """
    text, start = _npy_header(data, what)
    try:
        header = _parsed(text)
    except Exception as error:  # the parser evaluates a literal and builds a dtype; damage raises many types
        raise CorruptionError(f"{what} is damaged: its header is not that of a .npy file") from error
    if not header.is_known:
        raise UnsupportedError(
            f"{what} has dtype {header.dtype!s:.80}, which torch has no type for",
            hint="convert the array before it is saved, for example with array.astype(numpy.float32)",
        )
    array = _view(data[start:], header.shape, header.size, header.dtype, header.order, what)
    return array if header.dtype.isnative else array.astype(header.dtype.newbyteorder("="))


class _NpyHeader(NamedTuple):
    shape: tuple[int, ...]
    size: int | None
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    is_known: bool
    """Whether torch has the dtype."""


@functools.lru_cache(maxsize=256)
def _parsed(text: bytes) -> _NpyHeader:
    """Parse a header. numpy takes longer for it than the copy of a 100 kB array, and few files of a dataset differ."""
    file = io.BytesIO(struct.pack("<I", len(text)) + text)
    shape, fortran_order, dtype = npy_format.read_array_header_2_0(file, max_header_size=_NPY_HEADER_BYTES)
    is_known = dtype.name in NUMPY_DTYPES
    size = _size(shape, 8 * dtype.itemsize) if is_known else None
    return _NpyHeader(shape, size, dtype, "F" if fortran_order else "C", is_known)


def _npy_header(data: memoryview, what: str) -> tuple[bytes, int]:
    """The text of the header, and the offset of the data."""
    magic = bytes(data[: npy_format.MAGIC_LEN])
    if not magic.startswith(npy_format.MAGIC_PREFIX) or len(magic) < npy_format.MAGIC_LEN:
        raise CorruptionError(f"{what} is not a .npy file")
    major, minor = magic[-2:]
    if major not in _LENGTH_BYTES or minor != 0:
        raise UnsupportedError(f"{what} is a .npy file of version {major}.{minor}", hint="save it as version 1, 2 or 3")
    begin = npy_format.MAGIC_LEN + _LENGTH_BYTES[major]
    if len(data) < begin:
        raise CorruptionError(f"{what} is truncated: it ends in its header")
    length = int.from_bytes(data[npy_format.MAGIC_LEN : begin], "little")
    if length > len(data) - begin:
        raise CorruptionError(f"{what} is truncated: it ends in its header")
    if length > _NPY_HEADER_BYTES:
        raise UnsupportedError(f"{what} has a header of {length} bytes", hint=f"at most {_NPY_HEADER_BYTES}")
    text = bytes(data[begin : begin + length])
    return (_LONG.sub(rb"\1", text) if b"L" in text else text), begin + length


def _view(
    data: memoryview,
    shape: tuple[int, ...],
    size: int | None,
    dtype: np.dtype[Any],
    order: Literal["C", "F"],
    what: str,
) -> Array:
    """The array of `size` bytes whose items are all of `data`, without a copy."""
    if size is None:
        raise CorruptionError(f"{what} is damaged: its shape is not possible")
    if size != len(data):
        raise CorruptionError(
            f"{what} is damaged: its shape {shape} needs {format_bytes(size)}, and it has {format_bytes(len(data))} "
            f"({size} and {len(data)} bytes)"
        )
    array: Array = np.ndarray(shape, dtype, buffer=data, order=order)
    array.flags.writeable = False
    if not checked_bools(array):
        raise CorruptionError(f"{what} is damaged: it has bool values other than 0 and 1")
    return array


def _size(shape: Any, bits: int) -> int | None:
    """Bytes of an array with items of this many bits. None if no array has this shape."""
    if len(shape) > MAX_AXES or not all(type(side) is int and 0 <= side < _MAX_BYTES for side in shape):
        return None
    if math.prod(side or 1 for side in shape) * bits >= 8 * _MAX_BYTES:
        return None
    total = math.prod(shape) * bits
    return None if total % 8 else total // 8


# --- .safetensors

_SAFETENSORS_HEADER_BYTES = 4 * MIB
_METADATA = "__metadata__"
_OWN_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_BITS = {own: 8 * ITEM_BYTES[name] for own, name in _OWN_NAMES.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a .safetensors file. `begin` and `end` count bytes from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_entries(data: memoryview, what: str = "the file") -> tuple[dict[str, Entry], int]:
    """Parse the header of a .safetensors file.

    Args:
        data: the whole file.
        what: name of the file, for errors.

    Returns:
        The tensors by name, and the offset of the data. The tensors cover the data without gaps and overlaps.

    Raises:
        CorruptionError: the header is not valid, or does not fit the file's size.
        UnsupportedError: the header is too large, or has an unknown dtype.
    """
    header, start = _safetensors_header(data, what)
    entries = {name: _entry(name, value, what) for name, value in header.items() if name != _METADATA}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            how = "overlaps another" if entry.begin < end else "follows a gap"
            raise CorruptionError(f"{what} is damaged: its tensor {name!r:.80} {how}")
        end = entry.end
    if end != len(data) - start:
        raise CorruptionError(f"{what} is damaged: its tensors end at {end} of {len(data) - start} bytes")
    return entries, start


def _safetensors_header(data: memoryview, what: str) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(data[:8], "little")
    if length > len(data) - 8:
        raise CorruptionError(f"{what} is not a .safetensors file, or is truncated")
    if length > _SAFETENSORS_HEADER_BYTES:
        raise UnsupportedError(
            f"{what} has a header of {format_bytes(length)}", hint=f"at most {format_bytes(_SAFETENSORS_HEADER_BYTES)}"
        )
    text = bytes(data[8 : 8 + length])
    try:
        found = parse_json(text, max_bytes=_SAFETENSORS_HEADER_BYTES, unique_names=True)
    except ValueError as error:
        raise CorruptionError(f"{what} is damaged: its header is not JSON: {error}") from error
    if not text.startswith(b"{") or not isinstance(found, dict):
        raise CorruptionError(f"{what} is damaged: its header is not a JSON object")
    metadata = found.get(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptionError(f"{what} is damaged: its metadata are not text")
    return found, 8 + length


def _entry(name: str, value: Any, what: str) -> Entry:
    given: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any = given.get("dtype")
    shape: Any = given.get("shape")
    offsets: Any = given.get("data_offsets")
    if isinstance(dtype, str) and dtype not in _BITS:
        raise UnsupportedError(f"{what} has a tensor {name!r:.80} of the unknown dtype {dtype!r:.40}")
    size = _size(shape, _BITS[dtype]) if isinstance(dtype, str) and isinstance(shape, list) else None
    if size is None or not _is_range(offsets) or offsets[1] - offsets[0] != size:
        raise CorruptionError(f"{what} is damaged: the entry of its tensor {name!r:.80} is not valid")
    return Entry(dtype, tuple(shape), offsets[0], offsets[1])


def _is_range(offsets: Any) -> bool:
    """Whether this is a list of two offsets."""
    return isinstance(offsets, list) and len(offsets) == 2 and all(type(one) is int and one >= 0 for one in offsets)


def read_tensor(data: memoryview, start: int, entry: Entry, what: str = "the file") -> Any:
    """One tensor of a .safetensors file: a read-only numpy view of `data`, or a torch tensor if numpy lacks the dtype.

    Args:
        data: the whole file.
        start: offset of the data, from `read_entries`.
        entry: the tensor, from `read_entries`.
        what: name of the file, for errors.
    """
    name = _OWN_NAMES.get(entry.dtype)
    if name is None:
        raise UnsupportedError(
            f"{what} has dtype {entry.dtype}, which torch has no type for",
            hint="convert the tensor before it is saved, for example with tensor.to(torch.bfloat16)",
        )
    contents = data[start + entry.begin : start + entry.end]
    if name in NUMPY_DTYPES:
        return _view(contents, entry.shape, len(contents), np.dtype(name).newbyteorder("<"), "C", what)
    import torch

    bits = _view(contents, entry.shape, len(contents), np.dtype(f"<u{TORCH_DTYPES[name]}"), "C", what)
    return torch.from_numpy(bits.copy()).view(getattr(torch, name))
