"""The jobs that are accepted, run and held back, without a daemon, compared with a model that only counts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.dataio.core.errors import CapacityError
from headrace.dataio.sidecar.jobs.schedule import COMMITTING, HOLD_SECONDS, Schedule

BUDGET, RUNNING, QUEUED = 100, 2, 3


def ready(schedule: Schedule, token: str, size: int = 1, *, urgent: bool = False) -> None:
    assert schedule.offer(token, size, urgent=urgent, may_wait=False)
    schedule.journaled(token)


def test_urgent_jobs_start_beside_those_that_run_and_before_those_that_wait() -> None:
    schedule = Schedule(RUNNING, QUEUED, BUDGET)
    for token in "abc":
        ready(schedule, token)
    assert schedule.start() == ["a", "b"]
    ready(schedule, "u", urgent=True)
    assert schedule.start() == ["u"]
    schedule.remove("a")
    assert schedule.start() == ["c"]


def test_others_are_held_back_while_urgent_jobs_run_but_not_for_ever() -> None:
    schedule = Schedule(RUNNING, QUEUED, BUDGET)
    ready(schedule, "u", urgent=True)
    assert not schedule.holds_back(0.0)
    schedule.start()
    assert schedule.holds_back(1.0)
    assert schedule.holds_back(1.0 + HOLD_SECONDS - 0.1)
    assert not schedule.holds_back(1.0 + HOLD_SECONDS)
    schedule.committing("u")
    assert not schedule.holds_back(200.0)
    ready(schedule, "v", urgent=True)
    schedule.start()
    assert schedule.holds_back(201.0)


def test_an_arena_without_room_waits_and_is_counted_and_small_ones_do_not_overtake_it() -> None:
    schedule = Schedule(RUNNING, QUEUED, BUDGET)
    ready(schedule, "a", 60)
    assert not schedule.offer("b", 50, urgent=False, may_wait=True)
    assert not schedule.offer("c", 10, urgent=False, may_wait=True)
    room = schedule.room()
    assert (room["held_bytes"], room["waiting_bytes"], room["waiting"]) == (60, 60, 2)
    assert schedule.take() == []
    schedule.released("a")
    assert schedule.take() == ["b", "c"]


def test_what_can_never_fit_or_may_not_wait_is_refused() -> None:
    schedule = Schedule(RUNNING, QUEUED, BUDGET)
    with pytest.raises(CapacityError, match=r"larger than all .*100 B"):
        schedule.offer("a", 101, urgent=False, may_wait=True)
    ready(schedule, "a", 60)
    with pytest.raises(CapacityError, match="no room"):
        schedule.offer("b", 50, urgent=False, may_wait=False)
    assert schedule.offer("u", 100, urgent=True, may_wait=False), "urgent ones have a budget of their own"


def test_jobs_that_only_wait_for_other_ranks_hold_no_place() -> None:
    """Eight ranks of one step, two places: all come to write their manifests, without which none could commit."""
    schedule = Schedule(2, 16, BUDGET)
    for rank in range(8):
        ready(schedule, f"r{rank}")
    seen = []
    while started := schedule.start():
        seen += started
        for token in started:
            schedule.committing(token)
    assert seen == [f"r{rank}" for rank in range(8)]


def test_jobs_that_commit_are_bounded_too() -> None:
    schedule = Schedule(2, 1000, 10_000)
    for n in range(COMMITTING + 10):
        ready(schedule, str(n))
    while started := schedule.start():
        for token in started:
            schedule.committing(token)
    assert schedule.room()["committing"] == COMMITTING + 2


class Life(RuleBasedStateMachine):
    """Any order of events: the bounds hold, no job is lost, none is started twice."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(RUNNING, QUEUED, BUDGET)
        self.states: dict[str, str] = {}
        self.urgent: dict[str, bool] = {}
        self.counter = 0

    def pick(self, data: st.DataObject, *states: str) -> str | None:
        there = [token for token, state in self.states.items() if state in states]
        return data.draw(st.sampled_from(there)) if there else None

    @rule(size=st.integers(0, 130), urgent=st.booleans(), may_wait=st.booleans())
    def offer(self, size: int, urgent: bool, may_wait: bool) -> None:
        token = str(self.counter)
        self.counter += 1
        try:
            taken = self.schedule.offer(token, size, urgent=urgent, may_wait=may_wait)
        except CapacityError:
            return
        assert may_wait or taken
        self.states[token], self.urgent[token] = "taken" if taken else "waiting", urgent

    @rule(data=st.data())
    def journaled(self, data: st.DataObject) -> None:
        if token := self.pick(data, "taken"):
            self.schedule.journaled(token)
            self.states[token] = "queued"

    @rule()
    def take(self) -> None:
        for token in self.schedule.take():
            assert self.states[token] == "waiting"
            self.states[token] = "taken"

    @rule()
    def start(self) -> None:
        for token in self.schedule.start():
            assert self.states[token] == "queued"
            self.states[token] = "running"

    @rule(data=st.data())
    def released(self, data: st.DataObject) -> None:
        if token := self.pick(data, "running", "committing"):
            self.schedule.released(token)

    @rule(data=st.data())
    def committing(self, data: st.DataObject) -> None:
        if token := self.pick(data, "running"):
            self.schedule.committing(token)
            self.states[token] = "committing"

    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        if token := self.pick(data, "running", "committing"):
            self.schedule.requeue(token)
            self.states[token] = "queued"

    @rule(data=st.data())
    def retry_later(self, data: st.DataObject) -> None:
        if token := self.pick(data, "running", "committing"):
            self.schedule.retry_later(token)
            self.states[token] = "retrying"

    @rule(data=st.data())
    def the_pause_is_over(self, data: st.DataObject) -> None:
        if token := self.pick(data, "retrying"):
            self.schedule.requeue(token)
            self.states[token] = "queued"

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if token := self.pick(data, "waiting", "taken", "queued", "running", "committing", "retrying"):
            self.schedule.remove(token)
            del self.states[token]

    @precondition(lambda self: self.states)
    @rule()
    def everybody_gets_a_turn(self) -> None:
        """When everything that runs ends, everything that waits is taken, started and over in the end."""
        for _ in range(4 * len(self.states)):
            self.take()
            for token, state in list(self.states.items()):
                if state == "taken":
                    self.schedule.journaled(token)
                    self.states[token] = "queued"
                elif state == "retrying":
                    self.schedule.requeue(token)
                    self.states[token] = "queued"
            self.start()
            for token, state in list(self.states.items()):
                if state in ("running", "committing"):
                    self.schedule.remove(token)
                    del self.states[token]
        assert not self.states

    @invariant()
    def bounds_hold(self) -> None:
        room = self.schedule.room()
        assert room["held_bytes"] <= 2 * BUDGET
        assert room["running"] <= 2 * RUNNING
        assert room["retrying"] == sum(state == "retrying" for state in self.states.values())
        assert {token: self.schedule.state(token) for token in self.states} == self.states


TestLife = Life.TestCase
