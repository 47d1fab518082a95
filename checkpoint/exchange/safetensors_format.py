"""The safetensors format: the files of an export, and the header of a file that is imported.

A file is the length of its header (8 bytes), the header (JSON), and the bytes of all tensors one after another.
Invariant: `read_header` trusts nothing. Every tensor it returns lies inside the file and has the size of its shape.
The tensors cover the data without gaps or overlaps, as the format demands.
Failure behaviour: `CorruptionError` names the file and the tensor. `UnsupportedError` for types that the format lacks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.checkpoint.exchange.output import ALIGN, Data, OutputFile, Part
from headrace.checkpoint.format.chunking import ITEM_BYTES, MAX_DIMENSIONS, MAX_TENSOR_BYTES
from headrace.dataio.core.errors import CorruptionError, UnsupportedError
from headrace.dataio.core.limits import MIB

MAX_HEADER = 100 * MIB
"""The largest header, as in the safetensors library."""
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"
INDEX_SUFFIX = ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class NamedData:
    """A tensor of an export: its name, its shape and its bytes."""

    name: str
    shape: tuple[int, ...]
    data: Data


def check_types(tensors: Iterable[NamedData]) -> None:
    """Raise `UnsupportedError` for a tensor whose type or name safetensors lacks."""
    for tensor in tensors:
        if tensor.name == _METADATA:
            raise UnsupportedError(f"safetensors has no tensor called {_METADATA}", hint="rename it")
        if tensor.data.stored_dtype not in _NAMES:
            raise UnsupportedError(
                f"{tensor.name}: safetensors has no type {tensor.data.stored_dtype}",
                hint="exclude it, or export with --format torch",
            )


def file_header(name: str, dtype: str, shape: tuple[int, ...], size: int) -> bytes:
    """The bytes before the data of a file with one tensor. `size`: the bytes of the data."""
    if dtype not in _NAMES or name == _METADATA:
        raise UnsupportedError(f"{name}: safetensors has no type {dtype}, or no such name", hint="read it by `read`")
    return _encoded({name: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [0, size]}})


def _encoded(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    padded = text + b" " * (-(8 + len(text)) % ALIGN)
    return len(padded).to_bytes(8, "little") + padded


def output_file(name: str, tensors: Sequence[NamedData], metadata: dict[str, str]) -> OutputFile:
    """A file with these tensors. Tensors with larger elements come first, so that all elements are aligned."""
    ordered = sorted(tensors, key=lambda tensor: -tensor.data.item)
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    at = 0
    for tensor in ordered:
        offsets = [at, at + len(tensor.data)]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.data.stored_dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        at = offsets[1]
    parts: list[Part] = [_encoded(header), *(tensor.data for tensor in ordered)]
    return OutputFile(name, parts)


def shards(tensors: Sequence[NamedData], most: int | None) -> list[list[NamedData]]:
    """Divide tensors into shards of at most `most` bytes, in their order. A larger tensor is a shard of its own."""
    divided: list[list[NamedData]] = [[]]
    size = 0
    for tensor in tensors:
        if most is not None and divided[-1] and size + len(tensor.data) > most:
            divided.append([])
            size = 0
        divided[-1].append(tensor)
        size += len(tensor.data)
    return divided


def output_files(
    tensors: Sequence[NamedData], tied: dict[str, str], *, stem: str, single: str, most: int | None
) -> list[OutputFile]:
    """The files of an export: one, or shards and their index as Hugging Face names them.

    `single`: the name if one file is enough. `stem`: the beginning of the names of shards.
    """
    check_types(tensors)
    divided = shards(tensors, most)
    if len(divided) == 1:
        return [output_file(single, tensors, _metadata(tensors, tied))]
    files, places = [], dict[str, str]()
    for number, shard in enumerate(divided, 1):
        name = f"{stem}-{number:05d}-of-{len(divided):05d}.safetensors"
        files.append(output_file(name, shard, _metadata(shard, tied)))
        places |= {tensor.name: name for tensor in shard}
    total = sum(len(tensor.data) for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return [*files, OutputFile(stem + INDEX_SUFFIX, [json.dumps(index, indent=2).encode() + b"\n"])]


def _metadata(tensors: Sequence[NamedData], tied: dict[str, str]) -> dict[str, str]:
    """`format`, and each left-out name with the name that has its values, as `safetensors.torch.save_model` writes it."""
    names = {tensor.name for tensor in tensors}
    return {"format": "pt"} | {name: kept for name, kept in tied.items() if kept in names and name != "format"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its bytes begin at byte `at`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of a file in the order of their bytes, and the file's metadata."""

    tensors: list[StoredTensor]
    metadata: dict[str, str]


def read_header(fd: int, name: str) -> Header:
    """Read and check the header of an open file. `name` is used in errors."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise _bad(
            name, f"its header claims {length} bytes, and the file has {size}", "it may be cut off: copy it again"
        )
    text = os.pread(fd, length, 8)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"its header cannot be read: {error!s:.200}") from None
    if not isinstance(header, dict):
        raise _bad(name, "its header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _bad(name, "its metadata is not a map of texts")
    tensors = sorted((_tensor(name, key, about, 8 + length) for key, about in header.items()), key=_place)
    at = 8 + length
    for tensor in tensors:
        if tensor.at != at:
            raise _bad(name, f"the bytes of {tensor.name!r:.200} overlap another tensor, or follow a gap")
        at += tensor.nbytes
    if at != size:
        raise _bad(name, f"its tensors end at byte {at}, and the file has {size}", "it may be cut off: copy it again")
    return Header(tensors, metadata)


def _place(tensor: StoredTensor) -> tuple[int, int]:
    return tensor.at, tensor.nbytes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _tensor(file: str, name: str, about: Any, start: int) -> StoredTensor:
    try:
        dtype, shape, (first, last) = about["dtype"], about["shape"], about["data_offsets"]
        numbers = [*shape, first, last]
    except (KeyError, TypeError, ValueError):
        raise _bad(file, f"the entry of {name!r:.200} is malformed") from None
    if not name.isprintable() and any("\ud800" <= c <= "\udfff" for c in name):
        raise _bad(file, f"the name {name!a:.200} is not valid Unicode")
    if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        raise _bad(file, f"the shape or place of {name!r:.200} is malformed")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedError(
            f"{file}: {name!r:.200} has the type {dtype!r:.20}, which is unknown here", hint="convert it first"
        )
    if math.prod(n or 1 for n in shape) > MAX_TENSOR_BYTES:
        raise _bad(file, f"the shape of {name!r:.200} is too large to be valid")
    size = math.prod(shape) * ITEM_BYTES[DTYPES[dtype]]
    if last - first != size:
        raise _bad(file, f"{name!r:.200} has {last - first} bytes, and its shape needs {size}")
    return StoredTensor(name, DTYPES[dtype], tuple(shape), start + first, size)


def _bad(file: str, problem: str, hint: str = "download or export it again") -> CorruptionError:
    return CorruptionError(f"{file} is not a sound safetensors file: {problem}", hint=hint)
