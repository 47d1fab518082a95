"""Real gloo ranks evaluate: each sample is counted once, no rank hangs, and all ranks know the ranks without samples."""

from __future__ import annotations

import json
import subprocess
import sys

from headrace.dataio.shards.dataset import Dataset


def test_ranks_without_samples_do_not_block_the_others(made_dataset: Dataset) -> None:
    command = [sys.executable, "-m", "tests.support.evaluation_ranks", made_dataset.url, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"] == [1] * 8
    assert found["empty"] == [[], [], [0]]
    assert found["forward"] == 2  # rank 0 is the one without samples at the end
