"""`headrace bench simulate --control-plane`: figures of the code that plans, commits and restores."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.control_plane import commit, figures, plan, restore, state, steps
from headrace.bench.control_plane.figures import METRICS, Figures
from headrace.bench.workloads import simulate
from headrace.checkpoint.repository import collect
from headrace.dataio.core.errors import UsageError
from tests.support.benchmarks import run_part

MEASURED = {
    "plan": {"most_cpu_seconds": 0.5, "mib": 4.0},
    "commit": {"commit_seconds": 0.5, "requests": 0.0, "later_requests": 0.0},
    "restore": {"requests": 0.0},
    "one_rank": {"cpu_seconds": 0.3, "mib": 30.0},
    "steps": {"latest_s": 0.1, "latest_requests": 7, "retention_s": 2.0, "retention_requests": 120},
}

MEASURED_AT_ONCE = {
    *("restore_cpu_s", "restore_peak_mib"),
    *("latest_s", "latest_requests", "retention_s", "retention_requests"),
}


def measured(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[Figures, list[tuple[Any, ...]]]:
    """The figures of a job in which every rank sends five requests, and what was run for them."""
    ran: list[tuple[Any, ...]] = []

    def run(module: str, *arguments: float) -> dict[str, float]:
        ran.append((module, *arguments))
        requests = 7 + 5 * arguments[0]
        return MEASURED[module] | {"requests": requests, "later_requests": requests}

    monkeypatch.setattr(figures, "_run", run)
    return figures.figures(ranks, 0.01, lambda text, share: None), ran


def test_a_small_job_is_measured_and_not_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = measured(monkeypatch, 64)
    assert found.laws == {}
    assert found.values.keys() == METRICS.keys()
    assert found.values["save_requests"] == 7 + 5 * 64
    assert ran == [
        *(("plan", 64), ("commit", 64, 0.01)),
        *(("restore", 64, 64, 0.01), ("restore", 64, 48, 0.01)),
        *(("steps", 10_000, 64, 0.01), ("one_rank", 64)),
    ]


def test_a_large_job_is_extrapolated_by_a_line_that_the_results_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ran = measured(monkeypatch, 16_384)
    assert found.values.keys() == METRICS.keys()
    assert found.laws.keys() == METRICS.keys() - MEASURED_AT_ONCE
    assert found.values["save_requests"] == pytest.approx(7 + 5 * 16_384, rel=1e-6)
    law = found.laws["save_requests"]
    assert law == {
        "extrapolated": True,
        "law": "7 + 5 * ranks",
        "sizes": [256, 512, 1024],
        "measured": [7 + 5 * size for size in (256, 512, 1024)],
    }
    assert ("one_rank", 16_384) in ran
    assert max(arguments[1] for arguments in ran if arguments[0] not in ("one_rank", "steps")) == 1024


def test_the_state_has_the_size_of_the_model() -> None:
    sizes = [(4 if slot != "weight" else 2) for slot, _ in state.SLOTS]
    elements = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for _, shape in state.PARAMETERS)
    assert sizes == [2, 4, 4]
    assert len(state.PARAMETERS) == 1137
    assert elements == pytest.approx(405e9, rel=0.01)


@pytest.fixture
def few_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has three parameters in this process."""
    few = state.PARAMETERS[:3]
    names = [f"{slot}/{name}" for slot in ("weight", "exp_avg", "exp_avg_sq", "step") for name, _ in few]
    monkeypatch.setattr(plan, "PARAMETERS", few)
    monkeypatch.setattr(state, "PARAMETERS", few)
    monkeypatch.setattr(commit, "NAMES", names)
    monkeypatch.setattr(state, "DOCUMENT", state.document(names))


@pytest.mark.usefixtures("few_parameters")
def test_all_ranks_plan_commit_and_restore() -> None:
    assert plan.measure(5)["cpu_seconds"] > 0
    saved = commit.measure(5, 0.02)
    assert saved["requests"] >= 3 * 5
    assert 0.02 < saved["commit_seconds"] <= saved["seen_seconds"] < 10
    same, fewer = restore.measure(5, 5), restore.measure(5, 3)
    assert 5 < same["requests"] <= 5 * 5
    assert 5 < fewer["requests"] <= 20 * 5
    assert restore.measure(5, 5, latency=1.0)["virtual_seconds"] > same["virtual_seconds"] + 1


def test_two_saves_of_a_hundred_and_twenty_ranks_take_five_requests_a_rank_or_less() -> None:
    found = commit.measure(120, 0.02, tensors=1)
    assert found["ranks"] == 120
    assert 3 * 120 < found["requests"] <= 5 * 120
    assert 2 * 120 < found["later_requests"] <= 5 * 120
    assert 0 < found["commit_seconds"] < 1.5


@pytest.mark.process
def test_a_repository_of_many_steps_takes_as_many_requests_as_one_of_few() -> None:
    few, many = steps.measure(40, 120, 0.02), steps.measure(400, 120, 0.02)
    assert many["latest_requests"] == few["latest_requests"] <= 8
    assert many["retention_requests"] <= few["retention_requests"] + collect.AT_ONCE  # listings of live packs
    assert many["first_retention_requests"] > 3 * 400 > few["first_retention_requests"]
    assert 0.1 < many["latest_s"] < 0.5


@pytest.mark.usefixtures("few_parameters")
def test_the_command_prints_the_figures_with_their_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts are programs, as always, except restores: with all parameters they take 25 s of CPU."""
    run = figures._run
    here = {"restore": restore.measure}
    monkeypatch.setattr(figures, "_run", lambda part, *sizes: here[part](*sizes) if part in here else run(part, *sizes))
    part = run_part(capsys, "simulate", "--control-plane", "--ranks", "8", "--latency-ms", "5")
    assert part.settings == {"ranks": 8, "latency_ms": 5.0, "extrapolated": False, "laws": {}}
    found = part.candidates["headrace"].metrics
    assert found.keys() == METRICS.keys()
    assert all(value >= 0 for (value,) in found.values())
    assert found["restore_cpu_s"][0] > 0


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--latency-ms", "-1"], r"--latency-ms -1\.0: not between 0 and 10000"),
        (["--ranks", "7"], r"--ranks 7: the model needs at least 8"),
        (["--ranks", "20000"], r"--ranks 20000: at most 16384"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: list[str], refused: str) -> None:
    with pytest.raises(UsageError, match=refused):
        simulate.simulate(["--control-plane", *arguments])
