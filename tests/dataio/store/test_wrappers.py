"""The wrappers: each keeps the contract, and what happens at its bound."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.dataio.core.errors import (
    AccessDeniedError,
    AmbiguousWriteError,
    CapacityError,
    CorruptionError,
    DeadlineError,
    HeadraceError,
    SlowDownError,
    TransientError,
)
from headrace.dataio.core.metrics import REGISTRY
from headrace.dataio.store.base import Store
from headrace.dataio.store.hedge import Hedge, HedgePolicy
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.retry import Policy, Retry
from headrace.dataio.store.wrappers import Admission, Budget, Limit, MetricsStore, Ticket, Trace
from headrace.dataio.testing.conformance import StoreConformance
from headrace.dataio.testing.faulty_stores import Fault, Faulty, Rule
from headrace.dataio.testing.system import ManualClock

MIB = 1 << 20


@contextlib.contextmanager
def _span(name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
    yield


def _eager(inner: Store) -> Store:
    """Every read in a second thread, and the slower half twice."""
    tail = HedgePolicy(percentile=0.5, share=1.0, floor=0.0)
    for size in (0, *(1 << n for n in range(64))):
        for _ in range(20):
            tail.end(size, 0.0)
    return Hedge(inner, tail)


_WRAPPINGS: dict[str, Callable[[Store], Store]] = {
    "hedge": _eager,
    "limit": lambda inner: Limit(inner, Budget(64 * MIB, 4)),
    "trace": lambda inner: Trace(inner, _span),
    "faulty and retry": lambda inner: Retry(
        Faulty(inner, [Rule(Fault.TRANSIENT, "get", times=1), Rule(Fault.LOST_ANSWER, "put", times=1)]),
        Policy(first=0.001),
    ),
}


class TestWrapped(StoreConformance):
    many, racers = 30, 4

    @pytest.fixture(params=_WRAPPINGS)
    def store(self, request: pytest.FixtureRequest, store_url: str) -> Iterator[Store]:
        with _WRAPPINGS[request.param](PosixStore(store_url)) as wrapped:
            yield wrapped

    @pytest.fixture
    def store_url(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")

    # processes and kills are the back-end's own affair
    test_of_many_processes_one_wins = None  # type: ignore[assignment]
    test_a_killed_writer_leaves_what_was_there = None  # type: ignore[assignment]


@pytest.fixture
def posix(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "store")


# limit


class AdmissionMachine(RuleBasedStateMachine):
    """Random arrivals and departures: the bounds hold and none overtakes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Admission(bytes=100, requests=3, waiting=5, timeout=10.0)
        self.present: list[Ticket] = []
        self.now = 0.0

    @rule(cost=st.integers(0, 120))
    def arrive(self, cost: int) -> None:
        full = len(self.state.queue) >= 5
        try:
            self.present.append(self.state.ask(cost, self.now))
            assert cost <= 100
            assert not full
        except CapacityError:
            assert cost > 100 or full

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.present))
        self.present.remove(ticket)
        self.state.leave(ticket)

    @rule(seconds=st.floats(0, 20))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for ticket in self.present:
            assert self.state.expired(ticket, self.now) == (not ticket.admitted and self.now >= ticket.deadline)

    @invariant()
    def bounds_hold(self) -> None:
        admitted = [ticket for ticket in self.present if ticket.admitted]
        assert (self.state.used, self.state.active) == (sum(t.cost for t in admitted), len(admitted))
        assert self.state.used <= 100
        assert self.state.active <= 3
        waiting = [ticket for ticket in self.present if not ticket.admitted]
        assert waiting == [*self.state.queue]
        if waiting:  # whoever waits first truly does not fit
            assert self.state.active == 3 or self.state.used + waiting[0].cost > 100
            later = self.present.index(waiting[0])
            assert not any(ticket.admitted for ticket in self.present[later:])


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class _Watched(PosixStore):
    """Counts the reads and their bytes that run at the same time."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.lock, self.now, self.bytes, self.most = threading.Lock(), 0, 0, (0, 0)

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        size = sum(buffer.nbytes for _, buffer in ranges)
        with self.lock:
            self.now, self.bytes = self.now + 1, self.bytes + size
            self.most = max(self.most[0], self.now), max(self.most[1], self.bytes)
        time.sleep(0.002)
        super().get_ranges_into(key, ranges)
        with self.lock:
            self.now, self.bytes = self.now - 1, self.bytes - size


def test_never_more_than_the_budget_is_in_flight_over_two_stores(tmp_path: Path) -> None:
    budget, inner = Budget(10_000, requests=3), _Watched(tmp_path / "store")
    inner.put("k", bytes(4000))
    stores = [Limit(inner, budget), Limit(inner, budget)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: stores[n % 2].get_into("k", 0, memoryview(bytearray(4000))), range(60)))
    assert inner.most == (2, 8000)
    assert budget.in_flight == (0, 0)


def test_a_request_above_the_whole_budget_is_refused_at_once(posix: PosixStore) -> None:
    store = Limit(posix, Budget(1000))
    with pytest.raises(CapacityError, match=r"above the budget of 1000 B"):
        store.put("k", bytes(1001))
    posix.put("k", bytes(1001))
    with pytest.raises(CapacityError, match="above the limit"):
        store.get("k")


def test_a_wait_for_the_budget_ends_at_its_deadline(posix: PosixStore) -> None:
    clock = ManualClock()
    budget = Budget(1000, timeout=30.0, clock=clock)
    posix.put("k", bytes(1000))
    with budget.admitted(600, "somebody else"):
        waiting = threading.Thread(
            target=lambda: _until_queued(budget, lambda: setattr(clock, "now", clock.now + 31.0))
        )
        waiting.start()
        with pytest.raises(DeadlineError, match=r"get_into 'k': waited 30 s for 500 B .* 1 requests use 600 B"):
            Limit(posix, budget).get_into("k", 0, memoryview(bytearray(500)))
        waiting.join()
    Limit(posix, budget).get_into("k", 0, memoryview(bytearray(1000)))
    assert budget.in_flight == (0, 0)


def _until_queued(budget: Budget, then: Callable[[], None]) -> None:
    deadline = time.monotonic() + 60
    while not budget._state.queue and time.monotonic() < deadline:
        time.sleep(0.001)
    then()


def test_a_full_queue_refuses_the_next(posix: PosixStore) -> None:
    budget = Budget(1000, waiting=1)
    posix.put("k", bytes(1000))
    with ThreadPoolExecutor(1) as pool, budget.admitted(1000, "somebody else"):
        waiting = pool.submit(Limit(posix, budget).stat, "k")
        assert waiting.result(60).size == 1000  # costs no bytes, so it passes
        reading = pool.submit(Limit(posix, budget).get_into, "k", 0, memoryview(bytearray(10)))
        _until_queued(budget, lambda: None)
        with pytest.raises(CapacityError, match="1 requests are waiting"):
            Limit(posix, budget).get_into("k", 0, memoryview(bytearray(10)))
    reading.result(60)  # the one that waited is served


def test_a_failed_operation_gives_its_share_back(posix: PosixStore) -> None:
    budget = Budget(1000)
    for _ in range(3):
        with pytest.raises(HeadraceError):
            Limit(posix, budget).get_into("absent", 0, memoryview(bytearray(1000)))
    assert budget.in_flight == (0, 0)


# hedge


@given(
    share=st.floats(0, 1),
    burst=st.integers(0, 5),
    events=st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 100), st.booleans()), max_size=200),
)
def test_extra_requests_stay_within_their_share(
    share: float, burst: int, events: list[tuple[int, float, bool]]
) -> None:
    tail = HedgePolicy(share=share, burst=burst)
    for size, seconds, slow in events:
        after = tail.begin(size)
        assert after is None or after >= tail.floor
        if slow:
            tail.spend()
        tail.end(size, seconds)
        assert tail.hedged <= burst + share * tail.requests
    assert len(tail._latencies) <= 24


def test_slow_means_slower_than_the_percentile_of_requests_of_that_size() -> None:
    tail = HedgePolicy(percentile=0.9)
    for n in range(1, 101):
        assert (tail.begin(1000) is None) == (n <= 20)
        tail.end(1000, n / 100)
    assert tail.begin(1000) == pytest.approx(0.91)
    assert tail.begin(2000) == pytest.approx(0.91)
    assert tail.begin(10 * MIB) is None


class _Stuck(PosixStore):
    """Its first read waits until it is let go, and then writes something else into its buffer."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go, self.reads, self.lock, self.stuck = threading.Event(), 0, threading.Lock(), 0

    def get_ranges_into(self, key: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        with self.lock:
            self.reads += 1
            stuck, self.stuck = self.stuck > 0, self.stuck - 1
        super().get_ranges_into(key, ranges)
        if stuck:
            assert self.go.wait(60)
            for _, buffer in ranges:
                buffer[:] = b"x" * len(buffer)


def _hedged(inner: Store, **options: object) -> Hedge:
    tail = HedgePolicy(floor=0.0, **options)  # type: ignore[arg-type]
    for _ in range(20):
        tail.end(5, 0.001)
    return Hedge(inner, tail, threads=2)


def test_a_stuck_read_is_answered_by_a_second_and_never_touches_the_callers_buffer(tmp_path: Path) -> None:
    inner, buffer = _Stuck(tmp_path / "store"), bytearray(5)
    inner.put("k", b"12345")
    inner.stuck = 1
    store = _hedged(inner)
    store.get_into("k", 0, memoryview(buffer))
    assert (bytes(buffer), inner.reads, store.policy.hedged) == (b"12345", 2, 1)
    inner.go.set()
    store.close()
    assert buffer == b"12345"


def test_beyond_its_share_a_slow_read_is_waited_for(tmp_path: Path) -> None:
    inner, buffer = _Stuck(tmp_path / "store"), bytearray(5)
    inner.put("k", b"12345")
    inner.stuck = 1
    with _hedged(inner, share=0.0, burst=0) as store:
        threading.Timer(0.05, inner.go.set).start()
        store.get_into("k", 0, memoryview(buffer))
        assert (inner.reads, store.policy.hedged) == (1, 0)


def test_with_no_thread_free_a_read_is_passed_through(tmp_path: Path) -> None:
    inner = _Stuck(tmp_path / "store")
    inner.put("k", b"12345")
    inner.stuck = 2
    with _hedged(inner, burst=9) as store, ThreadPoolExecutor(1) as pool:
        both_stuck = pool.submit(store.get_into, "k", 0, memoryview(bytearray(5)))
        deadline = time.monotonic() + 60
        while inner.reads < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        buffer = bytearray(5)
        store.get_into("k", 0, memoryview(buffer))
        assert (bytes(buffer), inner.reads) == (b"12345", 3)
        inner.go.set()
        both_stuck.result(60)


@pytest.mark.parametrize("failures", [1, 2])
def test_if_one_of_two_requests_fails_the_other_decides(tmp_path: Path, failures: int) -> None:
    inner = PosixStore(tmp_path / "store")
    inner.put("k", b"12345")
    faulty = Faulty(inner, [Rule(Fault.TRANSIENT, times=failures)])
    begun = threading.Barrier(2)

    class Together(PosixStore):
        def get(self, key: str, *, max_bytes: int = 0) -> bytes:
            begun.wait(60)
            return faulty.get(key)

    with _hedged(Together(tmp_path / "store")) as store:
        if failures == 1:
            assert store.get("k", max_bytes=100) == b"12345"
        else:
            with pytest.raises(TransientError):
                store.get("k", max_bytes=100)
    assert faulty.fired == {Fault.TRANSIENT: failures}


def test_large_reads_are_not_hedged(tmp_path: Path) -> None:
    inner, buffer = _Stuck(tmp_path / "store"), bytearray(9 * MIB)
    inner.put("k", bytes(9 * MIB))
    with _hedged(inner) as store:
        store.get_into("k", 0, memoryview(buffer))
        assert store.policy.requests == 0


# trace and metrics


def test_every_operation_has_a_span_with_url_key_and_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, dict[str, str | int], str]] = []

    @contextlib.contextmanager
    def span(name: str, attributes: Mapping[str, str | int]) -> Iterator[None]:
        outcome = "ok"
        try:
            yield
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            seen.append((name, dict(attributes), outcome))

    store = Trace(PosixStore(tmp_path / "store"), span)
    store.put("k", b"12")
    assert store.get("k") == b"12"
    with pytest.raises(HeadraceError):
        store.stat("absent")
    assert [(name, outcome) for name, _, outcome in seen] == [
        ("store.put", "ok"),
        ("store.get", "ok"),
        ("store.stat", "NotFoundError"),
    ]
    assert seen[0][1]["store.key"] == "k"
    assert seen[0][1]["store.bytes"] == 2
    assert seen[0][1]["store.url"] == (tmp_path / "store").as_uri()


