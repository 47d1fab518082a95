"""What litdata makes of our samples, and what it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("litdata")

PROGRAM = """
import sys
from pathlib import Path
from headrace.bench.peers.source import write_litdata

def read(number):
    return {"bytes": bytes([number]) * 1000}

if __name__ == "__main__":
    write_litdata(read, list(range(5)), Path(sys.argv[1]) / "made", "1MB")
"""


def test_the_folders_that_litdata_would_empty_are_left_alone(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    kept = [temporary / name / "mine" for name in ("data", "chunks")]
    for file in kept:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    quiet = {"TMPDIR": str(temporary), "LITDATA_DISABLE_VERSION_CHECK": "1", "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, str(program), str(tmp_path)]
    subprocess.run(command, env=os.environ | quiet, check=True, capture_output=True, timeout=120)
    assert [file.read_text() for file in kept] == ["mine", "mine"]
    assert (tmp_path / "made" / "index.json").exists()
    assert not list(tmp_path.glob("headrace-litdata-*"))
