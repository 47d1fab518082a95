"""The memory of batches: a pool of buffers, and a memory budget for samples in processing.

Purpose: newly allocated memory costs a page fault for every 4 KiB, so `BufferPool` reuses the memory of delivered
batches. Sixteen threads that each decode a 4K clip must not exhaust the machine's memory. So each thread declares the
bytes that it needs, and `MemoryBudget` lets it wait until they are available.

How the pool works. On the CPU, each tensor uses one block of memory. When the last tensor, view or array over a block
is deleted, a weak reference returns the block to the pool. Pinned and device memory comes from torch's own caching
allocators, which also wait for unfinished copies. No Python code runs when a block is returned. If a Ctrl-C arrived in
such code, the interpreter would print the KeyboardInterrupt and continue.

Invariants: memory that anything still refers to is never written again. At most `spare` free blocks are kept. The
admitted bytes never exceed the limit, with one exception: a group of samples that is larger than the limit runs alone.
Threads are admitted in the order of their requests.
Failure behaviour: threads that wait for memory raise `Closed` when the loader closes. `MemoryError` and torch's errors
are raised unchanged.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_GRAIN = 1 << 16
_HUGE = 4 << 20
_IN_NUMPY = {
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
}
Block = mmap.mmap


class _BlockReference(weakref.ref[Any]):
    """A weak reference to the array that uses a block."""

    __slots__ = ("block",)
    block: Block


class BufferPool:
    """Allocates the memory of tensors, and reuses it. Safe to share between threads.

    Args:
        device: device of the tensors.
        pinned: use pinned memory.
        reuse: reuse memory. False allocates new memory for every tensor.
        spare: number of free blocks to keep.
    """

    def __init__(self, device: torch.device, *, pinned: bool = False, reuse: bool = True, spare: int = 4) -> None:
        self._device, self._pinned, self._spare = device, pinned, spare
        self._pooled = reuse and device.type == "cpu" and not pinned
        self._lock = threading.Lock()
        self._in_use: dict[int, _BlockReference] = {}
        # freed arrays append to it, at any time and without the lock
        self._returned: deque[weakref.ref[Any]] = deque()
        self._free: list[Block] = []
        self.allocations = self.reused = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with undefined values."""
        size = math.prod(shape) * dtype.itemsize
        if not self._pooled or not size:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device, pin_memory=self._pinned)
        block = self._block(size)
        array = np.frombuffer(block, np.uint8, size)
        reference = _BlockReference(array, self._returned.append)
        reference.block = block
        self._in_use[id(reference)] = reference
        if dtype in _IN_NUMPY:  # torch's own views release the GIL, and then wait for it
            return torch.from_numpy(array.view(_IN_NUMPY[dtype]).reshape(shape))
        return torch.from_numpy(array).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Free the blocks that no tensor uses."""
        with self._lock:
            self._free = []
            self._in_use.clear()
            self._returned.clear()

    def _block(self, size: int) -> Block:
        with self._lock:
            self.allocations += 1
            freed = [id(self._returned.popleft()) for _ in range(len(self._returned))]
            blocks = [self._in_use.pop(number).block for number in freed if number in self._in_use]
            self._free = (self._free + blocks)[-self._spare :]
            for number, block in enumerate(self._free):
                if size <= len(block) <= 2 * size + _GRAIN:
                    self.reused += 1
                    return self._free.pop(number)
        block = mmap.mmap(-1, -(-size // _GRAIN) * _GRAIN)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block


class Closed(Exception):
    """The loader was closed while this thread waited."""


class MemoryBudget:
    """Limits the bytes that samples use while they are processed. Each caller declares its bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = self.peak = self.waits = 0
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._closed = False

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Wait until `size` bytes are available, and reserve them for the duration of the block."""
        self._enter(size)
        try:
            yield
        finally:
            with self._changed:
                self.used -= size
                self._changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads, which then raise `Closed`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _enter(self, size: int) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                if not self._may_enter(ticket, size):
                    self.waits += 1
                self._changed.wait_for(lambda: self._closed or self._may_enter(ticket, size))
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
            if self._closed:
                raise Closed
            self.used += size
            self.peak = max(self.peak, self.used)

    def _may_enter(self, ticket: object, size: int) -> bool:
        return self._queue[0] is ticket and (not self.used or self.used + size <= self.limit)
