"""What is remembered of the last save's plan changes nothing: whatever comes next is saved as if nothing had been before."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.format import chunking
from headrace.checkpoint.ranks import Ranks
from headrace.checkpoint.state.save_plan import PreparedSave, SavePlanner, flatten_state

SHAPES = [(3,), (4, 5), (20_000,), (0,), (2, 0), ()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    made = torch.zeros(shape, dtype=dtype)
    return made.t() if len(shape) == 2 and draw(st.booleans()) else made


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = draw(st.dictionaries(st.sampled_from("abcdef"), tensors(), max_size=4))
    module = torch.nn.Module()
    for name in draw(st.sets(st.sampled_from("pqr"))):
        as_buffer = draw(st.booleans())
        value = torch.zeros(draw(st.sampled_from([(3,), (30_000,)])))
        module.register_buffer(name, value) if as_buffer else setattr(module, name, torch.nn.Parameter(value))
    found["module"] = module
    plain = [key for key, value in found.items() if isinstance(value, torch.Tensor) and value.numel() > 1]
    tied: bool = draw(st.booleans()) if plain else False
    if tied:
        base = found[draw(st.sampled_from(plain))]
        found["tied"] = base if draw(st.booleans()) else base[: max(1, len(base) // 2)]
    found["step"] = draw(st.integers(0, 9))
    return found


def facts(found: PreparedSave) -> tuple[object, ...]:
    where = [(t.data_ptr(), t.dtype, tuple(t.shape), t.stride()) for t in found.tensors]
    return found.tree, found.specs, found.layout, found.replicas, found.replicated, sorted(found.shared), where


@settings(max_examples=25)
@given(st.lists(states(), min_size=2, max_size=4), st.lists(st.integers(0, 3), min_size=3, max_size=8))
def test_a_plan_that_is_used_again_is_the_one_that_would_be_made(found: list[dict[str, Any]], order: list[int]) -> None:
    planner = SavePlanner()
    for number in order:
        state = found[number % len(found)]
        again = planner.prepare(planner.known(flatten_state(state)), Ranks(0, 1))
        fresh = SavePlanner().prepare(flatten_state(state), Ranks(0, 1))
        assert facts(again) == facts(fresh)


def test_while_nothing_changes_the_work_is_divided_once() -> None:
    planner, state = SavePlanner(), {"a": torch.zeros(5), "step": 1}
    first = planner.prepare(planner.known(flatten_state(state)), Ranks(0, 1))
    state = {"a": torch.ones(5), "step": 2}
    second = planner.prepare(planner.known(flatten_state(state)), Ranks(0, 1))
    assert second.layout is first.layout
    assert second.tree != first.tree
    assert second.tensors[0] is not first.tensors[0]
    third = planner.prepare(planner.known(flatten_state({"a": torch.ones(5).double(), "step": 2})), Ranks(0, 1))
    assert third.layout is not first.layout
    assert chunking.lay_out(third.specs) == third.layout
