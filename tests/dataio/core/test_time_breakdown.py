"""Sums of spans: what a trainer waited, was held, and computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataio.core.time_breakdown import NAMES, OTHERS, SAVE, WAIT, Process, by_name, trained

SPANS = st.lists(st.tuples(st.sampled_from([WAIT, SAVE, "step"]), st.integers(0, 10**6)), max_size=30)


@given(SPANS)
def test_what_is_neither_waited_nor_held_is_goodput(spans: list[tuple[str, int]]) -> None:
    process, clock = Process(0, 1, "node"), 10**15
    for name, lasted in spans:  # one after another, as a trainer's thread has them
        if name != "step":
            process.add(name, clock, lasted)
        clock += lasted
    mine = [n for n, (name, _) in enumerate(spans) if name != "step"]
    inside = spans[mine[0] : mine[-1] + 1] if mine else []
    whole = sum(lasted for _, lasted in inside)
    assert process.seconds == pytest.approx(whole / 1e6)
    if whole:
        computed = sum(lasted for name, lasted in inside if name == "step")
        assert process.goodput == pytest.approx(computed / whole, abs=1e-9)
        assert trained([process]) == [process]
    else:
        assert process.goodput is None
        assert trained([process]) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.integers(0, 100)), max_size=40))
def test_sums_by_name_are_of_all_processes_and_name_the_one_with_most(spans: list[tuple[int, str, int]]) -> None:
    processes = [Process(n, n, "node") for n in range(4)]
    for n, name, lasted in spans:
        processes[n].add(name, 0, lasted)
    found = by_name(processes)
    assert set(found) == {name for _, name, _ in spans}
    for name, (whole, most) in found.items():
        mine = [(n, lasted) for n, own, lasted in spans if own == name]
        assert (whole.count, whole.total) == (len(mine), sum(lasted for _, lasted in mine))
        assert whole.longest == max(lasted for _, lasted in mine)
        by_process = [sum(lasted for n, lasted in mine if n == process.rank) for process in processes]
        assert most.spans[name].total == max(by_process)


def test_more_names_than_the_bound_are_counted_together() -> None:
    process = Process(0, 1, "node")
    for n in range(NAMES + 50):
        process.add(f"span {n}", 0, 1)
    assert len(process.spans) == NAMES + 1
    assert process.spans[OTHERS].count == 50
