"""Describes the files of an export as sequences of parts, and reads any range of such a file.

A file is a list of parts in the order of their bytes:

- `Data`: elements of a saved tensor in row-major order, converted to another type if asked.
- `bytes`: headers and other small records.
- `DeferredBytes`: bytes that depend on the bytes before them, such as the checksum of a record in a zip file.

Invariant: reading a window needs memory for the window and, where a type is converted, 16 MiB more. A window never
splits an element, because windows begin at multiples of `ALIGN` and data at multiples of its element size. Every byte
of a tensor is checked against the digest of its chunk.
Failure behaviour: `CorruptionError` names step, tensor, pack and offset.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from headrace.checkpoint.format.chunking import ITEM_BYTES, Box
from headrace.checkpoint.repository.fetch import Step
from headrace.checkpoint.restoring import chunk_reader
from headrace.checkpoint.restoring.chunk_reader import Saved, Want
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Store

ALIGN = 4096
"""Windows begin at multiples of this, as direct I/O needs it."""


@dataclass(frozen=True, slots=True)
class Data:
    """`count` elements of type `dtype`, from byte `start` of a saved tensor's row-major bytes.

    `target`: the type in the file. It differs from `dtype` if the elements are converted.
    """

    saved: Saved
    dtype: str
    count: int
    start: int = 0
    target: str = ""

    @property
    def stored_dtype(self) -> str:
        """The type in the file."""
        return self.target or self.dtype

    @property
    def item(self) -> int:
        """Bytes of an element in the file."""
        return ITEM_BYTES[self.stored_dtype]

    def __len__(self) -> int:
        return self.count * self.item


@dataclass(frozen=True, slots=True)
class DeferredBytes:
    """`length` bytes that `make` returns once all bytes before them are known."""

    length: int
    make: Callable[[Checksums], bytes]

    def __len__(self) -> int:
        return self.length


_CONVERTED_BYTES = 16 * MIB
Part = Data | DeferredBytes | bytes
Checksums = dict[int, int]
"""CRC-32 of the bytes of a `Data` part, by the number of the part in its file."""


@dataclass(frozen=True)
class OutputFile:
    """One file of an export. `name` is relative to the folder; "" if the target is this file.

    `checksums`: the file has `DeferredBytes` parts that need the checksums of its data.
    """

    name: str
    parts: Sequence[Part]
    checksums: bool = False

    @cached_property
    def starts(self) -> list[int]:
        """The first byte of each part, and the size of the file."""
        return [0, *accumulate(len(part) for part in self.parts)]

    @property
    def size(self) -> int:
        return self.starts[-1]

    def overlapping(self, start: int, stop: int) -> Iterator[tuple[int, Part, int, int]]:
        """The parts within the bytes [start, stop), with their numbers and the range of their own bytes."""
        number = max(bisect_right(self.starts, start) - 1, 0)
        while number < len(self.parts) and self.starts[number] < stop:
            at, part = self.starts[number], self.parts[number]
            first, last = max(start - at, 0), min(stop - at, len(part))
            if first < last:
                yield number, part, first, last
            number += 1


@dataclass(frozen=True, slots=True)
class _Memory:
    """A sink for bytes that are written to `view`."""

    view: memoryview

    def open(self) -> memoryview:
        return self.view

    def close(self) -> None:
        """Do nothing: the bytes are where they belong."""


def read_window(store: Store, step: Step, file: OutputFile, start: int, window: memoryview) -> None:
    """Fill `window` with the bytes of the file from `start` on, except those of `DeferredBytes` parts."""
    reading = _Reading(store, step)
    for number, part, first, last in file.overlapping(start, start + len(window)):
        at = file.starts[number] + first - start
        target = window[at : at + last - first]
        if isinstance(part, bytes):
            target[:] = part[first:last]
        elif isinstance(part, Data) and part.target:
            reading.add_converted(part, first // part.item, last // part.item, target)
        elif isinstance(part, Data):
            reading.wants += _wants(part, first // part.item, last // part.item, target)
    reading.finish()


class _Reading:
    """Requests that are read together. Elements to convert are first read into memory of at most `_CONVERTED_BYTES`."""

    def __init__(self, store: Store, step: Step) -> None:
        self._store, self._step = store, step
        self.wants: list[Want] = []
        self._conversions: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._bytes = 0

    def add_converted(self, part: Data, first: int, last: int, target: memoryview) -> None:
        """Request the elements [first, last) of a part, converted to the type in the file."""
        item = ITEM_BYTES[part.dtype]
        for begin in range(first, last, _CONVERTED_BYTES // item):
            end = min(begin + _CONVERTED_BYTES // item, last)
            if self._bytes + (end - begin) * item > _CONVERTED_BYTES:
                self.finish()
            memory = memoryview(mmap.mmap(-1, (end - begin) * item))  # freed at once, unlike memory of the heap
            view = target[(begin - first) * part.item : (end - first) * part.item]
            self._conversions.append((_tensor(memory, part.dtype), _tensor(view, part.target)))
            self._bytes += len(memory)
            self.wants += _wants(part, begin, end, memory)
            del memory

    def finish(self) -> None:
        """Read what was requested, and convert it."""
        if self.wants:
            chunk_reader.read(self._store, self._step, self.wants)
        for source, converted in self._conversions:
            converted.copy_(source)
        self.wants, self._conversions, self._bytes = [], [], 0


def _tensor(memory: memoryview, dtype: str) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))


def _wants(part: Data, first: int, last: int, target: memoryview) -> Iterator[Want]:
    """Requests for the elements [first, last) of a part."""
    stored, item = ITEM_BYTES[part.saved.dtype], ITEM_BYTES[part.dtype]
    at = 0
    begin, end = (part.start + first * item) // stored, (part.start + last * item) // stored
    for box in boxes(part.saved.shape, begin, end):
        size = math.prod(box.local) * stored
        yield Want(part.saved, box, _Memory(target[at : at + size]))
        at += size


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a tensor, in row-major order, as boxes that are contiguous in it."""
    for offset, local in _boxes(shape, start, stop):
        yield Box(shape, offset, local)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the whole rows
    if first > last:  # the range is within one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * inner < stop:
        yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(
    shape: tuple[int, ...], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offset, local in _boxes(shape[1:], start, stop):
        yield (row, *offset), (1, *local)
