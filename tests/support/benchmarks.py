"""Runs a benchmark in the test's process, as `headrace bench` does."""

from __future__ import annotations

import pytest

from headrace.bench.cli import bench
from headrace.bench.core.results import Part, decode


def run_part(capsys: pytest.CaptureFixture[str], *arguments: str) -> Part:
    """Run `headrace bench ARGUMENTS --json`, which must succeed, and return the part that it measured."""
    capsys.readouterr()
    code = bench([*arguments, "--json"])
    (part,) = decode(capsys.readouterr().out.encode(), "stdout").parts
    assert code == 0, part
    assert not part.failed, part
    return part
