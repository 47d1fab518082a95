"""Tensors whose bytes are in several files: each file has chunks, which are boxes of the tensors.

A tensor is a view of memory that is reserved and never used. The address of a byte in that memory says which tensor and
which element are meant. `read` then collects the bytes from the chunks.
Invariant: memory holds what the caller asks for, and one chunk that is not contiguous, of at most `MAX_COPIED_BYTES`. At
most `MAX_OPEN` files are open, whatever their number is. A file that is opened again is the same file.
Failure behaviour: `CorruptionError` if a file changes or ends while it is read.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import warnings
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.exchange.file_slices import read_file
from headrace.checkpoint.exchange.output import boxes
from headrace.checkpoint.exchange.torch_format import row_major
from headrace.checkpoint.format.chunking import ITEM_BYTES, Box
from headrace.checkpoint.state.tensors import empty
from headrace.dataio.core.errors import CorruptionError, UsageError
from headrace.dataio.core.limits import MIB

MAX_OPEN = 64
"""The number of files that are open at the same time."""
MAX_COPIED_BYTES = 128 * MIB
"""The largest chunk that is not contiguous. It is copied as a whole."""
_ALIGN = 64
Bytes = npt.NDArray[np.uint8]


class OpenFiles:
    """The descriptors of files, of which the most recently used are open."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._known: dict[Path, tuple[int, int, int]] = {}
        stack.callback(self.close)

    def fd(self, path: Path) -> int:
        """A descriptor of the file, which is open until the next call."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        if len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._open[path] = fd
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{path} is not a regular file", hint="give a folder of regular files")
        identity = about.st_dev, about.st_ino, about.st_size
        if self._known.setdefault(path, identity) != identity:
            raise CorruptionError(f"{path} changed while it was imported", hint="import it when nothing writes to it")
        return fd

    def size(self, path: Path) -> int:
        """The size of the file in bytes, when it was opened first."""
        if path not in self._known:
            self.fd(path)
        return self._known[path][2]

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A box of a tensor, whose first element is at byte `at` of a file.

    `stride`: in elements, if the box is not contiguous in the file. It must be dense.
    """

    box: Box
    path: Path
    at: int
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor, and the chunks that fill it."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[ChunkFile]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class JoinedTensors:
    """Stands for tensors in memory, and reads their bytes from the chunks. `tensors`: the views, by name.

    Args:
        joined (Mapping[str, JoinedTensor]): The tensors by name.
        files (OpenFiles): The files of their chunks.

    Example:
        >>> import contextlib, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "halves"
        >>> _ = path.write_bytes(bytes([3, 4, 1, 2]))
        >>> halves = [ChunkFile(Box((4,), (at,), (2,)), path, place) for at, place in ((0, 2), (2, 0))]
        >>> with contextlib.ExitStack() as stack:
        ...     tensors = JoinedTensors({"w": JoinedTensor("uint8", (4,), halves)}, OpenFiles(stack))
        ...     view = memoryview(bytearray(4))
        ...     tensors.read(tensors.tensors["w"].data_ptr(), view), bytes(view)
        (True, b'\\x01\\x02\\x03\\x04')
    """

    def __init__(self, joined: Mapping[str, JoinedTensor], files: OpenFiles) -> None:
        self._files = files
        self._copied: tuple[ChunkFile, Bytes] | None = None
        self._joined = [tensor for tensor in joined.values() if tensor.nbytes]
        self.tensors: dict[str, torch.Tensor] = {}
        self._starts: list[int] = []
        offsets, total = [], 0
        for tensor in self._joined:
            offsets.append(total)
            total += tensor.nbytes + -tensor.nbytes % _ALIGN
        # Read-only, so that the kernel does not count it, however large it is.
        self._memory = mmap.mmap(-1, total or 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        at = iter(offsets)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            for name, tensor in joined.items():
                self.tensors[name] = self._view(tensor, next(at)) if tensor.nbytes else _empty(tensor)

    def _view(self, tensor: JoinedTensor, offset: int) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=math.prod(tensor.shape), offset=offset)
        self._starts.append(flat.data_ptr())
        return flat.view(tensor.shape)

    def read(self, address: int, view: memoryview) -> bool:
        """Fill `view` with the bytes of the tensor at `address`; False if it is none of these tensors."""
        number = bisect_right(self._starts, address) - 1
        if number < 0 or address + len(view) > self._starts[number] + self._joined[number].nbytes:
            return False
        self._fill(self._joined[number], address - self._starts[number], np.frombuffer(view, np.uint8))
        return True

    def _fill(self, tensor: JoinedTensor, start: int, target: Bytes) -> None:
        """Fill `target` with the row-major bytes of the tensor from byte `start`."""
        item, at = ITEM_BYTES[tensor.dtype], 0
        for box in boxes(tensor.shape, start // item, (start + len(target)) // item):
            size = math.prod(box.local) * item
            part = target[at : at + size].reshape(*box.local, item)
            for chunk in tensor.chunks:
                if chunk.box.overlaps(box):
                    self._copy(chunk, box, part, item)
            at += size

    def _copy(self, chunk: ChunkFile, box: Box, part: Bytes, item: int) -> None:
        """Copy what the chunk has of `box` to `part`.

        `box` is contiguous in the tensor, so all dimensions after the first that is longer than 1 are whole. What the
        chunk has of it is therefore contiguous in the chunk.
        """
        first = [max(a, b) for a, b in zip(chunk.box.offset, box.offset, strict=True)]
        ends = zip(chunk.box.offset, chunk.box.local, box.offset, box.local, strict=True)
        last = [min(a + n, b + m) for a, n, b, m in ends]
        local = [stop - start for start, stop in zip(first, last, strict=True)]
        inside = tuple(slice(a - at, b - at) for a, b, at in zip(first, last, box.offset, strict=True))
        begin = 0
        for a, at, n in zip(first, chunk.box.offset, chunk.box.local, strict=True):
            begin = begin * n + a - at
        target, length = part[inside], math.prod(local) * item
        if chunk.stride is not None:
            found = self._contiguous(chunk, item)[begin * item : begin * item + length]
            target[...] = found.reshape(target.shape)
        elif target.flags.c_contiguous:
            read_file(self._files.fd(chunk.path), chunk.at + begin * item, target.reshape(-1).data)
        else:
            found = np.empty(length, np.uint8)
            read_file(self._files.fd(chunk.path), chunk.at + begin * item, found.data)
            target[...] = found.reshape(target.shape)

    def _contiguous(self, chunk: ChunkFile, item: int) -> Bytes:
        """The row-major bytes of a chunk that is not contiguous. They are kept until another such chunk is read."""
        if self._copied is None or self._copied[0] is not chunk:
            self._copied = None
            stored = np.empty(math.prod(chunk.box.local) * item, np.uint8)
            read_file(self._files.fd(chunk.path), chunk.at, stored.data)
            strides = [step * item for step in chunk.stride or ()]
            ordered = np.lib.stride_tricks.as_strided(stored, (*chunk.box.local, item), (*strides, 1))
            self._copied = chunk, np.ascontiguousarray(ordered).reshape(-1)
        return self._copied[1]


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor with these strides has its elements one after the other, in row-major order."""
    return all(n == 1 or a == b for n, a, b in zip(shape, stride, row_major(shape), strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor with these strides has its elements one after the other, in some order of its dimensions."""
    expected = 1
    for step, n in sorted((step, n) for step, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= n
    return True


def _empty(tensor: JoinedTensor) -> torch.Tensor:
    return empty(getattr(torch, tensor.dtype), tensor.shape)
