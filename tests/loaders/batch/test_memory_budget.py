"""The budget of bytes in flight."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.loaders.batch.memory import Closed, MemoryBudget


def test_what_is_admitted_together_never_exceeds_the_limit() -> None:
    memory = MemoryBudget(100)
    most, lock, now = 0, threading.Lock(), 0

    def work(size: int) -> None:
        nonlocal most, now
        for _ in range(50):
            with memory.admitted(size):
                with lock:
                    now += size
                    most = max(most, now)
                with lock:
                    now -= size

    threads = [threading.Thread(target=work, args=(size,)) for size in (10, 35, 40, 60, 99)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most <= 100
    assert 0 < memory.peak <= 100
    assert memory.used == 0


def test_a_sample_larger_than_the_limit_runs_alone_and_in_its_turn() -> None:
    memory = MemoryBudget(10)
    events: list[str] = []
    first_in, go = threading.Event(), threading.Event()

    def small(name: str) -> None:
        with memory.admitted(5):
            events.append(name)
            first_in.set()
            go.wait(60)

    def large() -> None:
        with memory.admitted(1000):
            events.append("large")
            assert memory.used == 1000

    threads = [threading.Thread(target=small, args=("first",))]
    threads[0].start()
    assert first_in.wait(60)
    threads.append(threading.Thread(target=large))
    threads[1].start()
    deadline = time.monotonic() + 60
    while not memory.waits and time.monotonic() < deadline:
        time.sleep(0.001)
    threads.append(threading.Thread(target=small, args=("late",)))  # would fit, but comes after the large one
    threads[2].start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert events == ["first", "large", "late"]


def test_closing_raises_in_waiting_threads() -> None:
    memory = MemoryBudget(10)
    closed_seen = threading.Event()

    def wait() -> None:
        with pytest.raises(Closed), memory.admitted(10):
            pass
        closed_seen.set()

    with memory.admitted(10):
        thread = threading.Thread(target=wait)
        thread.start()
        deadline = time.monotonic() + 60
        while not memory.waits and time.monotonic() < deadline:
            time.sleep(0.001)
        memory.close()
        thread.join(60)
    assert closed_seen.is_set()
