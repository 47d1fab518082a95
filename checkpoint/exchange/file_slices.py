"""Stages tensors that are in files: each chunk is read from its file into the ring of slices.

The tensors are views of mapped files, or of memory that stands for tensors in several files (`joined_tensors`). The
kernel's table of maps gives the place of a view in its file.
Invariant: the maps are not read, so their pages do not count as memory of the process, and a file that becomes shorter
raises an error instead of a signal.
Failure behaviour: `CorruptionError` if a file ends before a tensor does. Tensors that are in no file are copied.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.format.chunking import Layout, Piece, TensorSpec
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.slices import SlicedState
from headrace.checkpoint.state.tensors import has_plain_memory
from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.store.direct_io import fill_directly

_MAPS = "/proc/self/maps"


class AddressReader(Protocol):
    """Reads the bytes that memory of this process stands for."""

    def read(self, address: int, view: memoryview) -> bool:
        """Fill `view` with the bytes at `address`; False if they are not in these files."""
        ...


class MappedFiles:
    """Finds the place of mapped memory in these files, given as descriptors by (device, inode)."""

    def __init__(self, files: Mapping[tuple[int, int], int]) -> None:
        maps = sorted(_maps(files))
        self._starts = [start for start, *_ in maps]
        self._maps = maps

    def read(self, address: int, view: memoryview) -> bool:
        """Fill `view` with the bytes at `address`; False if they are in no file."""
        place = self._place(address, len(view))
        if place is not None:
            read_file(*place, view)
        return place is not None

    def _place(self, address: int, length: int) -> tuple[int, int] | None:
        """The descriptor and the offset of this memory; None if it is in no file."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        start, stop, offset, fd = self._maps[number]
        return (fd, offset + address - start) if address + length <= stop else None


def _maps(files: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int, int]]:
    """The maps of these files: start, end, offset in the file, descriptor.

    A file is found by its device and inode, or by its path, because some file systems show another device there.
    """
    by_path = {os.readlink(f"/proc/self/fd/{fd}"): fd for fd in files.values()}
    found = []
    with open(_MAPS) as maps:
        for line in maps:
            addresses, _, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
            major, minor = (int(part, 16) for part in device.split(":"))
            fd = files.get((os.makedev(major, minor), int(inode)), by_path.get(path[0] if path else ""))
            if fd is not None:
                start, stop = (int(part, 16) for part in addresses.split("-"))
                found.append((start, stop, int(offset, 16), fd))
    return found


class FileSlices(SlicedState):
    """A `SlicedState` whose pieces are read from files where possible."""

    def __init__(
        self,
        readers: Sequence[AddressReader],
        arena: Arena,
        tensors: Sequence[torch.Tensor],
        *,
        specs: Sequence[TensorSpec],
        layout: Layout,
    ) -> None:
        self._readers = readers
        super().__init__(arena, tensors, specs=specs, layout=layout)

    def _gather(self, number: int, piece: Piece, target: npt.NDArray[np.uint8]) -> None:
        parts = self._parts[number]
        if sum(part.length for part in parts) != piece.length:
            target[:] = 0  # the gaps between small tensors
        for part in parts:
            view = target[part.at : part.at + part.length]
            if not self._read(self._tensors[part.tensor], part.start, view.data):
                memory = self._memory(part.tensor)[part.start : part.start + part.length]
                np.copyto(view, np.frombuffer(memory, np.uint8))

    def _read(self, tensor: torch.Tensor, start: int, view: memoryview) -> bool:
        """Fill `view` with the tensor's bytes from byte `start`; False if they are in no file."""
        address = tensor.data_ptr() + start
        return has_plain_memory(tensor) and any(reader.read(address, view) for reader in self._readers)


def read_file(fd: int, offset: int, view: memoryview) -> None:
    """Fill `view` from the file, past the page cache where that is possible and useful."""
    start, stop = fill_directly(fd, offset, view)
    for done, end in ((0, start), (stop, len(view))):
        while done < end:
            count = os.preadv(fd, [view[done:end]], offset + done)
            if not count:
                raise CorruptionError(
                    f"the file ends at byte {offset + done}, before a tensor does", hint="copy or download it again"
                )
            done += count