def test_the_time_of_each_operation_is_counted(tmp_path: Path) -> None:
    clock, backend = ManualClock(), uuid.uuid4().hex
    slow = Faulty(PosixStore(tmp_path / "store"), [Rule(Fault.DELAY, "put", seconds=0.5)], clock=clock)
    store = MetricsStore(slow, backend, clock)
    store.put("k", b"")
    store.stat("k")

    def sample(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"headrace_store_seconds_{name}", {"backend": backend, **labels})

    assert sample("sum", operation="put") == 0.5
    assert sample("bucket", operation="put", le="0.3") == 0
    assert sample("bucket", operation="put", le="1.0") == 1
    assert sample("count", operation="stat") == 1


# retry of an overloaded store


def test_an_overloaded_store_gets_the_pause_that_it_asked_for() -> None:
    assert Policy().pause(1, 0.5, SlowDownError("x", seconds=3.0)) == pytest.approx(3.1)
    for tries in range(1, 9):
        for draw in (0.0, 0.5, 0.999):
            usual = min(4.0, 0.2 * 2 ** (tries - 1))
            assert usual / 2 <= Policy().pause(tries, draw, SlowDownError("x")) <= usual


def test_a_pause_beyond_the_budget_is_not_waited_for_but_for_the_second_try(tmp_path: Path) -> None:
    clock = ManualClock()
    faulty = Faulty(PosixStore(tmp_path / "store"), [Rule(Fault.SLOW_DOWN, seconds=60.0)])
    with pytest.raises(SlowDownError, match="gave up after 2 attempts"):
        Retry(faulty, Policy(budget=15.0), clock).stat("k")
    assert faulty.fired == {Fault.SLOW_DOWN: 2}
    assert len(clock.pauses) == 1


