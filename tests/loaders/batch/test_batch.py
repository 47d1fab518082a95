"""Batches made ahead by threads: in order, bounded, and stoppable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.dataio.core.errors import CorruptionError, DeadlineError, UsageError
from headrace.dataio.shards.sample import Files, Member, Sample
from headrace.loaders.batch import prefetcher as prefetcher_module
from headrace.loaders.batch.batch import Batch, JoinedBatch, Output, write_pixels
from headrace.loaders.batch.memory import BufferPool
from headrace.loaders.batch.prefetcher import BatchExecutor
from headrace.loaders.batch.sample_builder import PlannedBatch, PlannedRead
from headrace.loaders.interfaces import ProcessedSample, SampleLayout, SampleRef

CPU = Output(torch.device("cpu"), pinned=False)
VIDEO = SampleLayout(("video",))


def refs(*numbers: int) -> list[SampleRef]:
    return [SampleRef(0, n, Sample(n, f"key{n}", "shards/0.tar", (), 1.0)) for n in numbers]


def planned(refs: Sequence[SampleRef]) -> PlannedBatch:
    return PlannedBatch(refs, [PlannedRead({}, 0)] * len(refs))


def finished(ref: SampleRef, shape: tuple[int, ...] = (1, 3, 2, 2)) -> ProcessedSample:
    return ProcessedSample(ref.sample, {"video": torch.full(shape, ref.virtual, dtype=torch.uint8)})


@pytest.fixture
def executor() -> Iterator[Callable[..., BatchExecutor]]:
    made: list[BatchExecutor] = []

    def make(work: Callable[[SampleRef], ProcessedSample], threads: int = 2, group: int = 1) -> BatchExecutor:
        def many(some: Sequence[SampleRef], *_: object) -> list[ProcessedSample]:
            return [work(ref) for ref in some]

        made.append(BatchExecutor(many, layout=VIDEO, output=CPU, num_threads=threads, group=group))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("group", [1, 2, 16])
def test_batches_and_clips_come_in_order_whichever_is_finished_first(executor: Any, group: int) -> None:
    late_is_done = threading.Event()

    def work(ref: SampleRef) -> ProcessedSample:
        if ref.virtual == 0 and group == 1:
            assert late_is_done.wait(60)
        if ref.virtual == 5:
            late_is_done.set()
        return finished(ref)

    ahead = executor(work, 2, group)
    ahead.start(planned(refs(0, 1, 2)))
    ahead.start(planned(refs(3, 4, 5)))
    first, second = ahead.next().tensors(), ahead.next().tensors()
    assert first["id"].tolist() == [0, 1, 2]
    assert first["video"][:, 0, 0, 0, 0].tolist() == [0, 1, 2]
    assert second["key"] == ["key3", "key4", "key5"]


def test_an_error_is_raised_at_its_batch_and_not_before(executor: Any) -> None:
    def work(ref: SampleRef) -> ProcessedSample:
        if ref.virtual == 3:
            raise CorruptionError("three is bad")
        return finished(ref)

    ahead = executor(work)
    for numbers in ((0, 1), (2, 3)):
        ahead.start(planned(refs(*numbers)))
    assert ahead.next().tensors()["id"].tolist() == [0, 1]
    for _ in range(2):
        with pytest.raises(CorruptionError, match="three"):
            ahead.next()


def test_a_batch_of_which_nothing_is_ever_finished_is_a_deadline_error(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetcher_module, "STALL_SECONDS", 0.05)
    forever = threading.Event()

    def work(ref: SampleRef) -> ProcessedSample:
        forever.wait(60)
        return finished(ref)

    ahead = executor(work)
    ahead.start(planned(refs(0)))
    with pytest.raises(DeadlineError, match="no sample was finished"):
        ahead.next()
    forever.set()


def test_closing_drops_what_was_not_begun(executor: Any) -> None:
    begun: list[int] = []
    go = threading.Event()

    def work(ref: SampleRef) -> ProcessedSample:
        begun.append(ref.virtual)
        go.wait(60)
        return finished(ref)

    ahead = executor(work, threads=1)
    ahead.start(planned(refs(*range(50))))
    threading.Timer(0.05, go.set).start()
    ahead.close()
    assert len(begun) <= 1
    assert len(ahead) == 0


def test_clips_of_unequal_shape_name_the_sample(executor: Any) -> None:
    ahead = executor(lambda ref: finished(ref, (1, 3, 2, 2 + ref.virtual)), threads=1)
    ahead.start(planned(refs(0, 1)))
    with pytest.raises(UsageError, match="'key1'"):
        ahead.next()


def test_a_batch_of_no_clips_has_no_video(executor: Any) -> None:
    ahead = executor(finished)
    ahead.start(planned([]))
    batch = ahead.next().tensors()
    assert batch["video"] is None
    assert len(batch["id"]) == 0


def test_pixels_drawn_in_a_batchs_memory_are_in_the_batch_without_a_copy() -> None:
    batch = Batch(2, layout=VIDEO, output=CPU, buffers=BufferPool(CPU.device))
    target = batch.target(1)
    assert target is not None
    drawn = target((1, 3, 2, 2))
    assert drawn is not None
    drawn[:] = 7
    second, first = refs(1, 0)
    batch.put(1, ProcessedSample(second.sample, {"video": torch.from_numpy(drawn)}))
    batch.put(0, finished(first))
    video = batch.tensors()["video"]
    assert video.flatten(1).tolist() == [[0] * 12, [7] * 12]
    drawn[:] = 8
    assert video[1].unique().tolist() == [8]


def test_a_batch_offers_no_memory_for_pixels_that_are_converted_or_have_another_shape() -> None:
    floats = Output(CPU.device, pinned=False, dtype=torch.float16)
    turned = Output(CPU.device, pinned=False, axes="THWC")
    for output in (floats, turned):
        assert Batch(1, layout=VIDEO, output=output, buffers=BufferPool(CPU.device)).target(0) is None
    batch = Batch(2, layout=VIDEO, output=CPU, buffers=BufferPool(CPU.device))
    batch.put(0, finished(refs(0)[0]))
    target = batch.target(1)
    assert target is not None
    assert target((2, 3, 2, 2)) is None


def test_a_batch_whose_samples_were_all_left_out_after_they_were_drawn_has_no_video() -> None:
    batch = Batch(1, layout=VIDEO, output=CPU, buffers=BufferPool(CPU.device))
    target = batch.target(0)
    assert target is not None
    assert target((1, 3, 2, 2)) is not None
    batch.put(0, ProcessedSample(refs(0)[0].sample, {}))
    assert batch.tensors()["video"] is None


class RecordingPool(BufferPool):
    """Knows what it lent: with `device="pinned"`, what is pinned."""

    def __init__(self) -> None:
        super().__init__(CPU.device)
        self.addresses = set[int]()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = super().empty(shape, dtype)
        self.addresses.add(made.data_ptr())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_which_something_was_left_out_is_in_memory_of_the_ring_too(dtype: torch.dtype) -> None:
    ring = RecordingPool()
    batch = Batch(3, layout=VIDEO, output=Output(CPU.device, pinned=False, dtype=dtype), buffers=ring)
    for slot, ref in enumerate(refs(0, 1, 2)):
        batch.put(slot, ProcessedSample(ref.sample, {}) if slot == 1 else finished(ref))
    video = batch.tensors()["video"]
    assert (video * 255).round().flatten(1).tolist() == [[0] * 12, [2] * 12]
    assert video.data_ptr() in ring.addresses


@pytest.mark.parametrize("other", [None, 5])
def test_files_of_which_something_was_left_out_or_replaced_are_in_memory_of_the_ring_too(other: int | None) -> None:
    ring, layout = RecordingPool(), SampleLayout(("bytes",))
    files = [Files("shards/0.tar", (Member("bin", 512 * n, 3, 0),)) for n in range(3)]
    batch = JoinedBatch(files, layout=layout, output=CPU, buffers=ring)
    for slot, ref in enumerate(refs(0, 1, 2)):
        long = 3 if slot != 1 else other
        tensors = {} if long is None else {"bytes": torch.full((long,), slot, dtype=torch.uint8)}
        batch.put(slot, ProcessedSample(ref.sample, tensors))
    joined = batch.tensors()["bytes"]
    assert joined.tolist() == [0] * 3 + [1] * (other or 0) + [2] * 3
    assert joined.data_ptr() in ring.addresses


class TransferCounter(TorchDispatchMode):
    """Notes what goes from main memory to another device: how many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        if isinstance(made, torch.Tensor) and isinstance(given, torch.Tensor) and made.device != given.device:
            self.nbytes += given.nbytes
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("axes", ["TCHW", "THWC"])
def test_pixels_that_a_processor_decoded_go_to_the_device_as_bytes_and_become_floats_there(
    dtype: torch.dtype, axes: str
) -> None:
    there, video = torch.device("meta"), torch.zeros(4, 3, 8, 6, dtype=torch.uint8)
    shape = (4, 3, 8, 6) if axes == "TCHW" else (4, 8, 6, 3)
    output = Output(there, False, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), dtype=dtype, axes=axes)
    with TransferCounter() as crossing:
        write_pixels(torch.empty(shape, dtype=dtype, device=there), video, output)
    assert crossing.nbytes == video.nbytes + 2 * 3 * 4, "the pixels, and three numbers twice"


def test_all_that_goes_into_a_batch_is_held_until_the_trainers_stream_has_read_it() -> None:
    files = [Files("shards/0.tar", (Member("bin", 512 * n, 3, 0),)) for n in range(2)]
    batch = JoinedBatch(files, layout=SampleLayout(("bytes",)), output=CPU, buffers=BufferPool(CPU.device))
    for slot, (ref, length) in enumerate(zip(refs(0, 1), (3, 5), strict=True)):
        batch.put(slot, ProcessedSample(ref.sample, {"bytes": torch.zeros(length, dtype=torch.uint8)}))
    assert sorted(len(tensor) for tensor in batch._all_tensors()) == [5, 6]
