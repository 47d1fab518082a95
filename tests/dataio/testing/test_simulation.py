"""Virtual time: order, waits, killed and stopped processes, and a store whose answers are lost, late or doubled."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import ModuleType

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core.errors import AmbiguousWriteError, NotFoundError, TransientError
from headrace.dataio.store.base import ObjectInfo, Store
from headrace.dataio.testing.folder_conformance import NAMES
from headrace.dataio.testing.simulation.collectives import Group, SimulatedRanks
from headrace.dataio.testing.simulation.scheduler import Process, Signal, Simulation, StuckError
from headrace.dataio.testing.simulation.store import PAGE, Bucket, Faults, SimulatedStore
from headrace.dataio.testing.simulation.threads import patched


def order_of(seed: int) -> tuple[tuple[str, float], ...]:
    simulation, order = Simulation(seed), list[tuple[str, float]]()

    def work(name: str) -> None:
        for _ in range(3):
            simulation.sleep(1.0)
            order.append((name, simulation.now))

    for name in "abc":
        simulation.start(work, name)
    simulation.run()
    return tuple(order)


def test_one_seed_repeats_one_history_and_seeds_differ() -> None:
    assert order_of(1) == order_of(1)
    assert len({order_of(seed) for seed in range(20)}) > 5


def test_an_hour_of_waiting_takes_no_time_at_all() -> None:
    simulation, began = Simulation(), time.monotonic()
    simulation.start(simulation.clock.sleep, 3600.0)
    simulation.run()
    assert simulation.now == 3600.0
    assert time.monotonic() - began < 60


def test_a_wait_without_end_is_an_error_that_names_the_task() -> None:
    simulation = Simulation()
    simulation.start(Signal(simulation).wait, name="forgotten")
    with pytest.raises(StuckError, match="forgotten"):
        simulation.run()


def test_a_task_that_polls_for_ever_ends_at_the_limit() -> None:
    simulation = Simulation(limit=100.0)

    def poll() -> None:
        while True:
            simulation.sleep(1.0)

    simulation.start(poll)
    with pytest.raises(StuckError, match="poll still waits after 100 s"):
        simulation.run()


def test_an_error_of_a_task_is_kept() -> None:
    simulation = Simulation()

    def fail() -> None:
        raise ValueError("as planned")

    task = simulation.start(fail)
    simulation.run()
    assert str(task.error) == "as planned"


def test_a_signal_wakes_all_that_wait_and_a_time_limit_ends_a_wait() -> None:
    simulation, found = Simulation(), list[tuple[bool, float]]()
    signal = Signal(simulation)

    def wait(timeout: float | None) -> None:
        found.append((signal.wait(timeout), simulation.now))

    for timeout in (None, 5.0, 50.0):
        simulation.start(wait, timeout)
    simulation.later(10.0, signal.set)
    simulation.run()
    assert sorted(found) == [(False, 5.0), (True, 10.0), (True, 10.0)]


def test_a_killed_process_writes_nothing_more_not_even_while_it_cleans_up() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, latency=1.0)
    store, victim = SimulatedStore(bucket), Process("victim")

    def work() -> None:
        try:
            store.put("first", b"1")
            store.put("second", b"2")
        finally:
            store.put("cleaned", b"3")

    simulation.start(work, process=victim)
    simulation.later(1.2, lambda: simulation.kill(victim))
    simulation.run()
    assert sorted(bucket.objects) == ["first"]


def test_a_stopped_process_goes_on_later() -> None:
    simulation, at = Simulation(), list[float]()
    process = Process("stopped")

    def work() -> None:
        simulation.sleep(1.0)
        at.append(simulation.now)

    simulation.start(work, process=process)
    simulation.later(0.5, lambda: simulation.pause(process, 100.0))
    simulation.run()
    assert at == [100.5]


def test_cpu_time_of_deliveries_and_of_the_collector_is_charged_to_no_process() -> None:
    simulation, process = Simulation(measure_cpu=True), Process("receiver")
    group, collects = Group(simulation, 1), list[bool]()

    def deliver(given: object) -> object:
        collects.append(gc.isenabled())
        spend(0.2)
        return given

    def work() -> None:
        group.exchange(0, b"", deliver, lambda _: 0)
        spend(0.02)

    simulation.start(work, process=process)
    assert gc.isenabled()
    simulation.run()
    assert gc.isenabled()
    assert collects == [False]
    assert 0.02 <= process.cpu < 0.2


def spend(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("charge", [False, True])
def test_cpu_time_is_measured_and_passes_if_it_is_charged(charge: bool) -> None:
    simulation, process = Simulation(measure_cpu=True, charge_cpu=charge), Process("busy")

    def work() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        simulation.sleep(1.0)

    simulation.start(work, process=process)
    simulation.run()
    assert process.cpu >= 0.02
    assert (simulation.now >= 1.02) == charge


# threads


def a_module() -> ModuleType:
    module = ModuleType("a_module")
    names = {"threading": threading, "ThreadPoolExecutor": ThreadPoolExecutor, "SimpleQueue": SimpleQueue, "time": time}
    for name, value in names.items():
        setattr(module, name, value)
    return module


def test_threads_queues_pools_and_clocks_of_a_module_wait_in_virtual_time() -> None:
    simulation, module, found = Simulation(), a_module(), dict[str, object]()

    def work() -> None:
        arrived = module.SimpleQueue()

        def send() -> None:
            module.time.sleep(30.0)
            arrived.put("late")

        def slowly(number: int) -> int:
            simulation.sleep(10.0)
            return number

        thread = module.threading.Thread(target=send, name="sender")
        thread.start()
        with pytest.raises(queue.Empty):
            arrived.get(timeout=10.0)
        found["waited"] = module.time.monotonic()
        found["item"] = arrived.get()
        thread.join()
        found["alive"] = thread.is_alive()
        with module.ThreadPoolExecutor(2) as pool:
            began = simulation.now
            found["mapped"] = list(pool.map(slowly, range(4)))
            found["pool"] = simulation.now - began
            failed = pool.submit(lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                failed.result()
        over = module.threading.Event()
        found["event"] = over.wait(5.0)
        over.set()
        assert over.wait(5.0)

    with patched(simulation, module):
        task = simulation.start(work)
        simulation.run()
    assert task.error is None
    assert found == {
        "waited": 10.0,
        "item": "late",
        "alive": False,
        "mapped": [0, 1, 2, 3],
        "pool": 20.0,  # four jobs of 10 s, two at once
        "event": False,
    }
    assert module.threading is threading
    assert module.SimpleQueue is SimpleQueue


# the store


def in_a_task(simulation: Simulation, work: Callable[[], object]) -> object:
    task = simulation.start(work)
    simulation.run()
    if task.error is not None:
        raise task.error
    return task.result


def test_the_store_keeps_the_contract_of_stores() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, latency=0.5)
    store = SimulatedStore(bucket)

    def work() -> None:
        assert store.put_if_absent("a/1", b"one")
        assert not store.put_if_absent("a/1", b"two")
        store.put("a/2", b"0123456789")
        assert store.put_multipart("b", [b"x", b"y"]) == 2
        assert store.get("a/1") == b"one"
        buffer = bytearray(3)
        store.get_into("a/2", 4, memoryview(buffer))
        assert buffer == b"456"
        assert [info.key for info in store.list("a/")] == ["a/1", "a/2"]
        assert store.stat("b") == ObjectInfo("b", 2, 1_700_000_001.0)
        store.delete_many(["a/1", "missing"])
        assert not store.exists("a/1")
        with pytest.raises(NotFoundError):
            store.get("a/1")

    in_a_task(simulation, work)
    assert bucket.requests == {"PUT": 4, "GET": 3, "LIST": 1, "HEAD": 2, "DELETE": 1}
    assert simulation.now == 0.5 * sum(bucket.requests.values())


def test_a_listing_takes_one_request_a_page() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation)
    for number in range(2 * PAGE + 1):
        bucket.apply_put(f"keys/{number:05d}", b"")
    bucket.apply_put("other", b"")
    assert in_a_task(simulation, lambda: sum(1 for _ in SimulatedStore(bucket).list("keys/"))) == 2 * PAGE + 1
    assert bucket.requests["LIST"] == 3


def test_a_listing_of_folders_takes_one_request_for_each_page_of_folders_whatever_they_hold() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, latency=0.5)
    folders = [f"{number:05}" for number in range(2 * PAGE + 500)]
    for key in ("object", *(f"runs/{name}/{n}" for name in folders for n in range(3)), "runs/object", "z/x"):
        bucket.apply_put(key, b"")
    store = SimulatedStore(bucket)
    assert in_a_task(simulation, lambda: list(store.list_folders("runs/"))) == folders
    assert in_a_task(simulation, lambda: list(store.list_folders("runs/", after=folders[1499]))) == folders[1500:]
    assert bucket.requests == {"LIST": 3 + 2}
    assert simulation.now == 0.5 * (3 + 2)


def test_a_listing_of_folders_has_the_faults_of_a_listing() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, faults=Faults(refused=1.0))
    with pytest.raises(TransientError, match="refused"):
        in_a_task(simulation, lambda: list(SimulatedStore(bucket).list_folders()))
    assert bucket.fired == {"refused": 1}


@given(keys=st.lists(st.lists(st.sampled_from(NAMES), max_size=3).map("/".join)), after=st.sampled_from(["", *NAMES]))
def test_the_folders_of_a_simulated_store_are_those_of_its_keys(keys: list[str], after: str) -> None:
    simulation = Simulation()
    bucket = Bucket(simulation)
    for key in keys:
        bucket.apply_put(f"{key}.x", b"")

    def work() -> None:
        store = SimulatedStore(bucket)
        for prefix in ("", "a/", "a-b/"):
            expected = list(Store.list_folders(store, prefix, after=after))
            assert list(store.list_folders(prefix, after=after)) == expected

    in_a_task(simulation, work)


def test_a_limit_of_requests_makes_them_wait_for_each_other() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, latency=0.0, rate=100.0)
    for number in range(200):
        simulation.start(SimulatedStore(bucket).put, f"k{number}", b"")
    simulation.run()
    assert simulation.now == pytest.approx(2.0)


def test_a_late_request_is_applied_after_its_client_gave_up_also_over_a_newer_object() -> None:
    simulation = Simulation(3)
    bucket = Bucket(simulation, faults=Faults(late=1.0, late_seconds=900.0, patience=5.0))
    store = SimulatedStore(bucket)

    def work() -> None:
        with pytest.raises(TransientError):
            store.put("key", b"early")
        bucket.faults = Faults()
        store.put("key", b"newer")
        assert store.get("key") == b"newer"
        simulation.sleep(900.0)
        assert store.get("key") == b"early"

    in_a_task(simulation, work)
    assert bucket.fired == {"late": 1}


def test_a_lost_answer_of_a_conditional_write_is_settled_by_reading_back() -> None:
    simulation = Simulation()
    bucket = Bucket(simulation, faults=Faults(lost=0.5))
    store, won = SimulatedStore(bucket), list[str]()

    def work(name: str) -> None:
        try:
            if store.put_if_absent("key", name.encode()):
                won.append(name)
        except AmbiguousWriteError:
            pass

    for number in range(8):
        simulation.start(work, f"writer {number}")
    simulation.run()
    assert bucket.fired["lost"] > 0
    assert won in ([], [bucket.objects["key"][0].decode()])


# ranks


def test_ranks_agree_and_exchange_parts() -> None:
    simulation, found = Simulation(), dict[int, object]()
    group = Group(simulation, 3)

    def work(rank: int) -> None:
        ranks = SimulatedRanks(group, rank)
        simulation.sleep(rank)
        found[rank] = (
            ranks.gather(bytes([rank])),
            ranks.maximum(bytes([rank, 5 - rank])),
            ranks.broadcast(b"root" if rank == 0 else b""),
            ranks.all_to_all({to: bytes([rank, to]) for to in range(rank, 3)}),
        )

    for rank in range(3):
        simulation.start(work, rank)
    simulation.run()
    for rank in range(3):
        sent = {source: bytes([source, rank]) for source in range(rank + 1)}
        assert found[rank] == ([b"\0", b"\1", b"\2"], b"\2\5", b"root", sent)


def test_ranks_do_not_wait_for_ever_for_one_that_is_gone() -> None:
    simulation, found = Simulation(), list[str]()
    group = Group(simulation, 2, timeout=60.0)

    def work() -> None:
        with pytest.raises(TransientError) as caught:
            SimulatedRanks(group, 0).gather(b"")
        found.append(str(caught.value))

    simulation.start(work)
    simulation.run()
    assert found == ["rank 1 did not take part (see that rank's log)"]
    assert simulation.now == 60.0
