"""One staging arena, allocated once and reused, and the copy of a state into it.

The arena is a memfd, so that the daemon can map it too; its size is sealed, its pages are touched once at allocation, and it
is registered with CUDA where CUDA is, for copies at full speed. It is laid out anew only when the tensors change.
Invariant: the arena has one owner at a time: the save that staged into it, until its carrier needs it no more. An arena
whose carrier was lost is given up, never reused, since someone may still be reading it.
Failure behaviour: `DeadlineError` when the previous save does not let go in time; `CapacityError` when there is no memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import torch

from checkpoint.kinds import as_bits, has_plain_memory, memory_of
from checkpoint.layout import Layout, TensorSpec
from dataio.core.crashpoints import declare
from dataio.core.errors import CapacityError, DeadlineError
from dataio.core.limits import MIB
from dataio.core.log import get_logger

_PIECE = 16 * MIB
_ROUND = 2 * MIB
_PAGE = 4096
_THREADS = 2
_log = get_logger(__name__)

_mid_stage = declare("ckpt.mid-stage", "the state is half copied, nothing of the attempt is stored")

_Copy = tuple[memoryview, int]
"""Bytes to copy, and where in the arena they go."""


class Arena:
    """`size` bytes of shared memory; `fd` names it for other processes."""

    def __init__(self, size: int) -> None:
        self.size = max(-(-size // _ROUND), 1) * _ROUND
        self.fd = os.memfd_create("millrace-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
            self._map = mmap.mmap(self.fd, self.size)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise CapacityError(f"no staging arena of {self.size} bytes: {error}") from error
        _advise(self._map)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = _pin(self.tensor)

    def view(self) -> memoryview:
        return memoryview(self._map)

    def close(self) -> None:
        """Give the memory back as soon as nobody holds a view of it any more."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
        os.close(self.fd)
        del self.bytes, self.tensor, self._map


def _advise(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a kernel without it
        _log.debug("no huge pages for the arena: %s", error)


def _pin(tensor: torch.Tensor) -> bool:
    if not torch.cuda.is_available():
        return False
    torch.cuda.init()  # type: ignore[no-untyped-call]
    failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))  # type: ignore[no-untyped-call]
    if failed:
        _log.warning("the staging arena could not be pinned (CUDA error %d); copies will be slower", failed)
    return not failed


class Staging:
    """Owns the arena between saves, and copies into it."""

    def __init__(self) -> None:
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._free = threading.Condition()
        self._owned = self._closed = False
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="millrace-stage")

    def take(self, layout: Layout, timeout: float) -> Arena:
        """The arena, laid out for `layout` and owned by the caller until `give_back` or `abandon`."""
        deadline = time.monotonic() + timeout
        with self._free:
            while self._owned:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(
                        f"the previous save still holds the staging arena after {timeout:g} s",
                        hint="the store is slower than the interval between saves: save less often",
                    )
                self._free.wait(left)
            self._owned = True
        try:
            return self._fitting(layout)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        """The arena may be written again."""
        with self._free:
            self._owned = False
            self._free.notify()
            self._drop_if_closed()

    def abandon(self) -> None:
        """Somebody may still read the arena: let go of it and let the next save make another."""
        with self._free:
            arena, self._arena, self._layout, self._owned = self._arena, None, None, False
            self._free.notify()
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Free the memory; with a save still in flight, once that ends."""
        self._pool.shutdown()
        with self._free:
            self._closed = True
            self._drop_if_closed()

    def _drop_if_closed(self) -> None:
        if self._closed and not self._owned and self._arena is not None:
            self._arena.close()
            self._arena = None

    def copy(self, arena: Arena, tensors: Sequence[torch.Tensor], specs: Sequence[TensorSpec], layout: Layout) -> None:
        """Copy every tensor's bytes to its place; on return the tensors may change."""
        plain: deque[_Copy] = deque()
        devices = set()
        for tensor, spec, at in zip(tensors, specs, layout.offsets, strict=True):
            source = tensor.detach()
            if not spec.nbytes:
                continue
            if has_plain_memory(source):
                view = memory_of(source)
                plain += ((view[i : i + _PIECE], at + i) for i in range(0, spec.nbytes, _PIECE))
            else:
                _copy_strided(arena, source, at, spec.nbytes)
                devices |= {source.device} if source.device.type == "cuda" else set()
        running = [self._pool.submit(_copy_plain, arena, plain) for _ in range(_THREADS)]
        try:
            for worker in running:
                worker.result()
        except BaseException:  # an interrupt: nobody may still be writing when the arena is given back
            plain.clear()
            wait(running)
            raise
        for device in devices:
            torch.cuda.synchronize(device)

    def _fitting(self, layout: Layout) -> Arena:
        if self._arena is None or self._arena.size < layout.total:
            if self._arena is not None:
                self._arena.close()
            self._arena, self._layout = None, layout
            self._arena = Arena(layout.total)
            self._touch(self._arena)
        elif layout != self._layout:
            self._arena.bytes[: layout.small_bytes] = 0  # the gaps between small tensors are part of their chunks
            self._layout = layout
        return self._arena

    def _touch(self, arena: Arena) -> None:
        half = arena.size // 2
        parts = arena.bytes[:half:_PAGE], arena.bytes[half::_PAGE]
        for worker in [self._pool.submit(part.fill, 0) for part in parts]:
            worker.result()


def _copy_plain(arena: Arena, pieces: deque[_Copy]) -> None:
    while True:
        try:
            source, at = pieces.popleft()
        except IndexError:
            return
        np.copyto(arena.bytes[at : at + len(source)], np.frombuffer(source, np.uint8))
        _mid_stage()


def _copy_strided(arena: Arena, source: torch.Tensor, at: int, size: int) -> None:
    """From another device, or from memory that is not one run of the tensor's bytes."""
    bits = as_bits(source.resolve_conj().resolve_neg())
    target = arena.tensor[at : at + size].view(bits.dtype).view(bits.shape)
    target.copy_(bits, non_blocking=True)
    _mid_stage()
