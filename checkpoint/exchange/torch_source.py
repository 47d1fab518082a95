"""Reads the structure of an archive of `torch.save`, and places its tensors in the archive.

torch loads the structure without any tensor bytes: the tensors are on the meta device, and each storage has its place in
the archive. Tensors that share a storage share memory.

- `load`: a file. Its tensors are views of the mapped file.
- `load_value`: a small archive in memory. Its tensors are views of that memory.
- `locate_tensor`: an archive of one tensor in a part of a file. Only the place of the tensor is returned.

Invariant: no pickled code runs (`weights_only=True`), and no key takes forever to hash (`pickle_tuples`). The map is
read-only, so a file may be larger than the memory. Every storage lies inside the archive.
Failure behaviour: `UnsupportedError` names code that the file needs. `CorruptionError` for a damaged file. If a tensor
cannot be placed (a sparse one), torch maps the file itself. That needs as much free memory as the file has bytes, and
raises `CapacityError` otherwise.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import warnings
import zipfile
from collections import Counter
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch

from headrace.checkpoint.exchange import pickle_tuples
from headrace.checkpoint.state.tensors import empty
from headrace.checkpoint.state.tree import MAX_DEPTH, join
from headrace.dataio.core.errors import (
    CapacityError,
    CorruptionError,
    HeadraceError,
    UnsupportedError,
    UsageError,
)
from headrace.dataio.core.limits import MIB

_MAX_STRUCTURE = 256 * MIB
"""The largest `data.pkl`, and the largest table of records."""
_MAX_ONE_TENSOR = 128 << 10
"""The same for an archive of one tensor, of which a folder may have millions."""
_HEADER_BYTES = 30
_MAGIC = b"PK\x03\x04"
_DAMAGED_HINT = "copy or download it again"
_CODE_HINT = (
    "convert these values where you trust the author, and keep the rest, such as the optimizer: see"
    ' "Files that are refused" in docs/howto/migrate/checkpoints.md'
)
_LEGACY_MAGIC = b"\x80"
"""The first byte of a pickle, with which files of torch before 1.6 begin."""


def is_zip(path: Path) -> bool:
    """Whether the file begins as a zip file does."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def load(path: Path, fd: int) -> tuple[dict[Any, Any], bool]:
    """The contents of a file that is open as `fd`, and whether all are tensors by name."""
    if not is_zip(path):
        raise not_a_zip(path)
    with open(path, "rb") as file:
        records = _records(str(path), file, os.fstat(fd).st_size)
    try:
        memory = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
        loaded = _Placing(str(path), memory, records).value(_load(str(path), path, "meta"), "", 0)
    except _CannotPlaceError:
        loaded = _load(str(path), path, "cpu", mmap=True)
        _check(loaded, "", str(path), 0)
    if not isinstance(loaded, dict) or not loaded:
        raise UsageError(f"{path} holds a {type(loaded).__name__}", hint='save a dict, such as {"model": state_dict}')
    is_flat = all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items())
    return dict(loaded), is_flat


def load_value(label: str, data: bytes) -> Any:
    """The value in the archive `data`. `label` names it in errors. Sparse tensors in it are refused."""
    records = _records_of_part(label, BytesIO(data), len(data))
    try:
        return _Placing(label, data, records).value(_load(label, BytesIO(data), "meta"), "", 0)
    except _CannotPlaceError:
        raise UnsupportedError(f"{label} holds a tensor that is not dense", hint="save it as dense tensors") from None


