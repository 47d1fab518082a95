"""Copies one state into the arena: before `save` returns (eager), or during the next training step (lazy).

A training step reads parameters in its forward and backward pass. It writes them, and the optimizer's own tensors,
only in `optimizer.step()`. So lazy staging copies those tensors late, and `OptimizerGate` makes the optimizer wait,
before its step, for the rest of the copy. Everything else (buffers, generators, counters, loader state) is copied
before `save` returns. So are small tensors in main memory, because preparing a late copy takes longer than the copy.
Threads copy main memory piece by piece. Copies from a CUDA device run on their own stream. A thread that waits for the
copy also copies pieces.
Invariant: when `wait` has returned, the arena holds every tensor as it was when the copy began. A tensor is copied late
only if it shares memory with a parameter or state tensor of a saved optimizer, or with a frozen parameter. PyTorch's
version counters show whether the trainer wrote it during the copy.
Failure behaviour: `wait` raises `UsageError`, which names the tensor, if a tensor was written during the copy. It
raises any error of the copy to every caller. After an error, nothing writes into the arena. An error of the copy fails
the save, never the optimizer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from headrace.checkpoint.format.chunking import Layout, TensorSpec, is_small
from headrace.checkpoint.gc_pause import gc_paused
from headrace.checkpoint.saving.arena import Arena
from headrace.checkpoint.saving.copy_threads import LATE, PIECE, CopyPool
from headrace.checkpoint.state.tensors import as_bits, has_plain_memory
from headrace.dataio.core.crashpoints import declare
from headrace.dataio.core.errors import DeadlineError, UsageError
from headrace.dataio.core.limits import KIB, MIB

_mid_stage = declare("ckpt.mid-stage", "the state is partly copied; no object of the attempt is stored")

_BATCH_BYTES, _BATCH_TENSORS = MIB, 4096
"""Small tensors are copied in batches of about this many bytes, or of this many tensors. A thread copies one batch.
"""
LATE_BYTES = 16 * KIB
"""Lazy staging copies smaller tensors of main memory at once."""
_memmove = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""`ctypes.memmove` without releasing the GIL, which would take longer than the copy of a small tensor."""


