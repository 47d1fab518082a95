"""Noise is not called a change, and a change is not called noise."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.core.compare import (
    as_text,
    benjamini_hochberg,
    compare,
    mann_whitney,
    ratio_of_medians,
    smallest_p,
)
from headrace.bench.core.results import Metric, Part, Run, Samples
from headrace.dataio.core.errors import MismatchError

MACHINE = {"cpu": "abacus", "cpus": 2, "memory_gib": 8.0, "kernel": "1"}


def run(metrics: dict[str, list[float]], *, settings: dict[str, int] | None = None, **machine: object) -> Run:
    about = {name: Metric(name, "MB/s", "higher") for name in metrics}
    part = Part("store", metrics=about, candidates={"ours": Samples(metrics)}, settings=settings or {})
    return Run(["headrace", "bench"], "2026-01-01", MACHINE | machine, [part])


def test_the_p_value_is_the_share_of_deals_at_least_as_lopsided() -> None:
    ours, theirs = [1.0, 2.0, 3.5], [3.0, 4.0, 5.0, 6.0]
    pooled = sorted([*ours, *theirs])
    ranks = {value: place for place, value in enumerate(pooled, 1)}
    seen = abs(sum(ranks[value] for value in ours) - 12)
    deals = [abs(sum(deal) - 12) >= seen for deal in itertools.combinations(range(1, 8), 3)]
    assert mann_whitney(ours, theirs) == pytest.approx(sum(deals) / len(deals))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=7), st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_the_test_knows_no_sides_and_never_promises_more_than_it_can(a: list[int], b: list[int]) -> None:
    ours, theirs = [float(x) for x in a], [float(x) for x in b]
    p = mann_whitney(ours, theirs)
    assert p == pytest.approx(mann_whitney(theirs, ours))
    assert smallest_p(len(a), len(b)) / 2 - 1e-12 <= p <= 1, "ties can halve it, no more"


def test_large_samples_are_dealt_at_random_but_always_the_same_way() -> None:
    rng = random.Random(1)
    ours, theirs = [rng.gauss(0, 1) for _ in range(40)], [rng.gauss(2, 1) for _ in range(40)]
    assert mann_whitney(ours, theirs) == mann_whitney(ours, theirs) < 1e-4


@pytest.mark.slow
def test_noise_alone_is_rarely_called_a_change() -> None:
    rng = random.Random(7)
    a, b = ({f"m{n}": [rng.gauss(100, 10) for _ in range(5)] for n in range(200)} for _ in range(2))
    found = compare(run(a), run(b))
    wrong = [change for change in found.changes if change.verdict in ("better", "worse")]
    assert len(found.changes) == 200
    assert len(wrong) <= 2


def test_a_real_change_is_found_with_its_size_and_its_direction() -> None:
    rng = random.Random(3)
    a = {name: [rng.gauss(100, 3) for _ in range(6)] for name in ("same", "up", "down")}
    b = {
        "same": [rng.gauss(100, 3) for _ in range(6)],
        "up": [rng.gauss(130, 3) for _ in range(6)],
        "down": [rng.gauss(70, 3) for _ in range(6)],
    }
    found = {change.metric: change for change in compare(run(a), run(b)).changes}
    assert {name: change.verdict for name, change in found.items()} == {
        "same": "no change seen",
        "up": "better",
        "down": "worse",
    }
    up = found["up"]
    assert up.low is not None
    assert up.high is not None
    assert up.low < 1.3 < up.high
    assert "| store | ours: down |" in as_text(compare(run(a), run(b)))


def test_three_rounds_are_too_few_to_tell_and_that_is_what_is_said() -> None:
    found = compare(run({"x": [1.0, 1.1, 1.2]}), run({"x": [9.0, 9.1, 9.2]}))
    assert found.changes[0].verdict == "too few samples"
    assert "1 too few samples" in as_text(found)


def test_two_machines_are_not_compared_without_saying_so() -> None:
    a, b = run({"x": [1.0] * 5}), run({"x": [1.0] * 5}, cpus=64)
    with pytest.raises(MismatchError, match="cpus: 2 / 64"):
        compare(a, b)
    assert "- DIFFERENT MACHINES: cpus: 2 / 64" in as_text(compare(a, b, any_machine=True))


def test_other_settings_are_another_benchmark() -> None:
    found = compare(run({"x": [1.0] * 5}, settings={"files": 1}), run({"x": [1.0] * 5}, settings={"files": 2}))
    assert not found.changes
    assert found.warnings == ["store: not compared, as its settings differ (files)"]


def test_what_is_in_one_run_only_and_what_failed_is_named() -> None:
    a, b = run({"x": [1.0] * 5}), run({"x": [1.0] * 5}, kernel="2")
    a.parts.append(Part("pack"))
    b.parts[0].candidates["peer"] = Samples()
    b.parts[0].candidates["ours"].errors.append("a request failed")
    assert compare(a, b).warnings == [
        "kernel: 1 / 2",
        "pack: only in A",
        "store: done in B, a request failed",
        "store: peer is only in B",
    ]


def test_changes_too_small_to_matter_are_set_aside() -> None:
    found = compare(run({"x": [100.0, 100.1, 100.2, 100.3, 100.4]}), run({"x": [101.0, 101.1, 101.2, 101.3, 101.4]}))
    assert found.changes[0].verdict == "changed little"


def test_the_false_discovery_rate_is_that_of_benjamini_and_hochberg() -> None:
    assert benjamini_hochberg({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5}) == {"a"}
    assert benjamini_hochberg({"a": 0.01, "b": 0.02, "c": 0.03, "d": 0.5}) == {"a", "b", "c"}
    assert benjamini_hochberg({}) == set()


def test_a_ratio_to_nothing_is_none() -> None:
    assert ratio_of_medians([1.0], [0.0]) is None
    found = ratio_of_medians([2.0, 2.0], [1.0, 1.0])
    assert found is not None
    assert (found.ratio, found.low, found.high) == (2, 2, 2)