@dataclass(frozen=True, slots=True)
class LocatedTensor:
    """A dense tensor in an archive. Its first element is at byte `at`. `stride`: in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: int


def locate_tensor(label: str, archive: BinaryIO, size: int) -> LocatedTensor:
    """The place of the one tensor in an archive of `size` bytes. `label` names it in errors."""
    records = _records_of_part(label, archive, size, _MAX_ONE_TENSOR)
    archive.seek(0)
    tensor = _load(label, archive, "meta")
    offset = _offset_of(tensor) if isinstance(tensor, torch.Tensor) else None
    if offset is None:
        raise CorruptionError(f"{label} is not a dense tensor", hint=_DAMAGED_HINT)
    if tensor.numel():
        _check_elements(tensor, "", label)
        _check_record(tensor, records.get(offset, -1), label, "")
        steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        if (tensor.storage_offset() + steps + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise CorruptionError(f"{label} reaches beyond its storage", hint=_DAMAGED_HINT)
    at = offset + tensor.storage_offset() * tensor.element_size()
    return LocatedTensor(tensor.dtype, tuple(tensor.shape), tensor.stride(), at)


def _records_of_part(label: str, archive: BinaryIO, size: int, limit: int | None = None) -> dict[int, int]:
    if archive.read(len(_MAGIC)) != _MAGIC:
        raise CorruptionError(f"{label} is not an archive of torch.save", hint=_DAMAGED_HINT)
    return _records(label, archive, size, limit)


def not_a_zip(path: Path) -> HeadraceError:
    """The error for a file that is empty, is of torch before 1.6, or is of another program."""
    with open(path, "rb") as file:
        start = file.read(len(_LEGACY_MAGIC))
    if not start:
        return CorruptionError(f"{path} is empty", hint=_DAMAGED_HINT)
    if start != _LEGACY_MAGIC:
        return UsageError(f"{path} is not a file of torch.save", hint="give a file that torch.save wrote")
    return UnsupportedError(
        f"{path} is not in the zip format that torch.save has written since torch 1.6",
        hint="load it where you trust its author, and write it again with torch.save",
    )


def _load(label: str, file: Path | BinaryIO, device: str, **options: Any) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise _refused(label, str(error)) from None
    except OSError:
        raise
    except Exception as error:  # a damaged structure can fail anywhere in torch
        if "Cannot allocate memory" in str(error):
            hint = "use a machine with more memory, or save the tensors as safetensors"
            raise CapacityError(f"{label} cannot be mapped: {error!s:.300}", hint=hint) from None
        raise CorruptionError(f"{label} cannot be read: {error!s:.300}", hint=_DAMAGED_HINT) from None


class _CannotPlaceError(Exception):
    """A tensor is not a plain view of a storage in the file, or this torch does not say where the storage is."""


class _Placing:
    """Replaces tensors on the meta device by views of the archive. `records`: sizes of records by their place."""

    def __init__(self, label: str, archive: mmap.mmap | bytes, records: dict[int, int]) -> None:
        self._label, self._archive, self._records = label, archive, records
        self._storages: dict[tuple[int, int], torch.Tensor] = {}
        self._placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(self, value: Any, path: str, depth: int) -> Any:
        """The value with its tensors in their places."""
        _check_depth(path, depth, self._label)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._placed:
                self._placed[id(value)] = value, self._tensor(value, path)
            return self._placed[id(value)][1]
        if isinstance(value, dict) and not isinstance(value, Counter):
            return type(value)((key, self.value(each, join(path, key), depth + 1)) for key, each in value.items())
        if type(value) in (list, tuple, set):
            return type(value)(self.value(each, join(path, i), depth + 1) for i, each in enumerate(value))
        return value

    def _tensor(self, tensor: torch.Tensor, path: str) -> torch.Tensor:
        offset = _offset_of(tensor)
        if offset is None:
            raise _CannotPlaceError
        storage = tensor.untyped_storage()
        _check_elements(tensor, path, self._label)
        _check_record(tensor, self._records.get(offset, -1), self._label, path)
        placed = empty(tensor.dtype, (0,))
        base = self._storage(offset, storage.nbytes())
        return placed.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _storage(self, offset: int, size: int) -> torch.Tensor:
        if (offset, size) not in self._storages:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                view = torch.frombuffer(self._archive, dtype=torch.uint8, count=size, offset=offset) if size else None
            self._storages[offset, size] = empty(torch.uint8, (0,)) if view is None else view
        return self._storages[offset, size]


def _offset_of(tensor: torch.Tensor) -> int | None:
    """The place of the tensor's storage in its archive; None if torch does not say it, or the tensor is not dense."""
    if not tensor.is_meta or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return None if tensor.is_quantized else getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


