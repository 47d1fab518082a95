"""The format of `torch.save`: a zip file with the structure (`data.pkl`) and one record for each storage.

Writing a file means writing a pickle, because the format is one. It names only torch's functions for tensors and plain
Python types, so `torch.load(weights_only=True)` reads it. Reading uses that unpickler, which runs no code.
Invariant: tensors that share memory in the state share a storage in the file. The bytes of storages are streamed.
Failure behaviour: values of other types are reported by `plain_values`, and are left out by the caller.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from headrace.checkpoint.exchange.output import Checksums, Data, DeferredBytes, Part
from headrace.checkpoint.format.chunking import ITEM_BYTES

ALIGN = 64
"""Storages begin at multiples of this, as those of `torch.save` do."""
_STORAGES: dict[str, Any] = {
    "float64": torch.DoubleStorage,
    "float32": torch.FloatStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "int64": torch.LongStorage,
    "int32": torch.IntStorage,
    "int16": torch.ShortStorage,
    "int8": torch.CharStorage,
    "uint8": torch.ByteStorage,
    "bool": torch.BoolStorage,
    "complex64": torch.ComplexFloatStorage,
    "complex128": torch.ComplexDoubleStorage,
}
"""The storage class of each type that has one. Tensors of other types name their type themselves."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)
_BIG = 0xFFFFFFFF
_DATE = 0x21
"""The first day of 1980, so that equal states give equal files."""


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """The bytes of one or several tensors. `dtype`: of its elements; "" if its tensors have different types."""

    data: Data
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class TensorStub:
    """A tensor that is not read yet: a view of a storage. `offset` is in elements."""

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_plain(value: object) -> bool:
    """Whether `torch.load(weights_only=True)` reads this value, which may hold `TensorStub`s."""
    if type(value) in _PLAIN or isinstance(value, TensorStub):
        return True
    if type(value) not in _CONTAINERS:
        return False
    inside: Any = value
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    return all(is_plain(item) for item in inside)


class _Pickler(pickle.Pickler):
    """Writes stubs as torch writes tensors. `storages`: the storages in the order of their keys."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[Storage, str] = {}

    def persistent_id(self, value: Any) -> object:
        if not isinstance(value, Storage):
            return None
        key = self.storages.setdefault(value, str(len(self.storages)))
        kind = _STORAGES.get(value.dtype, torch.UntypedStorage)
        count = len(value.data) // ITEM_BYTES[value.dtype] if value.dtype in _STORAGES else len(value.data)
        return "storage", kind, key, "cpu", count

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, TensorStub):
            return NotImplemented
        hooks: OrderedDict[str, object] = OrderedDict()
        common = value.storage, value.offset, value.shape, value.stride, False, hooks
        if value.storage.dtype == value.dtype and value.dtype in _STORAGES:
            return _rebuild_tensor_v2, common
        return _rebuild_tensor_v3, (*common, getattr(torch, value.dtype))


def parts(value: object, start: int = 0, folder: str = "archive") -> list[Part]:
    """The parts of a file for `value`. `start`: the number of the first part in the file that holds them.

    The position of the first part must be a multiple of `ALIGN`.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    archive = _Zip(start)
    archive.add(f"{folder}/data.pkl", buffer.getvalue())
    archive.add(f"{folder}/byteorder", b"little")
    for storage, key in pickler.storages.items():
        archive.add(f"{folder}/data/{key}", storage.data)
    archive.add(f"{folder}/version", b"3\n")
    archive.end()
    return archive.parts


class _Zip:
    """Builds the parts of a zip file whose records are stored without compression.

    The checksum of streamed data is known only after it, so it follows the data (a data descriptor).
    """

    def __init__(self, start: int) -> None:
        self.parts: list[Part] = []
        self._start, self._at = start, 0
        self._entries: list[_Entry] = []

    def add(self, name: str, content: bytes | Data) -> None:
        encoded, size = name.encode(), len(content)
        big = size >= _BIG
        is_data = isinstance(content, Data)
        extra = struct.pack("<HHQQ", 1, 16, 0 if is_data else size, 0 if is_data else size) if big else b""
        padding = -(self._at + 30 + len(encoded) + len(extra) + 4) % ALIGN
        extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        crc = 0 if is_data else zlib.crc32(content)  # type: ignore[arg-type]
        shown = 0 if is_data else size
        sizes = (_BIG, _BIG) if big else (shown, shown)
        flags, version = 0x0808 if is_data else 0x0800, 45 if big else 20
        head = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, version, flags, 0, 0, _DATE, crc, *sizes, len(encoded), len(extra)
        )
        header_at = self._at
        self._append(head + encoded + extra)
        number = self._start + len(self.parts)
        self._append(content)
        entry = _Entry(encoded, flags, version, size, header_at, None if is_data else crc, number)
        self._entries.append(entry)
        if is_data:
            self._append(DeferredBytes(24 if big else 16, entry.descriptor))

    def end(self) -> None:
        """Add the table of records."""
        entries, at = self._entries, self._at
        table = DeferredBytes(
            sum(entry.table_bytes for entry in entries), lambda sums: b"".join(e.row(sums) for e in entries)
        )
        self._append(table)
        size, count = len(table), len(entries)
        end = b""
        if at >= _BIG or count >= 0xFFFF:
            end = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, size, at)
            end += struct.pack("<IIQI", 0x07064B50, 0, at + size, 1)
        shown = min(count, 0xFFFF)
        self._append(end + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, shown, shown, min(size, _BIG), min(at, _BIG), 0))

    def _append(self, part: Part) -> None:
        self.parts.append(part)
        self._at += len(part)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A record of a zip file. `crc`: None if it is the checksum of the part `number`."""

    name: bytes
    flags: int
    version: int
    size: int
    at: int
    crc: int | None
    number: int

    @property
    def _extra(self) -> bytes:
        large = [value for value in (self.size, self.size) if value >= _BIG]
        large += [self.at] if self.at >= _BIG else []
        return struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""

    @property
    def table_bytes(self) -> int:
        return 46 + len(self.name) + len(self._extra)

    def _checksum(self, sums: Checksums) -> int:
        return self.crc if self.crc is not None else sums.get(self.number, 0)

    def descriptor(self, sums: Checksums) -> bytes:
        """The record that follows streamed data."""
        layout = "<IIQQ" if self.size >= _BIG else "<IIII"
        return struct.pack(layout, 0x08074B50, self._checksum(sums), self.size, self.size)

    def row(self, sums: Checksums) -> bytes:
        """The record's row in the table at the end of the file."""
        size, version = min(self.size, _BIG), 45 if self._extra else self.version
        lengths = len(self.name), len(self._extra), 0
        head = struct.pack("<IHHHHHH", 0x02014B50, version, version, self.flags, 0, 0, _DATE)
        head += struct.pack("<IIIHHH", self._checksum(sums), size, size, *lengths)
        return head + struct.pack("<HHII", 0, 0, 0, min(self.at, _BIG)) + self.name + self._extra
