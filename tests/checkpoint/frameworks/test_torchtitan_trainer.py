"""torchtitan's own Trainer with the repository as storage; skipped, with the reason, where it cannot run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer, read
from headrace.checkpoint.restoring.saved_step import LazyTensor

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]


def missing() -> str:
    """What torchtitan's Trainer lacks here; "" if it can run."""
    if importlib.util.find_spec("torchtitan") is None:
        return "torchtitan is not installed: `make test` installs it"
    if not hasattr(torch.distributed, "set_timeout"):
        return f"torchtitan's Trainer calls torch.distributed.set_timeout, which torch {torch.__version__} lacks"
    if importlib.util.find_spec("datasets") is None:
        return "torchtitan's Trainer imports the package datasets, which is not installed"
    return "" if torch.cuda.is_available() else "torchtitan's Trainer needs a GPU"


def contents(repo: Path) -> dict[str, object]:
    """The newest step: tensors as bytes, and all other values."""
    with read(str(repo), run="exp") as saved:
        values = {name: value.read() if isinstance(value, LazyTensor) else value for name, value in saved.items()}
    return {
        name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value for name, value in values.items()
    }


@pytest.mark.skipif(missing() != "", reason=missing())
def test_torchtitans_own_trainer_resumes_from_the_repository_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def train(repo: str, steps: int) -> None:
        where = [f"--checkpoint.url={tmp_path / repo}", f"--dump_folder={tmp_path / 'out'}"]
        what = ["--module", "tests.support.torchtitan_trainer", "--config", "tiny", f"--training.steps={steps}"]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command = [*launcher, "-m", "torchtitan.train", *what, *where]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HEADRACE_SIDECAR": "off"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-6000:]

    train("whole", 6)
    train("parts", 4)
    train("parts", 6)
    for repo in ("whole", "parts"):
        with Checkpointer(tmp_path / repo, run="exp", sidecar=None) as checkpointer:
            assert checkpointer.steps() == [2, 4, 6]
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
