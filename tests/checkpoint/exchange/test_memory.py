"""Memory does not grow with the size of the state: 512 MiB are exported and imported in less than 192 MiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.checkpoint import read

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
@pytest.mark.parametrize("kind", ["safetensors", pytest.param("torch", marks=pytest.mark.soak)])
def test_a_large_state_passes_through_little_memory(tmp_path: Path, kind: str) -> None:
    run("make", str(tmp_path))
    assert run("export", str(tmp_path), kind) < 192
    assert (tmp_path / kind).stat().st_size > 1 << 29
    assert run("import", str(tmp_path), kind) < 192
    with read(tmp_path / "r", run="exp") as one, read(tmp_path / "r", run=kind) as two:
        assert one._opened.manifests[0].bytes_state == two._opened.manifests[0].bytes_state == 1 << 29
        assert two._opened.manifests[0].bytes_written == 0  # every chunk is that of the step that was exported
