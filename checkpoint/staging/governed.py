"""Which tensors may be copied late, and the wait before they change.

A training step reads parameters in its forward and backward pass and writes them, and the optimizer's own tensors, only in
`optimizer.step()`. So they can be copied behind the next forward and backward, and a hook that runs before the step waits
for what is not copied by then. Everything else (buffers such as running means, generators, counters, loader state) is
copied before `save` returns.
Invariant: a tensor is late only if its memory is that of a parameter or a state tensor of an optimizer in the saved state, on
which the hook is, or that of a parameter which is not trained (`requires_grad` false). What changes them in another way is
found by torch's version counters (`headrace.checkpoint.staging.copying`), and then the save fails rather than mixing two moments.
Failure behaviour: none of its own; an error of the copy is the save's, never the optimizer's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

_DEPTH = 64


class Gate(Protocol):
    """What a step waits for."""

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


def late(state: object, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """Numbers of those of `tensors` that only a step of the optimizers in `state` changes."""
    governed = {_memory(t) for optimizer in optimizers_in(state) for t in _governed(optimizer)}
    if not governed:
        return frozenset()
    governed |= {_memory(t) for t in _frozen_in(state)}
    governed.discard(None)
    return frozenset(i for i, t in enumerate(tensors) if not t.is_inference() and _memory(t) in governed)


def _governed(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _memory(tensor: Any) -> int | None:
    """The address of the tensor's storage: of the local shard where there is one."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return int(local.untyped_storage().data_ptr()) or None
    except (RuntimeError, NotImplementedError):  # a layout without one storage
        return None


class Gates:
    """Makes every known optimizer wait, before its step, for the copies that are on their way."""

    def __init__(self) -> None:
        self._pending: list[Gate] = []
        self._lock = threading.Lock()
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    def watch(self, optimizers: Iterable[torch.optim.Optimizer], copying: Gate) -> None:
        """`copying` is done before any of `optimizers` steps."""
        with self._lock:
            self._pending.append(copying)
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_hook(weakref.ref(self)))

    def pass_all(self) -> None:
        """Return when the state may change."""
        with self._lock:
            pending, self._pending = self._pending, []
        for copying in pending:
            with contextlib.suppress(Exception):  # the save reports it; training goes on
                copying.gate()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in list(self._hooks.values()):
            handle.remove()
        self._hooks.clear()


def _hook(gates: weakref.ref[Gates]) -> Any:
    pid = os.getpid()

    def before_step(*_: object) -> None:
        if (
            os.getpid() == pid and (found := gates()) is not None
        ):  # a forked child has its own memory, and no thread that copies
            found.pass_all()

    return before_step
