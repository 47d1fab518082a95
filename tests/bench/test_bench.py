"""`headrace bench`: measures what it says, names what failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.report import part_table
from headrace.bench.core.results import Metric, Part, Samples
from tests.support.benchmarks import run_part


def test_candidates_alternate_and_what_is_no_figure_is_a_failure() -> None:
    ran: list[str] = []
    candidates = [Candidate(name, "time:perf_counter", ()) for name in "ab"]
    found = alternate(candidates, 2, lambda name, _share: ran.append(name))
    assert ran == ["a", "b", "b", "a"]
    assert [len(samples.errors) for samples in found.values()] == [2, 2], (
        "a number is no JSON object: a failure, not a figure"
    )


def test_a_candidate_that_fails_is_named_and_has_no_figures() -> None:
    found = alternate([Candidate("broken", "no_such_module:measure", ())], 1, lambda *_: None)
    assert not found["broken"].metrics
    assert "No module named 'no_such_module'" in found["broken"].errors[0]
    text = part_table(
        Part("p", metrics={"x": Metric("x s", "s")}, candidates={**found, "peer": Samples({"x": [2.0, 4.0, 3.0]})})
    )
    assert "broken failed" in text
    assert "| peer | 3 (2–4) |" in text


def test_checkpoints_are_measured_beside_their_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rounds", "1", "--size", "16MiB", "--directory", str(tmp_path), "--lora"]
    found = run_part(capsys, "checkpoint", *options, "--only", "headrace", "dcp.async_save").candidates
    assert set(found) == {"headrace", "dcp.async_save"}
    for name, samples in found.items():
        assert samples.metrics["first_mib"][0] >= 12, name
        assert samples.metrics["restore_s"][0] > 0, name
    ours, theirs = found["headrace"].metrics, found["dcp.async_save"].metrics
    for kind, share in (("frozen", 0.4), ("lora", 0.1)):
        assert ours[f"{kind}_mib"][0] < share * theirs[f"{kind}_mib"][0], "what did not change was written again"
    assert not list(tmp_path.iterdir()), "the benchmark left something behind"
