"""Describes the files of an export as sequences of parts, and reads any range of such a file.

A file is a list of parts in the order of their bytes:

- `Data`: elements of a saved tensor in row-major order, converted to another type if asked.
- `bytes`: headers and other small records.
- `Late`: bytes that depend on the bytes before them, such as the checksum of a record in a zip file.

Invariant: reading a window needs memory for the window and, where a type is converted, for its source. A window never
splits an element, because windows begin at multiples of `ALIGN` and data at multiples of its element size. Every byte
of a tensor is checked against the digest of its chunk.
Failure behaviour: `CorruptionError` names step, tensor, pack and offset.
"""

from __future__ import annotations

import math
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
from headrace.checkpoint.state.tensors import empty, memory_of
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
class Late:
    """`length` bytes that `make` returns once all bytes before them are known."""

    length: int
    make: Callable[[Checksums], bytes]

    def __len__(self) -> int:
        return self.length


Part = Data | Late | bytes
Checksums = dict[int, int]
"""CRC-32 of the bytes of a `Data` part, by the number of the part in its file."""


@dataclass(frozen=True)
class OutputFile:
    """One file of an export. `name` is relative to the folder; "" if the target is this file.

    `checksums`: the file has `Late` parts that need the checksums of its data.
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
    """Fill `window` with the bytes of the file from `start` on, except those of `Late` parts."""
    wants: list[Want] = []
    conversions: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, part, first, last in file.overlapping(start, start + len(window)):
        at = file.starts[number] + first - start
        target = window[at : at + last - first]
        if isinstance(part, bytes):
            target[:] = part[first:last]
        elif isinstance(part, Data):
            elements, end = first // part.item, last // part.item
            if part.target:
                source = empty(getattr(torch, part.dtype), (end - elements,))
                conversions.append((source, torch.frombuffer(target, dtype=getattr(torch, part.target))))
                target = memory_of(source)
            wants += _wants(part, elements, end, target)
    if wants:
        chunk_reader.read(store, step, wants)
    for source, converted in conversions:
        converted.copy_(source)


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