@dataclass(slots=True)
class _SmallTensors:
    """A batch of small tensors in contiguous main memory, and the addresses of their bytes and of the copies."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    nbytes: int = 0

    def copy(self, arena: Arena) -> None:
        deque(map(_memmove, self.targets, self.sources, self.sizes), maxlen=0)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """`length` bytes of a contiguous tensor from byte `start`, and their offset in the arena."""

    tensor: torch.Tensor
    start: int
    length: int
    at: int

    def copy(self, arena: Arena) -> None:
        ctypes.memmove(arena.tensor.data_ptr() + self.at, self.tensor.data_ptr() + self.start, self.length)


@dataclass(frozen=True, slots=True)
class _Elements:
    """A tensor that is not contiguous, and its offset in the arena."""

    tensor: torch.Tensor
    at: int

    def copy(self, arena: Arena) -> None:
        _copy_strided(arena, self.tensor, self.at)


_HostCopy = _SmallTensors | _Bytes | _Elements


@dataclass(slots=True)
class _Part:
    """What to copy to the arena at `base`: device tensors with their offsets, and copies of main memory."""

    base: int
    of_devices: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    of_host: deque[_HostCopy] = field(default_factory=deque)
    small: _SmallTensors = field(default_factory=_SmallTensors)

    def add(self, tensor: torch.Tensor, at: int, size: int) -> None:
        if not has_plain_memory(tensor):
            if tensor.is_cuda:
                self.of_devices.append((tensor, at))
            else:
                self.of_host.append(_Elements(tensor, at))
        elif not is_small(size):
            self.of_host.extend(
                _Bytes(tensor, start, min(PIECE, size - start), at + start) for start in range(0, size, PIECE)
            )
        else:
            small = self.small
            small.tensors.append(tensor)
            small.sources.append(tensor.data_ptr())
            small.targets.append(self.base + at)
            small.sizes.append(size)
            small.nbytes += size
            if small.nbytes >= _BATCH_BYTES or len(small.tensors) == _BATCH_TENSORS:
                self.end_batch()

    def end_batch(self) -> None:
        if self.small.tensors:
            self.of_host.append(self.small)
            self.small = _SmallTensors()


class Copying:
    """Copies `tensors` into `arena`.

    The copy of tensors whose numbers are in `late` may continue after the constructor returns.
    `wait_seconds`: the sum of the seconds that callers of `wait` and `gate` waited.
    """

    def __init__(
        self,
        pool: CopyPool,
        arena: Arena,
        *,
        tensors: Sequence[torch.Tensor],
        specs: Sequence[TensorSpec],
        layout: Layout,
        late: Collection[int] = (),
    ) -> None:
        self.wait_seconds = 0.0
        self._arena, self._lock = arena, threading.Lock()
        self._error: BaseException | None = None
        self._sealed = False
        self._idle, self._copying_threads = threading.Condition(), set[int]()
        self._watched = [(specs[i].name, tensors[i], tensors[i]._version) for i in late]
        self._events: list[tuple[torch.device, torch.cuda.Event]] = []
        self._todo: deque[_HostCopy] = deque()
        with gc_paused():
            now, later = self._parts(tensors, layout, late)
        try:
            self._begin(pool, now, later)
            if not late:
                self.join()
        except BaseException:
            self.cancel()
            raise

    def _parts(self, tensors: Sequence[torch.Tensor], layout: Layout, late: Collection[int]) -> tuple[_Part, _Part]:
        """What to copy now, and what may be copied late."""
        base = self._arena.tensor.data_ptr()
        now, later = _Part(base), _Part(base)
        assert layout.total <= self._arena.size
        for number, (tensor, at, size) in enumerate(zip(tensors, layout.offsets, layout.sizes, strict=True)):
            if not size:
                continue
            if number in late:  # `detach` keeps the memory, even if the trainer replaces the tensor
                later.add(tensor.detach(), at, size)
            else:
                now.add(tensor, at, size)
        now.end_batch()
        later.end_batch()
        return now, later

    def _begin(self, pool: CopyPool, now: _Part, later: _Part) -> None:
        self._enqueue_devices(now.of_devices, hold=True)
        self._todo.extend(now.of_host)
        self._copy_now(pool)
        self._enqueue_devices(later.of_devices, hold=False)
        self._todo.extend(later.of_host)
        for _ in range(min(LATE, pool.size, len(self._todo))):
            pool.submit(self._work)

    @property
    def sealed(self) -> bool:
        """Whether the state may change; also True after the copy has failed."""
        return self._sealed

    def join(self, timeout: float | None = None) -> None:
        """Return when every byte is in the arena, or raise the copy's error. For the worker."""
        self._wait_for_host(timeout)
        for _, event in self._events:
            event.synchronize()
        self._seal()

    def wait(self, timeout: float | None = None) -> None:
        """As `join`, for the trainer. The caller helps to copy, and the time is added to `wait_seconds`."""
        with self._counted():
            self._work()
            self.join(timeout)

    def gate(self) -> None:
        """Return when this thread, and device work that it enqueues from now on, may change the state.

        The thread does not wait for copies on a device. The device's next work waits for them.
        """
        with self._counted():
            self._work()
            self._wait_for_host(None)
            for device, event in self._events:  # an event's device need not be the current one
                event.wait(torch.cuda.current_stream(device))
            self._seal()

    def cancel(self) -> None:
        """Stop copying. When this returns, nothing writes into the arena."""
        with self._idle:
            self._todo.clear()
            self._idle.notify_all()
        self._wait_for_host(None)
        for _, event in self._events:
            event.synchronize()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.wait_seconds += time.perf_counter() - began

    def _wait_for_host(self, timeout: float | None) -> None:
        """Wait until no host memory is left to copy and no thread, the trainer's included, is copying."""
        with self._idle:
            is_idle = self._idle.wait_for(lambda: not self._todo and not self._copying_threads, timeout)
        if not is_idle:
            raise DeadlineError(f"the state is not copied after {timeout:g} s", hint="the copy continues; wait again")

    def _seal(self) -> None:
        with self._lock:
            if not self._sealed:
                self._error = self._error or self._find_changed()
                self._watched, self._sealed = [], True
        if self._error is not None:
            raise self._error

    def _find_changed(self) -> UsageError | None:
        for name, tensor, version in self._watched:
            if tensor._version != version:
                return UsageError(
                    f"tensor {name!r} was written while it was being copied",
                    hint="call handle.copied() before the state changes other than by a step of an optimizer in the "
                    'state, or use staging="eager"',
                )
        return None

    def _copy_now(self, pool: CopyPool) -> None:
        """Copy everything that is queued now, and return when it is copied."""
        for _ in range(min(pool.size, len(self._todo)) - 1):
            pool.submit(self._work)
        self._work()
        self._wait_for_host(None)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while True:
            try:
                with self._idle:
                    if not self._todo:
                        return
                    self._copying_threads.add(threading.get_ident())
                    batch = self._todo.popleft()
                _copy(self._arena, batch)
                _mid_stage()
            except BaseException as error:  # also KeyboardInterrupt: the interrupted batch is not in the arena
                self._todo.clear()
                self._error = self._error or error
                if not isinstance(error, Exception):
                    raise
            finally:
                with self._idle:
                    self._copying_threads.discard(threading.get_ident())
                    self._idle.notify_all()

    def _enqueue_devices(self, rows: Sequence[tuple[torch.Tensor, int]], *, hold: bool) -> None:
        """Enqueue copies on a separate stream of each device. With `hold` the device's next work waits for them."""
        for device in {tensor.device for tensor, _ in rows}:
            stream, event = torch.cuda.Stream(device), torch.cuda.Event()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            try:
                with torch.cuda.stream(stream):
                    for tensor, at in rows:
                        if tensor.device == device:
                            tensor.record_stream(stream)
                            _copy_strided(self._arena, tensor, at)
            finally:  # after an error, copies that are already enqueued continue, and `cancel` waits for them
                event.record(stream)
                self._events.append((device, event))
            if hold:
                event.wait(torch.cuda.current_stream(device))


