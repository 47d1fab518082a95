"""Memory of batches: used again when nothing refers to it, and never before."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.loaders.batch.memory import BufferPool

CPU = torch.device("cpu")


def test_memory_without_references_is_used_again() -> None:
    buffers = BufferPool(CPU)
    address = buffers.empty((100, 1000), torch.float32).data_ptr()  # let go at once
    again = buffers.empty((100, 1000), torch.float32)
    assert again.data_ptr() == address
    assert buffers.empty((100, 1000), torch.float32).data_ptr() != address
    assert buffers.reused == 1


@pytest.mark.parametrize(
    "keep",
    [lambda t: t, lambda t: t[3, 5:], lambda t: t.numpy(), lambda t: memoryview(t.numpy()), lambda t: t.view(-1)],
)
def test_a_reference_to_any_part_keeps_the_memory(keep: Any) -> None:
    buffers = BufferPool(CPU)
    tensor = buffers.empty((10, 4096), torch.uint8)
    tensor.fill_(7)
    address, kept = tensor.data_ptr(), keep(tensor)
    del tensor
    gc.collect()
    for _ in range(6):
        other = buffers.empty((10, 4096), torch.uint8)
        other.fill_(9)
        assert other.data_ptr() != address
    assert (np.asarray(kept) == 7).all()


class BufferPoolMachine(RuleBasedStateMachine):
    """A trainer that keeps and drops batches as it likes, each filled with its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = BufferPool(CPU, spare=3)
        self.held: dict[int, torch.Tensor] = {}
        self.number = 0

    @rule(rows=st.integers(1, 40))
    def get(self, rows: int) -> None:
        self.number += 1
        tensor = self.buffers.empty((rows, 70_000), torch.int32)
        tensor[:, ::5000] = self.number
        self.held[self.number] = tensor

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.held:
            del self.held[data.draw(st.sampled_from(sorted(self.held)))]

    @invariant()
    def nothing_held_was_written_to(self) -> None:
        assert all((tensor[:, ::5000] == number).all() for number, tensor in self.held.items())
        assert len(self.buffers._free) <= 3


TestBufferPool = BufferPoolMachine.TestCase
TestBufferPool.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_threads_may_lend_and_drop_at_once() -> None:
    buffers = BufferPool(CPU)
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(200):
            tensor = buffers.empty((20_000,), torch.int64)
            tensor.fill_(number * 1000 + step)
            if not bool((tensor == number * 1000 + step).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert buffers.reused > 0


@given(st.lists(st.integers(0, 5), max_size=4), st.sampled_from([torch.uint8, torch.float16, torch.int64]))
def test_every_shape_and_dtype_is_given(shape: list[int], dtype: torch.dtype) -> None:
    tensor = BufferPool(CPU).empty(shape, dtype)
    assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (tuple(shape), dtype, True)


def test_without_reuse_every_tensor_has_memory_of_its_own() -> None:
    buffers = BufferPool(CPU, reuse=False)
    buffers.empty((1000, 1000), torch.uint8)
    buffers.empty((1000, 1000), torch.uint8)
    assert buffers.reused == 0


def test_memory_returns_without_python_code_that_an_interrupt_could_hit() -> None:
    buffers, met = BufferPool(torch.device("cpu")), list[str]()
    for _ in range(2):
        tensor = buffers.empty((4, 5), torch.float32)
        sys.setprofile(lambda frame, event, _: met.append(f"{event} {frame.f_code.co_qualname}"))
        try:
            del tensor
        finally:
            sys.setprofile(None)
    assert buffers.reused == 1
    assert not [one for one in met if one.startswith("call")]
