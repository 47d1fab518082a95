"""Where ranks meet, and how they end with the tests that started them."""

from __future__ import annotations

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import nursery
from tests.support.ranks import launch
from tests.support.waiting import wait_for

PARENT = """
import sys
from tests.support import nursery
children = [nursery.start("tests.test_ranks", path) for path in sys.argv[1:]]
print("started", flush=True)
sys.stdin.read()
"""


def main(pid: str) -> None:
    """Report this rank, and continue."""
    Path(pid).write_text(f"{os.getpid()}\n")
    time.sleep(600)


def test_the_port_at_which_ranks_meet_is_taken_before_the_first_of_them_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    met, start = list[str](), nursery.start

    def watched(module: str, *arguments: str, **environment: str) -> nursery.Child:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(environment["MASTER_PORT"])))
        met.append(environment["RANK"])
        return start(module, *arguments, **environment)

    monkeypatch.setattr(nursery, "start", watched)
    assert launch(2, "tests.support.meeting_job") == [[{"ranks": [0, 1]}]] * 2
    assert met == ["0", "1"]


@pytest.mark.parametrize("folder", ["support", "bench", "histories"])
def test_importing_a_program_changes_no_other_module(folder: str) -> None:
    """The nursery imports programs. What one of them changed there, all later ones would have."""
    changes = [
        f"{path.name}:{line.lineno}"
        for path in (nursery.ROOT / "tests" / folder).glob("*.py")
        for line in ast.parse(path.read_text()).body
        for target in (line.targets if isinstance(line, ast.Assign) else ())
        if isinstance(target, ast.Attribute)
    ]
    assert changes == []


def test_ranks_end_with_the_tests_that_are_killed(tmp_path: Path) -> None:
    paths = [tmp_path / str(rank) for rank in range(2)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *map(str, paths)],
        cwd=nursery.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        try:
            wait_for(lambda: all(path.exists() and path.read_text().endswith("\n") for path in paths))
        finally:
            parent.send_signal(signal.SIGKILL)
    ranks = [int(path.read_text()) for path in paths]
    wait_for(lambda: not any(_runs(pid) for pid in ranks))


def _runs(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
