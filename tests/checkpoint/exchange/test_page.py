"""The blocks of docs/howto/export-import.md run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import Checkpointer
from headrace.dataio.cli import main

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "howto" / "export-import.md").read_text()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_SIDECAR", "off")
    state = {"model": torch.nn.Linear(4, 2), "ema": {"w": torch.ones(3)}, "loader": {"epoch": 1}}
    with Checkpointer(tmp_path / "checkpoints", run="exp42", sidecar=None) as checkpointer:
        checkpointer.save(1200, state).result(60)
    return tmp_path


def test_the_python_of_the_page_runs(here: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block.replace("s3://bucket", str(here)), "export-import.md", "exec"), {})


def test_the_commands_of_the_page_run(here: Path) -> None:
    (block,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("s3://bucket", str(here)).splitlines():
        assert main(line.split()[1:]) == 0
