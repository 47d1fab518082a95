"""What comes next is looked up several batches at a time, and what goes wrong with one takes nothing from those before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from headrace.dataio.core.errors import CorruptionError
from headrace.dataio.shards.sample import Member, Sample
from headrace.loaders.batch.batch import Output
from headrace.loaders.batch.memory import MemoryBudget
from headrace.loaders.batch.prefetcher import ANNOUNCED_BATCHES, PLANNED_AT_ONCE, BatchExecutor, Build, Prefetcher
from headrace.loaders.batch.sample_builder import SampleBuilder
from headrace.loaders.fetch.sample_reader import Range
from headrace.loaders.file_loader import FileProcessor
from headrace.loaders.interfaces import FileTarget, ProcessedSample, SampleRef
from headrace.loaders.quarantine.quarantine import Quarantine

Batches = Iterator[Sequence[SampleRef]]
AT_MOST = ANNOUNCED_BATCHES + PLANNED_AT_ONCE


def ref(number: int) -> SampleRef:
    return SampleRef(0, number, Sample(number, f"key{number}", "shard", (Member("bin", 512 * number, 3, 0),), 0.0))


class RecordingReader:
    """A reader that records the announced reads."""

    def __init__(self) -> None:
        self.announcements: list[list[Range]] = []
        self.announced = threading.Semaphore(0)

    def announce(self, upcoming: Sequence[Range]) -> None:
        self.announcements.append(list(upcoming))
        self.announced.release()

    def close(self) -> None:
        pass


def made(refs: Sequence[SampleRef], targets: Sequence[Any], *_: object) -> list[ProcessedSample]:
    """Every byte of a sample is its number."""
    for one, target in zip(refs, targets, strict=True):
        assert isinstance(target, FileTarget)
        target.memory[:] = bytes([one.sample.id] * len(target.memory))
    return [ProcessedSample(one.sample, {"bytes": torch.empty(0)}, {"sizes": [3]}, in_place=True) for one in refs]


def deliver(ahead: Prefetcher) -> Any:
    """The next batch, as a loader goes on."""
    batch = ahead.next()
    ahead.plan()
    return batch


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Prefetcher, RecordingReader]]]:
    begun = list[Prefetcher]()

    def start(batches: Batches, build: Build = made) -> tuple[Prefetcher, RecordingReader]:
        processor, source, memory = FileProcessor(["bin"]), RecordingReader(), MemoryBudget(1 << 30)
        plan: Any = None
        builder = SampleBuilder(plan, processor, [source], quarantine=Quarantine(0), memory=memory)  # type: ignore[list-item]
        executor = BatchExecutor(
            build, layout=processor.layout, output=Output(torch.device("cpu"), pinned=False), num_threads=2, group=2
        )
        begun.append(Prefetcher(batches, builder, executor, ahead=2, memory=memory))
        return begun[-1], source

    yield start
    for one in begun:
        one.close()


def test_batches_come_in_order_and_are_announced_several_at_a_time(start: Any) -> None:
    ahead, source = start([ref(2 * n % 256), ref((2 * n + 1) % 256)] for n in range(10**9))
    for number in range(60):
        batch = deliver(ahead).tensors()
        assert batch["bytes"].tolist() == [2 * number] * 3 + [2 * number + 1] * 3
    assert source.announced.acquire(timeout=60)
    assert all(len(announcements) <= 2 * (AT_MOST + 3) for announcements in source.announcements)
    assert len(source.announcements) <= 2 + (60 + 3) / PLANNED_AT_ONCE  # the first by itself, the others not one by one


def test_the_first_batch_is_announced_by_itself_and_nothing_else_looked_up_until_it_is_there(start: Any) -> None:
    seen, announcements = list[int](), list[list[Range]]()

    def batches() -> Batches:
        for n in range(10**9):
            seen.append(n)
            yield [ref(n)]

    def make(refs: Sequence[SampleRef], targets: Sequence[Any], *_: object) -> list[ProcessedSample]:
        if refs[0].sample.id == 0:
            assert source.announced.acquire(timeout=60)
            ahead._executor.run(int).result(60)  # whatever else the other thread was asked for is done
            announcements.extend(source.announcements)
            announcements.append([("looked up", n, 0) for n in seen])
        return made(refs, targets)

    ahead, source = start(batches(), make)
    deliver(ahead)
    assert announcements == [[("shard", 0, 3)], [("looked up", 0, 0)]]
    assert source.announced.acquire(timeout=60)
    assert [deliver(ahead).tensors()["id"].tolist() for _ in range(20)] == [[n] for n in range(1, 21)]


def test_what_is_in_the_making_is_announced_before_what_is_due_later(start: Any) -> None:
    begun = threading.Event()

    def batches() -> Batches:
        for n in range(10**9):
            assert n < 4 or begun.wait(60)
            yield [ref(n)]

    def make(refs: Sequence[SampleRef], targets: Sequence[Any], *_: object) -> list[ProcessedSample]:
        if refs[0].sample.id == 1:
            begun.set()
            assert source.announced.acquire(timeout=60)
        return made(refs, targets)

    ahead, source = start(batches(), make)
    deliver(ahead)
    assert source.announced.acquire(timeout=60)
    deliver(ahead)
    assert source.announcements[1][:5] == [("shard", 512 * n, 3) for n in range(1, 6)]


def test_batches_are_looked_up_by_the_threads_that_make_them_one_at_a_time(start: Any) -> None:
    inside, threads, most = list[int](), set[str](), 0

    class SlowSource:  # no generator, which would refuse a second thread by itself
        def __iter__(self) -> Batches:
            return self

        def __next__(self) -> Sequence[SampleRef]:
            nonlocal most
            inside.append(0)
            most = max(most, len(inside))
            threads.add(threading.current_thread().name)
            time.sleep(0.01)  # long enough for another one to come in
            inside.pop()
            return [ref(0)]

    ahead, _ = start(SlowSource())
    for _ in range(12):
        deliver(ahead)
    ahead.close()
    assert most == 1
    assert {name.rpartition("_")[0] for name in threads - {"MainThread"}} == {"headrace-loader"}


def test_what_goes_wrong_when_a_batch_is_announced_is_raised_before_the_next(start: Any) -> None:
    ahead, source = start([ref(n)] for n in range(10**9))

    def announce(_: Sequence[Range]) -> None:
        raise CorruptionError("the announcement failed")

    source.announce = announce
    deliver(ahead)
    with pytest.raises(CorruptionError, match="the announcement failed"):
        deliver(ahead)


def test_what_cannot_be_looked_up_is_raised_where_it_is_due(start: Any) -> None:
    def batches() -> Batches:
        yield from ([ref(n)] for n in range(5))
        raise CorruptionError("the index is damaged")

    ahead, _ = start(batches())
    assert [deliver(ahead).tensors()["id"].tolist() for _ in range(5)] == [[n] for n in range(5)]
    for _ in range(2):
        with pytest.raises(CorruptionError, match="index"):
            deliver(ahead)


def test_closing_waits_for_one_look_up_and_not_for_all_that_were_asked_for(start: Any) -> None:
    reached, go_on, seen = threading.Event(), threading.Event(), list[int]()

    def batches() -> Batches:
        for n in range(10**9):
            seen.append(n)
            if n == 5:
                reached.set()
                go_on.wait(60)
            yield [ref(n)]

    ahead, _ = start(batches())
    deliver(ahead)
    assert reached.wait(60)
    closing = threading.Thread(target=ahead.close)
    closing.start()
    while ahead._failed is None:
        time.sleep(0.001)
    go_on.set()
    closing.join(60)
    assert not closing.is_alive()
    assert seen == list(range(6))