# faulty itself


_EXPECTED = {
    Fault.TRANSIENT: TransientError,
    Fault.SLOW_DOWN: SlowDownError,
    Fault.DENIED: AccessDeniedError,
    Fault.FULL: CapacityError,
    Fault.CORRUPT: CorruptionError,
    Fault.LOST_ANSWER: TransientError,
    Fault.AMBIGUOUS: AmbiguousWriteError,
}


@pytest.mark.parametrize("fault", _EXPECTED)
def test_each_fault_raises_its_class_and_says_whether_it_took_effect(posix: PosixStore, fault: Fault) -> None:
    store = Faulty(posix, [Rule(fault, "put", times=1)])
    with pytest.raises(_EXPECTED[fault], match="injected"):
        store.put("k", b"1")
    assert posix.exists("k") == (fault in (Fault.LOST_ANSWER, Fault.AMBIGUOUS))
    assert store.fired == {fault: 1}
    store.put("k", b"2")
    assert store.fired == {fault: 1}


def test_a_flipped_bit_is_one_bit_of_what_was_read(posix: PosixStore) -> None:
    posix.put("k", bytes(100))
    store, buffer = Faulty(posix, [Rule(Fault.FLIP_BIT)]), bytearray(100)
    store.get_into("k", 0, memoryview(buffer))
    assert sum(buffer) == sum(store.get("k")) == 1
    assert store.fired == {Fault.FLIP_BIT: 2}
    assert posix.get("k") == bytes(100)


def test_the_same_seed_gives_the_same_faults(posix: PosixStore) -> None:
    def outcomes(seed: int) -> list[bool]:
        store, seen = Faulty(posix, [Rule(Fault.TRANSIENT, rate=0.3)], seed=seed), list[bool]()
        for _ in range(100):
            try:
                seen.append(store.exists("k"))
            except TransientError:
                seen.append(True)
        assert store.fired[Fault.TRANSIENT] == sum(seen)
        return seen

    assert outcomes(7) == outcomes(7) != outcomes(8)
