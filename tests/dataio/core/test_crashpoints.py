"""A crash point kills the process there and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.dataio.core.crashpoints import CrashPoint, declare, declared

PROGRAM = """
from headrace.dataio.core.crashpoints import declare
a, b = declare("test.a", "before b"), declare("test.b", "after a")
for turn in range(3):
    print("turn", turn, flush=True)
    a()
    b()
print("end")
"""


def _run(tmp_path: Path, point: str | None) -> tuple[int, str, str]:
    mark = tmp_path / "mark"
    environment = {name: value for name, value in os.environ.items() if name != "HEADRACE_CRASH"}
    if point is not None:
        environment |= {"HEADRACE_CRASH": point, "HEADRACE_CRASH_MARK": str(mark)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout.split("\n")[-2], mark.read_text() if mark.exists() else ""


@pytest.mark.parametrize(("point", "last"), [("test.a", "turn 0"), ("test.b#2", "turn 1"), ("test.a#3", "turn 2")])
def test_the_process_dies_at_the_named_point_the_nth_time_and_leaves_a_mark(
    tmp_path: Path, point: str, last: str
) -> None:
    assert _run(tmp_path, point) == (-9, last, point.partition("#")[0] + "\n")


@pytest.mark.parametrize("point", [None, "test", "test.a#4", "test.c"])
def test_without_its_name_nothing_happens(tmp_path: Path, point: str | None) -> None:
    assert _run(tmp_path, point) == (0, "end", "")


def test_a_point_is_declared_once_with_its_meaning() -> None:
    point = declare("test.once", "a meaning")
    assert isinstance(point, CrashPoint)
    assert declared()["test.once"] == "a meaning"
    with pytest.raises(ValueError, match="twice"):
        declare("test.once", "another")
