"""The one place for retries: what is tried again, how often, how long."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.dataio.core.errors import AmbiguousWriteError, ConflictError, HeadraceError, NotFoundError, TransientError
from headrace.dataio.store.base import ObjectInfo
from headrace.dataio.store.posix import PosixStore
from headrace.dataio.store.retry import Policy, Retry, call
from headrace.dataio.testing.system import ManualClock


def _failing(clock: ManualClock, errors: list[HeadraceError], seconds: float = 0.0) -> Callable[[], str]:
    left = iter(errors)

    def work() -> str:
        clock.now += seconds
        for error in left:
            raise error
        return "done"

    return work


def test_passing_trouble_is_tried_again_until_it_has_passed() -> None:
    clock = ManualClock()
    assert (
        call(_failing(clock, [TransientError("a"), AmbiguousWriteError("b")]), Policy(), clock, lambda: 1.0) == "done"
    )
    assert clock.pauses == [0.2, 0.4]


@pytest.mark.parametrize("error", [NotFoundError("x"), ConflictError("x"), HeadraceError("x")])
def test_what_will_fail_again_is_not_tried_again(error: HeadraceError) -> None:
    clock = ManualClock()
    with pytest.raises(type(error)):
        call(_failing(clock, [error]), Policy(), clock)
    assert clock.pauses == []


def test_the_last_error_keeps_its_class_and_hint_and_counts_the_attempts() -> None:
    clock = ManualClock()
    errors: list[HeadraceError] = [AmbiguousWriteError("no answer", hint="look") for _ in range(9)]
    with pytest.raises(AmbiguousWriteError, match=r"no answer \[gave up after 3 attempts in 6\.\d s\]") as caught:
        call(_failing(clock, errors, 2.0), Policy(attempts=3), clock, lambda: 0.0)
    assert caught.value.hint == "look"


def test_no_try_begins_after_the_budget_but_a_second_one_always_does() -> None:
    clock = ManualClock()
    with pytest.raises(TransientError, match="2 attempts"):
        call(_failing(clock, [TransientError("slow")] * 9, 60.0), Policy(budget=15.0), clock)


@given(
    attempts=st.integers(1, 10),
    budget=st.floats(0, 60),
    seconds=st.floats(0, 30),
    draws=st.lists(st.floats(0, 1), min_size=10),
)
def test_attempts_and_time_are_bounded(attempts: int, budget: float, seconds: float, draws: list[float]) -> None:
    clock, policy = ManualClock(), Policy(attempts=attempts, budget=budget)
    began = clock.now
    left = iter(draws)
    with pytest.raises(TransientError):
        call(_failing(clock, [TransientError("x")] * 100, seconds), policy, clock, lambda: next(left))
    assert len(clock.pauses) < attempts
    assert all(pause <= policy.longest for pause in clock.pauses)
    assert clock.now - began <= max(budget, seconds + policy.first) + seconds + 1e-6


class _Interrupted(PosixStore):
    """Its listing fails after every second object."""

    failures = 0

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for turn, info in enumerate(super().list(prefix)):
            if turn == self.failures + 1 and self.failures < 3:
                self.failures += 1
                raise TransientError("page lost")
            yield info


def test_a_listing_goes_on_where_it_failed_without_losing_or_repeating_keys(tmp_path: object) -> None:
    inner = _Interrupted(str(tmp_path))
    keys = [f"k{i}" for i in range(9)]
    for key in keys:
        inner.put(key, b"")
    assert [info.key for info in Retry(inner, clock=ManualClock()).list()] == keys
    assert inner.failures == 3
