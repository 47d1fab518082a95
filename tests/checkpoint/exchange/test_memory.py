"""Memory does not grow with the size of the state: 512 MiB are exported and imported in less than 192 MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import export, read
from tests.support.waiting import wait_for

pytestmark = pytest.mark.process
_ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> float:
    """Run a part in a new process. Returns the MiB that it needed in addition to what its modules take."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.exchange_state", *arguments]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    return float(found["peak"] - found["before"])


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("safetensors", "dcp"), pytest.param(("torch",), marks=pytest.mark.soak)], ids=str)
def test_a_large_state_passes_through_little_memory(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    run("make", str(tmp_path))
    for kind in kinds:
        assert run("export", str(tmp_path), kind) < 192
        path = tmp_path / kind
        assert (path / "__0_0.distcp" if kind == "dcp" else path).stat().st_size > 1 << 29
        assert run("import", str(tmp_path), kind) < 192
        with read(tmp_path / "r", run="exp") as one, read(tmp_path / "r", run=kind) as two:
            assert one._opened.manifests[0].bytes_state == two._opened.manifests[0].bytes_state == 1 << 29
            assert two._opened.manifests[0].bytes_written == 0  # every chunk is that of the step that was exported


def test_an_export_that_is_killed_continues(tmp_path: Path) -> None:
    run("make", str(tmp_path))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.exchange_state", "export", str(tmp_path), "torch"]
    process = subprocess.Popen(command, cwd=_ROOT, env=os.environ | {"PYTHONPATH": str(_ROOT)})
    journal = tmp_path / ".torch.headrace-export"
    wait_for(lambda: journal.exists() and journal.read_text().count("\n") > 3, 120)
    process.kill()
    assert process.wait() == -9
    assert not (tmp_path / "torch").exists()
    report = export(tmp_path / "r", tmp_path / "torch", run="exp", format="torch")
    assert 0 < report.bytes_written < report.bytes
    with zipfile.ZipFile(tmp_path / "torch") as archive:
        assert archive.testzip() is None
    found = torch.load(tmp_path / "torch", weights_only=True, mmap=True)
    with read(tmp_path / "r", run="exp") as step:
        assert all(torch.equal(found[name], step[name].read()) for name in step)
    assert not journal.exists()
