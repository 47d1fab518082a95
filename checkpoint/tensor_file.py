"""A saved tensor as a safetensors file, which is read by rows. `headrace.checkpoint.filesystem` uses it.

Invariants: the file is the header and the tensor's data, so its size is known before a byte is read. The file keeps the
rows that it read last, and no others. All bytes were checked against their digests.
Failure behaviour: `CorruptionError` names step, tensor, pack and offset. `close` ends the lease of the step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from fsspec.spec import AbstractBufferedFile

from headrace.checkpoint.exchange.safetensors_format import file_header
from headrace.checkpoint.restoring.saved_step import LazyTensor
from headrace.dataio.core.errors import UnsupportedError


def data_bytes(tensor: LazyTensor) -> int:
    """The size of the tensor's data."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's data."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def header_of(entry: str, tensor: LazyTensor) -> bytes | None:
    """The header of the tensor's file; None for a type that safetensors lacks."""
    try:
        return file_header(entry, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data_bytes(tensor))
    except UnsupportedError:
        return None


class TensorFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """A large tensor as a safetensors file. Rows are read when they are needed; the step is leased until `close`."""

    def __init__(
        self,
        fs: Any,
        path: str,
        tensor: LazyTensor,
        header: bytes,
        stack: contextlib.ExitStack,
        block_size: int | None,
        options: Mapping[str, Any],
    ) -> None:
        self._tensor, self._header, self._stack = tensor, header, stack
        self._rows: tuple[range, bytes] = range(0), b""
        size = len(header) + data_bytes(tensor)
        super().__init__(fs, path, "rb", block_size or "default", size=size, **options)

    def _fetch_range(self, start: int, end: int) -> bytes:
        before = len(self._header)
        return self._header[start:end] + self._data(max(0, start - before), max(0, end - before))

    def _data(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the tensor's data."""
        if start >= end:
            return b""
        count = self._tensor.shape[0]
        row = data_bytes(self._tensor) // count
        rows = range(start // row, min(count, -(-end // row)))
        if not (rows.start >= self._rows[0].start and rows.stop <= self._rows[0].stop):
            self._rows = rows, raw(self._tensor[rows.start : rows.stop])
        at = start - self._rows[0].start * row
        return self._rows[1][at : at + end - start]

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._stack.close()
