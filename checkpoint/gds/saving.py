"""Saves chunks from GPU memory into packs by cuFile.

`DeviceSlices` is a `SlicedState` with a second ring in device memory. The device gathers a slice there and copies it
once to the host, where it is hashed. If the chunk is stored raw, the pack writer finds the device slot by the address
of the host bytes. It then writes the bytes from the device slot.
Invariant: the bytes in a device slot equal those of its host slot while the worker holds a view. The pack writer uses
cuFile to write only whole blocks of 4 KiB at aligned offsets. It writes everything else from the host.
Failure behaviour: as `SlicedState`; a failed transfer raises `TransientError` and fails the save.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.format.chunking import CHUNK_BYTES, Layout, Piece, TensorSpec
from headrace.checkpoint.gds.file import ALIGNMENT, Direct, GpuFile, directory_of, flat_bytes
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.slices import SlicedState
from headrace.checkpoint.state.tensors import as_bits
from headrace.dataio.core.limits import MIB
from headrace.dataio.store.base import Buffer, Store
from headrace.dataio.store.direct_io import write_all
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.wrappers import Wrapper

RING_BYTES = 128 * MIB
"""Default size of the ring of slices, in host memory and again in device memory."""
DeviceCopy = Callable[[Buffer], torch.Tensor | None]
"""Returns the device memory that holds the same bytes as the given host bytes, or None."""


class DeviceSlices(SlicedState):
    """A `SlicedState` that gathers tensors in device memory that `direct` reaches.

    Others are copied through host memory.
    """

    def __init__(
        self,
        direct: Direct,
        arena: Arena,
        *,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        layout: Layout,
    ) -> None:
        self._direct = direct
        self._device = next(t.device for t in tensors if t.device.type == direct.device)
        # a separate buffer for each slot, because cuFile identifies a buffer by its start address
        self._ring = [direct.buffer(CHUNK_BYTES, self._device) for _ in range(arena.size // CHUNK_BYTES)]
        self._start = arena.bytes.ctypes.data
        self._twins: set[int] = set()
        self._flat: tuple[int, torch.Tensor] | None = None
        # the feeder's copies wait for work that the trainer has enqueued, and for earlier uses of the ring's memory
        self._ready_to_read = _event(self._device)
        super().__init__(arena, tensors, specs=specs, layout=layout)

    def device_copy(self, data: Buffer) -> torch.Tensor | None:
        """The device slot that belongs to a host slot, if both hold the same bytes. It is a `DeviceCopy`."""
        view = np.frombuffer(data, np.uint8)
        slot = view.ctypes.data - self._start
        return self._ring[slot // CHUNK_BYTES][: len(view)] if slot in self._twins else None

    def store(self, inner: Store) -> SavingStore:
        """The store that the worker of these slices writes to."""
        self.saving_store = SavingStore(inner, self._direct, self.device_copy)
        return self.saving_store

    def cancel(self) -> None:
        super().cancel()
        self._twins.clear()
        while self._ring:
            self._direct.release(self._ring.pop())

    def _feed(self) -> None:
        # a separate stream: on the trainer's stream, each slice would wait for training steps that were enqueued later
        with _new_stream(self._device):
            super()._feed()

    def _gather(self, number: int, piece: Piece, target: npt.NDArray[np.uint8]) -> None:
        slot, parts = target.ctypes.data - self._start, self._parts[number]
        if any(self._tensors[part.tensor].device.type != self._direct.device for part in parts):
            self._twins.discard(slot)
            super()._gather(number, piece, target)
            return
        device = self._ring[slot // CHUNK_BYTES][: piece.length]
        if self._ready_to_read is not None:
            self._ready_to_read.wait(torch.cuda.current_stream(self._device))
            self._ready_to_read = None
        if sum(part.length for part in parts) != piece.length:
            device.zero_()  # the gaps between small tensors
        for part in parts:
            source = self._bytes(part.tensor)[part.start : part.start + part.length]
            device[part.at : part.at + part.length].copy_(source)
        self._arena.tensor[slot : slot + piece.length].copy_(device, non_blocking=True)
        self._direct.synchronize(self._device)
        self._twins.add(slot)

    def _bytes(self, number: int) -> torch.Tensor:
        """The tensor's row-major bytes on its device.

        If it is not contiguous, a copy is kept until the next tensor.
        """
        if self._flat is None or self._flat[0] != number:
            tensor = self._tensors[number].resolve_conj().resolve_neg()
            self._flat = number, flat_bytes(as_bits(tensor).contiguous())
        return self._flat[1]


class SavingStore(Wrapper):
    """Wraps the directory store `inner` for one save. It writes packs by cuFile where that is possible."""

    def __init__(self, inner: Store, direct: Direct, device_copy: DeviceCopy) -> None:
        super().__init__(inner)
        self._direct, self._device_copy = direct, device_copy
        self.direct_bytes = 0

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        writer = PackWriter(directory_of(self.inner), self._direct, self._device_copy)
        size = writer.put_multipart(key, parts)
        self.direct_bytes += writer.direct_bytes
        return size


class PackWriter(PosixStore):
    """Writes objects into the directory `root`. Parts that are in device memory, too, are written by cuFile."""

    def __init__(self, root: str, direct: Direct, device_copy: DeviceCopy) -> None:
        super().__init__(root)
        self._gds, self._device_copy = direct, device_copy
        self._open: tuple[str, GpuFile | None] = "", None
        self.direct_bytes = 0

    def put_multipart(self, key: str, parts: Iterable[Buffer]) -> int:
        try:
            return super().put_multipart(key, parts)
        finally:
            self._file("")

    def _write(self, path: str, fd: int, parts: Iterable[Buffer]) -> int:
        return sum(self._part(path, fd, part) for part in parts)

    def _part(self, path: str, fd: int, data: Buffer) -> int:
        device_copy, at = self._device_copy(data), os.lseek(fd, 0, os.SEEK_CUR)
        aligned = 0 if device_copy is None or at % ALIGNMENT else len(data) - len(data) % ALIGNMENT
        if device_copy is not None and aligned:
            file = self._file(path)
            assert file is not None
            file.write(device_copy[:aligned], at)
            os.lseek(fd, at + aligned, os.SEEK_SET)
            self.direct_bytes += aligned
        write_all(fd, memoryview(data)[aligned:])
        return len(data)

    def _file(self, path: str) -> GpuFile | None:
        """The open file at `path`, which stays open until the next path; "" closes it."""
        if self._open[0] != path:
            if self._open[1] is not None:
                self._open[1].close()
            self._open = path, (GpuFile(path, writing=True, direct=self._gds) if path else None)
        return self._open[1]


def _new_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
