"""The staging arena: one, sealed, reused, with one owner at a time."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.checkpoint.format.chunking import Layout, TensorSpec, lay_out, whole
from headrace.checkpoint.saving import copying
from headrace.checkpoint.saving.arena import Arena, StagedCopy, Staging
from headrace.checkpoint.saving.copying import Copying
from headrace.dataio.core.errors import CapacityError, DeadlineError


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging()
    yield made
    made.close()


def layout_of(*sizes: int) -> tuple[list[TensorSpec], Layout]:
    specs = [TensorSpec(f"t{i}", "uint8", whole((n,))) for i, n in enumerate(sizes)]
    return specs, lay_out(specs)


def stage(staging: Staging, *tensors: torch.Tensor) -> bytes:
    specs, layout = layout_of(*(t.numel() for t in tensors))
    arena = staging.take(layout, 1)
    Copying(staging.pool, arena, tensors=tensors, specs=specs, layout=layout)
    staging.give_back()
    return bytes(arena.view()[: layout.total])


def test_an_arena_can_neither_grow_nor_shrink() -> None:
    arena = Arena(5000)
    seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, 100)
    arena.close()


def test_an_arena_that_cannot_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no staging arena"):
        Arena(1 << 62)


def test_the_arena_is_reused_while_it_is_large_enough(staging: Staging) -> None:
    big, small = layout_of(3_000_000)[1], layout_of(5)[1]
    first = staging.take(big, 1)
    staging.give_back()
    assert staging.take(small, 1) is first
    staging.give_back()
    assert staging.take(layout_of(30_000_000)[1], 1) is not first
    staging.give_back()


def test_gaps_of_a_new_layout_hold_nothing_of_the_old_one(staging: Staging) -> None:
    stage(staging, torch.full((1000,), 255, dtype=torch.uint8))
    ones = torch.ones(5, dtype=torch.uint8)
    assert stage(staging, ones, ones) == b"\1" * 5 + bytes(11) + b"\1" * 5


def test_pieces_of_large_tensors_land_in_order(staging: Staging) -> None:
    large = torch.randint(0, 256, (40 << 20,), dtype=torch.uint8)
    assert stage(staging, large) == bytes(large.numpy())


def test_small_tensors_are_copied_many_at_a_time(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of experts has a hundred thousand; threads that meet at a lock for each take longer than the copies."""
    turns: list[int] = []
    monkeypatch.setattr(copying, "_mid_stage", lambda: turns.append(1))
    tensors = [torch.full((16,), i % 251, dtype=torch.uint8) for i in range(3 * copying._BATCH_TENSORS)]
    assert stage(staging, *tensors) == b"".join(bytes(each.numpy()) for each in tensors)
    assert 1 < len(turns) <= 4


def test_parameters_that_are_no_run_of_memory_are_copied_as_they_are(staging: Staging) -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    specs = [TensorSpec("t", "float32", whole((4, 3)))]
    arena = staging.take(lay_out(specs), 1)
    Copying(staging.pool, arena, tensors=[torch.nn.Parameter(wide.t())], specs=specs, layout=lay_out(specs))
    staging.give_back()
    assert bytes(arena.view()[:48]) == wide.t().contiguous().numpy().tobytes()
    assert not arena.tensor.requires_grad


def test_an_abandoned_arena_is_never_handed_out_again(staging: Staging) -> None:
    layout = layout_of(100)[1]
    lost = staging.take(layout, 1)
    view = lost.view()
    lost.bytes[:3] = list(b"old")
    with pytest.raises(DeadlineError):
        staging.take(layout, 0.01)
    staging.abandon()
    again = staging.take(layout, 1)
    assert again is not lost
    again.bytes[:3] = list(b"new")
    assert bytes(view[:3]) == b"old"  # whoever still reads it reads what was staged
    staging.give_back()