def _check(value: Any, path: str, file: str, depth: int) -> None:
    """Check the elements of all tensors, and the depth of the structure."""
    _check_depth(path, depth, file)
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta:
            _check_elements(value, path, file)
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check(inner, join(path, key), file, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for number, inner in enumerate(value):
            _check(inner, join(path, number), file, depth + 1)


def _check_depth(path: str, depth: int, file: str) -> None:
    if depth > MAX_DEPTH:
        raise UsageError(f"{file}: {path[:200]} is nested deeper than {MAX_DEPTH}", hint="save a flatter dict")


def _check_elements(tensor: torch.Tensor, path: str, file: str) -> None:
    """Refuse a tensor that is larger than its bytes in the file."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsupportedError(
            f"{file}: elements of the tensor {path!r:.200} share memory", hint="save clone() of it instead"
        )


def _check_record(tensor: torch.Tensor, size: int, file: str, path: str) -> None:
    """Refuse a storage that is larger than its record."""
    if tensor.untyped_storage().nbytes() > size:
        raise CorruptionError(f"{file}: {path!r:.200} reaches beyond its record", hint=_DAMAGED_HINT)


class _LimitedFile:
    """A file of which at most `limit` bytes are read at once, whatever sizes the archive in it claims."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit = file, limit
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, self._limit + 1) if size >= 0 else self._limit + 1)
        if len(data) > self._limit:
            raise ValueError(f"its structure has more than {self._limit} bytes")
        return data


def _records(label: str, file: BinaryIO, size: int, limit: int | None = None) -> dict[int, int]:
    """Check an archive before torch reads it. Returns the sizes of its records by their first bytes."""
    try:
        with zipfile.ZipFile(_LimitedFile(file, limit or _MAX_STRUCTURE)) as archive:
            infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(infos) != len(archive.infolist()):
                raise CorruptionError(f"{label} has two records of one name", hint=_DAMAGED_HINT)
            structure, order = infos.get("data.pkl"), infos.get("byteorder")
            if structure is None or structure.file_size > _MAX_STRUCTURE:
                raise UsageError(f"{label} is not a file of torch.save", hint="TorchScript archives are not imported")
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
                raise UsageError(f"{label} has compressed records", hint="write it again with torch.save")
            pickle_tuples.check_tuples(archive.read(structure), label)
            if order is not None and (order.file_size > len(b"little") or archive.read(order) != b"little"):
                raise UnsupportedError(
                    f"{label} was written on a big-endian machine", hint="write it again on this one"
                )
            records = {_start(file, info.header_offset): info.file_size for info in infos.values()}
            if any(start + length > size for start, length in records.items()):
                raise CorruptionError(f"{label} is cut off or damaged: a record ends after it", hint=_DAMAGED_HINT)
            return records
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, ValueError) as error:
        raise CorruptionError(f"{label} is cut off or damaged: {error!s:.200}", hint=_DAMAGED_HINT) from None


def _start(file: BinaryIO, header: int) -> int:
    """The first byte of a record, after its header, which has two fields of variable length."""
    file.seek(header)
    fixed = file.read(_HEADER_BYTES)
    return header + _HEADER_BYTES + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")


def _refused(label: str, message: str) -> UnsupportedError:
    found = re.search(r"GLOBAL ([\w.]+)", message)
    what = f"the code {found[1]}" if found else "something that weights_only=True does not read"
    return UnsupportedError(f"{label} needs {what}: files that can run code are not imported", hint=_CODE_HINT)
