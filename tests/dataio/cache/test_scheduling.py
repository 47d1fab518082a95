"""Whose fetch goes next."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.cache.engine import Engine
from headrace.dataio.cache.scheduling import FairQueue, JobLimits
from tests.support.memory_store import MemoryStore

MIB = 1 << 20


def filled(limits: JobLimits, **waiting: int) -> FairQueue[str]:
    """Jobs with so many fetches of 1 MiB each."""
    turns: FairQueue[str] = FairQueue(limits)
    for name, number in waiting.items():
        for _ in range(number):
            turns.add(name, name, MIB)
    return turns


def test_a_job_that_asks_for_one_block_waits_for_one_block_of_the_other() -> None:
    turns = filled(JobLimits(), greedy=1000)
    assert [turns.next(0.0) for _ in range(10)] == ["greedy"] * 10
    turns.add("modest", "modest", MIB)
    assert "modest" in {turns.next(0.0), turns.next(0.0)}


def test_jobs_share_by_bytes_and_not_by_requests() -> None:
    turns: FairQueue[str] = FairQueue()
    for _ in range(100):
        turns.add("large", "large", 4 * MIB)
        turns.add("small", "small", MIB)
    given_ = Counter(turns.next(0.0) for _ in range(50))
    assert given_["small"] == 4 * given_["large"]


def test_a_job_that_was_idle_does_not_catch_up() -> None:
    turns = filled(JobLimits(), first=100)
    for _ in range(50):
        turns.next(0.0)
    for _ in range(50):
        turns.add("second", "second", MIB)
    assert Counter(turns.next(0.0) for _ in range(20)) == {"first": 10, "second": 10}


def test_what_belongs_to_no_job_goes_first() -> None:
    turns = filled(JobLimits(connections=1), a=2)
    turns.add_first("size of an object")
    assert [turns.next(0.0), turns.next(0.0), turns.next(0.0)] == ["size of an object", "a", None]


def test_what_does_not_fit_is_left_where_it_is() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.add("a1", "a", 1)
    turns.add("a2", "a", 1)
    assert turns.next(0.0, lambda item: item != "a1") is None
    assert turns.next(0.0, lambda item: item != "a2") == "a1"
    turns.add_first("job")
    assert turns.next(0.0, lambda item: item != "job") is None
    assert [turns.next(0.0), turns.next(0.0), turns.next(0.0)] == ["job", "a2", None]


def test_connections_and_bytes_in_flight_are_limited_for_each_job() -> None:
    turns = filled(JobLimits(connections=2), a=5, b=5)
    assert Counter(turns.next(0.0) for _ in range(5)) == {"a": 2, "b": 2, None: 1}
    turns.done("a", MIB, 0.0)
    assert [turns.next(0.0), turns.next(0.0)] == ["a", None]
    turns = filled(JobLimits(bytes_in_flight=3 * MIB), a=5)
    assert [turns.next(0.0) for _ in range(4)] == ["a", "a", "a", None]


def test_a_fetch_above_the_limit_goes_by_itself() -> None:
    turns = filled(JobLimits(bytes_in_flight=10), a=2)
    assert [turns.next(0.0), turns.next(0.0)] == ["a", None]
    turns.done("a", MIB, 0.0)
    assert turns.next(0.0) == "a"


def test_bandwidth_is_paid_for_before_the_next_fetch() -> None:
    turns = filled(JobLimits(bandwidth=2 * MIB), a=3)
    assert [turns.next(10.0), turns.next(10.4), turns.wake_in(10.4)] == ["a", None, 10.5 - 10.4]
    assert turns.next(10.5) == "a"
    turns.limit(JobLimits())
    assert turns.next(10.5) == "a"


def test_a_job_that_is_over_is_forgotten() -> None:
    turns = filled(JobLimits(), a=1)
    assert turns.report() == {"a": {"waiting": 1, "connections": 0, "bytes_in_flight": 0}}
    turns.next(0.0)
    turns.done("a", MIB, 0.0)
    assert turns.report() == {}
    assert not turns


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=60),
    st.integers(0, 4),
    st.integers(0, 150),
    st.integers(0, 500),
)
def test_everything_is_given_once_in_its_jobs_order_within_the_limits(
    asked: list[tuple[str, int]], connections: int, size: int, bandwidth: int
) -> None:
    turns: FairQueue[tuple[str, int, int]] = FairQueue(JobLimits(connections, size, bandwidth))
    for number, (name, cost) in enumerate(asked):
        turns.add((name, cost, number), name, cost)
    now, flying, order = 0.0, list[tuple[str, int, int]](), list[tuple[str, int, int]]()
    while len(order) < len(asked):
        if (item := turns.next(now)) is not None:
            flying.append(item)
            order.append(item)
            for name in "abc":
                own = [cost for owner, cost, _ in flying if owner == name]
                assert not connections or len(own) <= connections
                assert not size or sum(own) <= size or len(own) == 1
        elif flying:
            name, cost, _ = flying.pop(0)
            turns.done(name, cost, now)
        else:
            wait = turns.wake_in(now)
            assert wait is not None, "nothing is left lying"
            now += wait + 1e-9
    for name in "abc":
        numbers = [number for owner, _, number in order if owner == name]
        assert numbers == sorted(numbers)
    if bandwidth:
        for name in "abc":
            costs = [cost for owner, cost, _ in order if owner == name]
            assert sum(costs[:-1]) <= now * bandwidth + 1e-3


def test_in_the_engine_a_job_with_many_blocks_waiting_does_not_keep_another_waiting(tmp_path: Path) -> None:
    store = MemoryStore(greedy=bytes(40 * 4096), modest=bytes(4096))
    engine = Engine(tmp_path, 100 * 4096, threads=2, block_bytes=4096)
    engine.assign(1, "greedy")
    engine.assign(2, "modest")
    for key in store.objects:  # their sizes are known
        engine.open(store, key, []).result(60)
    store.gate.clear()
    many = [engine.open(store, "greedy", [(4096 * n, 4096)], 1) for n in range(40)]
    while len(store.reads) < 2:
        time.sleep(0.001)
    one = engine.open(store, "modest", [(0, 4096)], 2)
    assert engine.queue_stats()["greedy"]["waiting"] == 38
    assert engine.queue_stats()["modest"]["waiting"] == 1
    store.gate.set()
    assert one.result(60) is not None
    assert all(future.result(60) is not None for future in many)
    place = [key for key, _, _ in store.reads].index("modest")
    assert place < 5, f"its turn came after {place} of 40 blocks of the other"
    engine.close()


def test_in_the_engine_limits_hold_and_change_while_it_runs(tmp_path: Path) -> None:
    store = MemoryStore(a=bytes(40 * 4096))
    engine = Engine(tmp_path, 100 * 4096, threads=8, block_bytes=4096)
    engine.limit(JobLimits(connections=2))
    engine.open(store, "a", []).result(60)
    store.gate.clear()
    futures = [engine.open(store, "a", [(4096 * n, 4096)], 1) for n in range(20)]
    while len(store.reads) < 2:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(store.reads) == 2, "six threads have nothing to do"
    engine.limit(JobLimits(connections=6))
    while len(store.reads) < 6:
        time.sleep(0.001)
    assert engine.queue_stats()["1"]["connections"] == 6
    store.gate.set()
    assert all(future.result(60) is not None for future in futures)
    engine.close()
