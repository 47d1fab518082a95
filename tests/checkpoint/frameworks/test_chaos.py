"""ckpt-chaos, a crash tester of other people, over all ways in: it kills a training at file events of its saves and resumes it.

Skipped where it is not installed (`pip install -c constraints.txt headrace[chaos]`). The table of docs/howto/trainers.md
comes from more crash points than this takes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NEEDS = {"checkpointer": "torch", "dcp": "torch"}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["checkpointer", "dcp", "lightning", "transformers", "accelerate"])
def test_a_training_survives_the_kills_of_ckpt_chaos(way: str, tmp_path: Path) -> None:
    for name in ("ckpt_chaos", NEEDS.get(way, way)):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt headrace[chaos,frameworks]")
    program = [sys.executable, "-m", f"tests.support.train_{way}", "{out}"]
    options = ["--max-points", "12", "--result-file", "{out}/final.txt", "--step-regex", r'"resumed": (\d+)']
    work = ["--work", str(tmp_path / "work")]
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_chaos", "run", *options, *work, "--", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nPASS: " in done.stdout, done.stdout
