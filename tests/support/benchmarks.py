"""Runs a benchmark in the test's process, as `headrace bench` does. The processes of its candidates are forks (`nursery`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from headrace.bench.cli import bench
from headrace.bench.core import measure
from headrace.bench.core.results import Part, decode
from tests.support import nursery


def run_part(capsys: pytest.CaptureFixture[str], *arguments: str) -> Part:
    """Run `headrace bench ARGUMENTS --json`, which must succeed, and return the part that it measured."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "run_process", fork)
        code = bench([*arguments, "--json"])
    (part,) = decode(capsys.readouterr().out.encode(), "stdout").parts
    assert code == 0, part
    assert not part.failed, part
    return part


def fork(command: list[str], environ: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a candidate in a process that has torch already. Importing it takes longer than what the tests measure."""
    assert command[:3] == [sys.executable, "-m", measure.__name__], "a candidate of another interpreter"
    child = nursery.nursery().start("tests.support.candidate", *command[3:], env=environ)
    try:
        stdout, stderr = child.communicate(seconds)
    finally:
        child.kill()
    return subprocess.CompletedProcess(command, child.wait(), stdout, stderr)
