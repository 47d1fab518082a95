"""The staging arena: one memfd, allocated once and reused. The daemon can map it too.

At allocation, its size is sealed and its pages are touched; `warm_up` does both in the background. With CUDA, its
memory is pinned, so that copies run at full speed. The layout changes only when the tensors change.
Invariant: the arena has one owner at a time. This is the save that staged into it, until that save's worker no longer
needs it. If contact to the worker is lost, the arena is dropped and never reused, because the worker may still be
reading it. The copy stays in the arena until the next save takes it. Other threads may read it until then (`reading`).
Failure behaviour: `DeadlineError` if the previous save does not release the arena in time; `CapacityError` if there
is not enough memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from headrace.checkpoint.format.chunking import Layout, TensorSpec
from headrace.checkpoint.saving.copy_threads import CopyPool, num_copy_threads
from headrace.dataio.core.errors import CapacityError, DeadlineError, HeadraceError
from headrace.dataio.core.log import get_logger, warn_first

_ROUND = 2 << 20
_PAGE = 4096
_FOR_ALL_DEVICES = 1  # cudaHostRegisterPortable: a state may be on several devices
_log = get_logger(__name__)


class Arena:
    """`size` bytes of shared memory, rounded up to 2 MiB. `fd` can be sent to other processes.

    If `pool` is given, its threads touch every page.
    """

    def __init__(self, size: int, pool: CopyPool | None = None) -> None:
        self.size = max(-(-size // _ROUND), 1) * _ROUND
        self.fd = os.memfd_create("headrace-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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
        if pool is not None:
            self._touch(pool)
        self._pinned = _pin(self.tensor)  # after the touch: otherwise one thread would fault in every page here

    def view(self) -> memoryview:
        """A read-only view of the whole arena."""
        return memoryview(self._map).toreadonly()

    def _touch(self, pool: CopyPool) -> None:
        """Fault in every page now rather than during a copy."""
        part = -(-self.size // pool.size)
        parts = [self.bytes[i * part : (i + 1) * part : _PAGE] for i in range(pool.size)]
        for worker in [pool.submit(piece.fill, 0) for piece in parts]:
            worker.result()

    def close(self) -> None:
        """Close the arena. The memory is freed when the last view of it is dropped."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
        os.close(self.fd)
        del self.bytes, self.tensor, self._map


def _advise(mapped: mmap.mmap) -> None:
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # the kernel has no transparent huge pages
        _log.debug("no huge pages for the arena: %s", error)


def _current_device() -> contextlib.AbstractContextManager[object]:
    """A context manager that sets the caller's CUDA device in another thread.

    A new thread starts on device 0. Registering memory there would create a CUDA context of several hundred MiB on that
    device, which belongs to another rank.
    """
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.cuda.device(torch.cuda.current_device())


def _pin(tensor: torch.Tensor) -> bool:
    if not torch.cuda.is_available():
        return False
    torch.cuda.init()  # type: ignore[no-untyped-call]
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.numel(), _FOR_ALL_DEVICES))
    if failed:
        # clear CUDA's sticky error; otherwise the trainer's next kernel launch would report it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        warn_first(_log, "node", "the staging arena could not be pinned (CUDA error %d); copies will be slower", failed)
    return not failed


@dataclass(frozen=True, eq=False)
class StagedCopy:
    """What the arena holds: the tensors of an attempt. `tree`: the document that names them, as in a manifest."""

    attempt: str
    tree: bytes
    specs: tuple[TensorSpec, ...]
    layout: Layout


