"""Reads the structure of a file of `torch.save`, and places its tensors in the mapped file.

torch loads the structure without any tensor bytes: the tensors are on the meta device, and each storage has its place in
the file. A tensor of the result is a view of the mapped file at that place. Tensors that share a storage share memory.
Invariant: no pickled code runs (`weights_only=True`). The map is read-only, so a file may be larger than the memory.
Every storage lies inside the file.
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
from pathlib import Path
from typing import Any

import torch

from headrace.checkpoint.state.tensors import empty
from headrace.checkpoint.state.tree import MAX_DEPTH, join
from headrace.dataio.core.errors import CapacityError, CorruptionError, UnsupportedError, UsageError
from headrace.dataio.core.limits import MIB

_MAX_STRUCTURE = 256 * MIB
"""The largest `data.pkl`."""
_HEADER_BYTES = 30
_DAMAGED_HINT = "copy or download it again"
_CODE_HINT = (
    "load it where you trust its author, and save only tensors and plain values: torch.save(model.state_dict())"
)


def is_zip(path: Path) -> bool:
    """Whether the file begins as a zip file does."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def load(path: Path, fd: int) -> tuple[dict[Any, Any], bool]:
    """The contents of a file that is open as `fd`, and whether all are tensors by name."""
    if not is_zip(path):
        raise not_a_zip(path)
    records = _records(path, fd)
    try:
        loaded = _Placing(path, fd, records).value(_load(path, "meta"), "", 0)
    except _CannotPlaceError:
        loaded = _load(path, "cpu", mmap=True)
        _check(loaded, "", path, 0)
    if not isinstance(loaded, dict) or not loaded:
        raise UsageError(f"{path} holds a {type(loaded).__name__}", hint='save a dict, such as {"model": state_dict}')
    is_flat = all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in loaded.items())
    return dict(loaded), is_flat


def not_a_zip(path: Path) -> UnsupportedError:
    """The error for a file of torch before 1.6, or of another program."""
    return UnsupportedError(
        f"{path} is not in the zip format that torch.save has written since torch 1.6",
        hint="load it where you trust its author, and write it again with torch.save",
    )


def _load(path: Path, device: str, **options: Any) -> Any:
    try:
        return torch.load(path, map_location=device, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise _refused(path, str(error)) from None
    except OSError:
        raise
    except Exception as error:  # a damaged structure can fail anywhere in torch
        if "Cannot allocate memory" in str(error):
            hint = "use a machine with more memory, or save the tensors as safetensors"
            raise CapacityError(f"{path} cannot be mapped: {error!s:.300}", hint=hint) from None
        raise CorruptionError(f"{path} cannot be read: {error!s:.300}", hint=_DAMAGED_HINT) from None


class _CannotPlaceError(Exception):
    """A tensor is not a plain view of a storage in the file, or this torch does not say where the storage is."""


class _Placing:
    """Replaces tensors on the meta device by views of the mapped file. `records`: sizes of records by their place."""

    def __init__(self, path: Path, fd: int, records: dict[int, int]) -> None:
        self._path, self._records = path, records
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size, access=mmap.ACCESS_READ)
        self._storages: dict[tuple[int, int], torch.Tensor] = {}
        self._placed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(self, value: Any, path: str, depth: int) -> Any:
        """The value with its tensors in their places."""
        _check_depth(path, depth, self._path)
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
        if not tensor.is_meta or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise _CannotPlaceError
        storage: Any = tensor.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)
        if offset is None or tensor.is_quantized:
            raise _CannotPlaceError
        _check_elements(tensor, path, self._path)
        if storage.nbytes() > self._records.get(offset, -1):
            raise CorruptionError(f"{self._path}: {path!r:.200} reaches beyond its record", hint=_DAMAGED_HINT)
        placed = empty(tensor.dtype, (0,))
        base = self._storage(offset, storage.nbytes())
        return placed.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _storage(self, offset: int, size: int) -> torch.Tensor:
        if (offset, size) not in self._storages:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                view = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=offset) if size else None
            self._storages[offset, size] = empty(torch.uint8, (0,)) if view is None else view
        return self._storages[offset, size]


def _check(value: Any, path: str, file: Path, depth: int) -> None:
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


def _check_depth(path: str, depth: int, file: Path) -> None:
    if depth > MAX_DEPTH:
        raise UsageError(f"{file}: {path[:200]} is nested deeper than {MAX_DEPTH}", hint="save a flatter dict")


def _check_elements(tensor: torch.Tensor, path: str, file: Path) -> None:
    """Refuse a tensor that is larger than its bytes in the file."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsupportedError(
            f"{file}: elements of the tensor {path!r:.200} share memory", hint="save clone() of it instead"
        )


def _records(path: Path, fd: int) -> dict[int, int]:
    """Check a torch file before torch reads it. Returns the sizes of its records by their first bytes."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if len(infos) != len(archive.infolist()):
                raise CorruptionError(f"{path} has two records of one name", hint=_DAMAGED_HINT)
            structure, order = infos.get("data.pkl"), infos.get("byteorder")
            if structure is None or structure.file_size > _MAX_STRUCTURE:
                raise UsageError(f"{path} is not a file of torch.save", hint="TorchScript archives are not imported")
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
                raise UsageError(f"{path} has compressed records", hint="write it again with torch.save")
            if order is not None and (order.file_size > len(b"little") or archive.read(order) != b"little"):
                raise UnsupportedError(f"{path} was written on a big-endian machine", hint="write it again on this one")
            size = os.fstat(fd).st_size
            records = {_start(fd, info.header_offset): info.file_size for info in infos.values()}
            if any(start + length > size for start, length in records.items()):
                raise CorruptionError(f"{path} is cut off or damaged: a record ends after it", hint=_DAMAGED_HINT)
            return records
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError) as error:
        raise CorruptionError(f"{path} is cut off or damaged: {error!s:.200}", hint=_DAMAGED_HINT) from None


def _start(fd: int, header: int) -> int:
    """The first byte of a record, after its header, which has two fields of variable length."""
    fixed = os.pread(fd, _HEADER_BYTES, header)
    return header + _HEADER_BYTES + int.from_bytes(fixed[26:28], "little") + int.from_bytes(fixed[28:30], "little")


def _refused(path: Path, message: str) -> UnsupportedError:
    found = re.search(r"GLOBAL ([\w.]+)", message)
    what = f"the code {found[1]}" if found else "something that weights_only=True does not read"
    return UnsupportedError(f"{path} needs {what}: files that can run code are not imported", hint=_CODE_HINT)