def _copy(arena: Arena, part: _HostCopy) -> None:
    part.copy(arena)


def _copy_strided(arena: Arena, source: torch.Tensor, at: int) -> None:
    """Copy a device tensor, or one whose memory is not contiguous."""
    bits = as_bits(source.detach().resolve_conj().resolve_neg())
    size = source.numel() * source.element_size()
    target = arena.tensor[at : at + size].view(bits.dtype).view(bits.shape)
    target.copy_(bits, non_blocking=True)


_DEPTH = 64


class Gate(Protocol):
    """A copy that an optimizer's step waits for."""

    def gate(self) -> None: ...


def optimizers_in(state: object, depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of a nested state."""
    if isinstance(state, torch.optim.Optimizer):
        yield state
    elif depth < _DEPTH and isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from optimizers_in(value, depth + 1)


def _frozen_in(state: object, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.nn.Module):
        yield from (p for p in state.parameters() if not p.requires_grad)
    elif depth < _DEPTH and isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _frozen_in(value, depth + 1)


def late_tensors(state: object, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Indices of the `tensors` that may be copied late: large ones that only a step of the optimizers in `state` changes."""
    optimizers = list(optimizers_in(state))
    large = [i for i, t in enumerate(tensors) if t.nbytes >= LATE_BYTES or not t.is_cpu] if optimizers else []
    if not large:
        return frozenset()
    governed = _Governed(optimizers, state)
    return frozenset(i for i in large if not tensors[i].is_inference() and governed.has(tensors[i]))


class _Governed:
    """The memory that only steps of the optimizers change, and frozen parameters.

    A state mostly consists of the optimizers' own tensors, which are found by identity, and of their parameters. Other
    memory is looked up only for the rest, because that takes longer.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], state: object) -> None:
        self._optimizers, self._state = optimizers, state
        self._own = {id(t) for optimizer in optimizers for t in _tensors_of(optimizer)}
        self._parameters = {_memory(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        self._parameters.discard(None)
        self._all: set[int | None] | None = None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor has such memory."""
        if id(tensor) in self._own:
            return _memory(tensor) is not None
        memory = _memory(tensor)
        return memory in self._parameters or memory in self._rest()

    def _rest(self) -> set[int | None]:
        if self._all is None:
            self._all = {_memory(t) for optimizer in self._optimizers for t in _tensors_of(optimizer)}
            self._all |= {_memory(t) for t in _frozen_in(self._state)}
            self._all.discard(None)
        return self._all


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _memory(tensor: Any) -> int | None:
    """The address of the tensor's storage; for a DTensor, that of its local shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr()) or None
    except (RuntimeError, NotImplementedError):  # a layout without one storage
        return None


class OptimizerGate:
    """Makes every watched optimizer wait, before its step, for the copies in progress."""

    def __init__(self) -> None:
        self._pending: list[Gate] = []
        self._lock = threading.Lock()
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    def watch(self, optimizers: Iterable[torch.optim.Optimizer], copying: Gate) -> None:
        """Make every watched optimizer wait for `copying`. `optimizers` are watched from now on."""
        with self._lock:
            self._pending.append(copying)
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_hook(weakref.ref(self)))

    def pass_all(self) -> None:
        """Wait for all copies in progress. Their errors are suppressed here, because the saves report them."""
        with self._lock:
            pending, self._pending = self._pending, []
        for copying in pending:
            with contextlib.suppress(Exception):  # the save reports it; training continues
                copying.gate()

    def close(self) -> None:
        """Remove the hooks from all optimizers."""
        for handle in list(self._hooks.values()):
            handle.remove()
        self._hooks.clear()


def _hook(gate: weakref.ref[OptimizerGate]) -> Any:
    pid = os.getpid()

    def before_step(*_: object) -> None:
        if (
            os.getpid() == pid and (living_gate := gate()) is not None
        ):  # a forked child has its own memory, and no thread that copies
            living_gate.pass_all()

    return before_step
