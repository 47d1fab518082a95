"""The demo's comparison says equal only when everything is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.demo.runs import compare

STEPS = 6


def run(first: int, last: int, *, end: bool = True) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"event": "ready", "resumed_from": None}]
    for step in range(first, last + 1):
        events.append({"event": "step", "step": step, "ids": [step, step + 1], "loss": (1.0 / step).hex()})
    if end:
        events.append({"event": "end", "weights": "w"})
    return events


def test_equal_runs_are_equal_and_the_steps_done_twice_are_named() -> None:
    proof = compare(run(1, STEPS), run(1, 4, end=False), run(3, STEPS), STEPS)
    assert proof.equal
    assert proof.repeated == (3, 4)
    assert proof.samples == 2 * STEPS


@given(st.integers(1, 4), st.booleans(), st.booleans())
def test_any_single_change_of_a_step_is_found(step: int, in_killed: bool, in_ids: bool) -> None:
    killed, resumed = run(1, 4, end=False), run(1, STEPS)
    target = copy.deepcopy(killed if in_killed else resumed)
    event = next(e for e in target if e.get("step") == step)
    if in_ids:
        event["ids"] = event["ids"][::-1]
    else:
        event["loss"] = (float.fromhex(event["loss"]) * (1 + 2**-52)).hex()
    proof = compare(run(1, STEPS), target if in_killed else killed, resumed if in_killed else target, STEPS)
    assert not proof.equal
    assert f"step {step}" in proof.differences[0] or f"step {step} " in proof.differences[0]


@given(st.integers(1, STEPS))
def test_a_step_missing_from_both_trainers_is_a_difference(step: int) -> None:
    def without(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [e for e in events if e.get("step") != step]

    proof = compare(run(1, STEPS), without(run(1, 4, end=False)), without(run(3, STEPS)), STEPS)
    assert f"interrupted run: step {step} is missing" in proof.differences


@pytest.mark.parametrize("weights", ["other", None])
def test_other_final_weights_are_a_difference(weights: str | None) -> None:
    resumed = run(3, STEPS, end=False)
    if weights:
        resumed.append({"event": "end", "weights": weights})
    assert compare(run(1, STEPS), run(1, 4, end=False), resumed, STEPS).differences == ("the final weights differ",)


def test_a_run_that_was_never_interrupted_proves_nothing() -> None:
    assert not compare(run(1, STEPS), [], run(1, STEPS), STEPS).equal
