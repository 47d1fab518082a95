"""examples/slurm_requeue.sbatch, run as Slurm would run it, with stand-ins for `srun` and `scontrol`: no Slurm is here."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
from pathlib import Path

import pytest

from headrace.checkpoint import Checkpointer
from headrace.loaders import Loader
from tests.support.example_runs import ROOT, steps_of
from tests.support.forked_programs import ForkedPrograms
from tests.support.slurm_node import Node, slurm_node
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process


def trained_until(node: Node, log: Path, places: list[str], number: signal.Signals) -> tuple[int, int]:
    """Run the job, signal its task after some steps, and return the step that it began after and the one it saved."""
    environment = node.environment | {"SLURM_JOB_ID": "7", "HEADRACE_SIDECAR": "off", "OMP_NUM_THREADS": "1"}
    environment["PYTHON"] = str(node.folder / "programs" / "python")
    command = ["bash", str(ROOT / "examples" / "slurm_requeue.sbatch"), *places]
    with log.open("wb") as out, subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out) as job:
        try:
            wait_for(lambda: log.read_text().count("\nstep ") >= 3, 120)
            os.kill(int((node.folder / "task").read_text()), number)
            assert job.wait(120) == 99, log.read_text()
        finally:
            job.kill()
    steps = steps_of(log.read_text())
    begun = re.search(r"^from step (\d+)$", log.read_text(), re.MULTILINE)
    assert begun
    assert min(steps) == int(begun[1]) + 1
    return int(begun[1]), max(steps)


def test_a_job_that_is_preempted_is_requeued_and_continues_with_the_next_batch(raw: Path, tmp_path: Path) -> None:
    runs = str(tmp_path / "runs")
    places = [str(raw / "images-set"), runs, "--save-every", "1000000"]
    with slurm_node() as node, ForkedPrograms(node.folder / "programs"):
        begun, first = trained_until(node, tmp_path / "first.log", places, signal.SIGUSR1)
        assert begun == 0
        again, last = trained_until(node, tmp_path / "again.log", places, signal.SIGTERM)
        assert again == first < last
        assert (node.folder / "scontrol.log").read_text() == "requeue 7\n" * 2
    fields = runpy.run_path(str(ROOT / "examples" / "slurm_requeue.py"))["FIELDS"]
    with (
        Loader(places[0], 4, fields=fields, seed=1, trust_mounts=True) as loader,
        Checkpointer(runs, run="requeued", sidecar=None) as checkpointer,
    ):
        assert checkpointer.steps() == [first, last]
        checkpointer.restore({"loader": loader}, step=first, include="loader")
        keys = " ".join(next(iter(loader))["key"])
    assert steps_of((tmp_path / "again.log").read_text())[first + 1].endswith(f" keys {keys}")