class Staging:
    """Owns the arena between saves. `limit`: the largest size of the arena in bytes; None: as large as the state."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.pool = CopyPool(num_copy_threads())
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._free = threading.Condition()
        self._owned = self._closed = False
        self._copy: StagedCopy | None = None
        self._readers = 0

    def fits(self, layout: Layout) -> bool:
        """Whether the whole state fits into the arena."""
        return self.limit is None or layout.total <= self.limit

    @property
    def busy(self) -> bool:
        """Whether a save or `warm_up` owns the arena."""
        return self._owned

    def take(self, layout: Layout, timeout: float) -> Arena:
        """Return the arena, prepared for `layout`. The caller owns it until `give_back` or `abandon`."""
        deadline = time.monotonic() + timeout
        with self._free:
            while self._owned or self._readers:
                if not self._owned:
                    self._copy = None  # no new reader begins; each of those that have begun reads one block
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineError(
                        f"the previous save still holds the staging arena after {timeout:g} s",
                        hint="the store is slower than the interval between saves: save less often",
                    )
                self._free.wait(remaining)
            self._owned, self._copy = True, None
        try:
            return self._fitting(layout)
        except BaseException:
            self.give_back()
            raise

    def warm_up(self, layout: Layout) -> bool:
        """Allocate and touch the arena in a thread, which owns it until it is done.

        Returns False if a save owns the arena.
        """
        with self._free:
            if self._owned or self._closed or self._readers:
                return False
            self._owned, self._copy = True, None
        threading.Thread(target=self._warm_up, args=(layout, _current_device()), name="headrace-warm-up").start()
        return True

    def give_back(self) -> None:
        """Release the arena. The next save may then write to it."""
        with self._free:
            self._owned = False
            self._free.notify()
            self._drop_if_closed()

    def set_copy(self, copy: StagedCopy) -> None:
        """For the owner: record what the arena holds, once the copy is complete."""
        with self._free:
            self._copy = copy if self._owned else None

    def copy_of(self, attempt: str) -> StagedCopy | None:
        """The copy of an attempt; None if the arena does not hold it."""
        copy = self._copy
        return copy if copy is not None and copy.attempt == attempt else None

    @contextlib.contextmanager
    def reading(self, copy: StagedCopy) -> Iterator[np.ndarray[tuple[int], np.dtype[np.uint8]] | None]:
        """The arena's bytes, if it still holds this copy; None otherwise. The next save waits until the block ends."""
        with self._free:
            held = self._arena is not None and self._copy is copy and not self._closed
            memory = self._arena.bytes if held and self._arena is not None else None
            self._readers += held
        try:
            yield memory
        finally:
            if held:
                with self._free:
                    self._readers -= 1
                    self._free.notify_all()
                    self._drop_if_closed()

    def abandon(self) -> None:
        """Drop the arena, because a lost worker may still read it. The next save allocates another."""
        with self._free:
            arena, self._arena, self._layout, self._owned = self._arena, None, None, False
            self._copy = None
            self._free.notify()
            self._drop_if_closed()
        if arena is not None:
            arena.close()

    def close(self) -> None:
        """Free the memory. If a save still owns the arena, the memory is freed when that save ends."""
        with self._free:
            self._closed = True
            self._drop_if_closed()

    def _drop_if_closed(self) -> None:
        if self._closed and not self._owned and not self._readers:
            self.pool.shutdown(wait=False)
            if self._arena is not None:
                self._arena.close()
                self._arena = None

    def _warm_up(self, layout: Layout, device: contextlib.AbstractContextManager[object]) -> None:
        try:
            with device:
                self._fitting(layout)
        except HeadraceError as error:  # the next save tries again, and raises the error
            warn_first(_log, "node", "the staging arena could not be allocated in advance: %s", error)
        finally:
            self.give_back()

    def _fitting(self, layout: Layout) -> Arena:
        size = layout.total if self.limit is None else min(layout.total, self.limit)
        if self._arena is None or self._arena.size < size:
            if self._arena is not None:
                self._arena.close()
            self._arena, self._layout = None, layout
            self._arena = Arena(size, self.pool)
        elif layout != self._layout:
            # clear the gaps between small tensors, because they are part of the chunks
            self._arena.bytes[: min(layout.small_bytes, self._arena.size)] = 0
            self._layout = layout
        return self._arena
