"""Stages a state that is larger than the staging memory: one chunk at a time, as fast as the worker consumes them.

The arena is a ring buffer, cut into slots of one chunk. A feeder thread fills free slots in the order of the pieces.
The worker asks for the pieces in that order, from several threads. A slot is free again when the worker has dropped
every view of it; a finalizer reports that.
Invariant: at most the arena's bytes are held. The worker uses a `SlicedState` as if it were the whole arena. The state
must not change before `wait` has returned.
Failure behaviour: a worker that ends calls `cancel`. After that no thread waits and no thread writes into the arena.
Requests for pieces that were not copied by then raise an error. Errors of the feeder are raised in the worker and in
every waiting thread. A limit below `LEAST_BYTES` raises `UsageError`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from headrace.checkpoint.format import chunking as layouts
from headrace.checkpoint.format.chunking import CHUNK_BYTES, Layout, Piece, TensorSpec
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.state.tensors import as_bits, has_plain_memory, memory_of
from headrace.dataio.core.errors import DeadlineError, TransientError, UsageError
from headrace.dataio.core.limits import MIB, format_bytes

LEAST_BYTES = 64 * MIB
"""The smallest ring: 16 chunks.

The worker holds 8 chunks that are hashed ahead, those being hashed, and one being written. The rest are free slots.
"""


@dataclass(frozen=True, slots=True)
class _Part:
    """`length` bytes of tensor number `tensor` from byte `start`, at byte `at` of a piece."""

    tensor: int
    start: int
    at: int
    length: int


def check_limit(limit: int | None) -> int | None:
    """Return `limit`; `UsageError` if a ring of that size is too small."""
    if limit is not None and limit < LEAST_BYTES:
        raise UsageError(
            f"a staging memory of {format_bytes(limit)} is too small", hint=f"give {format_bytes(LEAST_BYTES)} or more"
        )
    return limit


class SlicedState:
    """The state's bytes for the worker: `sliced[at : at + length]` waits for that piece and returns it.

    `wait_seconds`: the sum of the seconds that callers of `wait` and `gate` waited.
    """

    def __init__(
        self, arena: Arena, tensors: Sequence[torch.Tensor], *, specs: Sequence[TensorSpec], layout: Layout
    ) -> None:
        self.wait_seconds = 0.0
        self._arena, self._total = arena, layout.total
        self._tensors = [tensor.detach() for tensor in tensors]
        self._pieces, spans = layouts.cut_all(specs, layout)
        self._parts = _parts(spans)
        self._ready: dict[int, npt.NDArray[np.uint8]] = {}
        self._delivered: set[int] = set()
        self._free = [i * CHUNK_BYTES for i in range(arena.size // CHUNK_BYTES)]
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._given_up = False
        self._copied = threading.Event()
        self._feeder = threading.Thread(target=self._feed, name="headrace-slices")
        self._feeder.start()

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, at: slice) -> memoryview:
        with self._changed:
            if at.start in self._delivered:
                raise TransientError(
                    "a slice of the state was requested twice, but it is available only once", hint="save again"
                )
            self._changed.wait_for(lambda: at.start in self._ready or self._error is not None)
            if self._error is not None:
                raise self._error
            self._delivered.add(at.start)
            return self._ready.pop(at.start).data

    @property
    def sealed(self) -> bool:
        """Whether the state may change."""
        return self._copied.is_set()

    def join(self, timeout: float | None = None) -> None:
        """Do nothing: the worker starts while the state is being copied."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the last slice is copied and the state may change."""
        began = time.perf_counter()
        try:
            if not self._copied.wait(timeout):
                raise DeadlineError(
                    f"the state is not copied after {timeout:g} s", hint="the copy continues; wait again"
                )
        finally:
            self.wait_seconds += time.perf_counter() - began
        if self._error is not None:
            raise self._error

    def gate(self) -> None:
        """As `wait`."""
        self.wait()

    def cancel(self) -> None:
        """Stop copying and wake every waiting thread.

        The worker calls this when it ends; a second call does nothing.
        """
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
        self._feeder.join()

    def _feed(self) -> None:
        try:
            for number, piece in enumerate(self._pieces):
                slot = self._slot()
                target = self._arena.bytes[slot : slot + piece.length]
                self._gather(number, piece, target)
                self._publish(piece, target, slot)
        except Exception as error:
            self._error = error
        finally:
            self._copied.set()
            self._tensors.clear()
            with self._changed:
                self._changed.notify_all()

    def _slot(self) -> int:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._given_up)
            if self._given_up:
                raise TransientError("the save was cancelled", hint="save again")
            return self._free.pop()

    def _publish(self, piece: Piece, target: npt.NDArray[np.uint8], slot: int) -> None:
        borrowed = np.frombuffer(target.data, np.uint8)  # a separate object, which lives as long as any view of it
        weakref.finalize(borrowed, self._release_slot, slot)
        with self._changed:
            self._ready[piece.at] = borrowed
            self._changed.notify_all()

    def _release_slot(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def _gather(self, number: int, piece: Piece, target: npt.NDArray[np.uint8]) -> None:
        parts = self._parts[number]
        if sum(part.length for part in parts) != piece.length:
            target[:] = 0  # the gaps between small tensors
        for part in parts:
            view = self._memory(part.tensor)[part.start : part.start + part.length]
            np.copyto(target[part.at : part.at + part.length], np.frombuffer(view, np.uint8))

    def _memory(self, number: int) -> memoryview:
        """The tensor's bytes. If the tensor is not plain memory, one copy is kept until the next such tensor."""
        tensor = self._tensors[number]
        if not has_plain_memory(tensor):
            if getattr(self, "_copy_of", None) != number:
                bits = as_bits(tensor.resolve_conj().resolve_neg())
                self._copy_of, self._copy = number, bits.cpu().contiguous()
            tensor = self._copy
        return memory_of(tensor)


def _parts(spans: Sequence[Sequence[layouts.PieceSpan]]) -> dict[int, list[_Part]]:
    parts: dict[int, list[_Part]] = defaultdict(list)
    for tensor, tensor_spans in enumerate(spans):
        start = 0
        for span in tensor_spans:
            parts[span.piece].append(_Part(tensor, start, span.start, span.length))
            start += span.length
    return parts


def released_after(sliced: SlicedState, release: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `release` after all copies into the arena have stopped."""

    def ended() -> None:
        try:
            sliced.cancel()
        finally:
            release()

    return ended
