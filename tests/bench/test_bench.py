"""`headrace bench`: measures what it says, names what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.bench.core.measure import Candidate, alternate
from headrace.bench.core.results import Metric, Part, Samples
from headrace.bench.core.table import part_table

COMMAND = [sys.executable, "-m", "headrace.dataio.cli", "bench"]


def test_candidates_alternate_and_what_is_no_figure_is_a_failure() -> None:
    told: list[str] = []
    candidates = [Candidate(name, "timeit", ("-n1", "-r1")) for name in "ab"]
    found = alternate(candidates, 2, lambda name, _share: told.append(name))
    assert told == ["a", "b", "b", "a"]
    assert [len(samples.errors) for samples in found.values()] == [2, 2], (
        "timeit prints no JSON object: a failure, not a figure"
    )


def test_a_candidate_that_fails_is_named_and_has_no_figures() -> None:
    found = alternate([Candidate("broken", "no_such_module", ())], 1, lambda *_: None)
    assert not found["broken"].metrics
    assert "No module named no_such_module" in found["broken"].errors[0]
    text = part_table(
        Part("p", metrics={"x": Metric("x s", "s")}, candidates={**found, "peer": Samples({"x": [2.0, 4.0, 3.0]})})
    )
    assert "broken failed" in text
    assert "| peer | 3 (2–4) |" in text


def test_checkpoints_are_measured_beside_their_peers(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *COMMAND,
            "checkpoint",
            "--rounds",
            "1",
            "--json",
            "--directory",
            str(tmp_path),
            "--lora",
            "--only",
            "headrace",
            "dcp.async_save",
        ],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "HEADRACE_BENCH_CHECKPOINT_MIB": "64", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)["parts"][0]["candidates"]
    assert set(found) == {"headrace", "dcp.async_save"}
    for name, samples in found.items():
        assert samples["metrics"]["first_mib"][0] >= 50, name
        assert samples["metrics"]["restore_s"][0] > 0, name
    ours, theirs = found["headrace"]["metrics"], found["dcp.async_save"]["metrics"]
    for kind, share in (("frozen", 0.2), ("lora", 0.1)):
        assert ours[f"{kind}_mib"][0] < share * theirs[f"{kind}_mib"][0], "what did not change was written again"
    assert not list(tmp_path.iterdir()), "the benchmark left something behind"
