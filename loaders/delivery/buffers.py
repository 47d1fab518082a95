"""The memory of batches, used again as soon as nobody holds it.

Purpose: a batch of floats is tens of megabytes; fresh memory of that size costs a page fault for every 4 KiB of it.

How. On the CPU a batch's memory is a block that is lent to the tensor. When the last tensor, view or array over it is
gone, the block comes back and is lent again. Pinned and device memory comes from
torch's own caching allocators, which also wait for the copies that are under way. It comes back without a line of Python: where a
Ctrl-C met one, in the trainer's thread, the interpreter would print the interrupt and go on as if there had been none.
Invariants: memory that anything still refers to is never written again: whoever keeps a batch keeps it. When one is lent, at
most `spare` other blocks wait for that.
Failure behaviour: none of its own; `MemoryError` and torch's errors pass.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_GRAIN = 1 << 16
_HUGE = 4 << 20
_IN_NUMPY = {torch.uint8: np.uint8, torch.float32: np.float32, torch.float16: np.float16, torch.int64: np.int64}
Block = mmap.mmap


class _Loan(weakref.ref[Any]):
    """Of a block, to an array."""

    __slots__ = ("block",)
    block: Block


class Buffers:
    """Lends tensors on `device`; `reuse=False` gives every tensor memory of its own. Safe to share between threads."""

    def __init__(self, device: torch.device, *, pinned: bool = False, reuse: bool = True, spare: int = 4) -> None:
        self._device, self._pinned, self._spare = device, pinned, spare
        self._pooled = reuse and device.type == "cpu" and not pinned
        self._lock = threading.Lock()
        self._lent: dict[int, _Loan] = {}
        self._returned: deque[weakref.ref[Any]] = deque()  # appended to when loans end, at any moment: without the lock
        self._free: list[Block] = []
        self.lent = self.reused = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of undefined values."""
        size = math.prod(shape) * dtype.itemsize
        if not self._pooled or not size:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device, pin_memory=self._pinned)
        block = self._block(size)
        loan = np.frombuffer(block, np.uint8, size)
        lent = _Loan(loan, self._returned.append)
        lent.block = block
        self._lent[id(lent)] = lent
        if dtype in _IN_NUMPY:  # torch's own views let other threads go first, and wait for them
            return torch.from_numpy(loan.view(_IN_NUMPY[dtype]).reshape(shape))
        return torch.from_numpy(loan).view(dtype).view(tuple(shape))

    def clear(self) -> None:
        """Let go of what is not lent."""
        with self._lock:
            self._free = []
            self._lent.clear()
            self._returned.clear()

    def _block(self, size: int) -> Block:
        with self._lock:
            self.lent += 1
            ended = [id(self._returned.popleft()) for _ in range(len(self._returned))]
            back = [self._lent.pop(number).block for number in ended if number in self._lent]
            self._free = (self._free + back)[-self._spare :]
            for number, block in enumerate(self._free):
                if size <= len(block) <= 2 * size + _GRAIN:
                    self.reused += 1
                    return self._free.pop(number)
        block = mmap.mmap(-1, -(-size // _GRAIN) * _GRAIN)
        if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