def test_descriptors_are_given_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        staging = Staging()
        staging.take(layout_of(100)[1], 1)
        staging.close()  # a save is in flight: its memory stays until it ends
        staging.give_back()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_arena_that_is_made_ahead_of_time_is_pinned_from_the_trainers_device(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each rank of a node would have a context, with its memory, on device 0."""
    current = threading.local()  # as CUDA has it: every thread begins on device 0
    current.device = 3
    pinned_from: list[int] = []

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        before, current.device = getattr(current, "device", 0), number
        yield
        current.device = before

    def pin(_: torch.Tensor) -> bool:
        pinned_from.append(getattr(current, "device", 0))
        return False

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr("headrace.checkpoint.saving.arena._pin", pin)
    layout = layout_of(5)[1]
    assert staging.warm_up(layout)
    staging.take(layout, 30)
    staging.give_back()
    assert pinned_from == [3]


def test_every_page_is_there_before_cuda_takes_the_arena(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA would have one thread find and clear them."""
    there: list[bool] = []

    def pin(tensor: torch.Tensor) -> bool:
        pages = (ctypes.c_ubyte * (tensor.numel() // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.numel()), pages)
        there.append(all(page & 1 for page in pages))
        return False

    monkeypatch.setattr("headrace.checkpoint.saving.arena._pin", pin)
    staging.take(layout_of(9_000_000)[1], 1)
    staging.give_back()
    assert there == [True]


class Stream:
    """In the place of a CUDA stream."""

    def __init__(self, device: str) -> None:
        self.device, self.waits_for = device, list[Any]()

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device


class Event:
    """In the place of a CUDA event."""

    def record(self, stream: Stream) -> None:
        self.of = stream.device

    def wait(self, stream: Stream | None = None) -> None:
        waiting = stream or torch.cuda.current_stream()
        assert isinstance(waiting, Stream)  # the tests replace CUDA's
        waiting.waits_for.append(self.of)

    def synchronize(self) -> None:
        pass


def test_a_step_waits_for_copies_on_each_device_and_not_only_on_the_current_one(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of one process may be on several devices."""
    streams = {f"cuda:{number}": Stream(f"cuda:{number}") for number in range(2)}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device="cuda:0": streams[device])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(copying, "_copy_strided", lambda *_: None)
    tensors: Any = [
        SimpleNamespace(device=device, record_stream=lambda _: None, _version=0) for device in ("cuda:0", "cuda:1")
    ]
    specs, layout = layout_of(16, 16)
    a_copy = Copying(
        staging.pool,
        staging.take(layout, 1),
        tensors=[torch.zeros(16, dtype=torch.uint8)] * 2,
        specs=specs,
        layout=layout,
    )
    a_copy._enqueue_devices([(tensor, 0) for tensor in tensors], hold=False)
    assert not any(stream.waits_for for stream in streams.values())
    a_copy.gate()
    assert {name: stream.waits_for for name, stream in streams.items()} == {"cuda:0": ["cuda:0"], "cuda:1": ["cuda:1"]}
    staging.give_back()


def test_a_copy_can_be_read_until_the_next_save_takes_the_arena(staging: Staging) -> None:
    specs, layout = layout_of(1000)
    staging.take(layout, 1)
    copy = StagedCopy("A", b"", tuple(specs), layout)
    staging.set_copy(copy)
    staging.give_back()
    staging.set_copy(StagedCopy("B", b"", tuple(specs), layout))  # not by the owner
    assert staging.copy_of("A") is None
    staging.take(layout, 1)
    staging.set_copy(copy)
    assert staging.copy_of("A") is copy
    with staging.reading(copy) as memory:  # while the save writes it
        assert memory is not None
    staging.give_back()
    taken = threading.Event()
    with staging.reading(copy) as memory:
        assert memory is not None
        assert not staging.warm_up(layout)
        taker = threading.Thread(target=lambda: (staging.take(layout, 20), taken.set()))
        taker.start()
        while staging.copy_of("A") is not None:
            time.sleep(0.001)
        with staging.reading(copy) as none:  # no reader begins while the next save waits
            assert none is None
        assert not taken.is_set()
    taker.join(20)
    assert taken.is_set()
    with staging.reading(copy) as none:
        assert none is None


def test_a_save_that_waits_too_long_for_readers_fails(staging: Staging) -> None:
    specs, layout = layout_of(1000)
    staging.take(layout, 1)
    copy = StagedCopy("A", b"", tuple(specs), layout)
    staging.set_copy(copy)
    staging.give_back()
    with staging.reading(copy) as memory:
        assert memory is not None
        with pytest.raises(DeadlineError):
            staging.take(layout, 0.01)


def test_memory_is_freed_after_its_last_reader() -> None:
    staging = Staging()
    specs, layout = layout_of(1000)
    staging.take(layout, 1)
    copy = StagedCopy("A", b"", tuple(specs), layout)
    staging.set_copy(copy)
    staging.give_back()
    with staging.reading(copy) as memory:
        assert memory is not None
        staging.close()
        assert staging._arena is not None
    assert staging._arena is None
